"""The command line: one module of `jaxspec.commands` per command, imported when it is chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import importlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxspec import __version__
from jaxspec.errors import JaxspecError, SettingError
from jaxspec.runtime import signals

# Name: module of jaxspec and class, and a line for the help.
COMMANDS = {
    "demo": ("commands.demo:DemoCommand", "see it work on a small trained pair"),
    "generate": ("commands.generate:GenerateCommand", "complete a prompt, or a file of them"),
    "chat": ("commands.chat:ChatCommand", "chat in the terminal; KV is kept between turns"),
    "audit": ("commands.audit:AuditCommand", "check that outputs are the target's own"),
    "compare": ("commands.compare:CompareCommand", "compare drafters on the same prompts"),
    "bench": ("commands.bench:BenchCommand", "measure speed"),
    "plan": ("commands.plan:PlanCommand", "find settings that fit a memory budget"),
    "study": (
        "commands.study:StudyCommand",
        "grids of runs: how acceptance scales; the published study",
    ),
    "convert": ("commands.convert:ConvertCommand", "convert a Hugging Face checkpoint"),
    "train": (
        "commands.train:TrainCommand",
        "train a small model, a draft model, heads or FlexDraft",
    ),
    "cache": ("commands.cache:CacheCommand", "list, verify or remove converted and compiled files"),
    "env": ("commands.environment:EnvCommand", "print versions and devices, for bug reports"),
}

# Why standard output takes nothing: a full disk or quota, a limit on its size, a broken disk.
OUTPUT_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status.

    This is 0 for success; 1 for a mistake of the user; 3 for an audit that finds a broken promise,
    or a cache with a damaged model; 130 after Ctrl-C; 143 after SIGTERM; 141 if the reader of the
    output has closed it. Options that cannot be parsed exit with 2.
    """
    if sys.stderr is None:
        # The next file to be opened would take its file descriptor, and get what C++ libraries
        # print.
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        print("error: Standard output is closed; redirect it to a file.", file=sys.stderr)
        return 1
    try:
        status = run_command(sys.argv[1:] if args is None else args)
        sys.stdout.flush()
        return status
    except BaseException as error:
        # After a signal, libraries may raise errors of their own.
        ending = ending_of(signals.interruption() or error)
        if ending is None:
            raise
    if ending.discards_output:
        discard_output()
    with contextlib.suppress(OSError):
        sys.stderr.write(ending.message)
    return ending.status


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a command that raised an error ends: its exit status, and its message on standard
    error."""

    status: int
    message: str = ""
    discards_output: bool = False


def ending_of(error: BaseException) -> Ending | None:
    """How a command that raised this error ends; None for a bug, which needs its traceback."""
    first_line = str(error).split("\n")[0]
    match error:
        case JaxspecError():
            return Ending(1, f"error: {' '.join(str(error).split())}\n")
        case KeyboardInterrupt():
            return Ending(getattr(error, "status", 130), "interrupted\n")
        case BrokenPipeError():
            return Ending(signals.BROKEN_PIPE_STATUS, discards_output=True)
        # Errors of files that commands write have messages of their own, and failures to open a
        # file carry its name.
        case OSError(filename=None) if error.errno in OUTPUT_REFUSED:
            return Ending(
                1,
                f"error: Standard output cannot be written ({error.strerror}); redirect it to a "
                "file on a disk with room.\n",
                discards_output=True,
            )
        case MemoryError() | RuntimeError() if is_out_of_memory(error):
            return Ending(
                1,
                f"error: Out of memory ({first_line}); lower --batch-size or "
                "--max-length, or choose a smaller model or dtype.\n",
            )
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host's memory or a device's is used up; JAX says so in a `RuntimeError`."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def program() -> NoReturn:
    """`main` as a whole process, which Ctrl-C and SIGTERM end promptly."""
    signals.exit_with(main)


def discard_output() -> None:
    """Discards what is left in the buffer, because Python would try to write it again at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_arguments(args: Sequence[str]) -> None:
    """Raises `SettingError` for an argument that is not UTF-8, because it could be neither printed
    nor written as JSON."""
    for place, argument in enumerate(args, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise SettingError(
                f"Argument {place}, {argument!a}, is not UTF-8; give it in UTF-8, or rename the "
                "file that it names."
            ) from error


def check_jax() -> None:
    """Raises `SettingError` if an environment variable keeps JAX from starting: it is malformed, or
    `JAX_PLATFORMS` names a platform that this machine does not have."""
    platforms = os.environ.get("JAX_PLATFORMS")
    try:
        import jax

        if platforms:
            jax.devices()
    except (ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0] or "there is no such device"
        named = f"where JAX_PLATFORMS is {platforms!r}" if platforms else "a variable is malformed"
        raise SettingError(
            f"JAX does not start in this environment, {named} ({reason}); correct the variable, or "
            "leave it out."
        ) from error


def run_command(args: Sequence[str]) -> int:
    """Parses `args` and runs the command they name; raises whatever that raises."""
    check_arguments(args)
    name, *options = args or ["help"]
    if name in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if name == "--version":
        print(f"jaxspec {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}."
        print(f"error: jaxspec has no command {name!r}; {hint}", file=sys.stderr)
        return 2

    check_jax()
    import tyro

    from jaxspec.runtime.console import Console
    from jaxspec.runtime.options import check_numbers

    command = tyro.cli(
        load_command(name),
        prog=f"jaxspec {name}",
        args=options,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
    )
    check_numbers(command)
    prepare_process()
    with signals.raised():
        document = command.run(Console())
    if command.json:
        print(json.dumps(document))
    return 0 if document.get("holds", True) else 3


def prepare_process() -> None:
    """Process-wide settings that a command may make and the library does not: JAX keeps compiled
    programs in the cache directory, long compilations are shown, and warnings are printed without
    the source line."""
    from jaxspec.commands.compiling import show_compiling
    from jaxspec.runtime.compilation import enable_compilation_cache

    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    enable_compilation_cache()
    show_compiling()


def load_command(name: str) -> Any:
    """The class of a command."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(f"jaxspec.{module}"), attribute)


def help_text() -> str:
    """What `jaxspec` alone prints."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items())
    return f"""\
usage: jaxspec COMMAND [options]

Lossless batched speculative decoding in JAX: faster generation, exactly the
tokens that the target model alone would have produced.

commands:
{commands}

  jaxspec COMMAND --help lists a command's options; jaxspec --version.

models:
  demo-target, demo-draft    a small trained pair that comes with the package
  DIRECTORY                  converted, or of Hugging Face
  Qwen/Qwen3-0.6B            any hub id of a supported architecture
  random:PRESET              random weights, for measuring speed; PRESET is one
                             of vicuna-7b, vicuna-68m, llama-2-70b, qwen3-8b,
                             qwen3-0.6b, glm-4-9b, glm-4-draft-0.6b,
                             llama-635m, llama-65m

try: jaxspec demo"""
