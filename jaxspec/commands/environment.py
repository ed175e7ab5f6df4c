"""`jaxspec env`: versions and devices."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxspec.commands.options import JsonOption
from jaxspec.kernels.registry import default_kernels, native_problem
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.environment import devices_sentence


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvCommand(JsonOption):
    """Print versions and devices, for bug reports and beside figures."""

    def run(self, console: Console) -> dict[str, Any]:
        """Prints and returns the JSON document."""
        default_kernels()  # compiles them where that has not been done
        document = make_document("env", self)
        devices = document["devices"]
        table = Table(show_header=False)
        for name, version in document["versions"].items():
            table.add_row(name, version)
        table.add_row("commit", document["commit"] or "not a checkout")
        table.add_row("host", devices["host"])
        table.add_row("devices", f"{devices['num_devices']} x {', '.join(devices['kinds'])}")
        is_lacking = devices["platform"] == "cpu" and devices["kernels"] != "native"
        why = f" (not native: {native_problem()})" if is_lacking else ""
        table.add_row("kernels", devices["kernels"] + escape(why))
        console.print(table)
        console.print(f"jaxspec is {devices_sentence(devices)}.")
        return document
