"""JSON that every parser reads: no NaN and no infinity."""

import json
import math

from jaxspec.runtime.documents import document_text, json_text, write_document


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_numbers_that_are_not_finite_are_null(tmp_path):
    value = {"a": [math.nan, (math.inf, 1.5)], "b": {"c": -math.inf, "d": True, "e": None}}
    expected = {"a": [None, [None, 1.5]], "b": {"c": None, "d": True, "e": None}}
    assert json.loads(json_text(value), parse_constant=refuse) == expected
    write_document(value, tmp_path / "document.json")
    written = (tmp_path / "document.json").read_text()
    assert json.loads(written, parse_constant=refuse) == expected


def test_a_record_is_a_line_of_a_document():
    run = {"name": "a", "speeds": [1.5] * 40, "nested": {"x": 1}}
    value = {"short": {"x": [[1], [2]]}, "runs": [run, {"speeds": list(range(40))}], "empty": []}
    lines = document_text(value).split("\n")
    assert lines[:3] == ["{", ' "short": {"x": [[1], [2]]},', ' "runs": [']
    assert lines[4:7] == ['   "name": "a",', f'   "speeds": {[1.5] * 40},', '   "nested": {"x": 1}']
    assert lines[8:] == [f'  {{"speeds": {list(range(40))}}}', " ],", ' "empty": []', "}"]
    assert json.loads("\n".join(lines)) == value
