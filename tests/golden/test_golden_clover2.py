"""Clover-2's heads against the logits that its release's own code computed; see `make_clover2`."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import toy
from golden.make_clover2 import FIELDS, NUM_HEADS, NUM_TOKENS
from safetensors.numpy import save_file

from jaxspec.drafters.heads import formulas
from jaxspec.drafters.heads.formulas import TargetParts
from jaxspec.load.drafters import load_drafter

FILE = Path(__file__).parent / "heads" / "clover2.npz"
TOLERANCE = 1e-4


def golden() -> dict[str, np.ndarray]:
    with np.load(FILE) as arrays:
        return dict(arrays)


def largest_difference(directory: Path, arrays: dict[str, np.ndarray]) -> float:
    """Between our logits of the stored hidden states and theirs, at every position that a head has
    a token for."""
    tensors = {
        name.removeprefix("tensor/"): array.astype(np.float32)
        for name, array in arrays.items()
        if name.startswith("tensor/")
    }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(FIELDS))
    target = toy.model(family="llama", has_qk_norm=False, norm_epsilon=1e-5)
    head = jnp.asarray(tensors["lm_head.weight"])
    parts = TargetParts(
        lambda _: pytest.fail("Clover-2 reads hidden states before the final norm"),
        lambda hidden: hidden @ head.T,
        lambda tokens: head[tokens],
    )
    heads = load_drafter(directory, target)
    config, params = heads.config, heads.params
    assert config.num_heads == len(arrays["logits"]) == NUM_HEADS
    tokens = jnp.asarray(arrays["tokens"], jnp.int32)
    hidden = formulas.anchor(
        config,
        params,
        parts,
        jnp.asarray(arrays["hidden"])[None],
        tokens[None],
        lambda x: formulas.run_training_block(
            config, params, x, jnp.ones((1, NUM_TOKENS), jnp.int32)
        ),
    )[0]
    differences = []
    for index, expected in enumerate(arrays["logits"]):
        length = NUM_TOKENS - index
        known = jnp.stack([tokens[k : k + length] for k in range(index + 1)], axis=-1)
        settings = config, params, parts, index
        hidden, output = formulas.apply_head(*settings, hidden[:length], known)
        found = formulas.head_logits(*settings, output)
        differences.append(np.abs(found - expected[:length]).max())
    return float(max(differences))


@pytest.mark.filterwarnings("ignore::jaxspec.errors.JaxspecWarning")  # the head is another model's
def test_clover2_computes_what_its_release_does(tmp_path):
    assert largest_difference(tmp_path / "heads", golden()) <= TOLERANCE


def test_where_the_arrays_come_from_is_stored():
    arrays = golden()
    assert str(arrays["repository"]) == "https://github.com/XiaoBin1992/clover"
    assert len(str(arrays["commit"])) == 40
    assert FILE.stat().st_size < 100_000


@pytest.mark.filterwarnings("ignore::jaxspec.errors.JaxspecWarning")
@pytest.mark.parametrize("changed", ["tokens", "tensor/clover_head_mlp_rnn2.q.weight"])
def test_tokens_and_weights_in_another_order_are_seen(tmp_path, changed):
    arrays = golden()
    arrays[changed] = np.roll(arrays[changed], 1, axis=0)
    assert largest_difference(tmp_path / "heads", arrays) > 100 * TOLERANCE
