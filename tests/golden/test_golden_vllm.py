"""Medusa's heads in vLLM's layout against the logits that vLLM's own code computed of the same
tensors; see `make_vllm`."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from golden.make_vllm import FORMS, NUM_HEADS, VOCAB_SIZE, WIDTH
from golden.test_golden_heads import TARGET, TOLERANCE, UNUSED
from safetensors.numpy import save_file

from jaxspec.drafters.heads import formulas
from jaxspec.load.drafters import load_drafter

FILE = Path(__file__).parent / "heads" / "vllm.npz"


def golden(form: str) -> dict[str, np.ndarray]:
    """The arrays of one form, by name."""
    prefix = f"{form}/"
    with np.load(FILE) as arrays:
        return {name.removeprefix(prefix): arrays[name] for name in arrays if prefix in name}


def largest_difference(directory: Path, form: str, arrays: dict[str, np.ndarray]) -> float:
    """Between our logits of the stored hidden states and theirs, of tokens that they have."""
    tensors = {
        name.removeprefix("tensor/"): array if array.dtype == np.int64 else array.astype(np.float32)
        for name, array in arrays.items()
        if name.startswith("tensor/")
    }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    # Two heads are stated, as in published files; there are three.
    fields = {"model_type": "medusa", "hidden_size": WIDTH, "vocab_size": VOCAB_SIZE}
    fields |= {"num_heads": 2, **FORMS[form]}
    (directory / "config.json").write_text(json.dumps(fields))
    heads = load_drafter(directory, TARGET)
    hidden, differences = jnp.asarray(arrays["hidden"]), []
    no_tokens = jnp.zeros((len(hidden), 1), jnp.int32)
    assert len(arrays["logits"]) == heads.config.num_heads == NUM_HEADS
    for index, expected in enumerate(arrays["logits"]):
        settings = heads.config, heads.params, UNUSED, index
        output = formulas.apply_head(*settings, hidden, no_tokens)[1]
        found = np.asarray(formulas.head_logits(*settings, output))
        is_there = np.isfinite(expected)
        assert (np.isfinite(found) == is_there).all()
        differences.append(np.abs(found[is_there] - expected[is_there]).max())
    return float(max(differences))


@pytest.mark.parametrize("form", FORMS)
def test_heads_compute_what_vllm_does(tmp_path, form):
    arrays = golden(form)
    num_tokens = np.isfinite(arrays["logits"]).sum(axis=-1)
    assert (num_tokens == FORMS[form]["truncated_vocab_size"]).all()
    assert largest_difference(tmp_path / "heads", form, arrays) <= TOLERANCE


def test_where_the_arrays_come_from_is_stored():
    with np.load(FILE) as arrays:
        assert str(arrays["repository"]) == "https://github.com/vllm-project/vllm"
        assert str(arrays["source"]) == "vllm/model_executor/models/medusa.py"
        assert len(str(arrays["commit"])) == len(str(arrays["blob"])) == 40
    assert FILE.stat().st_size < 100_000


@pytest.mark.parametrize("form", FORMS)
def test_blocks_that_change_places_are_seen(tmp_path, form):
    arrays = golden(form)
    first, second = (f"tensor/blocks.{head}.layers.0.weight" for head in range(2))
    swapped = {**arrays, first: arrays[second], second: arrays[first]}
    assert largest_difference(tmp_path / "heads", form, swapped) > 100 * TOLERANCE
