"""Errors that a user can cause.

Every message is one sentence that says what was given, what was expected, and what to do. They are
raised before anything is traced; inside a compiled loop, outcomes are status codes instead
(`types.Finish`).
"""

import functools
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class JaxspecError(ValueError):
    """Base of all errors that jaxspec raises for a mistake of its caller."""


class JaxspecWarning(UserWarning):
    """Something that works but is probably not what the caller meant."""


@functools.cache
def warn_once(message: str) -> None:
    """Warns of something with a `JaxspecWarning`, once in a process."""
    warnings.warn(message, JaxspecWarning, stacklevel=3)


class PromptError(JaxspecError):
    """A prompt that cannot be decoded: empty, too long, malformed, or in a form the model lacks."""


class SettingError(JaxspecError):
    """A setting outside its range, or two settings that contradict each other."""


class RequestError(JaxspecError):
    """A request that the engine does not know, or no longer accepts."""


class QueueFullError(JaxspecError):
    """A request that arrived while the queue was full: try again later."""


class ModelError(JaxspecError):
    """A model that cannot be found, or that does not fit the model it is paired with."""


class CheckpointError(JaxspecError):
    """A checkpoint that cannot be read, converted or written."""


class DamagedError(CheckpointError):
    """A converted directory whose files have changed since they were written."""


class UnreadableError(CheckpointError):
    """A file that may be intact, but that the system does not let this process read.

    Attributes:
      path: that of the file or directory.
      reason: what the system says, such as `Permission denied`.
    """

    def __init__(self, path: str, reason: str, *, instead: str = "name another"):
        super().__init__(
            f"{path} cannot be read ({reason}); let this process read it, or {instead}."
        )
        self.path = path
        self.reason = reason

    def __reduce__(self) -> Any:
        return type(self), (self.path, self.reason)


class ConformanceError(JaxspecError):
    """A user's own model or drafter that breaks a contract of decoding."""


def named(what: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of `table` with this name.

    Raises:
      SettingError: there is none.
    """
    if name not in table:
        raise SettingError(f"There is no {what} {name!r}; choose one of {', '.join(table)}.")
    return table[name]
