"""The C++ kernels' shared library: compiled once for this machine, and checked before it is loaded.

Loading a library runs its code, so it is loaded only from a directory that belongs to the user and
that no other user can write to. Its SHA-256 digest is part of its name: a file that was cut short
is compiled again instead of ending the process with SIGBUS. A lock makes one process compile while
others wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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
FUNCTIONS += ("jaxspec_highest", "jaxspec_move")
SYMBOLS = (*FUNCTIONS, "jaxspec_num_lanes", "jaxspec_family", "jaxspec_start_threads")
TIMEOUT_S = 600  # it takes seconds, and minutes on a machine that is busy

_log = logging.getLogger("jaxspec.runtime.compilation")


ANOTHER_COMPILER = "name another compiler with CXX"
ANOTHER_CACHE = "set JAXSPEC_CACHE to a directory of your own"


class BuildError(Exception):
    """The library cannot be had. The message is half a sentence that says why and, after a
    semicolon, what to do."""


def load_library() -> ctypes.CDLL:
    """The library with every name in `SYMBOLS`, compiled unless the cache directory has it.

    Raises:
      BuildError: there is no compiler, it failed, or the cache directory is not safe to load from.
    """
    compiler = _compiler()
    sources = [path.read_text(encoding="utf-8") for path in (SOURCE, *HEADERS)]
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
        is_no_directory = isinstance(error, FileExistsError)
        reason = os.strerror(errno.ENOTDIR) if is_no_directory else error.strerror or error
        raise BuildError(f"{path} cannot be used ({reason}); {ANOTHER_CACHE}") from error
    return library


def _build(compiler: Sequence[str], directory: pathlib.Path, key: str) -> ctypes.CDLL:
    _log.info("compiling the CPU kernels, once on this machine", extra={"compiling": True})
    try:
        made = _compile(compiler)
    finally:
        _log.info("compiled the CPU kernels", extra={"compiling": False})
    unfinished = directory / "unfinished"
    finished = directory / f"kernels-{key}-{hashlib.sha256(made).hexdigest()}.so"
    with uninterrupted:
        unfinished.write_bytes(made)
        unfinished.chmod(0o600)
        os.replace(unfinished, finished)
    try:
        return _load(finished)
    except OSError as error:
        finished.unlink()
        reason = str(error).rpartition(": ")[2]
        raise BuildError(
            f"{shlex.join(compiler)} made no library that can be loaded ({reason}); "
            f"{ANOTHER_COMPILER}, or set JAXSPEC_CACHE to a directory on a disk from which "
            "programs may be run"
        ) from error


def _compiler() -> list[str]:
    """The compiler's path, and the words that `$CXX` adds: a wrapper's compiler, or options."""
    named = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(named)] if named else [[name] for name in COMPILERS]
    except ValueError as error:
        raise BuildError(
            f"CXX is {named!r}, which is no command ({error}); correct it, or leave it out"
        ) from error
    for program, *others in commands:
        found = shutil.which(program)
        if found is not None:
            return [found, *others]
    if named:
        raise BuildError(
            f"CXX is {named}, and there is no such program; correct it, or leave it out"
        )
    raise BuildError(f"no C++ compiler was found ({', '.join(COMPILERS)}); install one")


@contextlib.contextmanager
def _private_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path to the directory `path`, which is made where needed.

    On Linux it leads through a file descriptor, so that someone who may rename the directory cannot
    put another in its place between the check and the use.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    _check_no_link(path, path.lstat())
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_private(path, os.fstat(descriptor))
        by_descriptor = pathlib.Path(f"/proc/self/fd/{descriptor}")
        yield by_descriptor if by_descriptor.exists() else path
    finally:
        os.close(descriptor)


def _check_private(path: pathlib.Path, found: os.stat_result) -> None:
    _check_no_link(path, found)
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"other users may write to {_shown(path)}, and code is not loaded from there; remove "
            f"it, or {ANOTHER_CACHE}"
        )


def _check_no_link(path: pathlib.Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise BuildError(
            f"{_shown(path)} cannot be used (it is a symbolic link, and code is not loaded through "
            f"one); remove the link, or {ANOTHER_CACHE}"
        )


def _shown(path: pathlib.Path) -> pathlib.Path:
    return path.parent.resolve() / path.name


def _load_built(directory: pathlib.Path, key: str) -> ctypes.CDLL | None:
    """The library of this key; None if there is none. One that is damaged is removed."""
    for path in sorted(directory.glob(f"kernels-{key}-*.so")):
        _check_private(path, path.lstat())
        if path.stem.endswith(f"-{sha256_of(path)}"):
            with contextlib.suppress(OSError):  # of another architecture, say
                return _load(path)
        path.unlink()
    return None


def _load(path: pathlib.Path) -> ctypes.CDLL:
    """Loads a library; raises `OSError` if that cannot be done, or if it lacks a function."""
    library = ctypes.CDLL(str(path))
    missing = [name for name in SYMBOLS if not hasattr(library, name)]
    if missing:
        raise OSError(f"it lacks {missing[0]}")
    return library


def _compile(compiler: Sequence[str]) -> bytes:
    """The library's content."""
    with contextlib.ExitStack() as stack:
        try:
            working = stack.enter_context(temporary_directory())
        except OSError as error:
            raise BuildError(
                f"no temporary directory can be made ({error.strerror}); name a directory with "
                "room for one with TMPDIR"
            ) from error
        made = working / "kernels.so"
        options = [*OPTIONS, *processor_options(), f"-isystem{jax.ffi.include_dir()}"]
        command = [*compiler, *options, str(SOURCE)]
        _run(compiler, [*command, "-o", str(made)])
        if not made.is_file():
            raise BuildError(f"{shlex.join(compiler)} wrote no library; {ANOTHER_COMPILER}")
        return made.read_bytes()


def _run(compiler: Sequence[str], command: list[str]) -> None:
    """Runs the compiler."""
    name = shlex.join(compiler)
    try:
        process = run_child(command, timeout_s=TIMEOUT_S)
    except OSError as error:
        raise BuildError(f"{name} cannot be run ({error.strerror}); {ANOTHER_COMPILER}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{name} took longer than {TIMEOUT_S} s; try again when the machine is less busy, or "
            f"{ANOTHER_COMPILER}"
        ) from error
    if process.returncode != 0:
        errors = [line for line in process.stderr.splitlines() if "error" in line]
        said = errors[0][:200] if errors else f"exit status {process.returncode}"
        raise BuildError(f"{name} could not compile {SOURCE.name}: {said}; {ANOTHER_COMPILER}")


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
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
