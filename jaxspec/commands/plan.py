"""`jaxspec plan`: how much memory a run takes, and which settings fit a budget."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console

from jaxspec.commands.options import DtypeName, JsonOption
from jaxspec.commands.progress import working
from jaxspec.engine.memory import in_units
from jaxspec.errors import SettingError
from jaxspec.lab.plan.planner import MOST_DEVICES, plan_memory
from jaxspec.lab.plan.request import Search
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.options import LARGEST_NUMBER, check_between
from jaxspec.runtime.processes import run_child
from jaxspec.runtime.report import Columns, TextTable
from jaxspec.schedulers import SchedulerName

UNITS = {"": 1, **{unit: 1000**n for n, unit in enumerate(("kB", "MB", "GB", "TB"), start=1)}}
UNITS |= {unit: 1024**n for n, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)}
VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"

PARTS = {
    "target_weights_bytes": "weights of the target",
    "draft_weights_bytes": "weights of the draft model",
    "target_kv_bytes": "KV of the target",
    "draft_kv_bytes": "KV of the draft model",
    "buffers_bytes": "tokens and other buffers",
    "logits_bytes": "logits of a round",
    "draft_probs_bytes": "distributions of the drafts",
}
RUNS: Columns = {
    "plan": "{name}",
    "bytes": lambda run: in_units(run["bytes"]["total_bytes"]),
    "tokens/s": "{tokens_per_s:.0f}",
    "settings": "{sentence}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommand(JsonOption):
    """Find the settings that fit a memory budget at the least cost in speed, and show where the
    bytes go. No weights are needed: presets are planned by name."""

    target: str
    """A preset such as `qwen3-8b`, or any model that `load_model` takes."""
    draft: str | None = None
    """Its draft model, named in the same way. Without a draft model or drafter, plain decoding is
    planned."""
    drafter: str | None = None
    """What drafts instead, as in `jaxspec generate`: `ngram`, `heads:MODEL`, `flexdraft:MODEL`, or
    with settings a JSON object, such as `{"kind": "draft_model", "model": MODEL, "tree":
    "4x4:12"}`, whose KV is searched over like that of --draft. For a tree, draft lengths are
    numbers of nodes, and --acceptance needs a probability for each node."""
    budget: str
    """Per device: bytes, or a number with a unit, such as `24GiB` or `80GB`."""
    batch: int = 8
    """Rows to decode together, over all devices."""
    context: int = 1024
    """Tokens of a request, prompt and output."""
    device: str = "h200"
    """`a100`, `h100`, `h200`, `l40s`, `l4` or `titan-rtx` (datasheet values: inferred, not
    measured), or a JSON document of `jaxspec bench decode --json` from this machine."""
    keep: float = 0.96
    """Fraction of the fastest plan's predicted speed to keep."""
    acceptance: tuple[float, ...] = (0.7,)
    """Probability that a drafted token is accepted, the same at every position; or measured
    probabilities that at least 1, 2, ... drafted tokens are, for a tree that its first, second, ...
    node is."""
    window_acceptance: tuple[float, ...] | None = None
    """The same for a draft model that keeps a window of its KV; `jaxspec compare` measures both.
    Default: those of --acceptance."""
    dtype: DtypeName | None = None
    """Dtype of the weights; default: that which the model is loaded in. A preset has bfloat16, and
    float32 when the plan is for this machine's CPU."""
    scheduler: SchedulerName = "continuous"
    """As in `jaxspec generate`; `continuous` keeps extra rows besides the batch."""
    max_logprobs: int | None = None
    """Log-probabilities that are kept per position, for requests that ask for them."""
    mesh: str | None = None
    """Axes of a mesh, such as `data=1,model=8`; default one device."""
    draft_lengths: tuple[int, ...] | None = None
    """Draft lengths to try; 0 is plain decoding. Default 0 to 8; for trees and FlexDraft, lengths
    that fill the windows up to theirs (0, 2, 4, 8, ...)."""

    def run(self, console: Console) -> dict[str, Any]:
        """Plans and prints; returns the JSON document."""
        budget_bytes = parse_bytes(self.budget)
        mesh = None if self.mesh is None else parse_mesh(self.mesh)
        in_window = self.window_acceptance
        num_devices = 1 if mesh is None else math.prod(mesh)
        check_between("--mesh, in devices,", num_devices, 1, MOST_DEVICES)
        if needs_virtual_devices(num_devices):
            with working(f"compiling for {num_devices} virtual devices, in a process of its own"):
                document = self._in_child(num_devices)
        else:
            with working("") as status:
                plan = plan_memory(
                    self.target,
                    self.draft,
                    budget_bytes,
                    drafter=self.drafter,
                    batch=self.batch,
                    context=self.context,
                    device=self.device,
                    keep=self.keep,
                    acceptance=_one_or_all(self.acceptance),
                    window_acceptance=None if in_window is None else _one_or_all(in_window),
                    dtype=self.dtype,
                    scheduler=self.scheduler,
                    max_logprobs=self.max_logprobs,
                    mesh=mesh,
                    search=Search(draft_lengths=self.draft_lengths),
                    say=status.update,
                )
            document = make_document("plan", self, plan=plan.to_json())
        self.show(document, console)
        return document

    def _in_child(self, num_devices: int) -> dict[str, Any]:
        """The document of the same command in a process with virtual CPU devices, because their
        number is fixed when JAX starts."""
        flags = f"{os.environ.get('XLA_FLAGS', '')} {VIRTUAL_DEVICES}={num_devices}".strip()
        found = run_child(
            [sys.executable, "-m", "jaxspec", "plan", *self.arguments(), "--json"],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        )
        if found.returncode:
            last = (found.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise SettingError(last.removeprefix("error: "))
        return json.loads(found.stdout.strip().splitlines()[-1])

    def arguments(self) -> list[str]:
        """The options as command-line arguments, without those at their defaults."""
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("json", "json_file") or value == field.default:
                continue
            words.append("--" + field.name.replace("_", "-"))
            if not isinstance(value, bool):
                values = value if isinstance(value, tuple) else (value,)
                words += map(str, values)
        return words

    def show(self, document: Mapping[str, Any], console: Console) -> None:
        """Prints the settings, where the bytes go, and the other plans."""
        plan = document["plan"]
        chosen, settings = plan["chosen"], plan["chosen"]["settings"]
        found = chosen["bytes"]
        num_devices = settings["num_data_shards"] * settings["num_model_shards"]
        each = "" if num_devices == 1 else f" on each of {num_devices} devices"
        rows = [[name, in_units(found[part])] for part, name in PARTS.items() if found[part]]
        rows.append([f"temporaries, {found['temporaries']}", in_units(found["temporaries_bytes"])])
        rows.append([f"in all, of {self.budget}", in_units(found["total_bytes"])])
        console.print(TextTable(title=f"bytes{each}", header=("", "bytes"), rows=rows))
        runs = [{"name": name, **plan[name]} for name in ("chosen", "fastest")]
        console.print(TextTable.of_columns("plans (speeds are predictions)", RUNS, runs))
        compiled = "The {name} was lowered in {lower_s:.1f} s and compiled in {compile_s:.1f} s."
        remarks = [compiled.format_map(program) for program in plan["programs"]]
        for text in (*remarks, *plan["remarks"]):
            console.print(text, style="dim", highlight=False)
        console.print(plan["description"], markup=False, highlight=False, soft_wrap=True)


def needs_virtual_devices(num_devices: int) -> bool:
    """Whether there are fewer CPU devices than a mesh needs, and more can be made."""
    if VIRTUAL_DEVICES in os.environ.get("XLA_FLAGS", ""):
        return False
    return jax.default_backend() == "cpu" and jax.local_device_count() < num_devices


def parse_bytes(text: str) -> int:
    """Bytes of `24GiB`, `80GB`, `1.5 GiB` or `1000000`.

    Raises:
      SettingError: the text has none of these forms, or means no bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]i?B)?", text.strip(), re.ASCII)
    factor = None if match is None else UNITS.get(match.group(2) or "")
    num_bytes = 0.0 if match is None or factor is None else float(match.group(1)) * factor
    if not 1 <= num_bytes <= LARGEST_NUMBER:
        raise SettingError(
            f"--budget {text} was given; write a number of bytes, or one with a unit such as 24GiB "
            "or 80GB."
        )
    return int(num_bytes)


def parse_mesh(text: str) -> tuple[int, int]:
    """(data, model) from `data=1,model=8`; an axis that is left out has size 1.

    Raises:
      SettingError: anything else.
    """
    axes = {"data": 1, "model": 1}
    for part in text.split(","):
        match = re.fullmatch(r" *(data|model)=([1-9]\d{0,4}) *", part, re.ASCII)
        if match is None:
            raise SettingError(f"--mesh {text} was given; write it as data=1,model=8.")
        axes[match.group(1)] = int(match.group(2))
    return axes["data"], axes["model"]


def _one_or_all(chances: tuple[float, ...]) -> float | tuple[float, ...]:
    """One probability for every position, or one for each."""
    return chances[0] if len(chances) == 1 else chances
