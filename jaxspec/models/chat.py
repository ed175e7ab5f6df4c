"""Chat templates, rendered in a process of their own with limits on time and memory.

A template comes with a checkpoint, and is a program. Jinja's sandbox keeps it away from the
machine's files, but does not stop it from running forever or taking all memory, and counting its
steps would not help, because a single filter can do either. So transformers renders it in a second
process, which is started with the first chat and kept: this takes about two seconds once, and less
than a millisecond per prompt. The system kills the process when it exceeds its processor time, and
refuses it memory over the limit.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import PromptError

TIME_LIMIT_S = 10.0  # processor time for one prompt; templates take milliseconds
MEMORY_LIMIT_BYTES = 2**30  # address space, of which the process uses 200 MB before it renders
LONGEST_TEXT = 2**24  # characters

_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateProcess:
    """Renders chat templates in a process that is started when needed, and restarted after it was
    killed for its time or memory. Threads take turns.

    Args:
      time_limit_s: processor time for one prompt.
      memory_limit_bytes: address space of the process (not on macOS).
    """

    def __init__(
        self,
        *,
        time_limit_s: float = TIME_LIMIT_S,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ):
        self.time_limit_s = time_limit_s
        self.memory_limit_bytes = memory_limit_bytes
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """The text of messages, up to where the assistant's answer begins.

        Args:
          template: Jinja.
          messages: made of JSON values.
          variables: further variables of the template, JSON values.

        Raises:
          PromptError: the template refuses the messages, takes too much time or memory, or writes
            too much; or messages or variables are not JSON values.
        """
        try:
            request = json.dumps(
                {"template": template, "messages": list(messages), "variables": dict(variables)}
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(
                f"Chat messages and the variables of a template must be JSON values ({error}); "
                "give texts, numbers, lists and dicts."
            ) from error
        reply = self._ask(request)
        if "error" in reply:
            raise PromptError(
                f"The chat template refused the messages ({' '.join(reply['error'].split())}); "
                "check their roles and contents."
            )
        return reply["text"]

    def close(self) -> None:
        """Ends the process; the next `render` starts another."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _ask(self, request: str) -> dict[str, str]:
        """The reply to one request. An interruption ends the process, so that no later request gets
        the reply to an earlier one."""
        with self._turn:
            if self._owner != os.getpid():  # after a fork: the process is the parent's
                self._process, self._owner = None, os.getpid()
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(request + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            except BaseException:
                self.close()
                raise
            if line.endswith("\n"):
                return json.loads(line)
            status = process.wait()
            self.close()
        if status == -signal.SIGPROF:
            raise PromptError(
                f"The chat template ran for more than {self.time_limit_s:g} s; it probably never "
                "ends, so name another with --chat-template (chat_template=)."
            )
        raise PromptError(
            f"The process that renders chat templates ended with status {status}; the template "
            "probably takes too much memory, so name another with --chat-template "
            "(chat_template=)."
        )

    def _start(self) -> subprocess.Popen[str]:
        # -P: the folder of the script is no place to import from; our own places are.
        command = [sys.executable, "-P", str(_WORKER)]
        limits = [str(self.time_limit_s), str(self.memory_limit_bytes), str(LONGEST_TEXT)]
        try:
            return subprocess.Popen(
                [*command, *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError as error:
            raise PromptError(
                f"No process could be started to render the chat template in ({error}); give "
                "plain prompts, or token ids."
            ) from error


@functools.cache
def template_process() -> TemplateProcess:
    """This program's process, which all tokenizers share."""
    process = TemplateProcess()
    atexit.register(process.close)
    return process
