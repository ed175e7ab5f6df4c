"""Checks of settings by type and range, for every function that takes some from a user.

NumPy's and JAX's scalars count as Python's. True and False are not numbers.
"""

from __future__ import annotations

import itertools
import numbers
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.errors import SettingError

LARGEST_COUNT = 2**30  # the device counts in int32
LARGEST_BYTES = 2**63 - 1  # and the largest seed
LONGEST_LIST = 2**14  # entries of a setting that is a list
LONGEST_SHOWN = 80  # characters of a value in a message


def plain(value: Any) -> Any:
    """`value`, with a scalar of NumPy or JAX as the Python value in it."""
    if getattr(value, "shape", None) != ():
        return value
    try:
        return value.item()
    except Exception:  # a random key, a deleted array, a value that is being traced
        return value


def is_whole(value: Any) -> bool:
    """Whether a plain value is a whole number."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """`value` as a message quotes it: in one line, and not too long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # such as a whole number of over 4,300 digits
        return f"of type {type(value).__name__}, too long to be shown,"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def refusal(name: str, value: Any, expected: str) -> SettingError:
    """The error for a setting that is not what was expected."""
    return SettingError(f"{name} {shown(value)} was given; it must be {expected}.")


def whole_number(
    name: str,
    value: Any,
    *,
    least: int = -LARGEST_COUNT,
    most: int = LARGEST_COUNT,
    expected: str | None = None,
) -> int:
    """`value` as an int.

    Args:
      name: of the setting.
      value: what was given.
      least: the smallest that is allowed.
      most: the largest that is allowed.
      expected: the range in words, for the message.

    Raises:
      SettingError: it is not a whole number in this range.
    """
    given = plain(value)
    if not is_whole(given):
        raise refusal(name, value, "a whole number")
    if given < least:
        raise refusal(name, value, expected or f"at least {least}")
    if given > most:
        raise refusal(name, value, expected or f"at most {most}")
    return int(given)


def number(
    name: str,
    value: Any,
    *,
    least: float = -sys.float_info.max,
    most: float = sys.float_info.max,
    above: float | None = None,
    expected: str = "a finite number",
) -> float:
    """`value` as a float.

    Args:
      name: of the setting.
      value: what was given.
      least: the smallest that is allowed.
      most: the largest that is allowed.
      above: it must be larger than this; None for no such limit.
      expected: the range in words, for the message.

    Raises:
      SettingError: it is not a number in this range; NaN is in none.
    """
    given = plain(value)
    if not isinstance(given, numbers.Real) or isinstance(given, bool):
        raise refusal(name, value, "a number")
    try:
        given = float(given)
    except OverflowError:  # a whole number, or a fraction, beyond all floats
        raise refusal(name, value, expected) from None
    if not least <= given <= most or (above is not None and not given > above):
        raise refusal(name, value, expected)
    return given


def flag(name: str, value: Any) -> bool:
    """`value` as a bool.

    Raises:
      SettingError: it is neither True nor False.
    """
    given = plain(value)
    if not isinstance(given, bool):
        raise refusal(name, value, "True or False")
    return given


def is_one_of(value: Any, names: Iterable[str]) -> bool:
    """Whether `value` is one of these names."""
    return isinstance(value, str) and value in names


def check_kind(name: str, value: Any, kind: Any, expected: str) -> None:
    """Raises `SettingError` unless `value` is an object of the class or protocol `kind`."""
    if isinstance(value, type) or not isinstance(value, kind):
        raise refusal(name, value, expected)


def text(name: str, value: Any, expected: str = "text") -> str:
    """`value` as a str.

    Raises:
      SettingError: it is not text.
    """
    given = plain(value)
    if not isinstance(given, str):
        raise refusal(name, value, expected)
    return str(given)


def listed(name: str, value: Any) -> tuple[Any, ...]:
    """The entries of a list, tuple, set, generator or array; none if None is given.

    Raises:
      SettingError: it is something else, or has more than `LONGEST_LIST` entries.
    """
    if value is None:
        return ()
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    if not is_list or getattr(value, "shape", None) == ():
        raise refusal(name, value, "a list")
    entries = tuple(map(plain, itertools.islice(value, LONGEST_LIST + 1)))
    if len(entries) > LONGEST_LIST:
        raise SettingError(
            f"{name} was given with more than {LONGEST_LIST} entries; give at most so many."
        )
    return entries


def seconds(name: str, value: Any) -> float | None:
    """A time limit as a float, or None for no limit.

    Raises:
      SettingError: it is neither None nor a number of seconds above 0.
    """
    if value is None:
        return None
    try:
        return number(name, value, above=0)
    except SettingError:
        raise refusal(name, value, "a number of seconds above 0, or None") from None


def check_callable(**settings: Any) -> None:
    """Raises `SettingError` for the first setting that is neither None nor a function."""
    for name, value in settings.items():
        if value is not None and not callable(value):
            raise refusal(name, value, "a function, or None")
