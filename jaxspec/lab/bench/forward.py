"""Alternating forward passes of several models, at every batch size, window and context."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from jaxspec.lab.bench.measure import Bench
from jaxspec.lab.bench.stages import forward_runs
from jaxspec.lab.cost.model import Pass
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.report import Columns
from jaxspec.runtime.turns import Turns, time_loops


class TimedPass(NamedTuple):
    """A forward pass of every model.

    Attributes:
      found: `batch_size`, `window`, `context`, and the milliseconds of each model as `NAME_ms`.
      work: that of each model.
      turns: the seconds of each model.
    """

    found: dict[str, Any]
    work: dict[str, Pass]
    turns: Turns[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardBench(Bench):
    """A bench of forward passes of one target in several variants."""

    COLUMNS: ClassVar[Columns] = {
        "dtype": "{dtype}",
        "window": "{window}",
        "context": "{context}",
        "batch": "{batch_size}",
    }

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    batch_sizes: tuple[int, ...] = (8,)
    """Rows decoded together."""
    windows: tuple[int, ...] = (1, 5)
    """Tokens per row."""
    contexts: tuple[int, ...] = (80, 1000)
    """Committed tokens per row."""
    repeats: int = 15
    """Timed runs of each pass; the median is reported."""

    def time_passes(self, models: Mapping[str, LanguageModel]) -> Iterator[TimedPass]:
        """Times the passes of these models, in alternation."""
        for batch, window in itertools.product(self.batch_sizes, self.windows):
            passes = {
                name: forward_runs(
                    model,
                    batch=batch,
                    window=window,
                    contexts=self.contexts,
                    max_length=max(self.contexts) + window,
                )
                for name, model in models.items()
            }
            for index, context in enumerate(self.contexts):
                turns = time_loops({name: passes[name][index][1] for name in models}, self.repeats)
                found = {
                    "batch_size": batch,
                    "window": window,
                    "context": context,
                    **{f"{name}_ms": 1e3 * turns.median_s(name) for name in models},
                }
                yield TimedPass(found, {name: passes[name][index][0] for name in models}, turns)
