"""How acceptance grows with a drafter's training tokens and capacity, and what the batch changes.

    jaxspec study scaling --corpora corpora --texts texts.jsonl --out scaling

Draft models of several sizes are distilled from the target, each as one trunk with a branch per
number of tokens (`training.schedule`), all on the same rows of text; every branch decodes the same
prompts. What comes out is a row for every drafter, prompt, verifier and draft length, with counts
by position; `analyse` fits and judges them, these or rows of one's own. Every result is a cell,
written to the disk as soon as it is known, so an interrupted study goes on where it stopped.

The sizes make a cross: all `layers` at the first of `widths`, and all `widths` at the first of
`layers`. The drafter of the first of both, the reference, is also trained with every seed and
decoded at every batch size; the others with the first seed.
"""

from jaxspec.lab.studies.scaling.cells import CELLS, Running
from jaxspec.lab.studies.scaling.document import analyse, read_rows
from jaxspec.lab.studies.scaling.report import print_report, write_report
from jaxspec.lab.studies.scaling.settings import ScalingSettings, Shape
from jaxspec.lab.studies.scaling.study import ScalingStudy

__all__ = [
    "CELLS",
    "Running",
    "ScalingSettings",
    "ScalingStudy",
    "Shape",
    "analyse",
    "print_report",
    "read_rows",
    "write_report",
]
