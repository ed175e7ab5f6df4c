"""Seconds to compile an engine's programs: with nothing kept, and from the persistent cache.

Measured in processes of their own, by the `compile_s` of `jaxspec generate`: a process compiles a
program once, whatever is kept on disk.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from jaxspec.errors import SettingError


def compile_times(options: Sequence[str], *, batch_size: int) -> dict[str, Any]:
    """`cold_s` and `persistent_s`: compiling and running the first call, in an empty compilation
    cache and in the one that this has filled.

    Args:
      options: of `jaxspec generate` that make the engine (`--target`, `--draft-length`, ...).
      batch_size: seats.

    Raises:
      SettingError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="jaxspec-compile-") as directory:
        prompts = pathlib.Path(directory) / "prompts.jsonl"
        prompts.write_text('{"prompt_token_ids": [0, 0]}\n' * batch_size)
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(directory) / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = [sys.executable, "-m", "jaxspec", "generate", *options]
        command += ["--batch-size", str(batch_size), "--prompts", str(prompts)]
        command += ["--max-tokens", "1", "--ignore-eos", "--json"]
        cold_s, persistent_s = (_compile_s(command, environment) for _ in range(2))
    return {"cold_s": cold_s, "persistent_s": persistent_s, "batch_size": batch_size}


def _compile_s(command: Sequence[str], environment: dict[str, str]) -> float:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").split("\n")[-1]
        raise SettingError(
            f"Compile times were measured in a process of their own, and it failed ({reason}); try "
            "`jaxspec generate` with the same models and settings."
        )
    return json.loads(done.stdout.strip().split("\n")[-1])["compile_s"]
