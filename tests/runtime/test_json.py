"""JSON that every parser reads: no NaN and no infinity."""

import json
import math

from jaxspec.runtime.documents import json_text, write_document


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_numbers_that_are_not_finite_are_null(tmp_path):
    value = {"a": [math.nan, (math.inf, 1.5)], "b": {"c": -math.inf, "d": True, "e": None}}
    expected = {"a": [None, [None, 1.5]], "b": {"c": None, "d": True, "e": None}}
    assert json.loads(json_text(value), parse_constant=refuse) == expected
    write_document(value, tmp_path / "document.json")
    written = (tmp_path / "document.json").read_text()
    assert json.loads(written, parse_constant=refuse) == expected
