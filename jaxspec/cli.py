"""The command line: one module of `jaxspec.commands` per command, imported when it is chosen.

Little is imported here, because Ctrl-C prints Python's traceback until `program` handles signals.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import importlib
import io
import os
import pathlib
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jaxspec import __version__
from jaxspec.errors import JaxspecError, SettingError
from jaxspec.runtime import signals

# Name: module of jaxspec and class, and a line for the help.
COMMANDS = {
    "demo": ("commands.demo:DemoCommand", "see it work on a small trained pair"),
    "generate": ("commands.generate:GenerateCommand", "complete a prompt, or a file of them"),
    "chat": ("commands.chat:ChatCommand", "chat in the terminal; KV is kept between turns"),
    "serve": ("commands.serve:ServeCommand", "serve a model with OpenAI's routes"),
    "audit": ("commands.audit:AuditCommand", "check that outputs are the target's own"),
    "compare": (
        "commands.compare:CompareCommand",
        "compare drafters or settings on the same prompts",
    ),
    "bench": ("commands.bench:BenchCommand", "measure speed"),
    "plan": ("commands.plan:PlanCommand", "find settings that fit a memory budget"),
    "study": (
        "commands.study:StudyCommand",
        "grids of runs: how acceptance scales; the published study",
    ),
    "convert": (
        "commands.convert:ConvertCommand",
        "convert a Hugging Face checkpoint or GGUF file",
    ),
    "train": (
        "commands.train:TrainCommand",
        "train a small model, a draft model, heads or FlexDraft",
    ),
    "cache": ("commands.cache:CacheCommand", "list, verify or remove converted and compiled files"),
    "doctor": (
        "commands.doctor:DoctorCommand",
        "check this machine: versions, devices, kernels, costs",
    ),
}

# Variables that decide which devices JAX finds.
DEVICE_VARIABLES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
MEMORY_FRACTION = "0.92"  # of a GPU's memory, which a command takes
# With less, libraries fail at any place. Option: limit, its unit in bytes, least value.
LEAST_LIMITS = {
    "ulimit -n (open files)": (resource.RLIMIT_NOFILE, 1, 32),
    "ulimit -v (KiB of address space)": (resource.RLIMIT_AS, 2**10, 2 * 2**20),
    "ulimit -d (KiB of data)": (resource.RLIMIT_DATA, 2**10, 2**20),
    "ulimit -s (KiB of stack)": (resource.RLIMIT_STACK, 2**10, 2**8),
}

# Why standard output takes nothing: a full disk or quota, a limit on its size, a broken disk.
ANOTHER_LOCALE = "set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
ESCAPED = "surrogateescape"  # how Python shows bytes that have another encoding
FILE_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)  # wherever a file is opened or made
OUTPUT_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status.

    This is 0 for success; 1 for a mistake of the user, or a candidate of a comparison that failed;
    3 for an audit that finds a broken promise, or a cache with a damaged model; 130 after Ctrl-C;
    143 after SIGTERM; 141 if the reader of the output has closed it. Options that cannot be parsed
    exit with 2.
    """
    if sys.stdout is None:
        print("error: Standard output is closed; redirect it to a file.", file=sys.stderr)
        return 1
    try:
        status = run_command(sys.argv[1:] if args is None else args)
        sys.stdout.flush()
        return status
    except BaseException as error:
        ending = ending_of(error)
        if ending is None:
            raise
    if ending.discards_output:
        discard_output()
    with contextlib.suppress(OSError):
        sys.stderr.write(ending.message)
    return ending.status


class Ending(NamedTuple):
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
            return Ending(128 + signal.SIGINT, "interrupted\n")
        case BrokenPipeError():
            return Ending(128 + signal.SIGPIPE, discards_output=True)
        # Errors of files that commands write have messages of their own, and failures to open a
        # file carry its name.
        case OSError(filename=None) if error.errno in OUTPUT_REFUSED:
            return Ending(
                1,
                f"error: Standard output cannot be written ({error.strerror}); redirect it to a "
                "file on a disk with room.\n",
                discards_output=True,
            )
        case OSError(filename=str() | bytes() as name) if error.errno in FILE_REFUSED:
            return Ending(
                1,
                f"error: {os.fsdecode(name)} cannot be used ({error.strerror}); let this process "
                "use it, or name another.\n",
            )
        case RuntimeError() if "home directory" in first_line:  # of Python, or of a library
            return Ending(
                1, f"error: There is no home directory ({first_line}); set HOME to a directory.\n"
            )
        case UnicodeError() if not is_utf8_locale():
            return Ending(
                1,
                f"error: The locale's encoding is {sys.getfilesystemencoding()}, which lacks a "
                f"character that is needed ({first_line}); {ANOTHER_LOCALE}.\n",
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
    said = ("RESOURCE_EXHAUSTED", "can't start new thread")
    return isinstance(error, MemoryError) or any(each in str(error) for each in said)


def program() -> NoReturn:
    """`main` as a whole process, which Ctrl-C and SIGTERM end promptly."""
    open_standard_streams()
    take_any_text()
    sys.unraisablehook = print_unraisable
    try:
        signals.handle_signals()
    except (RuntimeError, OSError) as error:
        sys.exit(f"error: No thread or pipe can be had ({error}); raise the limits of `ulimit`.")
    signals.exit_with(main)


def open_standard_streams() -> None:
    """Opens standard input and error where they are closed. Otherwise the next file to be opened
    would take their file descriptor, and get what C++ libraries print."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stderr = sys.stderr or open(os.devnull, "w")


def take_any_text() -> None:
    """Lets the standard streams take any text, whatever the terminal's encoding. Characters that it
    lacks are printed as `\\u2026`. Input in ASCII may be UTF-8, and bytes that are not valid in the
    encoding are refused where the text is used."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"
        encoding = "utf-8" if is_ascii else sys.stdin.encoding
        sys.stdin.reconfigure(encoding=encoding, errors=ESCAPED)


def print_unraisable(unraisable: Any) -> None:
    """`sys.unraisablehook`: prints an error that cannot be raised, unless it is in a thread of
    tensorstore. What fails there follows from an error that Orbax raises in the main thread."""
    if threading.current_thread() is threading.main_thread():
        sys.__unraisablehook__(unraisable)


def discard_output() -> None:
    """Discards what is left in the buffer, because Python would try to write it again at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_arguments(args: Sequence[str]) -> None:
    """Raises `SettingError` for an argument that is not UTF-8, because it could be neither printed
    nor written as JSON; or that this system's locale cannot name a file with."""
    for place, argument in enumerate(args, 1):
        if not is_utf8(argument):
            if not is_utf8_locale() and is_utf8(os.fsencode(argument).decode(errors=ESCAPED)):
                raise SettingError(
                    f"Argument {place}, {argument!a}, is in UTF-8, and the locale's encoding is "
                    f"{sys.getfilesystemencoding()}; {ANOTHER_LOCALE}."
                )
            raise SettingError(
                f"Argument {place}, {argument!a}, is not UTF-8; give it in UTF-8, or rename the "
                "file that it names."
            )


def check_environment() -> None:
    """Raises `SettingError` if no command can work in this environment: a variable or the working
    directory cannot be used, no temporary file can be written, or a limit is too low."""
    for name, value in os.environ.items():
        if name.startswith(("JAX", "XLA", "HF_")) and not is_utf8(value):
            raise SettingError(
                f"The environment variable {name} is {value!a}, which is not UTF-8; correct it."
            )
    try:
        os.getcwd()
    except OSError as error:
        raise SettingError(
            f"The working directory cannot be used ({error.strerror}); change to another."
        ) from error
    import tempfile

    try:
        tempfile.gettempdir()
    except OSError as error:
        raise SettingError(
            "No temporary file can be written; name a directory with room for them with TMPDIR, "
            "and allow files to be written (ulimit -f)."
        ) from error
    for option, (limit, unit, least) in LEAST_LIMITS.items():
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY and allowed // unit < least:
            raise SettingError(
                f"The limit {option} is {allowed // unit}, which is too low for JAX; raise it to "
                f"{least} or more."
            )
    if any(name.startswith("HF_") for name in os.environ):
        try:
            importlib.import_module("huggingface_hub.constants")
        except ValueError as error:
            raise SettingError(
                f"A variable of the hub (HF_...) is malformed ({error}); correct it, or leave it "
                "out."
            ) from error
    check_jax()


def is_utf8_locale() -> bool:
    """Whether Python names files, and reads arguments, in UTF-8."""
    return sys.getfilesystemencoding() == "utf-8"


def is_utf8(text: str) -> bool:
    """Whether text from the system, an argument or a variable, is valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_jax() -> None:
    """Raises `SettingError` if an environment variable keeps JAX from starting: it is malformed, or
    names devices that this machine does not have, or turns off compilation."""
    check_xla_flags()
    given = [f"{name}={os.environ[name]}" for name in DEVICE_VARIABLES if os.environ.get(name)]
    try:
        import jax

        if given:
            jax.devices()
    except (ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0] or "there is no such device"
        named = f"with {' '.join(given)}" if given else "a variable is malformed"
        raise SettingError(
            f"JAX does not start in this environment, {named} ({reason}); correct the variable, or "
            "leave it out."
        ) from error
    if jax.config.values["jax_disable_jit"]:
        raise SettingError(
            "JAX_DISABLE_JIT is set, but jaxspec only runs compiled programs; leave it out."
        )


def check_xla_flags() -> None:
    """Raises `SettingError` for `XLA_FLAGS` that XLA does not accept. It would end the process, so
    they are tried in another."""
    flags = os.environ.get("XLA_FLAGS")
    if not flags:
        return
    from jaxspec.runtime.processes import run_child

    tried = run_child(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    if tried.returncode:
        lines = tried.stderr.splitlines() or [f"status {tried.returncode}"]
        said = next((line for line in lines if "flag" in line), lines[-1])
        raise SettingError(
            f"XLA does not accept XLA_FLAGS={flags} ({said.split('] ')[-1]}); correct the "
            "variable, or leave it out."
        )


def run_command(args: Sequence[str]) -> int:
    """Parses `args` and runs the command they name; raises whatever that raises."""
    check_arguments(args)
    name, *given = args or ["help"]
    if name in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if name == "--version":
        print(f"jaxspec {__version__}")
        return 0
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}."
        print(f"error: jaxspec has no command {name!r}; {hint}", file=sys.stderr)
        return 2

    choose_device_memory(name)
    check_environment()
    import tyro

    from jaxspec.commands.options import parse
    from jaxspec.runtime.compilation import finish_cache_writes
    from jaxspec.runtime.console import Console
    from jaxspec.runtime.directories import check_can_write
    from jaxspec.runtime.documents import json_text, write_document
    from jaxspec.runtime.options import check_numbers

    command = parse(
        load_command(name),
        prog=f"jaxspec {name}",
        args=given,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
    )
    check_numbers(command)
    # Of several commands (`bench`, `study`, `train`), the chosen one has the options.
    options = vars(command if hasattr(command, "json") else next(iter(vars(command).values())))
    if (json_file := options.get("json_file")) is not None:
        check_is_apart(json_file, options)
        check_can_write(json_file)
    prepare_process()
    with signals.called_at_end(finish_cache_writes):
        document = command.run(Console())
    if json_file is not None:
        write_document(document, json_file)
    if options["json"]:
        print(json_text(document))
    if document.get("holds") is False:
        return 3
    return 1 if document.get("failed") else 0


def choose_device_memory(name: str) -> None:
    """How much of a GPU's memory JAX takes when it starts, unless the user has said so: more than
    its own default of 75 %, because a command has the GPU to itself; `doctor`, which starts other
    processes, takes it as it needs it."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    if name == "doctor":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def check_is_apart(json_file: pathlib.Path, options: Mapping[str, Any]) -> None:
    """Refuses a file for JSON that another option names too, or that is in what it writes."""
    given = dict(options)
    if "config" in given:  # of `train`
        given |= vars(given.pop("config"))
    where = json_file.resolve()
    for name, other in given.items():
        is_written = name in ("out", "output", "dst")
        kinds = (pathlib.Path, str) if is_written else pathlib.Path
        if name == "json_file" or not isinstance(other, kinds):
            continue
        place = pathlib.Path(other).resolve()
        if where == place or (is_written and place in where.parents):
            raise SettingError(
                f"--json-file {json_file} was given, and {other} for another option; give each a "
                "place of its own, the file outside what the other one writes."
            )


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
  smollm2-draft              a draft model for SmolLM2-135M-Instruct, and
  smollm2-clover             heads for it, which come with the package too
  DIRECTORY, FILE.gguf       converted or of Hugging Face, or in GGUF
  Qwen/Qwen3-0.6B            any hub id of a supported architecture
  random:PRESET              random weights, for measuring speed; PRESET is one
                             of vicuna-7b, vicuna-68m, llama-2-70b, qwen3-8b,
                             qwen3-0.6b, glm-4-9b, glm-4-draft-0.6b,
                             llama-635m, llama-65m

try: jaxspec demo"""
