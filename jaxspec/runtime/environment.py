"""Where a result was measured: versions, devices, and the package's own commit."""

from __future__ import annotations

import contextlib
import datetime
import glob
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
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
    """Records which kernels this process loads its models with, their instruction family and, if
    they are not the ones made for this device, the reason."""
    _kernels.update(kernels=name, kernels_family=family, kernels_fallback=fallback)


def note_fallback(why: str) -> None:
    """Records why the kernels made for this device do not compute something."""
    _kernels["kernels_fallback"] = why


def noted_kernels() -> dict[str, str | None]:
    """`kernels`, those that models are loaded with by default (None before the first model);
    `kernels_family`, the instructions with which the C++ kernels multiply bfloat16, or None; and
    `kernels_fallback`, the reason why the kernels made for this device are not used, or not for
    everything, or None."""
    return dict(_kernels)


AUTOTUNED = "xla_gpu_per_fusion_autotune_cache_dir"  # the flag, and JAX's name for the directory


def autotune_directory() -> pathlib.Path | None:
    """The directory in which XLA keeps its choices of the fastest kernels for a kind of GPU; None
    if this is not a GPU, or nothing is kept.

    XLA chooses by timing, and different kernels sum in different orders. Processes that share this
    directory, or have copies of it, compile to the same kernels on the same kind of GPU, and so
    give the same bits. JAX puts it into its persistent compilation cache, which commands use; a
    program that uses the library gets it by `enable_compilation_cache` or by setting
    `JAX_COMPILATION_CACHE_DIR`.
    """
    values = jax.config.values
    kept, directory = values[_XLA_CACHES] or "", values["jax_compilation_cache_dir"]
    is_kept = values["jax_enable_compilation_cache"] and (kept == "all" or AUTOTUNED in kept)
    if jax.default_backend() != "gpu" or not is_kept or directory is None:
        return None
    return pathlib.Path(directory, AUTOTUNED)


_XLA_CACHES = "jax_persistent_cache_enable_xla_caches"


def autotuned() -> dict[str, Any] | None:
    """`num_results` in `autotune_directory`, and a `digest` that is equal for processes with the
    same results; None if none are kept."""
    directory = autotune_directory()
    if directory is None:
        return None
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return {"num_results": len(files), "digest": digest.hexdigest()[:16]}


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on."""
    found = {"python": platform.python_version()} | dict.fromkeys(PACKAGES, "not installed")
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def loops_run_on_host() -> bool:
    """Whether the host runs loops with a dynamic trip count, waiting for the device before every
    trip. This is so on a GPU, so there the loops inside a round have static trip counts."""
    return jax.default_backend() == "gpu"


def compute_capability() -> float | None:
    """That of the GPUs that JAX runs on, such as 9.0; None if it runs on none, or it is not
    known."""
    if jax.default_backend() != "gpu":
        return None
    with contextlib.suppress(ValueError):
        return float(getattr(jax.local_devices()[0], "compute_capability", ""))
    return None


def is_hopper() -> bool:
    """Whether JAX runs on GPUs of compute capability 9, for which `jaxspec.kernels.mosaic` is
    made."""
    return compute_capability() == 9.0


def lacks_bfloat16() -> bool:
    """Whether JAX runs on GPUs that only emulate bfloat16, those before Ampere."""
    capability = compute_capability()
    return capability is not None and capability < 8.0


# Files that a driver makes for its devices, and the extra with which JAX uses them.
ACCELERATOR_FILES = {
    "an NVIDIA GPU": (
        ("/dev/nvidia[0-9]*", "/usr/lib/wsl/lib/libcuda.so*"),
        "cuda13` (or `cuda12` for older drivers)",
    ),
    "a TPU": (("/dev/accel[0-9]*",), "tpu`"),
}


def unused_accelerator() -> str | None:
    """A sentence about a device of this machine that JAX does not use, or None. JAX says nothing
    where its plugin is missing or the driver is too old for it, and runs on the CPU."""
    if jax.default_backend() != "cpu" or getattr(jax.config, "jax_platforms", None) == "cpu":
        return None
    for name, (patterns, extra) in ACCELERATOR_FILES.items():
        if any(glob.glob(pattern) for pattern in patterns):
            return (
                f"This machine has {name}, but JAX runs on the CPU: its plugin is missing, or does "
                f"not work with the driver. Install the extra `{extra}, or set JAX_PLATFORMS=cpu "
                "if that is intended."
            )
    return None


def devices(num_used: int = 1) -> dict[str, Any]:
    """Platform, kinds and number of devices, how many of them an engine uses, the host's processor,
    and the kernels (`noted_kernels`)."""
    local = jax.local_devices()
    return {
        "platform": jax.default_backend(),
        "kinds": sorted({device.device_kind for device in local}),
        "num_devices": len(local),
        "num_used": num_used,
        "host": f"{platform.system()} {platform.machine()}",
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        **noted_kernels(),
    }


def _cpu_model() -> str | None:
    """The name of the host's processor, e.g. `AMD EPYC`; None if the system does not say."""
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
        found = re.search(r"^model name\s*:\s*(\S.*)$", text, flags=re.MULTILINE)
        if found is not None:
            return found[1].strip()
    return platform.processor() or None


def devices_sentence(found: dict[str, Any]) -> str:
    """E.g. `using 1 of 4 GPUs`, `using all 4 GPUs`."""
    platform, number = found["platform"], found["num_devices"]
    name = {"cpu": "CPU", "gpu": "GPU", "cuda": "GPU", "tpu": "TPU"}.get(platform, platform)
    if number == 1:
        return f"using the only {name} device"
    used = f"all {number}" if found["num_used"] == number else f"{found['num_used']} of {number}"
    return f"using {used} {name}s"


def load_remark(load_average: float, num_cpus: int) -> str | None:
    """A warning about times that were taken while the load was more than 1.5 times the number of
    CPUs, or None. Our own benches keep at most all CPUs busy."""
    if load_average <= 1.5 * num_cpus:
        return None
    return (
        "Times are not to be trusted: other work ran on this machine (load average up to "
        f"{load_average:.1f} on {num_cpus} CPUs)."
    )


def commit() -> str | None:
    """Commit of the checkout that this package runs from, with `+` if it has changes; otherwise the
    commit that the installed distribution was built from; None if neither is known."""
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
    """Versions, devices, commit, and the day in UTC, for every command's JSON document."""
    today = datetime.datetime.now(datetime.UTC).date()
    return {
        "versions": versions(),
        "devices": devices(),
        "commit": commit(),
        "date": today.isoformat(),
    }
