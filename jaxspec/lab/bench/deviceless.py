"""Compiles programs for a device that is not present, and shows what XLA makes of them.

A GPU needs JAX's CUDA plugin (extra `deviceless`; no CUDA library, no driver), a TPU needs libtpu
(`jax[tpu]`). XLA then compiles for a device that it knows only from a description. Choices that it
would otherwise make by timing on the device (autotuning) follow rules, so a product may become
other kernels on a real device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies

from jaxspec.errors import SettingError
from jaxspec.runtime import environment
from jaxspec.runtime.compilation import shapes_at
from jaxspec.runtime.directories import temporary_directory
from jaxspec.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsentDevice:
    """A device to compile for.

    Attributes:
      kind: its name in JAX.
      platform: its name in `jax.default_backend()`.
      plugins: modules, one of which must be installed.
      package: a package that provides one, for `pip install`.
      bytes_per_s: memory bandwidth, from XLA's description; GPUs only.
      num_bytes: size of its memory, likewise.
    """

    kind: str
    platform: str
    plugins: tuple[str, ...]
    package: str
    bytes_per_s: int = 0
    num_bytes: int = 0

    @property
    def problem(self) -> str | None:
        """The reason why nothing can be compiled for it here, or None."""
        if any(map(_is_installed, self.plugins)):
            return None
        return (
            f"compiling for {self.kind} needs one of {', '.join(self.plugins)}; install it with "
            f"pip install {self.package}"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _gpu(kind: str, **memory: int) -> AbsentDevice:
    return AbsentDevice(
        kind=kind,
        platform="gpu",
        plugins=("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
        package="'jaxspec-decoding[deviceless]'",
        **memory,
    )


# Memory as in XLA's descriptions of these devices (xla/backends/gpu/target_config/specs).
ABSENT_DEVICES = {
    "h100": _gpu("NVIDIA H100 80GB HBM3", bytes_per_s=3_352_320_000_000, num_bytes=84_942_979_072),
    "h200": _gpu("NVIDIA H200", bytes_per_s=4_800_000_000_000, num_bytes=151_397_597_184),
    "v5e": AbsentDevice(
        kind="TPU v5 lite", platform="tpu", plugins=("libtpu",), package="'jax[tpu]'"
    ),
}

# A GpuTargetConfigProto with what H100 and H200 have in common: Hopper with 132 multiprocessors.
_HOPPER = """
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  name: "{kind}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  core_count: {num_cores}
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800
  memory_bandwidth: {bytes_per_s}
  device_memory_size: {num_bytes}
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
"""
_NUM_CORES = 132


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledText:
    """XLA's texts about a compiled program.

    Attributes:
      hlo: the optimised HLO.
      memory: the result of `compiled.memory_analysis()`.
      thunks: the dump `thunk_sequence_after_thunk_passes`, for GPUs.
      thunk_metadata: the dump of this name, for GPUs.
    """

    hlo: str
    memory: Any
    thunks: str
    thunk_metadata: str


def compile_for(
    name: str, function: Callable[..., Any], *arguments: PyTree, donated: int
) -> CompiledText:
    """The program that `function` compiles to on an absent device; call it within `as_if_on` for
    this device.

    Args:
      name: a key of `ABSENT_DEVICES`.
      function: the function to compile.
      arguments: `jax.ShapeDtypeStruct`s.
      donated: index of the argument that is updated in place.
    """
    placed = shapes_at(arguments, jax.sharding.SingleDeviceSharding(_device(name)))
    with temporary_directory() as directory:
        is_gpu = ABSENT_DEVICES[name].platform == "gpu"
        options = {"xla_dump_to": str(directory)} if is_gpu else None
        program = jax.jit(function, donate_argnums=donated, compiler_options=options)
        with _keeping_no_program():
            compiled = program.lower(*placed).compile()

        def dumped(ending: str) -> str:
            found = sorted(directory.glob(f"*{ending}.txt"))
            return found[-1].read_text() if found else ""

        return CompiledText(
            hlo=compiled.as_text() or "",
            memory=compiled.memory_analysis(),
            thunks=dumped("thunk_sequence_after_thunk_passes"),
            thunk_metadata=dumped("thunk_metadata"),
        )


@contextlib.contextmanager
def _keeping_no_program() -> Iterator[None]:
    """Disables the persistent cache, which could not load the program without the device."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def as_if_on(name: str) -> Iterator[None]:
    """Makes JAX report this device's backend as the default, and Pallas lower kernels for it, so
    that models and loops make the same choices as on the device.

    Raises:
      SettingError: nothing can be compiled for the device here.
    """
    if name not in ABSENT_DEVICES:
        raise SettingError(
            f"The device {name!r} was given; choose one of {', '.join(ABSENT_DEVICES)}."
        )
    device = ABSENT_DEVICES[name]
    if device.problem is not None:
        raise SettingError(f"Nothing was compiled: {device.problem}.")
    described = jax.sharding.AbstractDevice(
        device_kind=device.kind,
        platform="cuda" if device.platform == "gpu" else device.platform,
        num_cores=_NUM_CORES if device.platform == "gpu" else None,
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=described)
    with (
        mock.patch.object(jax, "default_backend", return_value=device.platform),
        mock.patch.object(environment, "is_hopper", return_value=device.platform == "gpu"),
        jax.sharding.use_abstract_mesh(mesh),
    ):
        yield


@functools.cache
def _device(name: str) -> Any:
    device = ABSENT_DEVICES[name]
    if device.platform == "tpu":
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no cloud service to ask
        return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    text = _HOPPER.format(
        kind=device.kind,
        num_cores=_NUM_CORES,
        bytes_per_s=device.bytes_per_s,
        num_bytes=device.num_bytes,
    )
    found = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1")
    return found.devices[0]
