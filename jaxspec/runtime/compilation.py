"""Compiled programs that say so where compiling takes long, and that may be compiled ahead of time.

A decode loop of a large model compiles for a minute or more, and a program that is silent for so
long looks hung. So everything of ours that may take seconds to compile is a `Program`: a jitted
function with a name, which says after two seconds what it is that compiles, and at the end how long
that took and whether the persistent cache held it:

    compiling the decode round of my-model, 8 batch_size, window 5 (4 of 5) ...
    compiled the decode round of my-model, 8 batch_size, window 5 (4 of 5) in 41.3 s (not in the
    cache)

These are records of the logger `jaxspec.runtime.compilation`, which prints them on standard error
unless it has been given handlers of its own. It takes what any logger takes:
`.setLevel(logging.WARNING)` keeps them back, `.propagate = True` hands them on to whatever logging
has been set up, `.handlers.clear()` ends the printing.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import jax


class _OnStandardError(logging.Handler):
    """Prints on what is standard error at the time: where `rich` draws, that is its console, which
    puts the line above the drawing."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints the record."""
        try:
            if sys.stderr is not None:
                sys.stderr.write(self.format(record) + "\n")
                sys.stderr.flush()
        except Exception:
            self.handleError(record)


_log = logging.getLogger(__name__)
if not _log.handlers:
    # Not left to the root logger: absl, which Orbax logs with, gives that a handler for whatever
    # standard error was at its first record, with lines of another form.
    _log.addHandler(_OnStandardError())
    _log.setLevel(logging.INFO)
    _log.propagate = False

PATIENCE_S = 2.0  # a wait that needs no word

# Events of JAX. Where a version has others, all works but the word on the cache.
CACHE_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
CACHE_HIT = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """How a program was compiled.

    Attributes:
      name: of the program.
      seconds: for tracing, lowering, and compiling or loading it.
      is_cached: whether the persistent cache held it; None where no cache was asked: there is none,
        or this process had compiled the same program before.
    """

    name: str
    seconds: float
    is_cached: bool | None


class Program:
    """A jitted function that is compiled audibly, at its first call or before.

    Later calls cost one look at an attribute more than those of the jitted function.

    Args:
      function: as `jax.jit` returns it.
      name: what it does, and for whom, to go after "compiling": `the decode round of demo-target,
        8 batch_size, window 5`.
      shapes_vary: False for a function that is always called with arguments of the same shapes,
        dtypes and places (what others compile is compiled in silence); True looks at the shapes of
        every call, and is for functions that are called rarely.

    Attributes:
      number: among the programs that belong together, from 1; see `numbered`.
      num_programs: that belong together.
      compiled: how it was compiled last; None before.
    """

    def __init__(self, function: Any, name: str, *, shapes_vary: bool = False):
        self.name = name
        self.number = self.num_programs = 1
        self.compiled: Compiled | None = None
        self._function = function
        self._shapes_vary = shapes_vary
        self._signatures: set[Hashable] = set()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        """The name, and the number among several: `... (2 of 4)`."""
        if self.num_programs == 1:
            return self.name
        return f"{self.name} ({self.number} of {self.num_programs})"

    def __call__(self, *args, **kwargs):
        """Calls the function; the first time, compiles it before."""
        if self.compiled is None or self._shapes_vary:
            self.compile(*args, **kwargs)
        return self._function(*args, **kwargs)

    def compile(self, *args, **kwargs) -> Compiled:
        """Compiles the program and runs nothing; returns how it was compiled, now or before.

        Args:
          args: of the function, or `jax.ShapeDtypeStruct`s in the place of arrays, with the
            sharding that the arrays will have. A call with arguments like these finds the program
            compiled.
        """
        with self._lock:
            signature = _signature(args, kwargs) if self._shapes_vary else None
            if self.compiled is None or signature not in self._signatures:
                self.compiled = self._compile(*args, **kwargs)
                self._signatures.add(signature)
            return self.compiled

    def _compile(self, *args, **kwargs) -> Compiled:
        _listen()
        is_announced = threading.Event()

        def announce() -> None:
            is_announced.set()
            _log.info("compiling %s ...", self)

        timer = threading.Timer(PATIENCE_S, announce)
        timer.daemon = True
        timer.start()
        started_s = time.perf_counter()
        try:
            lowered = self._function.lower(*args, **kwargs)
            _heard.is_cached = None
            lowered.compile()
        finally:
            timer.cancel()
            timer.join()  # it may be speaking, and has the first word
        seconds = time.perf_counter() - started_s
        compiled = Compiled(name=self.name, seconds=seconds, is_cached=_heard.is_cached)
        if is_announced.is_set():
            cache = {None: "", True: " (from the cache)", False: " (not in the cache)"}
            _log.info("compiled %s in %.1f s%s", self, seconds, cache[compiled.is_cached])
        return compiled

    def lower(self, *args, **kwargs) -> Any:
        """The jitted function's `lower`."""
        return self._function.lower(*args, **kwargs)

    def _cache_size(self) -> int:
        """How many programs the function has been compiled to."""
        return self._function._cache_size()


OnProgram: TypeAlias = Callable[[Program], None]


def numbered(*programs: Program) -> tuple[Program, ...]:
    """Programs that belong together, in the order of their first use, told so: `n of m`."""
    for index, program in enumerate(programs):
        program.number, program.num_programs = index + 1, len(programs)
    return programs


def warm_up(
    arguments: Mapping[Program, tuple[Any, ...]], on_program: OnProgram | None = None
) -> tuple[Compiled, ...]:
    """Compiles programs for these arguments (see `Program.compile`), one after the other.

    Args:
      arguments: of each program.
      on_program: called before each.
    """
    compiled = []
    for program, args in arguments.items():
        if on_program is not None:
            on_program(program)
        compiled.append(program.compile(*args))
    return tuple(compiled)


def shapes_at(tree: Any, shardings: Any) -> Any:
    """Shapes, as `jax.eval_shape` returns them, of arrays that stand somewhere.

    Args:
      shardings: one for all, a pytree of them, or None for wherever JAX puts things.
    """
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
    """What tells calls apart that are compiled apart: shapes and dtypes, and what is static."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    kinds = tuple((leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf for leaf in leaves)
    return structure, kinds


# What this thread has heard of the persistent cache since it began to compile.
_heard = threading.local()


def _note(event: str, **_: Any) -> None:
    if event == CACHE_ASKED:
        _heard.is_cached = False
    elif event == CACHE_HIT:
        _heard.is_cached = True


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_listener(_note)
