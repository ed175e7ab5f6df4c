"""The C++ kernels' shared library: compiled once for this machine, and checked before it is loaded.

Loading a library runs its code, so it is loaded only from a directory that belongs to the user and
that no other user can write to. Its SHA-256 digest is part of its name: a file that was cut short
is compiled again instead of ending the process with SIGBUS. A lock makes one process compile while
others wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import pathlib
import platform
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import version

import jax

from jaxspec.runtime.directories import (
    KERNELS_DIRECTORY,
    cache_directory,
    sha256_of,
    temporary_directory,
)
from jaxspec.runtime.locks import only_writer
from jaxspec.runtime.processes import run_child
from jaxspec.runtime.signals import uninterrupted

SOURCE = pathlib.Path(__file__).with_name("kernels.cc")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
COMPILERS = ("c++", "g++", "clang++")  # in this order, unless $CXX names one
# No -ffast-math: NaN has to stay NaN, and sums must keep their order. What is fused is said there.
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno")
OPTIONS += ("-shared", "-fPIC", "-pthread", "-w")
FUNCTIONS = ("jaxspec_pack", "jaxspec_product", "jaxspec_attention", "jaxspec_coded_attention")
FUNCTIONS += ("jaxspec_highest",)
SYMBOLS = (*FUNCTIONS, "jaxspec_num_lanes", "jaxspec_family", "jaxspec_start_threads")
TIMEOUT_S = 600  # it takes seconds, and minutes on a machine that is busy

_log = logging.getLogger("jaxspec.runtime.compilation")


class BuildError(Exception):
    """The library cannot be had; the message is half a sentence that says why."""


def load_library() -> ctypes.CDLL:
    """The library with every name in `SYMBOLS`, compiled unless the cache directory has it.

    Raises:
      BuildError: there is no compiler, it failed, or the cache directory is not safe to load from.
    """
    compiler = _compiler()
    sources = [path.read_text() for path in (SOURCE, *HEADERS)]
    what = [*sources, *OPTIONS, *processor_options(), *compiler, version("jaxlib"), _cpu()]
    key = hashlib.sha256("\0".join(what).encode()).hexdigest()[:16]
    path = cache_directory() / KERNELS_DIRECTORY
    try:
        with _private_directory(path) as directory:
            library = _load_built(directory, key)
            if library is None:
                with only_writer(path / f"kernels-{key}", wait=True):
                    # Another process may have made it meanwhile.
                    library = _load_built(directory, key) or _build(compiler, directory, key)
    except OSError as error:
        raise BuildError(f"{path} cannot be used ({error.strerror or error})") from error
    return library


def _build(compiler: Sequence[str], directory: pathlib.Path, key: str) -> ctypes.CDLL:
    _log.info("compiling the CPU kernels, once on this machine", extra={"compiling": True})
    try:
        made = _compile(compiler)
    finally:
        _log.info("compiled the CPU kernels", extra={"compiling": False})
    unfinished = directory / "unfinished"
    with uninterrupted:
        unfinished.write_bytes(made)
        unfinished.chmod(0o600)
        os.replace(unfinished, directory / f"kernels-{key}-{hashlib.sha256(made).hexdigest()}.so")
    library = _load_built(directory, key)
    if library is None:
        raise BuildError(f"{shlex.join(compiler)} made no library that can be loaded")
    return library


def _compiler() -> list[str]:
    """The compiler's path, and the words that `$CXX` adds: a wrapper's compiler, or options."""
    named = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(named)] if named else [[name] for name in COMPILERS]
    except ValueError as error:
        raise BuildError(f"CXX is {named!r}, which is no command ({error})") from error
    for program, *others in commands:
        found = shutil.which(program)
        if found is not None:
            return [found, *others]
    raise BuildError(f"no C++ compiler was found ({named or ', '.join(COMPILERS)})")


@contextlib.contextmanager
def _private_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path to the directory `path`, which is made where needed.

    On Linux it leads through a file descriptor, so that someone who may rename the directory cannot
    put another in its place between the check and the use.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_private(path, os.fstat(descriptor))
        by_descriptor = pathlib.Path(f"/proc/self/fd/{descriptor}")
        yield by_descriptor if by_descriptor.exists() else path
    finally:
        os.close(descriptor)


def _check_private(path: pathlib.Path, found: os.stat_result) -> None:
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        shown = path.parent.resolve() / path.name
        raise BuildError(
            f"other users may write to {shown}, and code is not loaded from there; remove it, or "
            "set JAXSPEC_CACHE to a directory of your own"
        )


def _load_built(directory: pathlib.Path, key: str) -> ctypes.CDLL | None:
    """The library of this key; None if there is none. One that is damaged is removed."""
    for path in sorted(directory.glob(f"kernels-{key}-*.so")):
        _check_private(path, path.lstat())
        if path.stem.endswith(f"-{sha256_of(path)}"):
            with contextlib.suppress(OSError):  # of another architecture, say
                library = ctypes.CDLL(str(path))
                if all(hasattr(library, name) for name in SYMBOLS):
                    return library
        path.unlink()
    return None


def _compile(compiler: Sequence[str]) -> bytes:
    """The library's content."""
    with temporary_directory() as working:
        made = working / "kernels.so"
        options = [*OPTIONS, *processor_options(), f"-isystem{jax.ffi.include_dir()}"]
        command = [*compiler, *options, str(SOURCE)]
        _run(compiler, [*command, "-o", str(made)])
        if not made.is_file():
            raise BuildError(f"{shlex.join(compiler)} wrote no library")
        return made.read_bytes()


def _run(compiler: Sequence[str], command: list[str]) -> None:
    """Runs the compiler."""
    name = shlex.join(compiler)
    try:
        process = run_child(command, timeout_s=TIMEOUT_S)
    except OSError as error:
        raise BuildError(f"{name} cannot be run ({error.strerror})") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{name} took longer than {TIMEOUT_S} s") from error
    if process.returncode != 0:
        errors = [line for line in process.stderr.splitlines() if "error" in line]
        said = errors[0][:200] if errors else f"exit status {process.returncode}"
        raise BuildError(f"{name} could not compile {SOURCE.name}: {said}")


def processor_options() -> tuple[str, ...]:
    """Options for this processor besides `-march=native`.

    Intel's processors multiply pairs of bf16 in vectors more slowly than floats, because they have
    AMX for them. Virtual machines may hide AMX: on an Emerald Rapids that does, products of five
    rows and more are 1.2 times as fast if pairs are taken apart, and those of one row as fast.
    """
    words = _cpu().split()
    is_slow = "GenuineIntel" in words and "avx512_bf16" in words and "amx_bf16" not in words
    return ("-mno-avx512bf16",) if is_slow else ()


def _cpu() -> str:
    """What tells this processor from one that lacks its instructions."""
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "flags", "Features")
    lines = info.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
