"""`jaxspec env`: versions and devices."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from jaxspec.commands.options import JsonOption
from jaxspec.kernels.registry import default_kernels
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.environment import autotune_directory, devices_sentence
from jaxspec.runtime.report import TextTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvCommand(JsonOption):
    """Print versions and devices, to add to bug reports and figures."""

    def run(self, console: Console) -> dict[str, Any]:
        """Prints and returns the JSON document."""
        default_kernels()  # compiles them if that has not been done
        document = make_document("env", self)
        devices = document["devices"]
        fallback = devices["kernels_fallback"]
        family = devices["kernels_family"]
        why = f" ({fallback or family})" if fallback or family else ""
        found = document["versions"] | {
            "commit": document["commit"] or "not a checkout",
            "host": devices["host"],
            "devices": f"{devices['num_devices']} x {', '.join(devices['kinds'])}",
            "kernels": devices["kernels"] + why,
            "autotuned kernels": str(autotune_directory() or "none are kept"),
        }
        console.print(TextTable.of_values("Versions and devices", found))
        console.print(f"jaxspec is {devices_sentence(devices)}.")
        return document
