"""Compiled programs that report long compilations and can be compiled ahead of time.

The decode loop of a large model compiles for a minute or more, and a silent program looks hung. So
functions that may take seconds to compile are `Program`s: jitted functions with a name. After two
seconds a `Program` logs what it is compiling, and at the end how long it took and whether the
persistent cache had it:

    compiling 4 of 5: the decode round of my-model, batch size 8, verify length 5
    compiled 4 of 5: the decode round of my-model, batch size 8, verify length 5 in 41.3 s
      (not in the cache)

These are INFO records of the logger `jaxspec.runtime.compilation`. The library adds no handler to
it: commands show them as a progress line, and a program that uses the library sees them after
`logging.basicConfig(level=logging.INFO)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import jax

from jaxspec.errors import SettingError
from jaxspec.runtime.directories import COMPILED_DIRECTORY, cache_directory
from jaxspec.runtime.host_limits import usable_cpus

_log = logging.getLogger(__name__)

PATIENCE_S = 2.0  # compilations that take less are not reported
MOST_AT_A_TIME = 4  # compilations; each takes its own memory
CACHE_MAX_BYTES = 2 * 2**30  # of the persistent cache
CACHE_FROM_S = 0.3  # compilations that take less are not worth keeping
CACHE_WAIT_S = 2.0

# JAX's events. If a version renames them, only the note about the cache is lost.
CACHE_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
CACHE_HIT = "/jax/compilation_cache/cache_hits"


_first_user: int | None = None  # the process that first used JAX, or Orbax, whose threads it has


def check_not_forked() -> None:
    """Called before JAX or Orbax is used.

    Raises:
      SettingError: this process was forked from one that had used them.
    """
    global _first_user
    if _first_user is None:
        _first_user = os.getpid()
    if os.getpid() != _first_user:
        raise SettingError(
            f"Process {os.getpid()} was forked from process {_first_user}, which had used JAX. A "
            "fork does not copy JAX's threads, so the call would never return; start processes by "
            'multiprocessing.get_context("spawn"), and load models and make engines there.'
        )


def _note_use() -> None:
    """Before a fork: JAX may have been used without us. If a version renames this, only that is not
    noticed."""
    is_used = getattr(sys.modules.get("jax._src.xla_bridge"), "backends_are_initialized", None)
    if is_used is not None and is_used():
        with contextlib.suppress(SettingError):
            check_not_forked()


os.register_at_fork(before=_note_use)


def enable_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache directory, so that later processes load them.

    This sets JAX's own configuration for the whole process. Commands call it; a program or notebook
    that uses the library may. Nothing changes if JAX already has a cache directory
    (`JAX_COMPILATION_CACHE_DIR`, `jax_compilation_cache_dir`) or its cache was disabled
    (`JAX_ENABLE_COMPILATION_CACHE=false`).
    """
    if getattr(jax.config, "jax_compilation_cache_dir") is not None:  # noqa: B009
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_directory() / COMPILED_DIRECTORY))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHE_FROM_S)
    jax.config.update("jax_compilation_cache_max_size", CACHE_MAX_BYTES)


def finish_cache_writes() -> None:
    """Waits until no program is being written to the persistent cache, at most `CACHE_WAIT_S`.

    A program that is cut off would be tried, with a warning, by every later process. JAX locks a
    cache of limited size while it writes; other caches are not waited for.
    """
    directory = jax.config.values["jax_compilation_cache_dir"]
    if directory is None or jax.config.values["jax_compilation_cache_max_size"] == -1:
        return
    import filelock  # which such a cache needs

    with contextlib.suppress(OSError):  # no such directory, or too long
        with filelock.FileLock(os.path.join(directory, ".lockfile"), timeout=CACHE_WAIT_S):
            pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """How a program was compiled.

    Attributes:
      name: the program's.
      seconds: time for tracing, lowering, and compiling or loading it.
      is_cached: whether the persistent cache had it; None if no cache was used, because there is
        none or this process had already compiled the same program.
    """

    name: str
    seconds: float
    is_cached: bool | None


class Program:
    """A jitted function that reports its compilation, which happens at its first call or before.

    A later call costs a process id and two attribute lookups more than a call of the jitted
    function.

    Args:
      function: a function returned by `jax.jit`.
      name: what it does, and for what, to follow "compiling": `the decode round of demo-target,
        batch size 8, verify length 5`.
      shapes_vary: False for a function whose arguments always have the same shapes, dtypes and
        devices (compilations for others are not reported); True checks the shapes of every call,
        for functions that are called rarely.

    Attributes:
      number: its number among the programs of a group, from 1; see `numbered`.
      num_programs: number of programs of the group.
      compiled: how it was last compiled; None before that.
      is_compiling: whether it is being compiled now, in any thread.
    """

    def __init__(self, function: Any, name: str, *, shapes_vary: bool = False):
        self.name = name
        self.number = self.num_programs = 1
        self.compiled: Compiled | None = None
        self.is_compiling = False
        self._function = function
        self._shapes_vary = shapes_vary
        self._signatures: set[Hashable] = set()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        """The name after the number among several: `2 of 4: ...`."""
        if self.num_programs == 1:
            return self.name
        return f"{self.number} of {self.num_programs}: {self.name}"

    def __call__(self, *args, **kwargs):
        """Calls the function, after compiling it if this is the first call.

        Raises:
          SettingError: this process was forked from one that had used JAX.
        """
        check_not_forked()
        if self.compiled is None or self._shapes_vary:
            self.compile(*args, **kwargs)
        return self._function(*args, **kwargs)

    def compile(self, *args, **kwargs) -> Compiled:
        """Compiles the program without running it; returns how it was compiled, now or before.

        Args:
          args: those of the function, with `jax.ShapeDtypeStruct`s instead of arrays if you like,
            with the sharding that the arrays will have. A later call with such arguments needs no
            compilation.

        Raises:
          SettingError: as for a call.
        """
        check_not_forked()
        with self._lock:
            signature = _signature(args, kwargs) if self._shapes_vary else None
            if self.compiled is None or signature not in self._signatures:
                self.is_compiling = True
                try:
                    self.compiled = self._compile(*args, **kwargs)
                finally:
                    self.is_compiling = False
                self._signatures.add(signature)
            return self.compiled

    def _compile(self, *args, **kwargs) -> Compiled:
        _listen()
        is_announced = threading.Event()

        def announce() -> None:
            is_announced.set()
            _log.info("compiling %s", self, extra={"compiling": True})

        timer = threading.Timer(PATIENCE_S, announce)
        timer.daemon = True
        timer.start()
        started_s = time.perf_counter()
        outcome = "could not compile"
        _heard.is_cached = None
        try:
            lowered = self._function.lower(*args, **kwargs)
            _heard.is_cached = None
            lowered.compile()
            outcome = "compiled"
        finally:
            timer.cancel()
            timer.join()  # it may be logging, and its record must come first
            seconds, is_cached = time.perf_counter() - started_s, _heard.is_cached
            if is_announced.is_set():
                end = {None: "", True: " (from the cache)", False: " (not in the cache)"}[is_cached]
                message = f"{outcome} {self} in {seconds:.1f} s{end}"
                _log.info("%s", message, extra={"compiling": False})
        return Compiled(name=self.name, seconds=seconds, is_cached=is_cached)

    def lower(self, *args, **kwargs) -> Any:
        """The jitted function's `lower`."""
        return self._function.lower(*args, **kwargs)

    def num_compilations(self) -> int:
        """How many programs have been compiled for the function."""
        return self._function._cache_size()


OnProgram: TypeAlias = Callable[[Program], None]


def numbered(*programs: Program) -> tuple[Program, ...]:
    """The same programs, numbered in the order of their first use: `n of m`."""
    for index, program in enumerate(programs):
        program.number, program.num_programs = index + 1, len(programs)
    return programs


def warm_up(
    arguments: Mapping[Program, tuple[Any, ...]], on_program: OnProgram | None = None
) -> tuple[Compiled, ...]:
    """Compiles programs for these arguments (see `Program.compile`), as many at a time as there are
    CPUs, at most `MOST_AT_A_TIME`. `on_program` is called with each program in turn, before waiting
    for it.

    Programs are compiled in separate threads, where a `with` block of JAX's configuration in the
    caller's thread has no effect; a program that is called in such a block is then compiled for it.
    """
    with ThreadPoolExecutor(min(usable_cpus(), MOST_AT_A_TIME)) as threads:
        started = {
            program: threads.submit(program.compile, *args) for program, args in arguments.items()
        }
        try:
            compiled = []
            for program, result in started.items():
                if on_program is not None:
                    on_program(program)
                compiled.append(result.result())
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple(compiled)


def shapes_at(tree: Any, shardings: Any) -> Any:
    """Shapes, as `jax.eval_shape` returns them, with the sharding that the arrays will have: one
    for all, a pytree of them, or None for JAX's choice."""
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type
        ),
        tree,
        shardings,
    )


def _signature(args: tuple, kwargs: Mapping[str, Any]) -> Hashable:
    """A key that is equal for calls that share a compilation: shapes, dtypes and static
    arguments."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    kinds = tuple((leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf for leaf in leaves)
    return structure, kinds


# Per thread: whether the persistent cache had the program that is being compiled.
_heard = threading.local()


def _note(event: str, **_: Any) -> None:
    if event == CACHE_ASKED:
        _heard.is_cached = False
    elif event == CACHE_HIT:
        _heard.is_cached = True


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_listener(_note)
