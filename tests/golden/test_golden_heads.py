"""Heads against the logits that other projects' own code computed of the same tensors: the releases
of Medusa and Clover-2, and vLLM's Medusa; see `make_medusa`, `make_clover2` and `make_vllm`."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from golden import make_clover2
from golden.make_vllm import FORMS, NUM_HEADS, VOCAB_SIZE, WIDTH
from safetensors.numpy import save_file

from jaxspec.drafters.heads import formulas
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.drafters.heads.formulas import TargetParts
from jaxspec.load.drafters import load_drafter
from jaxspec.sampling import over_vocabulary

HERE = Path(__file__).parent / "heads"
TOLERANCE = 1e-4
TARGET = toy.model(family="llama", has_qk_norm=False)
UNUSED = TargetParts(*(lambda _: pytest.fail("not of a head's own"),) * 3)
# Of a clone of each project: its repository.
SOURCES = {
    "medusa": "https://github.com/FasterDecoding/Medusa",
    "clover2": "https://github.com/XiaoBin1992/clover",
    "vllm": "https://github.com/vllm-project/vllm",
}
# Two heads are stated, as in vLLM's published files; there are three.
VLLM = {"model_type": "medusa", "hidden_size": WIDTH, "vocab_size": VOCAB_SIZE, "num_heads": 2}


def golden(name: str, prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays of a file whose names begin so, by the rest of their names."""
    with np.load(HERE / f"{name}.npz") as arrays:
        return {
            each.removeprefix(prefix): arrays[each] for each in arrays if each.startswith(prefix)
        }


def loaded(directory: Path, file: str, arrays, fields=None, target=TARGET) -> Heads:
    """The heads in a directory with the stored tensors and the `fields` of `config.json`."""
    tensors = {
        name.removeprefix("tensor/"): array if array.dtype == np.int64 else array.astype(np.float32)
        for name, array in arrays.items()
        if name.startswith("tensor/")
    }
    directory.mkdir()
    save_file(tensors, directory / file)
    if fields is not None:
        (directory / "config.json").write_text(json.dumps(fields))
    return load_drafter(directory, target)


def largest_difference(heads: Heads, arrays: dict[str, np.ndarray]) -> float:
    """Between our logits of the stored hidden states and theirs, of tokens that they have."""
    hidden, differences = jnp.asarray(arrays["hidden"]), []
    no_tokens = jnp.zeros((len(hidden), 1), jnp.int32)
    assert len(arrays["logits"]) == heads.config.num_heads == NUM_HEADS
    for index, expected in enumerate(arrays["logits"]):
        settings = heads.config, heads.params, UNUSED, index
        output = formulas.apply_head(*settings, hidden, no_tokens)[1]
        made = formulas.head_logits(*settings, output)
        token_map = heads.params.get("token_map")
        found = np.asarray(over_vocabulary(made, token_map, heads.config.vocab_size))
        is_there = np.isfinite(expected)
        assert (np.isfinite(found) == is_there).all()
        differences.append(np.abs(found[is_there] - expected[is_there]).max())
    return float(max(differences))


@pytest.mark.parametrize("name", SOURCES)
def test_where_the_arrays_come_from_is_stored(name):
    arrays = golden(name)
    assert str(arrays["repository"]) == SOURCES[name]
    assert len(str(arrays["commit"])) == 40
    assert (HERE / f"{name}.npz").stat().st_size < 100_000


@pytest.mark.parametrize("num_layers", [1, 2])
def test_medusa_computes_what_its_release_does(tmp_path, num_layers):
    arrays, file = golden("medusa", f"{num_layers}/"), "medusa_lm_head.safetensors"
    assert largest_difference(loaded(tmp_path / "heads", file, arrays), arrays) <= TOLERANCE
    # Sabotage: heads that change places are seen.
    first, second = (f"tensor/{head}.0.linear.weight" for head in range(2))
    swapped = {**arrays, first: arrays[second], second: arrays[first]}
    assert largest_difference(loaded(tmp_path / "other", file, swapped), arrays) > 100 * TOLERANCE


@pytest.mark.parametrize("form", FORMS)
def test_heads_compute_what_vllm_does(tmp_path, form):
    arrays, fields = golden("vllm", f"{form}/"), VLLM | FORMS[form]
    file = "model.safetensors"
    num_tokens = np.isfinite(arrays["logits"]).sum(axis=-1)
    assert (num_tokens == FORMS[form]["truncated_vocab_size"]).all()
    heads = loaded(tmp_path / "heads", file, arrays, fields)
    assert largest_difference(heads, arrays) <= TOLERANCE
    # Sabotage: blocks that change places are seen.
    first, second = (f"tensor/blocks.{head}.layers.0.weight" for head in range(2))
    swapped = {**arrays, first: arrays[second], second: arrays[first]}
    heads = loaded(tmp_path / "other", file, swapped, fields)
    assert largest_difference(heads, arrays) > 100 * TOLERANCE


@functools.partial(jax.jit, static_argnums=0)
def clover2_logits(config, params, head, hidden, tokens):
    """Of every head, at every position that it has a token for."""
    parts = TargetParts(
        lambda _: pytest.fail("Clover-2 reads hidden states before the final norm"),
        lambda hidden: hidden @ head.T,
        lambda tokens: head[tokens],
    )
    segments = jnp.ones((1, len(tokens)), jnp.int32)
    block = functools.partial(formulas.run_training_block, config, params, segments=segments)
    [hidden] = formulas.anchor(config, params, parts, hidden[None], tokens[None], block)
    made = []
    for index in range(config.num_heads):
        length = len(tokens) - index
        known = jnp.stack([tokens[k : k + length] for k in range(index + 1)], axis=-1)
        settings = config, params, parts, index
        hidden, output = formulas.apply_head(*settings, hidden[:length], known)
        made.append(formulas.head_logits(*settings, output))
    return made


def difference_of_clover2(directory: Path, arrays: dict[str, np.ndarray]) -> float:
    """The largest between our logits of the stored hidden states and theirs."""
    target = toy.model(family="llama", has_qk_norm=False, norm_epsilon=1e-5)
    heads = loaded(directory, "model.safetensors", arrays, make_clover2.FIELDS, target)
    head = jnp.asarray(arrays["tensor/lm_head.weight"].astype(np.float32))
    tokens = jnp.asarray(arrays["tokens"], jnp.int32)
    made = clover2_logits(heads.config, heads.params, head, jnp.asarray(arrays["hidden"]), tokens)
    assert len(made) == len(arrays["logits"]) == make_clover2.NUM_HEADS
    expected = [each[: len(own)] for own, each in zip(made, arrays["logits"], strict=True)]
    differences = [np.abs(own - each).max() for own, each in zip(made, expected, strict=True)]
    return float(max(differences))


@pytest.mark.filterwarnings("ignore::jaxspec.errors.JaxspecWarning")  # the head is another model's
def test_clover2_computes_what_its_release_does(tmp_path):
    arrays = golden("clover2")
    assert difference_of_clover2(tmp_path / "heads", arrays) <= TOLERANCE
    # Sabotage: tokens and weights in another order are seen.
    for changed in ("tokens", "tensor/clover_head_mlp_rnn2.q.weight"):
        other = {**arrays, changed: np.roll(arrays[changed], 1, axis=0)}
        assert difference_of_clover2(tmp_path / changed.split("/")[0], other) > 100 * TOLERANCE
