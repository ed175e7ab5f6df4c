"""Golden logits of every family, converted and computed without torch."""

from __future__ import annotations

from pathlib import Path

import hf_checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.format import load_converted
from jaxspec.convert import convert
from jaxspec.convert.conversion import FAMILIES
from jaxspec.models.base import packed_model
from jaxspec.models.prefill import chain_window

pytestmark = pytest.mark.as_shipped

TOLERANCE = 2e-4
GOLDEN_FILES = sorted(Path(__file__).parent.glob("*.npz"))


def golden_differences(model, family: str) -> list[float]:
    """Largest difference of each prompt's logits, all prompts in one ragged batch."""
    model = packed_model(model)
    tokens = list(hf_checkpoints.golden_arrays(family, "tokens").values())
    expected = list(hf_checkpoints.golden_arrays(family, "logits").values())
    longest = max(map(len, tokens))
    padded = np.zeros((len(tokens), longest), np.int32)
    for row, prompt in enumerate(tokens):
        padded[row, : len(prompt)] = prompt

    @jax.jit
    def forward(params, cache):
        window = chain_window(jnp.zeros((len(padded),), jnp.int32), longest)
        hidden, _ = model.forward(params, jnp.asarray(padded), window, cache)
        return model.logits(params, hidden)

    logits = np.asarray(forward(model.params, model.init_cache(len(tokens), longest)))
    return [
        float(np.abs(logits[row, : len(prompt)] - expected[row]).max())
        for row, prompt in enumerate(tokens)
    ]


def test_every_family_has_a_golden_file():
    assert {file.stem for file in GOLDEN_FILES} == {family.name for family in FAMILIES}
    assert all(file.stat().st_size < 300_000 for file in GOLDEN_FILES)


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_golden_logits(family, tmp_path):
    hf_checkpoints.write_golden(tmp_path / "hf", family, num_shards=3)
    convert(tmp_path / "hf", tmp_path / "out")
    model = load_converted(tmp_path / "out", dtype="float32")
    assert max(golden_differences(model, family)) <= TOLERANCE


def test_swapped_tensors_are_seen(tmp_path):
    """The comparison fails if the gate and the up projection change places."""

    def swap(tensors):
        gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]

    hf_checkpoints.write_golden(tmp_path / "hf", "llama", change=swap)
    convert(tmp_path / "hf", tmp_path / "out")
    model = load_converted(tmp_path / "out", dtype="float32")
    assert min(golden_differences(model, "llama")) > 5 * TOLERANCE
