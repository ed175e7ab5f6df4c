"""Where a figure was measured: versions, devices, the package's own commit."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

from jaxspec.kernels import cpu as native
from jaxspec.kernels.registry import default_kernels
from jaxspec.runtime.directories import COMPILED_DIRECTORY, cache_directory

PACKAGES = (
    "jaxspec-decoding",
    "jax",
    "jaxlib",
    "flax",
    "orbax-checkpoint",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "numpy",
)


COMPILED_MAX_BYTES = 2 * 2**30
WORTH_KEEPING_S = 0.3


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache directory, so that a later process loads them.

    Nothing is changed where JAX has been told of a directory already (`JAX_COMPILATION_CACHE_DIR`,
    `jax_compilation_cache_dir`), or was told to keep none (`JAX_ENABLE_COMPILATION_CACHE=false`).
    """
    if getattr(jax.config, "jax_compilation_cache_dir") is not None:  # noqa: B009
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_directory() / COMPILED_DIRECTORY))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING_S)
    jax.config.update("jax_compilation_cache_max_size", COMPILED_MAX_BYTES)


def versions() -> dict[str, str]:
    """Installed versions of the packages that figures depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def devices(num_used: int = 1) -> dict[str, Any]:
    """Platform, kinds and number of devices, how many of them an engine uses, and the kernels that
    models are loaded with (None on a CPU where none was loaded: to find out may take compiling)."""
    is_known = jax.default_backend() != "cpu" or native.is_tried()
    local = jax.local_devices()
    return {
        "platform": jax.default_backend(),
        "kinds": sorted({device.device_kind for device in local}),
        "num_devices": len(local),
        "num_used": num_used,
        "host": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "kernels": default_kernels() if is_known else None,
    }


def devices_sentence(found: dict[str, Any]) -> str:
    """E.g. `using 1 of 4 GPUs`, `using all 4 GPUs`."""
    name = {"cpu": "CPU", "gpu": "GPU", "cuda": "GPU", "tpu": "TPU"}.get(
        found["platform"], found["platform"]
    )
    number = found["num_devices"]
    if number == 1:
        return f"using the only {name} device"
    if found["num_used"] == number:
        return f"using all {number} {name}s"
    return f"using {found['num_used']} of {number} {name}s"


def commit() -> str | None:
    """Commit of the checkout that this package runs from, with `+` if it was changed; elsewhere the
    one that the installed distribution was built from; None where neither is known."""
    package = pathlib.Path(__file__).resolve().parent.parent
    if not (package.parent / ".git").exists():
        built_from = package / "_commit.txt"  # written by setup.py
        return built_from.read_text().strip() or None if built_from.exists() else None
    command = ["git", "-C", str(package), "describe", "--always", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run([*command, "--dirty=+"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def provenance() -> dict[str, Any]:
    """Versions, devices and commit, as every command's JSON document carries them."""
    return {"versions": versions(), "devices": devices(), "commit": commit()}


def sha256_of(path: str | os.PathLike) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
