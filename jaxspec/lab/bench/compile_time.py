"""Seconds to compile an engine's programs, without a cache and from the persistent cache, and how
they grow with the number of layers.

Layers are unrolled in every program, so compile time that grew with the square of their number
would make a deep model unusable.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.lab.bench import measure
from jaxspec.lab.bench.measure import Bench, Dtype
from jaxspec.models.base import LanguageModel
from jaxspec.models.registry import random_model
from jaxspec.runtime.directories import temporary_directory
from jaxspec.runtime.processes import run_child
from jaxspec.runtime.report import Columns


def compile_times(options: Sequence[str], *, batch_size: int) -> dict[str, Any]:
    """`cold_s` and `persistent_s`: seconds to compile and run the first call, with an empty
    compilation cache and with the one that this has filled.

    Measured in separate processes, by the `compile_s` of `jaxspec generate`, because a process
    compiles a program only once, whatever is on the disk.

    Args:
      options: those of `jaxspec generate` that define the engine (`--target`, `--draft-length`,
        ...).
      batch_size: rows.

    Raises:
      SettingError: the process failed.
    """
    with temporary_directory() as directory:
        prompts = directory / "prompts.jsonl"
        prompts.write_text('{"prompt_token_ids": [0, 0]}\n' * batch_size)
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = [sys.executable, "-m", "jaxspec", "generate", *options]
        command += ["--batch-size", str(batch_size), "--prompts", str(prompts)]
        command += ["--max-tokens", "1", "--ignore-eos", "--json"]
        cold_s, persistent_s = (_compile_s(command, environment) for _ in range(2))
    return {"cold_s": cold_s, "persistent_s": persistent_s, "batch_size": batch_size}


def _compile_s(command: Sequence[str], environment: dict[str, str]) -> float:
    done = run_child(command, env=environment)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").split("\n")[-1]
        raise SettingError(
            f"Compile times were measured in a process of their own, and it failed ({reason}); try "
            "`jaxspec generate` with the same models and settings."
        )
    return json.loads(done.stdout.strip().split("\n")[-1])["compile_s"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileTimeBench(Bench):
    """Compile time by the target's number of layers."""

    NAME: ClassVar[str] = "compile-time"
    TITLE: ClassVar[str] = "compiling an engine"
    COLUMNS: ClassVar[Columns] = {
        "layers": "{num_layers}",
        "CPU s": "{cpu_s:.1f}",
        "s": "{wall_s:.1f}",
        "exponent": "{exponent:.2f}",
    }

    layers: tuple[int, ...] = (2, 4, 8, 16, 36)
    """Numbers of layers of the target, in ascending order; the draft model has two."""
    width: int = 64
    """Width of both models; it hardly matters, because compile time depends on instructions and not
    on array sizes."""
    batch_size: int = 8
    """Rows decoded together."""
    draft_length: int = 4
    """Tokens proposed per round."""
    max_length: int = 1024
    """Slots per row."""
    repeats: int = 3
    """How often each engine is compiled, in alternation."""
    dtype: Dtype = "float32"
    """Dtype of parameters, compute and cache."""

    def measure(self) -> dict[str, Any]:
        """Seconds by number of layers (medians of the repeats), and the growth from each number to
        the next.

        `cpu_s` covers all threads of this process, and is more reliable than `wall_s` if the
        machine has other work. `cpu_s_per_added_layer` is the same at every step if compile time is
        a straight line; `exponent` is 1 if compile time is proportional to the number of layers,
        and 2 if it grows with the square.

        Raises:
          SettingError: fewer than two numbers of layers, or not in ascending order.
        """
        if len(self.layers) < 2 or list(self.layers) != sorted(set(self.layers)):
            raise SettingError(
                f"The numbers of layers {self.layers} were given; give two or more, rising."
            )
        jax.config.update("jax_enable_compilation_cache", False)
        draft = DraftModel(self._model(2))
        targets = [self._model(num_layers) for num_layers in self.layers]
        self._compile(targets[0], draft)  # what is loaded at the first compile
        times = [[self._compile(target, draft) for target in targets] for _ in range(self.repeats)]
        results: list[dict[str, Any]] = []
        for num_layers, runs in zip(self.layers, zip(*times, strict=True), strict=True):
            cpu_s, wall_s, programs = zip(*runs, strict=True)
            result = {
                "num_layers": num_layers,
                "cpu_s": statistics.median(cpu_s),
                "wall_s": statistics.median(wall_s),
                "programs": {
                    what: statistics.median(each[what] for each in programs) for what in programs[0]
                },
            }
            if results:
                before = results[-1]
                added_s = result["cpu_s"] - before["cpu_s"]
                result["cpu_s_per_added_layer"] = added_s / (num_layers - before["num_layers"])
                ratio = math.log(num_layers / before["num_layers"])
                result["exponent"] = math.log(result["cpu_s"] / before["cpu_s"]) / ratio
            results.append(result)
        return {"results": results}

    def _model(self, num_layers: int) -> LanguageModel:
        config = measure.tiny_config(num_layers, width=self.width, max_length=self.max_length)
        return random_model(config, dtype=self.dtype)

    def _compile(
        self, target: LanguageModel, draft: DraftModel
    ) -> tuple[float, float, dict[str, float]]:
        """CPU seconds and seconds to compile a new engine's programs, and seconds of each."""
        engine = Engine(
            target,
            draft,
            draft_length=self.draft_length,
            batch_size=self.batch_size,
            max_length=self.max_length,
        )
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        compiled = engine.warm_up()
        seconds = time.process_time() - cpu_started_s, time.perf_counter() - started_s
        return *seconds, {each.name.split(" of ")[0]: each.seconds for each in compiled}
