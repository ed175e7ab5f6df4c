"""Tokens per second of engines that ran in alternation, as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.analysis.compare import Candidate
from jaxspec.engine.engine import Engine
from jaxspec.runtime.report import Columns

SPEEDS: Columns = {
    "batch": "{batch_size}",
    "drafter": "{drafter}",
    "tokens/s": "{tokens_per_s:.0f}",
    "speed-up": "{speedup:.2f}x",
    "emitted\n/round": "{emitted_per_round:.2f}",
    "rounds by nodes": lambda found: ", ".join(
        f"{nodes}: {count}" for nodes, count in found["rounds_by_draft_length"].items()
    ),
}


def speed_rows(
    found: Sequence[Candidate],
    engines: Mapping[str, Engine],
    *,
    batch_size: int,
    label: str = "drafter",
) -> list[dict[str, Any]]:
    """A row for each engine, with its speed-up over the first.

    Args:
      found: the engines' runs, in their order.
      engines: by label.
      batch_size: that of every engine.
      label: name of the field for the engine's label.
    """
    return [
        {
            "batch_size": batch_size,
            label: own.label,
            "tokens_per_s": own.tokens_per_s,
            "speedup": float(np.median(own.speedups(found[0]))),
            "speedups": own.speedups(found[0]).tolist(),
            "emitted_per_round": own.acceptance.emitted_per_round,
            "rounds_by_draft_length": engine.rounds_by_draft_length,
        }
        for own, engine in zip(found, engines.values(), strict=True)
    ]
