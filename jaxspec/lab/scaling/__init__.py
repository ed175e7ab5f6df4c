"""Scaling studies of acceptance: estimators, fits, gates, the batch, and the report."""

from jaxspec.lab.scaling.document import analyse, read_rows
from jaxspec.lab.scaling.report import print_report, write_report

__all__ = ["analyse", "print_report", "read_rows", "write_report"]
