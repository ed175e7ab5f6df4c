"""The settings of an engine: one record, whose fields type checkers know as keywords."""

from __future__ import annotations

import dataclasses
import typing

import numpy as np
import pytest
import toy

from jaxspec import Engine
from jaxspec.engine.config import EngineConfig, EngineSettings, ServingSettings
from jaxspec.errors import SettingError
from jaxspec.serving import ServingEngine


def test_the_keywords_are_the_fields():
    fields = typing.get_type_hints(EngineConfig)
    assert isinstance(fields.pop("prefill_chunk"), dataclasses.InitVar)  # refused
    assert typing.get_type_hints(EngineSettings) == fields
    assert typing.get_type_hints(ServingSettings).items() <= fields.items()


def test_what_is_out_of_range_is_refused_before_there_are_models():
    for settings in (
        {"batch_size": 0},
        {"max_length": 1.5},
        {"prefill_chunk": 128},
        {"draft_length": "long"},
        {"layout": "square"},
        {"exactness": "roughly"},
        {"logprobs_mode": "logits"},
        {"session_bytes": -1},
        {"step_timeout_s": -1.0},
        {"check_invariants": 2},
        {"mesh": "all"},
    ):
        [name] = settings
        with pytest.raises(SettingError, match=name):
            EngineConfig(**settings)


def test_an_engine_has_its_settings():
    config = Engine(toy.model(num_layers=1), batch_size=np.int64(2), max_length=128).config
    assert config == EngineConfig(batch_size=2, max_length=128)
    assert type(config.batch_size) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.batch_size = 3


def test_keywords_that_nobody_knows_are_refused():
    target = toy.model(num_layers=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        Engine(target, nonsense=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'trace'"):
        ServingEngine(target, trace="rounds")
