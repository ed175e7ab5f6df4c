"""`jaxspec doctor`: does this machine run jaxspec as it should?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from jaxspec.commands.options import JsonOption
from jaxspec.commands.progress import working
from jaxspec.kernels.registry import KernelsName, default_kernels, native_problem
from jaxspec.lab import doctor
from jaxspec.runtime import environment
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.options import check_between
from jaxspec.runtime.report import Columns, TextTable
from jaxspec.runtime.verdicts import keep_verdicts

KERNELS: Columns = {
    "kernels": "{kernels}",
    "outcome": "{outcome}",
    "seconds": "{seconds:.0f}",
    "why": lambda found: found["why"] or "",
}
CELLS: Columns = {
    "": "{what}",
    "model": "{model}",
    "batch": "{batch_size}",
    "context": "{context}",
    "measured": "{measured_ms:.3g}",
    "predicted": "{predicted_ms:.3g}",
    "ratio": "{measured_over_predicted:.2f}",
}
FINE = ("works", "not for this device")
LARGEST_TIMEOUT_S = 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorCommand(JsonOption):
    """Check this machine: versions and devices, kernels, costs, and the engine against plain
    decoding.

    Kernels are tried in processes of their own; what is found is kept in the cache directory, and
    the default choice of kernels heeds it.
    """

    versions: bool = False
    """Print versions and devices only."""
    kernels: tuple[KernelsName, ...] = tuple(doctor.MADE_FOR)
    """Which kernels to try; those that are not for this device are passed over."""
    timeout_s: float = 300.0
    """Seconds for the kernels of one name; longer counts as hanging."""

    def run(self, console: Console) -> dict[str, Any]:
        """Prints each part as it is found; returns the JSON document."""
        check_between("--timeout-s", self.timeout_s, 1, LARGEST_TIMEOUT_S)
        found: dict[str, Any] = {}
        # First, because JAX does not run in this process yet.
        if not self.versions:
            found["tried_kernels"] = self._try_kernels(console)
        default_kernels()  # compiles them if that has not been done
        document = make_document("doctor", self, unused=environment.unused_accelerator())
        _show_versions(document, console)
        if not self.versions:
            found |= self._examine(console)
            works = [each["outcome"] in FINE for each in found["tried_kernels"]]
            outputs = found["outputs"]
            is_equal = outputs["num_equal"] == outputs["num_equal_alone"] == outputs["num_prompts"]
            found["holds"] = is_equal and all(works)
        if document["unused"] is not None:
            console.print(document["unused"])
        console.print(f"jaxspec is {environment.devices_sentence(document['devices'])}.")
        if found.get("holds") is False:
            console.print("Something is wrong: kernels that do not work, or outputs that differ.")
        return document | found

    def _try_kernels(self, console: Console) -> list[dict[str, Any]]:
        """Tries each name's kernels, and keeps what was found."""
        tried = []
        for name in self.kernels:
            with working(f"trying the kernels {name}"):
                tried.append(doctor.try_kernels(name, timeout_s=self.timeout_s))
        console.print(TextTable.of_columns("Kernels, against XLA's", KERNELS, tried))
        keep_verdicts(
            {
                each["kernels"]: None if each["outcome"] == "works" else each["why"]
                for each in tried
                if each["outcome"] != "not for this device"
                # Every process finds by itself that they cannot be built, and that they can again.
                and not (each["kernels"] == "native" and native_problem())
            }
        )
        return tried

    def _examine(self, console: Console) -> dict[str, Any]:
        """Compares outputs, and measures the device and the engine."""
        dtype = doctor.usual_dtype()
        with working("comparing with plain decoding"):
            outputs = doctor.compare_with_plain(dtype)
        console.print(
            f"Outputs of the embedded pair that equal plain decoding's: {outputs['num_equal']} of "
            f"{outputs['num_prompts']} in a batch, {outputs['num_equal_alone']} alone "
            f"({outputs['num_accepted_tokens']} accepted tokens, {outputs['exactness']})."
        )
        with working("measuring what this device costs"):
            costs = doctor.measure_costs(dtype)
            device = doctor.device_of(costs)
        shown = {
            "a call": f"{1e6 * costs['call_s']:.3g} us",
            "a kernel in a program": f"{1e6 * costs['kernel_s']:.3g} us",
            "a trip of a loop": f"{1e6 * costs['trip_s']:.3g} us",
            "reading a result": f"{1e6 * costs['read_result_s']:.3g} us",
            "reading memory": f"{costs['bytes_per_s'] / 1e9:.4g} GB/s",
            "products": f"{costs['flops_per_s'] / 1e12:.3g} TFLOP/s",
        }
        console.print(TextTable.of_values("Costs", shown))
        with working("measuring the engine"):
            cells = doctor.measure_cells(device)
        console.print(TextTable.of_columns("Engine, ms", CELLS, cells))
        measured = dataclasses.asdict(device)
        return {"outputs": outputs, "costs": costs, "measured_device": measured, "cells": cells}


def _show_versions(document: Mapping[str, Any], console: Console) -> None:
    devices = document["devices"]
    why = devices["kernels_fallback"] or devices["kernels_family"]
    shown = document["versions"] | {
        "commit": document["commit"] or "not a checkout",
        "host": devices["host"],
        "devices": f"{devices['num_devices']} x {', '.join(devices['kinds'])}",
        "kernels": devices["kernels"] + (f" ({why})" if why else ""),
        "autotuned kernels": str(environment.autotune_directory() or "none are kept"),
    }
    console.print(TextTable.of_values("Versions and devices", shown))
