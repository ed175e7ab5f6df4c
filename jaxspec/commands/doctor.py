"""`jaxspec doctor`: does this machine run jaxspec as it should?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from jaxspec.commands.options import JsonOption
from jaxspec.commands.progress import working
from jaxspec.kernels.registry import KernelsName, default_kernels
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
        """Prints and returns the JSON document."""
        check_between("--timeout-s", self.timeout_s, 1, LARGEST_TIMEOUT_S)
        tried = [] if self.versions else self._try_kernels()
        if tried:
            keep_verdicts(
                {
                    found["kernels"]: None if found["outcome"] == "works" else found["why"]
                    for found in tried
                    if found["outcome"] != "not for this device"
                }
            )
        default_kernels()  # compiles them if that has not been done
        found = {} if self.versions else self._examine(tried)
        document = make_document("doctor", self, unused=environment.unused_accelerator(), **found)
        for each in _shown(document):
            console.print(each)
        return document

    def _try_kernels(self) -> list[dict[str, Any]]:
        tried = []
        for name in self.kernels:
            with working(f"trying the kernels {name}"):
                tried.append(doctor.try_kernels(name, timeout_s=self.timeout_s))
        return tried

    def _examine(self, tried: list[dict[str, Any]]) -> dict[str, Any]:
        dtype = "float32" if environment.devices()["platform"] == "cpu" else "bfloat16"
        with working("comparing with plain decoding"):
            outputs = doctor.compare_with_plain(dtype)
        with working("measuring what this device costs"):
            costs = doctor.measure_costs(dtype)
            device = doctor.device_of(costs)
        with working("measuring the engine"):
            cells = doctor.measure_cells(device)
        num_prompts = outputs["num_prompts"]
        is_equal = outputs["num_equal"] == outputs["num_equal_alone"] == num_prompts
        works = all(found["outcome"] in ("works", "not for this device") for found in tried)
        return {
            "tried_kernels": tried,
            "outputs": outputs,
            "costs": costs,
            "measured_device": dataclasses.asdict(device),
            "cells": cells,
            "holds": is_equal and works,
        }


def _shown(document: Mapping[str, Any]) -> list[TextTable | str]:
    """The screen of a document."""
    devices = document["devices"]
    why = devices["kernels_fallback"] or devices["kernels_family"]
    directory = environment.autotune_directory()
    shown: list[TextTable | str] = [
        TextTable.of_values(
            "Versions and devices",
            document["versions"]
            | {
                "commit": document["commit"] or "not a checkout",
                "host": devices["host"],
                "devices": f"{devices['num_devices']} x {', '.join(devices['kinds'])}",
                "kernels": devices["kernels"] + (f" ({why})" if why else ""),
                "autotuned kernels": str(directory or "none are kept"),
            },
        )
    ]
    if "cells" in document:
        costs, outputs = document["costs"], document["outputs"]
        shown += [
            TextTable.of_columns("Kernels, against XLA's", KERNELS, document["tried_kernels"]),
            TextTable.of_values(
                "Costs",
                {
                    "a call": f"{1e6 * costs['call_s']:.3g} us",
                    "a kernel in a program": f"{1e6 * costs['kernel_s']:.3g} us",
                    "a trip of a loop": f"{1e6 * costs['trip_s']:.3g} us",
                    "reading a result": f"{1e6 * costs['read_result_s']:.3g} us",
                    "reading memory": f"{costs['bytes_per_s'] / 1e9:.4g} GB/s",
                    "products": f"{costs['flops_per_s'] / 1e12:.3g} TFLOP/s",
                },
            ),
            TextTable.of_columns("Engine, ms", CELLS, document["cells"]),
            f"Outputs of the embedded pair that equal plain decoding's: {outputs['num_equal']} of "
            f"{outputs['num_prompts']} in a batch, {outputs['num_equal_alone']} alone "
            f"({outputs['num_accepted_tokens']} accepted tokens, {outputs['exactness']}).",
        ]
    if document["unused"] is not None:
        shown.append(document["unused"])
    shown.append(f"jaxspec is {environment.devices_sentence(devices)}.")
    if document.get("holds") is False:
        shown.append("Something is wrong: see the kernels that do not work, and unequal outputs.")
    return shown
