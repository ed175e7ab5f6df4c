"""Logits and greedy tokens of converted checkpoints against transformers and torch."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import hf_checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.format import load_converted
from jaxspec.convert import convert
from jaxspec.models.base import packed_model
from jaxspec.models.prefill import chain_window

torch = pytest.importorskip("torch")

TOLERANCE = 2e-4
PROMPT_LENGTHS = (1, 9, 40, 17)
NUM_GREEDY = 64
TAIL = 6  # window of all calls after the prefill


@functools.cache
def pair_of(variant: str, root: Path):
    """A torch model and ours, converted from several shards."""
    reference = hf_checkpoints.write(root / "hf", variant, shard_size="30KB")
    assert len(list((root / "hf").glob("*.safetensors"))) > 1
    convert(root / "hf", root / "out")
    return reference, packed_model(load_converted(root / "out", dtype="float32"))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("parity")


def reference_logits(reference, tokens) -> np.ndarray:
    with torch.no_grad():
        return reference(torch.tensor([list(tokens)])).logits[0].numpy()


def random_prompts(vocab_size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocab_size, length, dtype=np.int32) for length in PROMPT_LENGTHS]


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, tokens, starts, cache):
    window = chain_window(starts, tokens.shape[1])
    hidden, cache = model.forward(params, tokens, window, cache)
    return model.logits(params, hidden), cache


def forward(model, rows, starts, length, cache):
    """Logits `[B, length, V]` of tokens right-padded with 0, each row written at its own offset."""
    tokens = np.zeros((len(rows), length), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    logits, cache = _forward(
        model, model.params, jnp.asarray(tokens), jnp.asarray(starts, jnp.int32), cache
    )
    return np.asarray(logits), cache


def prefill(model, prompts):
    """Logits of all prompts in one window from slot 0, padding included, and the cache."""
    longest = max(map(len, prompts))
    cache = model.init_cache(len(prompts), longest + NUM_GREEDY + TAIL)
    return forward(model, prompts, [0] * len(prompts), longest, cache)


def ragged_logits(model, prompts) -> list[np.ndarray]:
    """Logits of every prompt token: a window from slot 0, then one at each row's own offset.

    The second window rewrites what the first one left beyond the offset, padding included.
    """
    first, cache = prefill(model, prompts)
    starts = [max(len(prompt) - TAIL, 0) for prompt in prompts]
    tails = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
    second, _ = forward(model, tails, starts, TAIL, cache)
    return [
        np.concatenate([first[row, :start], second[row, : len(tails[row])]])
        for row, start in enumerate(starts)
    ]


SLOW_VARIANTS = ("mistral-full", "qwen2-yarn-mscale", "glm4-plain")


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=[pytest.mark.slow] if variant in SLOW_VARIANTS else [])
        for variant in hf_checkpoints.VARIANTS
    ],
)
def test_logits_of_a_ragged_batch(variant, root):
    reference, model = pair_of(variant, root / variant)
    prompts = random_prompts(model.vocab_size)
    for prompt, ours in zip(prompts, ragged_logits(model, prompts), strict=True):
        theirs = reference_logits(reference, prompt)
        assert np.abs(theirs).max() > 0.5  # random weights that say something
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2", "qwen3", "glm4"])
def test_greedy_tokens(variant, root):
    """64 tokens, each row at its own length; where the choices differ, it must be a tie."""
    reference, model = pair_of(variant, root / variant)
    prompts = random_prompts(model.vocab_size)
    rows = [list(map(int, prompt)) for prompt in prompts]
    logits, cache = prefill(model, prompts)
    newest = [logits[row, len(prompt) - 1] for row, prompt in enumerate(prompts)]
    kept = [[] for _ in rows]
    for _ in range(NUM_GREEDY):
        for row, scores in enumerate(newest):
            kept[row].append(scores)
            rows[row].append(int(scores.argmax()))
        starts = [len(row) - 1 for row in rows]
        logits, cache = forward(model, [row[-1:] for row in rows], starts, TAIL, cache)
        newest = list(logits[:, 0])

    for prompt, tokens, ours in zip(prompts, rows, map(np.stack, kept), strict=True):
        theirs = reference_logits(reference, tokens[:-1])[len(prompt) - 1 :]
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)
        for position in np.flatnonzero(ours.argmax(-1) != theirs.argmax(-1)):
            second, first = np.sort(theirs[position])[-2:]
            assert first - second <= 2 * np.abs(ours - theirs)[position].max()


@pytest.mark.parametrize("variant", ["llama", "llama3", "mistral", "qwen2-yarn", "glm4"])
def test_keys_of_transformers_v4_give_the_same_model(variant, tmp_path):
    hf_checkpoints.write(tmp_path / "hf", variant)
    new = convert(tmp_path / "hf", tmp_path / "new").config
    assert "rope_parameters" in json.loads((tmp_path / "hf/config.json").read_text())
    hf_checkpoints.make_v4_style(tmp_path / "hf/config.json")
    assert convert(tmp_path / "hf", tmp_path / "old").config == new


@pytest.mark.parametrize(
    ("variant", "damage"),
    [
        ("mistral", {"sliding_windows": (8, 8)}),
        ("qwen2-windows", {"sliding_windows": (5, 5)}),
        ("llama3", {"rope": {"factor": 4.0}}),
        ("qwen2-yarn", {"rope": {"attention_factor": 1.0}}),
        pytest.param("llama", {"norm_epsilon": 1e-3}, marks=pytest.mark.slow),
        pytest.param("glm4", {"has_sandwich_norms": False}, marks=pytest.mark.slow),
    ],
)
def test_sabotage_is_seen(variant, damage, root):
    """The comparison fails when one setting is off by a little."""
    reference, model = pair_of(variant, root / f"{variant}-sabotage")
    if "rope" in damage:
        damage = {"rope": dataclasses.replace(model.config.rope, **damage["rope"])}
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, **damage))
    (prompt,) = (prompt for prompt in random_prompts(model.vocab_size) if len(prompt) == 40)
    ours, _ = prefill(model, [prompt])
    assert np.abs(ours[0] - reference_logits(reference, prompt)).max() > 5 * TOLERANCE
