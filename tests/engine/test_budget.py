"""`Engine(budget_bytes=...)`: the most rows whose bytes fit, programs counted."""

from __future__ import annotations

import dataclasses

import pytest
import toy

from jaxspec import DraftModel, Engine, SamplingParams
from jaxspec.decode.loop import DecodeLoop
from jaxspec.engine import memory
from jaxspec.engine.memory import bytes_of, compile_programs, fit_rows
from jaxspec.errors import SettingError

SHAPE = {"max_length": 256, "draft_length": 3, "scheduler": "static"}


@pytest.fixture(scope="module")
def parts():
    return toy.model(num_layers=1), DraftModel(toy.model(seed=1, num_layers=1))


@pytest.fixture(scope="module", autouse=True)
def _each_is_compiled_once():
    """The programs of a number of rows are compiled once for all tests of this module."""
    found = {}

    def compile_once(loop):
        key = loop.parts.shape.batch_size
        if key not in found:
            found[key] = compile_programs(loop)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "compile_programs", compile_once)
        yield


@pytest.fixture(scope="module")
def made(parts):
    return Engine(*parts, batch_size=6, **SHAPE).executor.parts


def total_bytes(made, num_rows):
    shape = dataclasses.replace(made.shape, batch_size=num_rows)
    return bytes_of(DecodeLoop(dataclasses.replace(made, shape=shape))).total_bytes


def is_the_most(made, found, budget_bytes):
    """Whether what was found fits, and one more row would not."""
    rows = found.shape.batch_size
    fits = total_bytes(made, rows) <= budget_bytes
    return fits and total_bytes(made, rows + 1) > budget_bytes


@pytest.mark.slow
def test_the_most_rows_that_fit_are_chosen(made):
    whole, four = total_bytes(made, 6), total_bytes(made, 4)
    assert fit_rows(made, whole).shape.batch_size == 6
    for budget_bytes in (whole - 1, four, four - 1):
        assert is_the_most(made, fit_rows(made, budget_bytes), budget_bytes)
    assert fit_rows(made, four).shape.batch_size == 4


def test_rows_chosen_without_the_programs_are_too_many(made, monkeypatch):
    """Sabotage: the temporaries are forgotten."""
    budget_bytes = total_bytes(made, 4) - 1
    real = memory.compile_programs

    def without_temporaries(loop):
        return [
            dataclasses.replace(each, temporary_bytes=0, output_bytes=each.alias_bytes)
            for each in real(loop)
        ]

    monkeypatch.setattr(memory, "compile_programs", without_temporaries)
    found = fit_rows(made, budget_bytes)
    monkeypatch.undo()
    assert not is_the_most(made, found, budget_bytes)


def test_an_engine_takes_a_budget(parts, made):
    budget_bytes = total_bytes(made, 2)
    engine = Engine(*parts, batch_size=6, budget_bytes=budget_bytes, **SHAPE)
    assert engine.shape.batch_size == engine.num_residents == 2
    assert bytes_of(engine.executor.loop).total_bytes <= budget_bytes
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert len(engine.generate([[1, 2, 3]] * 5, params)) == 5
    # The round was compiled to know its bytes, and is not compiled again.
    assert engine.executor.programs["run"].compiled.is_cached


@pytest.mark.slow
def test_what_cannot_fit_is_refused_with_the_smallest_budget(parts, made):
    with pytest.raises(SettingError, match="one row needs") as refused:
        fit_rows(made, 1000)
    least = int(str(refused.value).split(" bytes), of which")[0].split("(")[-1])
    assert fit_rows(made, least).shape.batch_size == 1
    with pytest.raises(SettingError, match=f"{least} bytes"):
        fit_rows(made, least - 1)
    with pytest.raises(SettingError, match="budget_bytes 0 was given"):
        Engine(*parts, batch_size=6, budget_bytes=0, **SHAPE)
