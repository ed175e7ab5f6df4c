"""Conditions for calling a fit a scaling law."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEAST_POINTS, LEAST_DECADES, LEAST_SEEDS = 5, 1.5, 3
MOST_ALL_ACCEPTED = 0.10
MOST_DECADES_BEYOND = 1.0


def check_gates(
    *,
    num_points: int,
    decades: float,
    held_out: Mapping[str, Any] | None,
    curvature: Mapping[str, float] | None,
    all_accepted: float,
    response: str,
    num_seeds: int,
    decades_beyond: float,
) -> list[dict[str, Any]]:
    """The gates of an axis: their `name`, the `requirement`, what was `found`, and whether it
    `passes`.

    Args:
      num_points: n.
      decades: that they span.
      held_out: of the log-linear fit without the largest point: `observed`, `predicted`, `low` and
        `high` of its 95 % prediction interval, and `is_inside`; None if there are too few points.
      curvature: `value`, `low` and `high` of the quadratic term; None as before.
      all_accepted: chance at the largest point that a whole draft is accepted.
      response: `tau`, or `logit` of the rate.
      num_seeds: that were trained at every point.
      decades_beyond: how far beyond the largest point a prediction goes.
    """
    held_found, curve_found = (
        "too few points to leave one out",
        "too few points for a quadratic term",
    )
    if held_out is not None:
        held_found = "{observed:.3f} measured, {predicted:.3f} predicted ({low:.3f} to {high:.3f})"
        held_found = held_found.format_map(held_out)
    if curvature is not None:
        curve_found = "{value:+.3f} ({low:+.3f} to {high:+.3f})".format_map(curvature)
    is_logit = response == "logit"
    gates = [
        (
            "points",
            f"at least {LEAST_POINTS} over at least {LEAST_DECADES} decades",
            f"{num_points} over {decades:.2f}",
            # Token counts are whole batches, so 32 times as many may be 31.9 times.
            num_points >= LEAST_POINTS and decades >= LEAST_DECADES - 0.01,
        ),
        (
            "largest point held out",
            "inside the 95 % prediction interval of the others",
            held_found,
            held_out is not None and held_out["is_inside"],
        ),
        (
            "no curvature",
            "the 95 % interval of a quadratic term holds 0",
            curve_found,
            curvature is not None and holds_zero(curvature),
        ),
        (
            "not saturated",
            f"P(all accepted) < {MOST_ALL_ACCEPTED:.2f} at the largest point, or the logit of the "
            "rate is fitted",
            f"{all_accepted:.3f}{', and the logit of the rate is fitted' if is_logit else ''}",
            all_accepted < MOST_ALL_ACCEPTED or is_logit,
        ),
        (
            "seeds",
            f"at least {LEAST_SEEDS} at every point",
            str(num_seeds),
            num_seeds >= LEAST_SEEDS,
        ),
        (
            "extrapolation",
            f"at most {MOST_DECADES_BEYOND:g} decade, and marked",
            f"{decades_beyond:g}",
            decades_beyond <= MOST_DECADES_BEYOND,
        ),
    ]
    fields = "name", "requirement", "found", "passes"
    return [dict(zip(fields, gate, strict=True)) for gate in gates]


def holds_zero(interval: Mapping[str, float]) -> bool:
    """Whether 0 lies between the ends `low` and `high`."""
    return interval["low"] <= 0.0 <= interval["high"]
