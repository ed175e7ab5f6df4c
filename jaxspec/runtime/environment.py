"""Where a result was measured: versions, devices, and the package's own commit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

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

_kernels: dict[str, str | None] = {
    "kernels": None,
    "kernels_family": None,
    "kernels_fallback": None,
}


def note_kernels(name: str, *, family: str | None = None, fallback: str | None = None) -> None:
    """Records which kernels this process loads its models with, of which family of instructions,
    and, where these are not the ones made for this device, why."""
    _kernels.update(kernels=name, kernels_family=family, kernels_fallback=fallback)


def noted_kernels() -> dict[str, str | None]:
    """`kernels`, those that models are loaded with by default (None before the first model);
    `kernels_family`, the instructions that the C++ kernels multiply bfloat16 with, or None; and
    `kernels_fallback`, why these cannot be used on this CPU, or None."""
    return dict(_kernels)


def versions() -> dict[str, str]:
    """Installed versions of the packages that figures depend on."""
    found = {"python": platform.python_version()} | dict.fromkeys(PACKAGES, "not installed")
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def devices(num_used: int = 1) -> dict[str, Any]:
    """Platform, kinds and number of devices, how many of them an engine uses, and the kernels
    (`noted_kernels`)."""
    local = jax.local_devices()
    return {
        "platform": jax.default_backend(),
        "kinds": sorted({device.device_kind for device in local}),
        "num_devices": len(local),
        "num_used": num_used,
        "host": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        **noted_kernels(),
    }


def devices_sentence(found: dict[str, Any]) -> str:
    """E.g. `using 1 of 4 GPUs`, `using all 4 GPUs`."""
    platform, number = found["platform"], found["num_devices"]
    name = {"cpu": "CPU", "gpu": "GPU", "cuda": "GPU", "tpu": "TPU"}.get(platform, platform)
    if number == 1:
        return f"using the only {name} device"
    used = f"all {number}" if found["num_used"] == number else f"{found['num_used']} of {number}"
    return f"using {used} {name}s"


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
