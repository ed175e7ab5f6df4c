"""Tokens per second of engines that ran in alternation, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.lab.compare import Candidate
from jaxspec.runtime.report import Columns

SPEED: Columns = {
    "tokens/s": "{tokens_per_s:.0f}",
    "speed-up": "{speedup:.2f}x",
    "of best\nfixed": lambda found: (
        "" if found["of_best_fixed"] is None else f"{found['of_best_fixed']:.2f}"
    ),
    "emitted\n/round": "{emitted_per_round:.2f}",
    "rounds by nodes": lambda found: ", ".join(
        f"{nodes}: {count}" for nodes, count in found["rounds_by_draft_length"].items()
    ),
}
SPEEDS: Columns = {"batch": "{batch_size}", "drafter": "{drafter}", **SPEED}


def of_best_fixed(found: Sequence[Candidate], engines: Iterable[Engine]) -> dict[str, float | None]:
    """Speed of each engine with automatic draft length over that of the fastest other engine: the
    median over turns, by label; None for the others.

    Args:
      found: the engines' runs, in their order.
      engines: those engines.
    """
    is_adaptive = [engine.adaptive is not None for engine in engines]
    fixed = [own for own, adapts in zip(found, is_adaptive, strict=True) if not adapts]
    best = max(fixed, key=lambda own: own.tokens_per_s)
    return {
        own.label: float(np.median(own.speedups(best))) if adapts else None
        for own, adapts in zip(found, is_adaptive, strict=True)
    }


def speed_rows(
    found: Sequence[Candidate],
    engines: Mapping[str, Engine],
    *,
    batch_size: int,
    label: str = "drafter",
) -> list[dict[str, Any]]:
    """A row for each engine, with its speed-up over the first, and over the fastest fixed setting
    if its draft length is automatic.

    Args:
      found: the engines' runs, in their order.
      engines: by label.
      batch_size: that of every engine.
      label: name of the field for the engine's label.
    """
    beside_best = of_best_fixed(found, engines.values())
    return [
        {
            "batch_size": batch_size,
            label: own.label,
            "tokens_per_s": own.tokens_per_s,
            "speedup": float(np.median(own.speedups(found[0]))),
            "speedups": own.speedups(found[0]).tolist(),
            "of_best_fixed": beside_best[own.label],
            "emitted_per_round": own.acceptance.emitted_per_round,
            "rounds_by_draft_length": engine.rounds_by_draft_length,
        }
        for own, engine in zip(found, engines.values(), strict=True)
    ]
