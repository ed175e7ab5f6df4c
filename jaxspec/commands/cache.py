"""`jaxspec cache list|verify|remove`: converted models and compiled programs in the user's cache
directory.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from jaxspec.commands.options import JsonOption
from jaxspec.commands.progress import working
from jaxspec.errors import SettingError
from jaxspec.load.models import cached_models, remove_cached_model
from jaxspec.runtime.directories import (
    COMPILED_DIRECTORY,
    KERNELS_DIRECTORY,
    cache_directory,
    size_of_directory,
)
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.report import TextTable

COMPILED = "compiled"
COLUMNS = {
    "name": "{name}",
    "MiB": lambda kept: f"{kept['num_bytes'] / 2**20:.0f}",
    "dtype": lambda kept: kept["dtype"] or "",
    "source": lambda kept: _source(kept),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheCommand(JsonOption):
    """List what the cache directory holds (converted models, compiled programs), verify that the
    models are undamaged, or remove entries."""

    action: Annotated[Literal["list", "verify", "remove"], tyro.conf.Positional]
    """What to do; verify reads the converted models and compares them with their checksums."""
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME ...")] = ()
    """What to remove, by the names that `list` shows; `compiled` means all compiled programs."""

    def run(self, console: Console) -> dict[str, Any]:
        """Lists, verifies or removes; returns the JSON document."""
        if self.action == "remove" and not self.names:
            raise SettingError(
                "jaxspec cache remove was given no name; take names from jaxspec cache list."
            )
        if self.action != "remove" and self.names:
            raise SettingError(f"jaxspec cache {self.action} takes no names; leave them out.")
        for name in self.names:
            num_bytes = remove_compiled() if name == COMPILED else remove_cached_model(name)
            console.print(f"removed {escape(name)} ({num_bytes / 2**20:.0f} MiB)")
        with working("reading the cache"):
            cached = cached_models(verify=self.action == "verify")
        problems = [model.problem for model in cached if model.problem is not None]
        models = [dataclasses.asdict(model) for model in cached]
        if self.action == "list":
            show_cache(console, models)
        elif self.action == "verify":
            num_whole = len(cached) - len(problems)
            console.print(f"{num_whole} of {len(cached)} converted models are as they were written")
        if self.action != "remove":
            for problem in problems:
                console.print(problem, markup=False, highlight=False, soft_wrap=True)
        return make_document(
            f"cache {self.action}",
            self,
            directory=cache_directory(),
            models=models,
            compiled_bytes=compiled_bytes(),
            removed=self.names,
            holds=not problems or self.action != "verify",
        )


def show_cache(console: Console, models: list[dict[str, Any]]) -> None:
    """Prints what is kept, one line per entry."""
    compiled = {"name": COMPILED, "num_bytes": compiled_bytes(), "dtype": "", "problem": None}
    compiled["source"] = "compiled programs and CPU kernels"
    listed = [*models, *[compiled] * (compiled_bytes() > 0)]
    directory = escape(str(cache_directory()))
    if listed:
        console.print(TextTable.of_columns(directory, COLUMNS, listed))
    else:
        console.print(f"The cache {directory} is empty.", soft_wrap=True)


def _source(kept: dict[str, Any]) -> str:
    if kept["problem"]:
        return "damaged" if kept["is_damaged"] else "cannot be read"
    return kept["source"]


def compiled_bytes() -> int:
    """Size of all compiled code that is kept: XLA's programs and the CPU kernels."""
    return sum(map(size_of_directory, _compiled_directories()))


def remove_compiled() -> int:
    """Removes what `compiled_bytes` counts; returns it."""
    num_bytes = compiled_bytes()
    for directory in _compiled_directories():
        shutil.rmtree(directory, ignore_errors=True)
    return num_bytes - compiled_bytes()


def _compiled_directories() -> tuple[Path, ...]:
    return tuple(cache_directory() / name for name in (COMPILED_DIRECTORY, KERNELS_DIRECTORY))
