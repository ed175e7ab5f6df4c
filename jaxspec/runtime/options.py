"""Checks of the numbers in a dataclass of options, before the work that they are for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxspec.errors import SettingError
from jaxspec.runtime.values import LARGEST_BYTES, LARGEST_COUNT, number

LARGEST_NUMBER = LARGEST_BYTES  # of seeds, and of what the host counts


def check_numbers(options: Any) -> None:
    """Raises `SettingError` if a number in these options, or in the dataclasses and tuples in them,
    is not finite or takes more than 64 bits."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(each):
                check_numbers(each)
            elif isinstance(each, float) and not math.isfinite(each):
                raise SettingError(
                    f"{_option(field.name)} {each} was given; it must be a finite number."
                )
            elif isinstance(each, int) and abs(each) > LARGEST_NUMBER:
                raise SettingError(
                    f"{_option(field.name)} was given a number of {each.bit_length()} bits; it "
                    "must be at most 2**63 - 1."
                )


def check_counts(options: Any, *names: str) -> None:
    """Raises `SettingError` unless these fields are counts: whole numbers from 1 to
    `LARGEST_COUNT`, tuples of them, or None. A tuple may be empty if its default is."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name in names:
        value, option = getattr(options, name), _option(name)
        if isinstance(value, tuple):
            if not value and defaults[name] != ():
                raise SettingError(f"{option} nothing was given; give numbers of at least 1.")
            if value and not 1 <= min(value):
                given = " ".join(map(str, value))
                raise SettingError(f"{option} {given} was given; give numbers of at least 1.")
            value = max(value, default=1)
        if value is None or 1 <= value <= LARGEST_COUNT:
            continue
        if value < 1:
            raise SettingError(f"{option} {value} was given; it must be at least 1.")
        shown = value if value <= LARGEST_NUMBER else f"of {value.bit_length()} bits"
        raise SettingError(f"{option} {shown} was given; it must be at most {LARGEST_COUNT}.")


def check_between(
    name: str, value: float, least: float, most: float, *, excludes_least: bool = False
) -> None:
    """Raises `SettingError` unless `least <= value <= most`, or `least < value <= most`. NaN is
    never between."""
    bounds = f"above {least}" if excludes_least else f"at least {least}"
    if most < math.inf:
        bounds += f" and at most {most}"
    above = least if excludes_least else None
    number(name, value, least=least, most=most, above=above, expected=f"a number, {bounds}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
