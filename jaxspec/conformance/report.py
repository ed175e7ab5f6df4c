"""Records of a battery, and how its checks are run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.errors import ConformanceError, SettingError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """What became of one check.

    Attributes:
      name: of the check.
      clause: of the contract that it tests, `C1` to `C6`.
      statement: what the clause says here.
      passed: None if the check does not apply, or could not be run.
      detail: what was seen.
    """

    name: str
    clause: str
    statement: str
    passed: bool | None
    detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What became of a battery. `rich.print` shows it as a table.

    Attributes:
      kind: `model` or `drafter`.
      subject: name of what was checked.
      checks: in the order in which they ran.
    """

    kind: str
    subject: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.passed is False)

    def __getitem__(self, name: str) -> Check:
        """The check of that name."""
        return next(check for check in self.checks if check.name == name)

    def assert_ok(self) -> None:
        """Raises `ConformanceError` naming the clauses that are broken, if any is."""
        if self.ok:
            return
        broken = "; ".join(f"{c.clause} ({c.name}: {c.detail})" for c in self.failures)
        raise ConformanceError(
            f"The {self.kind} {self.subject} breaks {broken}; see jaxspec.testing for the clauses."
        )

    def to_json(self) -> dict[str, Any]:
        """Fields as JSON values."""
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def __rich__(self):
        """A row per check."""
        from rich.table import Table
        from rich.text import Text

        num_passed = sum(check.passed is True for check in self.checks)
        table = Table(
            title=f"{self.kind} {self.subject}: {num_passed} checks passed, "
            f"{len(self.failures)} failed",
            title_justify="left",
        )
        for column in ("clause", "check", "", "detail"):
            table.add_column(column, overflow="fold")
        marks = {True: ("passed", "green"), False: ("FAILED", "bold red"), None: ("-", "dim")}
        for check in self.checks:
            table.add_row(
                check.clause,
                Text(f"{check.name}\n{check.statement}"),
                Text(*marks[check.passed]),
                Text(check.detail),
            )
        return table


class Broken(Exception):
    """A check that failed; the message says what was seen."""


class NotApplicable(Exception):
    """A check that says nothing about this object; the message says why."""


@dataclasses.dataclass(frozen=True)
class Clause:
    """A check of a battery.

    Attributes:
      name: of the check.
      clause: `C1` to `C6`.
      statement: what it demands.
      run: raises `Broken` or `NotApplicable`; returns a detail.
    """

    name: str
    clause: str
    statement: str
    run: Callable[[Any], str]


def enters(battery: dict[str, Clause], clause: str, statement: str):
    """Enters a function into a battery under its own name."""

    def enter(function):
        name = function.__name__.removeprefix("_")
        battery[name] = Clause(name, clause, statement, function)
        return function

    return enter


def chosen_checks(
    battery: dict[str, Clause], only: Sequence[str], skip: Sequence[str]
) -> list[Clause]:
    """The checks of a battery that are asked for; raises `SettingError` for one that is not
    there."""
    unknown = [name for name in (*only, *skip) if name not in battery]
    if unknown:
        raise SettingError(f"There is no check {unknown[0]!r}; choose among {', '.join(battery)}.")
    return [
        clause
        for name, clause in battery.items()
        if (not only or name in only) and name not in skip
    ]


def run_checks(kind: str, subject: Any, clauses: Sequence[Clause], bench: Any) -> Report:
    """Runs checks in order on a bench. Where the protocol is not followed the others are not run:
    all would fail for that one reason."""
    checks, is_usable = [], True
    for clause in clauses:
        passed: bool | None = True
        if not is_usable:
            passed, detail = None, "not run: the protocol is not followed"
        else:
            try:
                detail = clause.run(bench)
            except Broken as broken:
                passed, detail = False, str(broken)
            except NotApplicable as reason:
                passed, detail = None, str(reason)
            except Exception as error:  # somebody else's code raises what it likes
                message = str(error).strip().split("\n")[0]
                passed, detail = False, f"raised {type(error).__name__}: {message}"
        if clause.name == "protocol" and passed is False:
            is_usable = False
        checks.append(
            Check(
                name=clause.name,
                clause=clause.clause,
                statement=clause.statement,
                passed=passed,
                detail=detail,
            )
        )
    name = getattr(subject, "name", type(subject).__name__)
    return Report(kind=kind, subject=str(name), checks=tuple(checks))
