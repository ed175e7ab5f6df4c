"""`jaxspec env`: versions and devices."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from jaxspec.environment import devices_sentence, provenance


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvCommand:
    """Print versions and devices, for bug reports and beside figures."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """End with one line of JSON on standard output."""

    def run(self, console: Console) -> dict[str, Any]:
        """Prints and returns the JSON document."""
        found = provenance()
        table = Table(show_header=False)
        for name, version in found["versions"].items():
            table.add_row(name, version)
        table.add_row("commit", found["commit"] or "not a checkout")
        table.add_row("host", found["devices"]["host"])
        table.add_row("devices", ", ".join(found["devices"]["kinds"]))
        console.print(table)
        console.print(f"jaxspec is {devices_sentence(found['devices'])}.")
        return {"command": "env", **found}
