"""What must hold before a line through points may be called a law."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.lab.studies.scaling.fits import Interval

LEAST_POINTS, LEAST_DECADES, LEAST_SEEDS = 5, 1.5, 3
MOST_ALL_ACCEPTED = 0.10
MOST_DECADES_BEYOND = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """One condition.

    Attributes:
      name: of it.
      requirement: what must hold.
      found: what was found, with its number.
      passes: whether it holds.
    """

    name: str
    requirement: str
    found: str
    passes: bool

    def to_json(self) -> dict[str, Any]:
        """Fields."""
        return dataclasses.asdict(self)


def check_gates(
    *,
    num_points: int,
    decades: float,
    held_out: dict[str, Any] | None,
    curvature: Interval | None,
    all_accepted: float,
    response: str,
    num_seeds: int,
    decades_beyond: float,
) -> list[Gate]:
    """The gates of an axis.

    Args:
      num_points: n.
      decades: that they span.
      held_out: of the log-linear fit without the largest point: `observed`, `predicted`, `low` and
        `high` of its 95 % prediction interval; None if there are too few points for it.
      curvature: of the quadratic term.
      all_accepted: chance at the largest point that a whole draft is accepted.
      response: `tau`, or `logit` of the rate.
      num_seeds: that were trained at every point.
      decades_beyond: how far beyond the largest point a prediction goes.
    """
    held_found, is_inside = "too few points to leave one out", False
    if held_out is not None:
        is_inside = bool(held_out["is_inside"])
        held_found = "{observed:.3f} measured, {predicted:.3f} predicted ({low:.3f} to {high:.3f})"
        held_found = held_found.format_map(held_out)
    curve_found, is_straight = "too few points for a quadratic term", False
    if curvature is not None:
        is_straight = curvature.holds_zero
        curve_found = f"{curvature.value:+.3f} ({curvature.low:+.3f} to {curvature.high:+.3f})"
    of_logit = ", and the logit of the rate is fitted" if response == "logit" else ""
    return [
        Gate(
            name="points",
            requirement=f"at least {LEAST_POINTS} over at least {LEAST_DECADES} decades",
            found=f"{num_points} over {decades:.2f}",
            # Token counts are whole batches, so 32 times as many may be 31.9 times.
            passes=num_points >= LEAST_POINTS and decades >= LEAST_DECADES - 0.01,
        ),
        Gate(
            name="largest point held out",
            requirement="inside the 95 % prediction interval of the others",
            found=held_found,
            passes=is_inside,
        ),
        Gate(
            name="no curvature",
            requirement="the 95 % interval of a quadratic term holds 0",
            found=curve_found,
            passes=is_straight,
        ),
        Gate(
            name="not saturated",
            requirement=f"P(all accepted) < {MOST_ALL_ACCEPTED:.2f} at the largest point, or the "
            "logit of the rate is fitted",
            found=f"{all_accepted:.3f}{of_logit}",
            passes=all_accepted < MOST_ALL_ACCEPTED or response == "logit",
        ),
        Gate(
            name="seeds",
            requirement=f"at least {LEAST_SEEDS} at every point",
            found=str(num_seeds),
            passes=num_seeds >= LEAST_SEEDS,
        ),
        Gate(
            name="extrapolation",
            requirement=f"at most {MOST_DECADES_BEYOND:g} decade, and marked",
            found=f"{decades_beyond:g}",
            passes=decades_beyond <= MOST_DECADES_BEYOND,
        ),
    ]


def word_for(gates: Sequence[Gate]) -> str:
    """`law` where all pass, else `trend`."""
    return "law" if all(gate.passes for gate in gates) else "trend"
