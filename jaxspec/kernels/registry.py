"""Kernels by name, imported when they are first asked for.

`import jaxspec` therefore needs neither Pallas nor a C++ compiler.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping
from typing import Literal, TypeAlias

import jax

from jaxspec.errors import SettingError
from jaxspec.kernels.base import Kernels
from jaxspec.runtime import environment
from jaxspec.runtime.values import text
from jaxspec.runtime.verdicts import kept_problem

_log = logging.getLogger(__name__)

KernelsName: TypeAlias = Literal["xla", "mosaic", "pallas", "native"]

LEAST_CAPABILITY = 8.0  # of GPUs that Triton compiles for, from Ampere on

# Module and attribute of each.
KERNELS: Mapping[str, tuple[str, str]] = {
    "xla": ("jaxspec.kernels.base", "XLA"),
    "mosaic": ("jaxspec.kernels.mosaic", "MOSAIC"),
    "pallas": ("jaxspec.kernels.pallas", "PALLAS"),
    "native": ("jaxspec.kernels.cpu", "NATIVE"),
}


def get_kernels(name: str, platform: str | None = None) -> Kernels:
    """The kernels with this name, for programs of a platform; None for JAX's default one.

    Raises:
      SettingError: there are no kernels with this name, or their dependencies cannot be imported.
    """
    return _kernels_on(name, platform or jax.default_backend())


@functools.cache
def _kernels_on(name: str, platform: str) -> Kernels:
    if name not in KERNELS:
        raise SettingError(f"There are no kernels {name!r}; choose one of {', '.join(KERNELS)}.")
    module, attribute = KERNELS[name]
    try:
        kernels: Kernels = getattr(importlib.import_module(module), attribute)
    except (AttributeError, ImportError) as error:
        raise SettingError(
            f"kernels={name!r} was given, but this JAX lacks what they are written in ({error}); "
            "choose 'xla'."
        ) from error
    return kernels.on(platform)


def check_kernels(name: str) -> None:
    """Raises `SettingError` unless kernels with this name exist and can be used here."""
    get_kernels(text("kernels", name, f"one of {', '.join(KERNELS)}"))
    if name == "mosaic" and not environment.is_hopper():
        raise SettingError(
            f"kernels='mosaic' was given, but JAX runs on {jax.default_backend()} and they are for "
            "GPUs of compute capability 9 (Hopper); choose 'xla' or 'pallas'."
        )
    if name == "native":
        if jax.default_backend() != "cpu":
            raise SettingError(
                f"kernels='native' was given, but JAX runs on {jax.default_backend()} and they are "
                "for CPUs; choose 'xla' or 'pallas'."
            )
        problem = native_problem()
        if problem is not None:
            raise SettingError(f"kernels='native' was given, but {problem}, or choose 'xla'.")


def native_problem() -> str | None:
    """Why the CPU kernels cannot be used here, with what to do after a semicolon, or None; compiles
    them at the first call."""
    from jaxspec.kernels import cpu

    return cpu.problem()


def family_of(name: str | None) -> str | None:
    """The instructions with which the kernels of this name multiply bfloat16 (`cpu.family`); None
    if XLA chooses them."""
    if name != "native":
        return None
    from jaxspec.kernels import cpu

    return cpu.family()


def default_kernels() -> KernelsName:
    """`native` on a CPU, `mosaic` on a Hopper GPU, `pallas` on another, where they can be used;
    otherwise `xla`.

    If this is `xla` on a CPU or GPU, a warning in the log says so once, as do `Engine.describe()`
    and every JSON document: it is slower, and its outputs may differ at ties within rounding.
    """
    wanted, problem = _wanted_kernels(jax.default_backend())
    name: KernelsName = wanted if problem is None else "xla"
    if wanted == "mosaic" and problem is not None and problem_on_gpu("pallas") is None:
        name = "pallas"
    environment.note_kernels(name, family=family_of(name), fallback=problem)
    if problem is not None:
        _announce(wanted, problem, name)
    return name


def _wanted_kernels(platform: str) -> tuple[KernelsName, str | None]:
    """The kernels intended for a platform, and the reason why they cannot be used here, or None."""
    if platform == "cpu":
        return "native", native_problem() or kept_problem("native")
    if platform != "gpu":
        return "xla", None
    name: KernelsName = "mosaic" if environment.is_hopper() else "pallas"
    capability = environment.compute_capability()
    if capability is not None and capability < LEAST_CAPABILITY:
        return name, (
            f"this GPU has compute capability {capability:.1f}, and Triton needs {LEAST_CAPABILITY}"
        )
    return name, problem_on_gpu(name)


def problem_on_gpu(name: KernelsName) -> str | None:
    """Why the kernels of this name cannot be imported, or why `jaxspec doctor` advises against
    them; None if neither."""
    try:
        get_kernels(name)
    except SettingError as error:
        return str(error.__cause__)
    return kept_problem(name)


@functools.cache
def _announce(wanted: str, problem: str, instead: str) -> None:
    _log.warning(
        "The %s kernels cannot be used: %s. %s are used instead; they are slower, and two "
        "tokens that tie within rounding may be exchanged.",
        {"native": "C++", "mosaic": "Mosaic GPU", "pallas": "Pallas"}[wanted],
        problem,
        {"xla": "XLA's", "pallas": "Those of Pallas"}[instead],
    )
