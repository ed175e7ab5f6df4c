"""Records of a battery, and the functions that run its checks."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.errors import ConformanceError, SettingError
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.report import Printed, TextTable

if TYPE_CHECKING:
    import pandas


class Outcome(enum.StrEnum):
    """The outcome of a check.

    UNTESTED: the clause applies, but nothing happened that could have broken it (a drafter drafted
    nothing), or the protocol is not followed. NOT_APPLICABLE: the clause says nothing here.
    """

    PASSED = "passed"
    FAILED = "FAILED"
    UNTESTED = "untested"
    NOT_APPLICABLE = "not applicable"


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of a battery, and in a report also its result.

    Attributes:
      name: of the check.
      clause: of the contract that it tests, `C1` to `C6`.
      statement: what the clause demands here.
      run: raises `Broken`, `Untested` or `NotApplicable`; returns a detail.
      outcome: its outcome.
      detail: what was observed.
    """

    name: str
    clause: str
    statement: str
    run: Callable[[Any], str] = dataclasses.field(repr=False)
    outcome: Outcome = Outcome.UNTESTED
    detail: str = "not run: the protocol is not followed"

    @property
    def passed(self) -> bool | None:
        """None if it is untested or does not apply."""
        return {Outcome.PASSED: True, Outcome.FAILED: False}.get(self.outcome)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ConformanceReport(Printed):
    """The results of a battery. It prints as a table.

    Attributes:
      kind: `model` or `drafter`.
      subject: name of what was checked.
      checks: in the order in which they ran.
    """

    kind: str
    subject: str
    checks: tuple[Check, ...]

    def of(self, outcome: Outcome) -> tuple[Check, ...]:
        """The checks with this outcome."""
        return tuple(check for check in self.checks if check.outcome == outcome)

    @property
    def ok(self) -> bool:
        """Whether everything that applies was tested, and nothing failed."""
        return not self.failures and not self.of(Outcome.UNTESTED)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return self.of(Outcome.FAILED)

    def __getitem__(self, name: str) -> Check:
        """The check with that name."""
        return next(check for check in self.checks if check.name == name)

    def assert_ok(self) -> None:
        """Raises `ConformanceError` unless `ok`, naming the broken clauses or, if there are none,
        the untested ones."""
        if self.ok:
            return
        verb, checks = "breaks", self.failures
        if not checks:
            verb, checks = "leaves untested", self.of(Outcome.UNTESTED)
        listed = "; ".join(f"{c.clause} ({c.name}: {c.detail})" for c in checks)
        raise ConformanceError(
            f"The {self.kind} {self.subject} {verb} {listed}; see jaxspec.testing for the clauses."
        )

    def to_json(self) -> dict[str, Any]:
        """Fields as JSON values."""
        checks = [{name: x for name, x in vars(c).items() if name != "run"} for c in self.checks]
        return {"ok": self.ok, "kind": self.kind, "subject": self.subject, "checks": checks}

    def to_frame(self) -> pandas.DataFrame:
        """A row per check; needs pandas."""
        return import_extra("pandas", "frames").DataFrame(self.to_json()["checks"])

    @property
    def all_tables(self) -> list[TextTable]:
        """A row per check."""
        counts = (f"{len(self.of(outcome))} {outcome.lower()}" for outcome in Outcome)
        title = f"{self.kind} {self.subject}: {', '.join(counts)}"
        columns = {
            "clause": "{clause}",
            "check": "{name}\n{statement}",
            "": "{outcome}",
            "detail": "{detail}",
        }
        return [TextTable.of_columns(title, columns, self.checks)]


class NotPassed(Exception):
    """Ends a check; the message says what was observed, or why nothing was."""

    outcome = Outcome.FAILED


class Broken(NotPassed):
    """It failed."""


class Untested(NotPassed):
    """It applies, but nothing happened that could have failed."""

    outcome = Outcome.UNTESTED


class NotApplicable(NotPassed):
    """It does not apply to this object."""

    outcome = Outcome.NOT_APPLICABLE


def enters(battery: dict[str, Check], clause: str, statement: str):
    """Enters a function into a battery under its own name."""

    def enter(function):
        name = function.__name__.removeprefix("_")
        battery[name] = Check(name, clause, statement, function)
        return function

    return enter


def chosen_checks(
    battery: dict[str, Check], only: Sequence[str], skip: Sequence[str]
) -> list[Check]:
    """The requested checks of a battery.

    Raises:
      SettingError: there is no check with one of the names.
    """
    unknown = [name for name in (*only, *skip) if name not in battery]
    if unknown:
        raise SettingError(f"There is no check {unknown[0]!r}; choose among {', '.join(battery)}.")
    chosen = [name for name in battery if name in (only or battery) and name not in skip]
    return [battery[name] for name in chosen]


def run_checks(
    kind: str, subject: Any, chosen: Sequence[Check], prepared: Any
) -> ConformanceReport:
    """Runs checks in order on the prepared object. If the protocol is not followed, the other
    checks are not run, because all would fail for that one reason."""
    checks, is_usable = [], True
    for check in chosen:
        if is_usable:
            try:
                outcome, detail = Outcome.PASSED, check.run(prepared)
            except NotPassed as reason:
                outcome, detail = reason.outcome, str(reason)
            except Exception as error:  # foreign code may raise anything
                message = str(error).strip().split("\n")[0]
                outcome, detail = Outcome.FAILED, f"raised {type(error).__name__}: {message}"
            check = dataclasses.replace(check, outcome=outcome, detail=detail)
            is_usable = check.name != "protocol" or outcome != Outcome.FAILED
        checks.append(check)
    name = getattr(subject, "name", type(subject).__name__)
    return ConformanceReport(kind=kind, subject=str(name), checks=tuple(checks))
