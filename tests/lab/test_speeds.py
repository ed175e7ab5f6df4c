"""Tables of speeds: an automatic draft length beside the fastest fixed one, turn by turn."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, cast

import pytest

from jaxspec.lab.bench.speeds import of_best_fixed
from jaxspec.lab.compare import Candidate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed(Candidate):
    """Runs that emitted a thousand tokens each."""

    @property
    def tokens_per_s(self):
        return 1000 / sorted(self.run_s)[len(self.run_s) // 2]


def timed(label, *run_s):
    others: dict[str, Any] = dict.fromkeys(
        ("engine", "completions", "compile_s", "num_unequal_to_plain", "divergences")
    )
    return Timed(label=label, run_s=run_s, must_be_equal=True, **others)


def test_an_automatic_length_is_compared_with_the_fastest_fixed_one_in_the_same_turns():
    found = [
        timed("plain", 2.0, 2.0, 2.0),
        timed("two", 1.0, 3.0, 1.0),
        timed("four", 1.5, 1.5, 1.5),
        timed("auto", 1.1, 3.0, 0.8),
        timed("other auto", 0.5, 0.5, 0.5),
    ]
    engines = [
        cast(Any, types.SimpleNamespace(adaptive=object() if "auto" in one.label else None))
        for one in found
    ]
    assert of_best_fixed(found, engines) == {
        "plain": None,
        "two": None,
        "four": None,
        "auto": pytest.approx(1.0),
        "other auto": pytest.approx(2.0),
    }
