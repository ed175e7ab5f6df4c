"""From the rows of a study to a document: axes, fits, gates, and the batch."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.errors import SettingError, named
from jaxspec.lab.intervals import NUM_DRAWS
from jaxspec.lab.studies.scaling.axes import FEWEST_POINTS, axes_of, fit_axis
from jaxspec.lab.studies.scaling.batch import best_widths, check_times
from jaxspec.lab.studies.scaling.estimators import (
    DECODING,
    DRAFTER,
    acceptance_by_position,
    check_rows,
    estimate,
    groups,
    select,
)
from jaxspec.runtime.extras import import_extra

if TYPE_CHECKING:
    import pandas

RESPONSES = ("auto", "tau", "logit")
SIZE = ("num_layers", "width")


def read_rows(path: pathlib.Path) -> pandas.DataFrame:
    """A table of rows or times: a Parquet file, or JSON lines (`.jsonl`, `.jsonl.gz`).

    Raises:
      SettingError: the file cannot be read as either.
    """
    pd = import_extra("pandas", "a scaling study")
    name = pathlib.Path(path).name
    try:
        if name.endswith(".parquet"):
            import_extra("pyarrow", "Parquet files")
            return pd.read_parquet(path)
        if name.endswith((".jsonl", ".jsonl.gz")):
            return pd.read_json(path, lines=True)
    except (OSError, ValueError) as error:
        raise SettingError(
            f"{path} cannot be read as a table ({error}); give the rows of a scaling study."
        ) from error
    raise SettingError(f"{path} is neither a .parquet nor a .jsonl file; give rows in one of them.")


def analyse(
    rows: pandas.DataFrame,
    times: pandas.DataFrame | None = None,
    *,
    num_draws: int = NUM_DRAWS,
    seed: int = 0,
    response: str = "auto",
    decades_beyond: float = 1.0,
) -> dict[str, Any]:
    """What acceptance gains from tokens, layers and parameters, and which draft length pays.

    Every axis (see `axes.axes_of`) of every way of decoding is fitted, and the gates say whether
    the line may be called a law. The *main* way of decoding has the longest drafts, and of these
    rejection sampling and the most prompts: its figures are drawn, and all its curves have
    intervals. Of the others the document has tau at every point, the slope of the log-linear curve,
    and what the gates say.

    Args:
      rows: one per target, drafter, tokens, seed, way of decoding and prompt; the columns of
        `estimators.NEEDED`. `overlap`, `greedy_agreement` and `held_out_loss` are used if they are
        there, and `last_emitted`, the tokens of an output's last round, must be there if outputs
        end otherwise than by length.
      times: one per drafter, batch and draft length, the columns of `batch.NEEDED`.
      num_draws: of the cluster bootstrap over prompts and seeds.
      seed: of its draws.
      response: what is fitted: `tau`, the `logit` of the rate, or `auto`: tau, unless whole drafts
        are accepted so often that it is bounded by the draft length.
      decades_beyond: how far beyond the largest point predictions go.

    Returns:
      a document of JSON values.

    Raises:
      SettingError: rows or times that cannot be used (see `check_rows`, `check_times`), a setting
        out of range, or no axis with at least 3 points.
    """
    named("response", response, dict.fromkeys(RESPONSES))
    if num_draws < 100 or not 0.0 <= decades_beyond:
        raise SettingError(
            f"{num_draws} draws and {decades_beyond:g} decades beyond the largest point were "
            "given; take at least 100 draws, and 0 or more decades."
        )
    rows = estimate(check_rows(rows))
    rows = rows.sort_values([*SIZE, *DRAFTER, *DECODING, "prompt"], ignore_index=True)
    drafters = [str(name) for name in rows.drafter.unique()]
    if times is not None:
        check_times(times, drafters)
    random = np.random.default_rng(seed)
    decodings = _decodings(rows)
    axes, by_position, notes = [], [], []
    for index, (decoding, own) in enumerate(decodings):
        found, left_out = axes_of(own)
        notes += left_out if index == 0 else []
        for axis in found:
            fitted = fit_axis(
                axis,
                num_draws=num_draws,
                random=random,
                decades_beyond=decades_beyond,
                response=response,
                is_main=index == 0,
            )
            shown = fitted if index == 0 else _in_short(fitted)
            axes.append({"decoding": decoding, "is_main": index == 0, **shown})
        if index == 0:
            by_position = [
                {"drafter": str(drafter), "training_tokens": int(tokens),
                 "positions": acceptance_by_position(cell)}
                for (drafter, tokens), cell in groups(own, ["drafter", "training_tokens"])
            ]  # fmt: skip
    if not axes:
        raise SettingError(
            f"No axis has the {FEWEST_POINTS} points that a fit takes; add token counts or "
            "drafters, 5 over 1.5 decades for the gates."
        )
    batch = None
    if times is not None:
        batch = [
            best_widths(
                _of_times(decodings, str(drafter)), own, num_draws=num_draws, random=random
            )
            for drafter, own in times.groupby("drafter", sort=False)
        ]  # fmt: skip
    main = decodings[0][0]
    return {
        "target": str(rows.target.iloc[0]),
        "num_rows": len(rows),
        "num_draws": num_draws,
        "seed": seed,
        "drafters": drafters,
        "seeds": sorted(int(each) for each in rows.seed.unique()),
        "main_decoding": main,
        "axes": axes,
        "acceptance_by_position": by_position,
        "batch": batch,
        "notes": notes,
        "made_by": {
            name: _only(rows, name) for name in ("recipe", "version", "commit") if name in rows
        },
    }


def _in_short(axis: dict[str, Any]) -> dict[str, Any]:
    """What a document has of an axis of another than the main way of decoding."""
    names = ("axis", "fixed", "title", "response", "slope_per_decade", "word", "sentence")
    points = [{"x": point["x"], "tau": point["tau"]} for point in axis["points"]]
    return {name: axis[name] for name in names} | {"points": points}


def _decodings(rows: pandas.DataFrame) -> list[tuple[dict[str, Any], pandas.DataFrame]]:
    """Ways of decoding and their rows, the main one first."""
    found = []
    for values, own in groups(rows, list(DECODING)):
        decoding = {name: _plain(each) for name, each in zip(DECODING, values, strict=True)}
        found.append((decoding, own))

    def rank(pair: tuple[dict[str, Any], pandas.DataFrame]) -> tuple[Any, ...]:
        decoding, own = pair
        is_rejection = decoding["verifier"] == "rejection"
        return decoding["draft_length"], is_rejection, own.prompt.nunique(), len(own)

    return sorted(found, key=rank, reverse=True)


def _of_times(
    decodings: list[tuple[dict[str, Any], pandas.DataFrame]], drafter: str
) -> pandas.DataFrame:
    """Rows of the main way of decoding of a drafter at its most tokens."""
    for _, own in decodings:
        of_drafter = select(own, own.drafter.astype(str) == drafter)
        if len(of_drafter):
            most = of_drafter.training_tokens.max()
            return select(of_drafter, of_drafter.training_tokens == most)
    raise AssertionError(drafter)  # check_times has seen it


def _only(rows: pandas.DataFrame, name: str) -> Any:
    values = [_plain(each) for each in rows[name].dropna().unique()]
    return values[0] if len(values) == 1 else values


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, float) and value.is_integer() else value
