"""A grid of cells, measured one after another, that can be continued after an interruption.

All cells are kept in one JSON file, which is rewritten after each cell.
"""

from __future__ import annotations

import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxspec.errors import SettingError
from jaxspec.runtime.documents import as_json, write_document

Cell: TypeAlias = dict[str, Any]


class CellStore:
    """The cells that are known, in a file.

    Args:
      path: that of the file.
      header: everything that the cells depend on; it precedes them in the file, and a grid can only
        be resumed with the same header, on any `date`.
      resume: keep the cells that the file holds, and measure the others.

    Raises:
      SettingError: the file exists although `resume` is False, or was made with another header.

    Attributes:
      header: the given one, with additions.
      cells: results by name.
      elapsed_s: seconds spent on measuring them, over all resumptions.
    """

    def __init__(self, path: pathlib.Path, *, header: Mapping[str, Any], resume: bool = False):
        self.path = path
        self.header: dict[str, Any] = as_json(header)
        self.cells: dict[str, Cell] = {}
        self.elapsed_s = 0.0
        if not path.exists():
            return
        if not resume:
            raise SettingError(
                f"The file {path} is there already; add --resume to go on with what it holds, or "
                "name another file."
            )
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.cells = {name: dict(cell) for name, cell in kept.pop("cells").items()}
            self.elapsed_s = float(kept.pop("elapsed_s", 0.0))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingError(
                f"{path} was to be resumed, but it is not the file of a grid of cells; leave "
                "--resume out and name another file."
            ) from error
        for name, value in self.header.items():
            if name != "date" and (other := kept.get(name)) != value:
                raise SettingError(
                    f"{path} was to be resumed, but its {name} is another{_which(other, value)}; "
                    "run with the models, prompts and options that it was begun with, or name "
                    "another file."
                )
        if "date" in self.header:
            kept["date"] = self.header["date"]
        self.header = kept

    @property
    def document(self) -> dict[str, Any]:
        """The contents of the file."""
        return {**self.header, "elapsed_s": self.elapsed_s, "cells": self.cells}

    def write(self) -> None:
        """Writes the file."""
        write_document(self.document, self.path)

    def run(
        self,
        cells: Mapping[str, Callable[[], Cell]],
        *,
        say: Callable[[str], None],
        budget_s: float = math.inf,
    ) -> None:
        """Measures the missing cells, in order.

        Args:
          cells: a function that measures each cell, by name. It may read the results of earlier
            cells.
          say: called with e.g. `cell 5 of 42, 6 minutes left: NAME`.
          budget_s: no cell is started that, judging by the slowest so far, would end later than
            this.
        """
        started_s = time.perf_counter()
        waiting = [name for name in cells if name not in self.cells]
        num_kept = len(cells) - len(waiting)
        slowest_s = 0.0
        for index, name in enumerate(waiting):
            begun_s = time.perf_counter()
            spent_s = begun_s - started_s
            if spent_s + slowest_s > budget_s:
                break
            left = time_left(spent_s, index, len(waiting) - index) if index else ""
            say(f"cell {num_kept + index + 1} of {len(cells)}{left}: {name}")
            self.cells[name] = as_json(cells[name]())
            cell_s = time.perf_counter() - begun_s
            slowest_s = max(slowest_s, cell_s)
            self.elapsed_s += cell_s
            self.write()
        self.cells = {name: self.cells[name] for name in cells if name in self.cells}


def _which(kept: Any, given: Any) -> str:
    """E.g. ` (max_tokens was 8 and is 9)`: in which fields two parts of a header differ."""
    if not isinstance(kept, dict) or not isinstance(given, dict):
        return ""
    names = [name for name in {**kept, **given} if kept.get(name) != given.get(name)]
    changes = (f"{name} was {kept.get(name)} and is {given.get(name)}" for name in names)
    return f" ({', '.join(changes)})"


def time_left(spent_s: float, num_done: int, num_left: int) -> str:
    """E.g. `, 6 minutes left`, if the remaining cells take as long as the finished ones."""
    seconds = spent_s / num_done * num_left
    if seconds < 60:
        return ", less than a minute left"
    minutes = round(seconds / 60)
    return f", {minutes} minute{'s' * (minutes > 1)} left"
