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
      capability: compute capability; GPUs only, as is all that follows.
      num_cores: multiprocessors.
      description: further fields of XLA's `GpuDeviceInfoProto`.
      bytes_per_s: memory bandwidth, from XLA's description.
      num_bytes: size of its memory, likewise.
    """

    kind: str
    platform: str
    plugins: tuple[str, ...]
    package: str
    capability: float | None = None
    num_cores: int | None = None
    description: str = ""
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


def _gpu(
    kind: str,
    capability: float,
    num_cores: int,
    *,
    fpus: int,
    threads: int,
    shared: int,
    l2: int,
    ghz: float,
    **memory: int,
) -> AbsentDevice:
    """A GPU, by what XLA reads: of a core (multiprocessor) its FPUs, threads and bytes of shared
    memory; the bytes of the L2 cache; and the clock."""
    major, minor = divmod(round(10 * capability), 10)
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    optin = shared - 1024 if major >= 8 else shared
    return AbsentDevice(
        kind=kind,
        platform="gpu",
        plugins=("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
        package="'jaxspec-decoding[deviceless]'",
        capability=capability,
        num_cores=num_cores,
        description=f"""
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  core_count: {num_cores}
  fpus_per_core: {fpus}
  clock_rate_ghz: {ghz}
  threads_per_core_limit: {threads}
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {optin}
  l2_cache_size: {l2}
""",
        **memory,
    )


# As in XLA's descriptions of these devices (xla/backends/gpu/target_config/specs); those of RTX
# 4090 and T4 as NVIDIA describes them.
_HOPPER: dict[str, Any] = {
    "capability": 9.0,
    "num_cores": 132,
    "fpus": 128,
    "threads": 2048,
    "shared": 233472,
    "l2": 52428800,
    "ghz": 1.98,
}
ABSENT_DEVICES = {
    "h100": _gpu(
        "NVIDIA H100 80GB HBM3",
        bytes_per_s=3_352_320_000_000,
        num_bytes=84_942_979_072,
        **_HOPPER,
    ),
    "h200": _gpu(
        "NVIDIA H200", bytes_per_s=4_800_000_000_000, num_bytes=151_397_597_184, **_HOPPER
    ),
    "a100": _gpu(
        "NVIDIA A100-SXM4-80GB",
        8.0,
        108,
        fpus=64,
        threads=2048,
        shared=167936,
        l2=41943040,
        ghz=1.41,
        bytes_per_s=2_039_040_000_000,
        num_bytes=85_100_068_864,
    ),
    "rtx4090": _gpu(
        "NVIDIA GeForce RTX 4090",
        8.9,
        128,
        fpus=128,
        threads=1536,
        shared=102400,
        l2=75497472,
        ghz=2.52,
        bytes_per_s=1_008_000_000_000,
        num_bytes=25_757_220_864,
    ),
    "b200": _gpu(
        "NVIDIA B200",
        10.0,
        148,
        fpus=128,
        threads=2048,
        shared=233472,
        l2=132644864,
        ghz=1.965,
        bytes_per_s=7_672_320_000_000,
        num_bytes=191_514_411_008,
    ),
    "t4": _gpu(
        "Tesla T4",
        7.5,
        40,
        fpus=64,
        threads=1024,
        shared=65536,
        l2=4194304,
        ghz=1.59,
        bytes_per_s=320_000_000_000,
        num_bytes=15_843_721_216,
    ),
    "v5e": AbsentDevice(
        kind="TPU v5 lite", platform="tpu", plugins=("libtpu",), package="'jax[tpu]'"
    ),
}

_TARGET_CONFIG = """
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  name: "{kind}"
  device_vendor: "NVIDIA Corporation"
  {description}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
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
    [device] = absent_devices(name)
    placed = shapes_at(arguments, jax.sharding.SingleDeviceSharding(device))
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
        num_cores=device.num_cores,
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=described)
    with (
        mock.patch.object(jax, "default_backend", return_value=device.platform),
        mock.patch.object(environment, "compute_capability", return_value=device.capability),
        jax.sharding.use_abstract_mesh(mesh),
    ):
        yield


@functools.cache
def absent_devices(name: str, count: int = 1) -> list[Any]:
    """This many devices of one kind, a key of `ABSENT_DEVICES`, to compile for; of TPUs one."""
    device = ABSENT_DEVICES[name]
    if device.platform == "tpu":
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no cloud service to ask
        return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[:1]
    text = _TARGET_CONFIG.format(
        kind=device.kind,
        description=device.description,
        bytes_per_s=device.bytes_per_s,
        num_bytes=device.num_bytes,
    )
    topology = f"1x1x{count}"
    found = topologies.get_topology_desc(platform="cuda", target_config=text, topology=topology)
    return found.devices
