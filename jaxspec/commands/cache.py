"""`jaxspec cache list|remove`: the converted models in the user's cache directory."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from jaxspec.checkpoint import cached_models, remove_cached_model
from jaxspec.errors import SettingError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheCommand:
    """List the models converted into the cache directory, or remove some of them."""

    action: Annotated[Literal["list", "remove"], tyro.conf.Positional]
    """What to do."""
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Models to remove, as `list` names them."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """End with one line of JSON on standard output."""

    def run(self, console: Console) -> dict[str, Any]:
        """Lists or removes; returns the JSON document."""
        if self.action == "remove":
            if not self.names:
                raise SettingError(
                    "jaxspec cache remove was given no name; take names from jaxspec cache list."
                )
            for name in self.names:
                remove_cached_model(name)
                console.print(f"removed {name}")
        elif self.names:
            raise SettingError("jaxspec cache list takes no names; leave them out.")
        models = [dataclasses.asdict(model) for model in cached_models()]
        if self.action == "list":
            table = Table("name", "size", "source")
            for model in models:
                table.add_row(model["name"], f"{model['num_bytes'] / 2**20:.0f} MiB", model["source"])
            console.print(table if models else "The cache is empty.")
        return {"command": f"cache {self.action}", "models": models, "removed": list(self.names)}
