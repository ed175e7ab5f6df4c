"""The configuration of a model: what no decoder can have is refused before anything is made."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxspec.errors import ModelError
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.registry import PRESETS

CONFIG = PRESETS["qwen3-0.6b"]
NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 1.5}, "num_layers is 1.5; it must be a whole number from 1"),
        ({"num_layers": True}, "num_layers is True"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
        ({"max_length": None}, "max_length is None"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"num_kv_heads": 3}, "16 query heads and 3 KV heads"),
        ({"norm_epsilon": NAN}, "norm_epsilon is nan"),
        ({"norm_epsilon": 1e-300}, "norm_epsilon is 1e-300"),
        ({"sliding_windows": (0,) * 28}, "sliding_windows is 0"),
        ({"sliding_windows": (None,) * 3}, "3 sliding windows for 28 layers"),
    ],
)
def test_values_out_of_range(changes, message):
    with pytest.raises(ModelError) as raised:
        dataclasses.replace(CONFIG, **changes)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"theta": 0}, "rope.theta is 0; it must be a finite number above 0"),
        ({"theta": 1, "scaling": "yarn", "original_max_length": 9}, "another number than 1"),
        ({"scaling": "linear", "factor": 0.0}, "rope.factor is 0.0"),
        ({"scaling": "dynamic"}, "rope.scaling is 'dynamic'; it must be one of"),
        ({"scaling": "yarn"}, "rope.original_max_length is 0"),
        ({"attention_factor": NAN}, "rope.attention_factor is nan"),
        (
            {"scaling": "llama3", "original_max_length": 9, "low_frequency_factor": 4.0},
            "rope.low_frequency_factor is 4.0; it must be below its high_frequency_factor",
        ),
    ],
)
def test_rotary_values_out_of_range(changes, message):
    with pytest.raises(ModelError) as raised:
        RopeConfig(**{"theta": 1e4, "rotary_size": 64, **changes})
    assert message in str(raised.value)


@pytest.mark.parametrize("size", [0, 3, 256, 2.0])
def test_components_that_cannot_be_rotated(size):
    with pytest.raises(ModelError, match=r"rotary_size|rotates"):
        dataclasses.replace(CONFIG, rope=RopeConfig(theta=1e4, rotary_size=size))


def test_configurations_as_json():
    for config in PRESETS.values():
        assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
