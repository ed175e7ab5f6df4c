"""Child processes that do not outlive this one."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from jaxspec.runtime.signals import called_at_end, uninterrupted


def run_child(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command without input, and captures what it prints.

    It runs in a session of its own. If this raises, or a signal ends this process, the command is
    killed with all that it started.

    Raises:
      OSError: it cannot be run.
      subprocess.TimeoutExpired: it takes too long.
    """
    with contextlib.ExitStack() as stack:
        with uninterrupted:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                close_fds=False,  # so that it can read what a shell's <(command) names
                text=True,
                errors="replace",
            )
            stack.enter_context(process)
            stack.enter_context(called_at_end(functools.partial(_kill, process)))
        out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a process and those that it started, if it is still running."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
