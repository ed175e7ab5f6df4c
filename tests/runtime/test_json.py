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


def test_records_and_lists_are_lines_of_a_document():
    speeds = [1.5] * 40
    run = {"name": "a", "batch": 1, "speeds": speeds, "nested": {"x": {}}, "is_new": True}
    value = {"short": {"x": [[1], [2]]}, "runs": [run, {"speeds": speeds}], "empty": []}
    lines = document_text(value).split("\n")
    assert lines == [
        "{",
        ' "short": {"x": [[1], [2]]},',
        ' "runs": [',
        "  {",
        '   "name": "a", "batch": 1,',
        f'   "speeds": {speeds},',
        '   "nested": {"x": {}}, "is_new": true',
        "  },",
        f'  {{"speeds": {speeds}}}',
        " ],",
        ' "empty": []',
        "}",
    ]
    assert json.loads("\n".join(lines)) == value
