"""Schedulers: which resident rows take part in a round."""

from collections.abc import Callable
from typing import Literal, TypeAlias

from jaxspec.errors import named
from jaxspec.runtime.values import check_kind
from jaxspec.schedulers.base import Scheduler
from jaxspec.schedulers.continuous import Continuous
from jaxspec.schedulers.pool import Pool
from jaxspec.schedulers.static import Static

SchedulerName: TypeAlias = Literal["continuous", "static", "pool"]
SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "continuous": Continuous,
    "static": Static,
    "pool": Pool,
}


def make_scheduler(scheduler: Scheduler | str) -> Scheduler:
    """The scheduler with this name in `SCHEDULERS`; a scheduler is returned as it is.

    Raises:
      SettingError: it is neither, or there is no scheduler with that name.
    """
    if isinstance(scheduler, str):
        return named("scheduler", scheduler, SCHEDULERS)()
    check_kind("scheduler", scheduler, Scheduler, f"a scheduler, or one of {', '.join(SCHEDULERS)}")
    return scheduler


__all__ = [
    "SCHEDULERS",
    "Continuous",
    "Pool",
    "Scheduler",
    "SchedulerName",
    "Static",
    "make_scheduler",
]
