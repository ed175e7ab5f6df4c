"""The classification itself: each way to fail is seen."""

from __future__ import annotations

import sys
import time

import pytest
from attack import outcomes
from attack.outcomes import Outcome, Tally

from jaxspec.errors import SettingError


@pytest.mark.parametrize(
    ("status", "stderr", "kind"),
    [
        (0, "", "unchanged"),
        (1, "loading\nerror: There is no model at 'x'; name one.\n", "refused"),
        (2, "| Parsing error |\n", "refused"),
        (0, "Traceback (most recent call last):\n  ...\nOSError: x\n", "failed"),
        (1, "Traceback (most recent call last):\n  ...\nKeyError: 'x'\n", "failed"),
        (1, "error: one.\nerror: two.\n", "failed"),
        (1, "", "failed"),
        (-11, "", "failed"),
        (137, "Killed\n", "failed"),
    ],
)
def test_how_a_command_ended(status, stderr, kind):
    assert outcomes.of_status(status, stderr).kind == kind


def _python(code: str, **options) -> Outcome:
    return outcomes.of_process([sys.executable, "-c", code], **options)


def test_processes():
    assert _python("print(1)") == Outcome("unchanged")
    assert _python("print(1)", problem=lambda done: f"printed {done.stdout!r}") == Outcome(
        "failed", "printed b'1\\n'"
    )
    assert _python("import time; time.sleep(60)", limit_s=0.2).reason.startswith("hangs")
    assert _python("import os; os.kill(os.getpid(), 9)").reason.startswith("status -9")
    assert "ZeroDivisionError" in _python("1 / 0").reason


def _refuse(sentence: str):
    raise SettingError(sentence)


def test_calls():
    assert outcomes.of_call(lambda: 1) == Outcome("unchanged")
    assert outcomes.of_call(lambda: 1, problem=lambda one: f"{one} is odd").kind == "failed"
    assert outcomes.of_call(lambda: _refuse("Too big; lower it.")).kind == "refused"
    assert outcomes.of_call(lambda: _refuse("Too\nbig.")).kind == "failed"
    assert outcomes.of_call(lambda: 1 / 0).reason.startswith("traceback: ZeroDivisionError")
    assert outcomes.of_call(lambda: time.sleep(60), limit_s=0.1).reason.startswith("hangs")


def test_a_tally_fails_with_its_attempts():
    recorded = []
    tally = Tally("disks")
    tally.add("full", Outcome("refused", "The disk is full."))
    tally.add("slow", Outcome("failed", "hangs"))
    with pytest.raises(AssertionError, match=r"disks: 1 failed\nslow: hangs"):
        tally.finish(lambda name, row: recorded.append((name, row)))
    assert recorded == [(outcomes.PROPERTY, {"name": "disks", "refused": 1, "failed": 1})]
    with pytest.raises(AssertionError, match="nothing was tried"):
        Tally("none").finish(lambda *_: None)


def test_the_table():
    rows = [{"name": "disks", "refused": 3, "unchanged": 1}, {"name": "kills", "unchanged": 200}]
    assert outcomes.table(rows) == (
        "attack  tried  refused  unchanged  failed\n"
        "disks      4        3          1       0\n"
        "kills    200        0        200       0\n"
        "all      204        3        201       0"
    )
