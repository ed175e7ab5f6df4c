"""What comes out of a study's cells: rows, times, and whether outputs are the target's."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxspec.lab.bench.cells import Cell
from jaxspec.lab.bench.stages import block_read_by
from jaxspec.lab.studies.scaling.batch import fit_pair, predict_times
from jaxspec.lab.studies.scaling.settings import ScalingSettings
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.extras import import_extra

if TYPE_CHECKING:
    import pandas

_FEWEST_TIMES = 6  # for a cost model


def rows_table(cells: Mapping[str, Cell]) -> pandas.DataFrame:
    """The rows of all drafters."""
    measured = [cell for cell in cells.values() if "rows" in cell]
    rows = [{**cell["drafter"], **row} for cell in measured for row in cell["rows"]]
    return import_extra("pandas", "a scaling study").DataFrame(rows)


def times_table(
    cells: Mapping[str, Cell], settings: ScalingSettings, target: LanguageModel
) -> pandas.DataFrame:
    """Seconds of rounds, and of a plain round at the same batch size; and what a cost model that is
    fitted to their stages says of them, where there are enough of them."""
    timed = [cell for name, cell in cells.items() if name.startswith("times-")]
    plain = {cell["batch"]: cell["round_s"] for cell in timed if not cell["draft_length"]}
    rows = [
        {"drafter": settings.reference.name, **cell, "plain_s": plain[cell["batch"]]}
        for cell in timed
        if cell["draft_length"]
    ]
    times = import_extra("pandas", "a scaling study").DataFrame(rows)
    if len(times) < _FEWEST_TIMES:
        return times
    ceilings = cells["ceilings"]
    draft = settings.train_config(settings.reference, settings.seeds[0])
    pair, _ = fit_pair(
        times,
        target.config,
        draft.model_config(target.vocab_size),
        most_bytes_per_s=ceilings["bytes_per_s"],
        most_flops_per_s=ceilings["matmul_flops_per_s"],
        block=block_read_by(target),
    )
    return predict_times(times, pair)


def checks(cells: Mapping[str, Cell]) -> dict[str, int]:
    """Outputs that were compared with plain decoding, over all drafters and batch sizes, and how
    many are equal; and how many of those by batch size took the same rounds."""
    drafters = [cell for cell in cells.values() if "rows" in cell]
    batches = [cell for cell in cells.values() if "num_same_counts" in cell]
    return {
        "num_compared_with_plain": sum(each["num_compared_with_plain"] for each in drafters),
        "num_equal_to_plain": sum(each["num_equal_to_plain"] for each in drafters),
        "num_compared_over_batches": sum(each["num_compared"] for each in batches),
        "num_equal_over_batches": sum(each["num_equal_to_plain"] for each in batches),
        "num_same_counts_over_batches": sum(each["num_same_counts"] for each in batches),
    }


def holds(cells: Mapping[str, Cell], target: LanguageModel) -> bool:
    """Whether every output is the target's own, where the kernels' bits do not depend on the width
    of a window; ties within rounding may change others."""
    found = checks(cells)
    is_equal = (
        found["num_equal_to_plain"] == found["num_compared_with_plain"]
        and found["num_equal_over_batches"]
        == found["num_same_counts_over_batches"]
        == found["num_compared_over_batches"]
    )
    return is_equal or not target.is_width_invariant


def write_table(table: pandas.DataFrame, path: pathlib.Path) -> pathlib.Path:
    """Writes a table as Parquet, whole or not at all; returns its path."""
    content = io.BytesIO()
    table.to_parquet(content, index=False)
    write_atomically(path, content.getvalue())
    return path
