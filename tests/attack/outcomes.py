"""What became of an attack, and the table of all of them.

Every attempt ends in one of three ways:

    refused    one sentence that says what was given, and a status that is not zero
    unchanged  it worked as it would have without the damage
    failed     anything else: a traceback, a hang, a death by signal, another result, a partial file

A test classifies its attempts (`of_process`, `of_call`), adds them to a `Tally`, and ends with
`tally.finish(record_property)`, which fails the test if an attempt failed. pytest prints the
table after the last test (see tests/conftest.py).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxspec.errors import JaxspecError

Kind = Literal["refused", "unchanged", "failed"]
PROPERTY = "attack"  # of a pytest report: rows of the table


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended: the kind, and the sentence, or what is wrong."""

    kind: Kind
    reason: str = ""


def of_process(
    arguments: Sequence[str | bytes],
    *,
    limit_s: float = 120,
    problem: Callable[[subprocess.CompletedProcess], str | None] = lambda _: None,
    **options: Any,
) -> Outcome:
    """Runs a program and classifies its end.

    Args:
      arguments: of the program, its name first.
      limit_s: seconds after which it hangs.
      problem: what is wrong with the outputs of a run that ended by itself, refused or not (another
        result, a partial file), or None; it is called with the captured bytes.
      options: of `subprocess.run`.
    """
    try:
        done = subprocess.run(arguments, capture_output=True, timeout=limit_s, **options)
    except subprocess.TimeoutExpired:
        return Outcome("failed", f"hangs: no end after {limit_s:g} s")
    outcome = of_status(done.returncode, done.stderr.decode(errors="replace"))
    found = problem(done) if outcome.kind != "failed" else None
    return outcome if found is None else Outcome("failed", found)


def of_status(status: int, stderr: str) -> Outcome:
    """Classifies how a command ended: by its exit status, and what it wrote to standard error."""
    if "Traceback" in stderr or "Fatal Python error" in stderr:
        return Outcome("failed", f"traceback: {_last_line(stderr)}")
    if status == 0:
        return Outcome("unchanged")
    if status == 2:  # options that cannot be parsed, in the parser's own form
        return Outcome("refused", _last_line(stderr))
    if status == 1:
        sentences = [line for line in stderr.splitlines() if line.startswith("error: ")]
        if len(sentences) == 1 and sentences[0].endswith("."):
            return Outcome("refused", sentences[0])
        return Outcome("failed", f"status 1 and no single sentence: {_last_line(stderr)}")
    return Outcome("failed", f"status {status}: {_last_line(stderr)}")


def of_call(
    call: Callable[[], Any],
    *,
    limit_s: float = 60,
    problem: Callable[[Any], str | None] = lambda _: None,
) -> Outcome:
    """Calls a function of the library and classifies what it raises, or returns.

    Args:
      call: the attempt. It has to run in the main thread, which is interrupted after `limit_s`.
      limit_s: seconds after which it hangs.
      problem: what is wrong with a result, or None.
    """
    try:
        with _alarm(limit_s):
            result = call()
    except JaxspecError as error:
        text = str(error)
        if "\n" in text or not text.endswith("."):
            return Outcome("failed", f"no single sentence: {text!r}")
        return Outcome("refused", text)
    except _TooLong:
        return Outcome("failed", f"hangs: no end after {limit_s:g} s")
    except Exception as error:
        return Outcome("failed", f"traceback: {type(error).__name__}: {error}")
    found = problem(result)
    return Outcome("unchanged") if found is None else Outcome("failed", found)


class _TooLong(BaseException):
    """Not an `Exception`, so that the code under attack cannot take it for one of its own."""


@contextlib.contextmanager
def _alarm(limit_s: float) -> Iterator[None]:
    def stop(*_):
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "nothing on standard error"


class Tally:
    """The attempts of a test.

    Attributes:
      name: of the attack, its row in the table.
      outcomes: by the name of the case.
    """

    def __init__(self, name: str):
        self.name = name
        self.outcomes: dict[str, Outcome] = {}

    def add(self, case: str, outcome: Outcome) -> None:
        """Adds the attempt of a case, whose name says how to repeat it."""
        assert case not in self.outcomes, f"two cases are named {case}"
        self.outcomes[case] = outcome

    @property
    def counts(self) -> dict[str, int]:
        """Attempts by the way they ended."""
        return dict(collections.Counter(outcome.kind for outcome in self.outcomes.values()))

    def finish(self, record_property: Callable[[str, object], None]) -> None:
        """Records the row of the table, and fails if an attempt failed.

        Args:
          record_property: pytest's fixture.
        """
        record_property(PROPERTY, {"name": self.name, **self.counts})
        assert self.outcomes, f"{self.name}: nothing was tried"
        failed = [
            f"{case}: {outcome.reason}"
            for case, outcome in self.outcomes.items()
            if outcome.kind == "failed"
        ]
        assert not failed, f"{self.name}: {len(failed)} failed\n" + "\n".join(failed)


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The table of all attacks: a row for each, and their sum if there are several."""
    rows = list(rows)
    if len(rows) > 1:
        total: collections.Counter[str] = collections.Counter()
        for row in rows:
            total.update({kind: row.get(kind, 0) for kind in ("refused", "unchanged", "failed")})
        rows.append({"name": "all", **total})
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'attack':{width}}  tried  refused  unchanged  failed"]
    for row in rows:
        refused, unchanged, failed = (
            row.get(kind, 0) for kind in ("refused", "unchanged", "failed")
        )
        tried = refused + unchanged + failed
        lines.append(f"{row['name']:{width}}  {tried:5}  {refused:7}  {unchanged:9}  {failed:6}")
    return "\n".join(lines)
