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


def versions() -> dict[str, str]:
    """Installed versions of the packages that figures depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def devices() -> dict[str, Any]:
    """Platform, kinds and number of devices, and how many of them an engine uses (one)."""
    local = jax.local_devices()
    return {
        "platform": jax.default_backend(),
        "kinds": sorted({device.device_kind for device in local}),
        "num_devices": len(local),
        "num_used": 1,
        "host": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def devices_sentence(found: dict[str, Any]) -> str:
    """E.g. `using 1 of 4 GPUs`."""
    name = {"cpu": "CPU", "gpu": "GPU", "cuda": "GPU", "tpu": "TPU"}.get(
        found["platform"], found["platform"]
    )
    number = found["num_devices"]
    if number == 1:
        return f"using the only {name} device"
    return f"using {found['num_used']} of {number} {name}s"


def commit() -> str | None:
    """Commit of the checkout this package runs from, with `+` if it was changed; None elsewhere."""
    root = pathlib.Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def provenance() -> dict[str, Any]:
    """Versions, devices and commit, as every command's JSON document carries them."""
    return {"versions": versions(), "devices": devices(), "commit": commit()}


def sha256_of(path: str | os.PathLike) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
