"""Environments in which no command can work end in one sentence, and odd ones change nothing."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
import sys
import tempfile
import threading
import types

import hf_checkpoints
import jax
import pytest
from attack.outcomes import Tally, of_process
from rich.console import Console

from jaxspec import cli
from jaxspec.commands import progress
from jaxspec.errors import SettingError
from jaxspec.kernels import cpu
from jaxspec.runtime.directories import cache_directory

JAXSPEC = [sys.executable, "-m", "jaxspec"]
GENERATE = "generate --target demo-draft --drafter ngram --prompt hello --max-tokens 4".split()


@pytest.fixture
def refusal(capsys):
    """The sentence with which `jaxspec doctor` ends in this process."""

    def run() -> str:
        assert cli.main(["doctor", "--versions"]) == 1
        out, err = capsys.readouterr()
        assert not out
        assert err.startswith("error: ")
        assert err.endswith(".\n")
        assert err.count("\n") == 1
        return err

    return run


@pytest.mark.parametrize(
    "name", ["JAXSPEC_CACHE", "JAX_COMPILATION_CACHE_DIR", "HF_HOME", "XLA_FLAGS", "JAX_PLATFORMS"]
)
def test_a_variable_that_is_not_utf8(refusal, monkeypatch, name):
    monkeypatch.setenv(name, "caf\udce9")
    assert f"{name} is 'caf\\udce9', which is not UTF-8" in refusal()


@pytest.mark.parametrize("name", ["JAXSPEC_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_a_cache_whose_path_is_not_utf8(monkeypatch, name):
    for other in ("JAXSPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "/caf\udce9")
    with pytest.raises(SettingError, match=r"cache directory '/caf.*name another with JAXSPEC_"):
        cache_directory()


@pytest.mark.parametrize("chosen", ["9" * 5000, "0" * 5000, "-1", "", "²", "1.0", "10000"])
def test_a_number_of_threads(monkeypatch, chosen):
    monkeypatch.setenv("JAXSPEC_NUM_THREADS", chosen)
    with pytest.raises(SettingError, match="a whole number from 1 to 1024") as refused:
        cpu.num_threads()
    assert len(str(refused.value)) < 200


def test_a_working_directory_that_was_removed(refusal, monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "working directory cannot be used (No such file or directory)" in refusal()


def test_no_place_for_temporary_files(refusal, monkeypatch):
    def gettempdir():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    assert "No temporary file can be written" in refusal()


@pytest.mark.parametrize("option", cli.LEAST_LIMITS)
def test_a_limit_that_is_too_low(refusal, monkeypatch, option):
    limit, unit, least = cli.LEAST_LIMITS[option]
    real = resource.getrlimit

    def getrlimit(asked):
        return (unit * (least - 1),) * 2 if asked == limit else real(asked)

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    assert f"{option} is {least - 1}, " in refusal()


def test_jax_without_compilation(refusal):
    jax.config.update("jax_disable_jit", True)
    try:
        assert "JAX_DISABLE_JIT is set" in refusal()
    finally:
        jax.config.update("jax_disable_jit", False)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--xla_nothing=1", "Unknown flag"),
        ("garbage", "Could not open file"),
        ("--xla_force_host_platform_device_count=x", "flag"),
    ],
)
def test_xla_flags_that_would_end_the_process(refusal, monkeypatch, flags, reason):
    monkeypatch.setenv("XLA_FLAGS", flags)
    said = refusal()
    assert f"XLA_FLAGS={flags}" in said
    assert reason in said


def test_a_thread_that_cannot_be_started(tmp_path):
    """Before the command begins, so that not even signals can be handled."""
    code = """
import threading
from jaxspec import cli

def start(self):
    raise RuntimeError("can't start new thread")

threading.Thread.start = start
cli.program()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: No thread")
    assert done.stderr.count("\n") == 1


def test_a_thread_that_cannot_be_started_later():
    ending = cli.ending_of(RuntimeError("can't start new thread"))
    assert ending is not None
    assert ending.message.startswith("error: Out of memory (can't start new thread)")


@pytest.mark.parametrize(
    "num_attempts",
    [1, pytest.param(10, marks=pytest.mark.slow)],  # threads do not always fail
)
def test_convert_at_a_limit_of_file_size_says_one_sentence(tmp_path, num_attempts):
    """Threads of tensorstore fail then, and do not print that."""
    source = hf_checkpoints.write_golden(tmp_path / "hf", "qwen3")
    command = [*JAXSPEC, "convert", str(source), str(tmp_path / "out")]
    for _ in range(num_attempts):
        done = subprocess.run(
            ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", *command],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert "File too large" in done.stderr
        assert not (tmp_path / "out").exists()


def test_errors_in_threads_of_tensorstore_are_not_printed(capsys):
    """They arrive at `sys.unraisablehook`; those of the main thread are printed."""

    def fail(message: str) -> None:
        try:
            raise RuntimeError(message)
        except RuntimeError as error:
            found = types.SimpleNamespace(
                exc_type=type(error),
                exc_value=error,
                exc_traceback=error.__traceback__,
                err_msg=None,
                object=None,
            )
            cli.print_unraisable(found)

    thread = threading.Thread(target=fail, args=("Event loop is closed",))
    thread.start()
    thread.join()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_file_that_the_system_refuses(number):
    """Wherever that happens, it is a sentence that names the file."""
    reason = os.strerror(number)
    for name in ("/some/caf\u00e9", b"/some/caf\xc3\xa9"):
        ending = cli.ending_of(OSError(number, reason, name))
        assert ending is not None
        assert ending.status == 1
        assert ending.message == (
            f"error: /some/caf\u00e9 cannot be used ({reason}); let this process use it, or name "
            "another.\n"
        )
    assert cli.ending_of(OSError(number, reason)) is None
    assert cli.ending_of(OSError(errno.ENOENT, "gone", "/some")) is None


def test_a_variable_of_the_hub(refusal, monkeypatch):
    def fail(name):
        raise ValueError("invalid literal for int() with base 10: 'x'")

    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "x")
    monkeypatch.setattr(cli.importlib, "import_module", fail)
    assert "A variable of the hub (HF_...) is malformed (invalid literal" in refusal()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_any_text_can_be_printed_and_read(monkeypatch, encoding):
    written = io.BytesIO()
    typed = io.BytesIO("caf\u00e9 \u2192".encode() + b"\xff\n")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed, encoding=encoding))
    cli.take_any_text()
    print("caf\u00e9 \u2192 \U0001f600 \udcff")
    print("caf\u00e9 \u2192 \U0001f600 \udcff", file=sys.stderr)
    sys.stdout.flush()
    assert b"\\udcff" in written.getvalue()
    line = sys.stdin.readline()
    if encoding in ("ascii", "utf-8"):
        assert line == "caf\u00e9 \u2192\udcff\n"


def test_an_argument_in_utf8_where_the_locale_is_not(refusal, monkeypatch):
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    with pytest.raises(SettingError) as refused:
        cli.check_arguments(["generate", "caf\udcc3\udca9"])
    assert str(refused.value) == (
        "Argument 2, 'caf\\udcc3\\udca9', is in UTF-8, and the locale's encoding is ascii; set "
        "LC_ALL=C.UTF-8 or PYTHONUTF8=1."
    )
    with pytest.raises(SettingError, match="is not UTF-8; give it in UTF-8"):
        cli.check_arguments(["caf\udce9"])
    error = UnicodeEncodeError("ascii", "caf\u00e9", 3, 4, "ordinal not in range(128)")
    ending = cli.ending_of(error)
    assert ending is not None
    assert ending.message.startswith("error: The locale's encoding is ascii, which lacks a")
    monkeypatch.undo()
    assert cli.ending_of(error) is None  # a bug


def test_spinners_fit_the_terminal(monkeypatch):
    for encoding, spinner in (("ascii", "line"), ("utf-8", "dots")):
        console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        monkeypatch.setattr(progress, "standard_error", lambda console=console: console)
        assert progress.working("loading")._spinner.name == spinner


NO_HOME = """
import os, pwd, sys
del os.environ["HOME"]
if os.getuid() == 0:
    os.setresuid(4242, 0, 0)  # the files of this Python may be root's
def getpwuid(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")
pwd.getpwuid = getpwuid
from jaxspec import cli, load_model
from jaxspec.errors import JaxspecError
for name in sys.argv[1:]:
    try:
        load_model(name)
    except JaxspecError as error:
        print("refused:", error)
    else:
        print("loaded")
sys.exit(cli.main(["cache", "list"]))
"""


@pytest.mark.parametrize("has_cache", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_user_without_home_and_without_entry(tmp_path, has_cache):
    names = ("JAXSPEC_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "CXX")
    env = {name: value for name, value in os.environ.items() if name not in names}
    if has_cache:
        env["JAXSPEC_CACHE"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", NO_HOME, "demo-draft", "nobody/no-model"],
        env={"HOME": str(tmp_path), **env, "CXX": "no-compiler"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in done.stderr
    demo, hub = done.stdout.splitlines()[:2]
    if has_cache:
        assert demo == "loaded"
        assert hub.startswith("refused: There is no home directory to download to (HOME is not")
        assert done.returncode == 0
    else:
        assert "name a cache directory with JAXSPEC_CACHE." in done.stdout + done.stderr
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("error: This process has no home directory")


# Shell commands before `jaxspec generate`, and variables for it.
SHELLS = {
    **{f"ulimit -f {size}": {} for size in (0, 1, 8, 64)},
    **{f"ulimit -n {number}": {} for number in (4, 8, 16, 31, 32, 64)},
    **{f"ulimit -v {size}": {} for size in (600_000, 1_200_000, 2_000_000, 2_100_000, 4_000_000)},
    **{f"ulimit -d {size}": {} for size in (300_000, 1_048_576)},
    **{f"ulimit -s {size}": {} for size in (64, 256)},
    "exec 0<&-": {},
    "exec 1>&-": {},
    "exec 2>&-": {},
    "exec 0<&- 2>&-": {},
    "mkdir gone; cd gone; rmdir ../gone": {},
    "mkdir $'caf\\xe9'; cd $'caf\\xe9'": {},
}
VARIABLES = {
    "JAX_PLATFORMS": ("nothing", "", "cpu,nothing"),
    "JAX_PLATFORM_NAME": ("nothing",),
    "JAX_NUM_CPU_DEVICES": ("0", "2", "x"),
    "JAX_DISABLE_JIT": ("1", "x"),
    "JAX_COMPILATION_CACHE_DIR": ("/proc/x", "/dev/null", "caf\udce9"),
    "JAX_ENABLE_X64": ("1", "x"),
    "JAXSPEC_CACHE": ("/proc/x", "/dev/null", "caf\udce9", "x" * 300, "~nobody-here/x"),
    "JAXSPEC_NUM_THREADS": ("9" * 5000, "0"),
    "HF_HUB_DOWNLOAD_TIMEOUT": ("x",),
    "HF_HOME": ("caf\udce9",),
    "HOME": ("", "/nonexistent", "caf\udce9"),
    "TMPDIR": ("/nonexistent", "caf\udce9"),
    "PATH": ("",),
    "PYTHONWARNINGS": ("error", "garbage"),
    "XLA_FLAGS": ("garbage", "--xla_nothing=1"),
    "PYTHONIOENCODING": ("ascii", "latin-1", "ascii:strict", "utf-16"),
    "COLUMNS": ("0", "x"),
    "TERM": ("garbage",),
    "TZ": ("garbage",),
    "MPLBACKEND": ("x",),
}


PROMPT = "caf\u00e9 \u2192 \U0001f600"
# Variables of a locale that is not UTF-8, and arguments of `jaxspec` in it; {} is a directory.
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LOCALES = (C_LOCALE, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"})
IN_LOCALES = (
    "generate --target demo-target --draft demo-draft --prompts {}/prompts.txt --max-tokens 9",
    "generate --target demo-target --prompts {}/prompts.txt --max-tokens 4 --json "
    '--sampling-args {{"logprobs":2}}',
    "generate --target demo-target --prompts {}/caf\u00e9.txt --max-tokens 4",
    "generate --target demo-target --prompts {}/none-\u2192.txt --max-tokens 4",
    "generate --target demo-target --prompts {}/prompts.txt --output {}/o\u2192 --max-tokens 4",
    "generate --target demo-target --prompts {}/prompts.txt --trace {}/\u2192.parquet",
    "generate --target {}/caf\u00e9 --prompts {}/prompts.txt --max-tokens 4",
    "compare --target demo-target --drafter none --drafter ngram --limit 2 --max-tokens 4",
    "convert {}/caf\u00e9 {}/out",
    "plan --target demo-target --budget 80MiB --draft-lengths 0",
    "chat --target demo-target --max-tokens 4",
    "cache list",
    "doctor --versions",
    "bench --help",
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_terminal_that_is_not_utf8(tmp_path, record_property):
    tally = Tally("terminals")
    for index, locale in enumerate(LOCALES):
        for position, line in enumerate(IN_LOCALES):
            place = tmp_path / f"{index}-{position}"
            (place / "caf\u00e9").mkdir(parents=True)
            for name in ("prompts.txt", "caf\u00e9.txt"):
                (place / name).write_text(f"{PROMPT}\n", encoding="utf-8")
            command = [*JAXSPEC, *(word.format(place) for word in line.split())]
            options = {"cwd": place, "input": f"{PROMPT}\n/quit\n".encode()}
            env = {**os.environ, "PYTHONPATH": os.getcwd(), **locale}
            outcome = of_process([word.encode() for word in command], env=env, **options)
            tally.add(f"{line} {locale}", outcome)
    tally.finish(record_property)


def _tried(shell: str, variables: dict[str, str], place, tally: Tally) -> None:
    place.mkdir()
    command = ["/bin/bash", "-c", f'{shell}; exec "$@"', "bash", *JAXSPEC, *GENERATE]
    outcome = of_process(
        command,
        cwd=place,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **variables},
        stdin=subprocess.DEVNULL,
    )
    tally.add(f"{shell} {variables!a:.80}", outcome)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_environment(tmp_path, record_property):
    tally = Tally("environments")
    cases = list(SHELLS.items())
    cases += [(":", {name: value}) for name, values in VARIABLES.items() for value in values]
    for index, (shell, variables) in enumerate(cases):
        _tried(shell, variables, tmp_path / str(index), tally)
    tally.finish(record_property)
