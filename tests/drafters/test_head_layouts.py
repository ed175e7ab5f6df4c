"""Heads in other projects' layouts: written here from random arrays, read, and compared with
formulas of their own; and what is refused."""

from __future__ import annotations

import contextlib
import json
import pickle
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec.drafters.heads import formulas
from jaxspec.drafters.heads.config import HeadsConfig
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.drafters.heads.formulas import TargetParts
from jaxspec.errors import (
    CheckpointError,
    JaxspecError,
    JaxspecWarning,
    ModelError,
    SettingError,
)
from jaxspec.load.drafters import load_drafter, parse_drafter

WIDTH, VOCAB, NUM_HEADS, NUM_LAYERS = 32, toy.VOCAB, 3, 2
TARGET = toy.model(family="llama", has_qk_norm=False, norm_epsilon=1e-5)
HEAD = np.asarray(TARGET.head_rows(TARGET.params, jnp.arange(VOCAB)))  # [V, E]
TOKENS = np.array([7, 3, 60, 0, 21])  # of truncated vocabularies
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,  # which the release of Clover-2 does not use
}

Tensors = dict[str, np.ndarray]


def random(seed: int, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Matrices of about unit gain, norms around 1, biases that are not zero."""
    rng, made = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        values = rng.normal(0, shape[-1] ** -0.5 if len(shape) == 2 else 0.3, shape)
        made[name] = (values + ("norm" in name)).astype(np.float32)
    return made


# Writers


def medusa_tensors(*, has_own: bool = True, prefix: str = "") -> Tensors:
    shapes = {}
    for k in range(NUM_HEADS):
        for j in range(NUM_LAYERS):
            shapes[f"{prefix}{k}.{j}.linear.weight"] = (WIDTH, WIDTH)
            shapes[f"{prefix}{k}.{j}.linear.bias"] = (WIDTH,)
        if has_own:
            shapes[f"{prefix}{k}.{NUM_LAYERS}.weight"] = (VOCAB, WIDTH)
    return random(1, shapes)


def vllm_tensors(
    *, has_bias: bool = True, num_own: int = NUM_HEADS, num_rows: int = VOCAB, prefix: str = ""
) -> Tensors:
    shapes = {}
    for k in range(NUM_HEADS):
        for j in range(NUM_LAYERS):
            shapes[f"{prefix}blocks.{k}.layers.{j}.weight"] = (WIDTH, WIDTH)
            if has_bias:
                shapes[f"{prefix}blocks.{k}.layers.{j}.bias"] = (WIDTH,)
    shapes |= {f"{prefix}lm_heads.{k}.weight": (num_rows, WIDTH) for k in range(num_own)}
    return random(2, shapes)


def clover2_tensors() -> Tensors:
    shapes = {
        "clover_norm.weight": (WIDTH,),
        "clover_head_norm.weight": (WIDTH,),
        "clover_head_mlp.weight": (WIDTH, WIDTH),
        "clover_head_mlp.bias": (WIDTH,),
        "clover_head_mlp2.weight": (WIDTH, 2 * WIDTH),
        "clover_head_mlp2.bias": (WIDTH,),
    }
    for module in ("clover_head_mlp_rnn", "clover_head_mlp_rnn2"):
        shapes[f"{module}.input_layernorm.weight"] = (WIDTH,)
        for name in "qkv":
            shapes |= {f"{module}.{name}.weight": (WIDTH, WIDTH), f"{module}.{name}.bias": (WIDTH,)}
    for i in range(2):
        layer = f"layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (WIDTH,),
            f"{layer}.post_attention_layernorm.weight": (WIDTH,),
            f"{layer}.self_attn.q_proj.weight": (WIDTH, WIDTH),
            f"{layer}.self_attn.k_proj.weight": (WIDTH // 2, WIDTH),
            f"{layer}.self_attn.v_proj.weight": (WIDTH // 2, WIDTH),
            f"{layer}.self_attn.o_proj.weight": (WIDTH, WIDTH),
            f"{layer}.mlp.gate_proj.weight": (48, WIDTH),
            f"{layer}.mlp.up_proj.weight": (48, WIDTH),
            f"{layer}.mlp.down_proj.weight": (WIDTH, 48),
        }
    return {**random(3, shapes), "lm_head.weight": HEAD, "clover_embed_tokens.weight": HEAD}


CLOVER2 = {**LLAMA, "clover": {"num_heads": 5, "num_layers": 2, "heads_coefficient": 1.0}}
VLLM = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": WIDTH,
    "num_heads": 2,  # of three: heads are counted from the tensors
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "truncated_vocab_size": None,
    "medusa_fc_bias": True,
}
MEDUSA = {"base_model_name_or_path": "x/y", "medusa_num_heads": 2, "medusa_num_layers": 1}


def write(
    directory: Path, tensors: Tensors, config: dict | None, file: str = "model.safetensors"
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, directory / file)
    else:
        torch = pytest.importorskip("torch")
        torch.save({k: torch.from_numpy(v.copy()) for k, v in tensors.items()}, directory / file)
    return directory


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "heads"


# The formulas once more, in numpy, on tensors as they are stored


def silu(x):
    return x / (1 + np.exp(-x))


def rms_norm(x, weight, epsilon=1e-5):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def target_norm(features):
    return rms_norm(features, np.asarray(TARGET.params["final_norm"]))


def medusa_logits(stored: Tensors, features: np.ndarray) -> list[np.ndarray]:
    """Of each head, for one feature `[E]` of the target."""
    found = []
    for k in range(NUM_HEADS):
        r = target_norm(features)
        for j in range(NUM_LAYERS):
            r = r + silu(stored[f"{k}.{j}.linear.weight"] @ r + stored[f"{k}.{j}.linear.bias"])
        found.append(stored.get(f"{k}.{NUM_LAYERS}.weight", HEAD) @ r)
    return found


def vllm_logits(stored: Tensors, features: np.ndarray) -> list[np.ndarray]:
    found = []
    for k in range(NUM_HEADS):
        r = target_norm(features)
        for j in range(NUM_LAYERS):
            name = f"blocks.{k}.layers.{j}"
            r = r + silu(stored[f"{name}.weight"] @ r + stored.get(f"{name}.bias", 0))
        head = stored.get(f"lm_heads.{k}.weight", stored["lm_heads.0.weight"])
        if "token_map" not in stored:
            found.append(head @ r)
            continue
        rows = head if len(head) == len(TOKENS) else head[TOKENS]
        logits = np.full(VOCAB, -np.inf)
        logits[stored["token_map"]] = rows @ r
        found.append(logits)
    return found


def attention_decoder(stored: Tensors, module: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    def project(name, value):
        return (
            stored[f"{module}.{name}.weight"] @ value + stored[f"{module}.{name}.bias"]
        ).reshape(4, -1)

    q = project("q", rms_norm(x, stored[f"{module}.input_layernorm.weight"]))
    k, v = project("k", y), project("v", y)
    lengths = np.linalg.norm(q, axis=1) * np.linalg.norm(k, axis=1)
    cosine = np.sum(q * k, axis=1) / np.maximum(lengths, 1e-5)
    return x + (cosine[:, None] * v).reshape(-1)


def llama_layer(stored: Tensors, layer: str, x: np.ndarray, theta: float) -> np.ndarray:
    """`x` `[T, E]` after a layer with 4 query heads on 2 KV heads of size 8."""

    def linear(name, value):
        return value @ stored[f"{layer}.{name}.weight"].T

    def rotate(value):  # [T, heads, 8]
        inverse = theta ** (-np.arange(0, 8, 2) / 8)
        angle = np.arange(len(value))[:, None, None] * inverse
        low, high = value[..., :4], value[..., 4:]
        turned = [low * np.cos(angle) - high * np.sin(angle)]
        turned.append(high * np.cos(angle) + low * np.sin(angle))
        return np.concatenate(turned, axis=-1)

    length = len(x)
    normed = rms_norm(x, stored[f"{layer}.input_layernorm.weight"])
    q = rotate(linear("self_attn.q_proj", normed).reshape(length, 4, 8))
    k = rotate(linear("self_attn.k_proj", normed).reshape(length, 2, 8)).repeat(2, axis=1)
    v = linear("self_attn.v_proj", normed).reshape(length, 2, 8).repeat(2, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(8)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    x = x + linear("self_attn.o_proj", np.einsum("hqk,khd->qhd", weights, v).reshape(length, -1))
    normed = rms_norm(x, stored[f"{layer}.post_attention_layernorm.weight"])
    gated = silu(linear("mlp.gate_proj", normed)) * linear("mlp.up_proj", normed)
    return x + linear("mlp.down_proj", gated)


def clover2_logits(
    stored: Tensors, features: np.ndarray, tokens: list[int], *, theta: float = 1e4
) -> list[np.ndarray]:
    """Of five heads at the last of T features `[T, E]`; `tokens` are those after each feature, then
    those that the heads propose."""
    embed = stored["clover_embed_tokens.weight"]
    hidden = np.stack(
        [
            attention_decoder(stored, "clover_head_mlp_rnn", x, embed[token])
            for x, token in zip(features, tokens[: len(features)], strict=True)
        ]
    )
    for i in range(2):
        hidden = llama_layer(stored, f"layers.{i}", hidden, theta)
    h = rms_norm(hidden[-1], stored["clover_norm.weight"])
    found = []
    for i in range(5):
        if i == 0:
            made = stored["clover_head_mlp.weight"] @ h + stored["clover_head_mlp.bias"]
        else:
            e = embed[tokens[len(features) - 1 + i]]
            h = attention_decoder(stored, "clover_head_mlp_rnn2", h, e)
            made = stored["clover_head_mlp2.weight"] @ np.concatenate([h, e])
            made = made + stored["clover_head_mlp2.bias"]
        found.append(HEAD @ rms_norm(made, stored["clover_head_norm.weight"]))
    return found


def our_logits(heads: Heads, features: np.ndarray, tokens: list[int]) -> list[np.ndarray]:
    """What the package's formulas give for the same."""
    config, params, length = heads.config, heads.params, len(features)
    parts = TargetParts(
        *(
            lambda x, method=method: method(TARGET.params, x)
            for method in (TARGET.final_norm, TARGET.head, TARGET.head_rows)
        )
    )
    everything = jnp.asarray(tokens, jnp.int32)
    hidden = formulas.anchor(
        config,
        params,
        parts,
        jnp.asarray(features, jnp.float32)[None],
        everything[None, :length],
        lambda x: formulas.run_training_block(config, params, x, jnp.ones((1, length), jnp.int32)),
    )[0, -1]
    found = []
    for k in range(config.num_heads):
        known = everything[length - 1 : length + k]
        hidden, output = formulas.apply_head(config, params, parts, k, hidden, known)
        found.append(np.asarray(formulas.head_logits(config, params, parts, k, output)))
    return found


FEATURES = np.random.default_rng(5).normal(0, 1, (6, WIDTH))
SOME_TOKENS = [4, 8, 15, 16, 23, 42, 50, 51, 52, 53]


def assert_same_logits(heads: Heads, expected: list[np.ndarray]) -> None:
    found = our_logits(heads, FEATURES, SOME_TOKENS)
    assert len(found) == len(expected) == heads.config.num_heads
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4 * np.ptp(theirs[theirs > -99]))


def load(directory: Path, *, target=TARGET, **options) -> Heads:
    """Without warnings, which are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", JaxspecWarning)
        return load_drafter(directory, target, kind="heads", **options)


# Medusa


def test_medusa_as_released(place):
    stored = medusa_tensors()
    write(place, stored, MEDUSA, "medusa_lm_head.safetensors")
    heads = load(place)
    config = HeadsConfig(
        kind="medusa",
        width=WIDTH,
        vocab_size=VOCAB,
        num_heads=3,
        num_layers=2,
        norm_epsilon=1e-5,
        shares_head=False,
    )
    assert heads.config == config
    assert heads.name == f"medusa[budget:4]:{place}"
    assert_same_logits(heads, medusa_logits(stored, FEATURES[-1]))

    (place / "medusa_lm_head.safetensors").unlink()
    write(place, stored, None, "medusa_lm_head.pt")
    again = load(place)
    assert again.config == config
    for one, other in zip(*map(jax.tree.leaves, (heads.params, again.params)), strict=True):
        np.testing.assert_array_equal(one, other)
    (place / "config.json").unlink()  # nothing of it is used
    assert load(place).config == config


def test_a_wrong_table_fails_the_comparison(place):
    """Sabotage: the weights of a head's two blocks change places."""
    stored = medusa_tensors()
    write(place, stored, MEDUSA, "medusa_lm_head.safetensors")
    first, second = (f"0.{j}.linear.weight" for j in range(2))
    stored[first], stored[second] = stored[second], stored[first]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_logits(load(place), medusa_logits(stored, FEATURES[-1]))


def test_medusa_heads_that_use_the_targets_head(place):
    """TGI's second version stores none; others store copies of the target's."""
    stored = medusa_tensors(has_own=False)
    heads = load(write(place / "none", stored, MEDUSA, "medusa_lm_head.safetensors"))
    copies = {f"{k}.{NUM_LAYERS}.weight": HEAD for k in range(NUM_HEADS)}
    same = load(write(place / "copies", stored | copies, MEDUSA, "medusa_lm_head.safetensors"))
    for found in (heads, same):
        assert found.config.shares_head
        assert_same_logits(found, medusa_logits(stored, FEATURES[-1]))
    copies["2.2.weight"] = HEAD + 1e-3
    other = load(write(place / "one", stored | copies, MEDUSA, "medusa_lm_head.safetensors"))
    assert not other.config.shares_head


@pytest.mark.parametrize("is_sharded", [False, True])
def test_medusa_in_a_merged_model(is_sharded, place):
    """Of the shards only those with heads are opened."""
    stored = medusa_tensors(prefix="medusa_head.")
    target = {"model.norm.weight": np.ones(WIDTH, np.float32), "lm_head.weight": HEAD}
    if is_sharded:
        first, *_ = stored
        shards = {
            "model-00001-of-00003.safetensors": target,
            "model-00002-of-00003.safetensors": {first: stored[first]},
            "model-00003-of-00003.safetensors": {k: v for k, v in stored.items() if k != first},
        }
        for file, tensors in list(shards.items())[1:]:
            write(place, tensors, LLAMA, file)
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        index = place / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    else:
        write(place, target | stored, LLAMA)
    plain = {name.removeprefix("medusa_head."): value for name, value in stored.items()}
    assert_same_logits(load(place), medusa_logits(plain, FEATURES[-1]))


# vLLM


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("has_bias", [False, True])
def test_vllm(prefix, has_bias, place):
    stored = vllm_tensors(has_bias=has_bias, prefix=prefix)
    write(place, stored, VLLM | {"medusa_fc_bias": has_bias or None})
    plain = {name.removeprefix("medusa_heads."): value for name, value in stored.items()}
    assert_same_logits(load(place), vllm_logits(plain, FEATURES[-1]))


def test_vllm_with_one_head_for_all(place):
    stored = vllm_tensors(num_own=1)
    heads = load(write(place, stored, VLLM | {"original_lm_head": True}))
    assert_same_logits(heads, vllm_logits(stored, FEATURES[-1]))
    assert len({id(head["head"]) for head in heads.params["heads"]}) == 1  # in memory once too
    stored["lm_heads.0.weight"] = HEAD
    heads = load(write(place, stored, VLLM | {"original_lm_head": True}))
    assert heads.config.shares_head
    assert_same_logits(heads, vllm_logits(stored, FEATURES[-1]))


@pytest.mark.parametrize("num_rows", [len(TOKENS), VOCAB])
@pytest.mark.parametrize(("num_own", "prefix"), [(1, "medusa_heads."), (NUM_HEADS, "")])
def test_vllm_with_a_truncated_vocabulary(num_rows, num_own, prefix, place):
    stored = vllm_tensors(num_rows=num_rows, num_own=num_own) | {"token_map": TOKENS}
    fields = {"truncated_vocab_size": len(TOKENS), "original_lm_head": num_own == 1}
    prefixed = {f"{prefix}{name}": tensor for name, tensor in stored.items()}
    heads = load(write(place, prefixed, VLLM | fields))
    assert heads.config.num_head_tokens == len(TOKENS)
    assert heads.params["heads"][0]["head"].shape == (WIDTH, len(TOKENS))
    expected = vllm_logits(stored, FEATURES[-1])
    assert_same_logits(heads, expected)
    for ours in our_logits(heads, FEATURES, SOME_TOKENS):
        np.testing.assert_array_equal(np.flatnonzero(ours > -np.inf), np.sort(TOKENS))
    if num_rows < VOCAB:  # its rows as the target has them: the whole head is there already
        stored |= {f"lm_heads.{k}.weight": HEAD[TOKENS] for k in range(num_own)}
        heads = load(write(place, stored, VLLM | fields))
        assert (heads.config.shares_head, heads.config.num_head_tokens) == (True, None)


# Clover-2


def test_clover2_as_released(place):
    stored = clover2_tensors()
    heads = load(write(place, stored, CLOVER2))
    config = heads.config
    assert (config.kind, config.num_heads, config.num_gate_heads) == ("clover2", 5, 4)
    assert (config.block.num_layers, config.block.rope.theta) == (2, 1e4)
    assert_same_logits(heads, clover2_logits(stored, FEATURES, SOME_TOKENS))
    # What the comparison would not see if it were too weak.
    for wrong in (
        clover2_logits(stored, FEATURES, SOME_TOKENS, theta=5e5),
        clover2_logits(stored, FEATURES, [*SOME_TOKENS[1:], 1]),
        clover2_logits(stored | {"layers.1.self_attn.o_proj.weight": np.zeros((WIDTH, WIDTH))},
                       FEATURES, SOME_TOKENS),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_same_logits(heads, wrong)


def test_clover2_that_rotates_with_another_base(place):
    """Files of an earlier jaxspec may state one."""
    stored, stated = clover2_tensors(), {"clover": {**CLOVER2["clover"], "rope_theta": 5e5}}
    heads = load(write(place, stored, CLOVER2 | stated))
    assert_same_logits(heads, clover2_logits(stored, FEATURES, SOME_TOKENS, theta=5e5))


def test_directories_that_say_what_they_hold(place):
    """So that the kind need not be named; a merged model is a model."""
    write(place / "own", medusa_tensors(), None, "medusa_lm_head.safetensors")
    write(place / "clover2", clover2_tensors(), CLOVER2)
    write(place / "vllm", vllm_tensors(), VLLM)
    write(place / "merged", medusa_tensors(prefix="medusa_head."), LLAMA)
    kinds = {path.name: parse_drafter(str(path)).kind for path in place.iterdir()}
    expected = {"own": "heads", "clover2": "heads", "vllm": "heads", "merged": "draft_model"}
    assert kinds == expected


def test_clover2_with_another_head(place):
    stored = clover2_tensors()
    stored["lm_head.weight"] = stored["clover_embed_tokens.weight"] = HEAD + 1e-3
    write(place, stored, CLOVER2)
    with pytest.warns(JaxspecWarning, match="outputs stay the target's own"):
        load_drafter(place, TARGET)
    stored["clover_embed_tokens.weight"] = HEAD
    write(place, stored, CLOVER2)
    with pytest.raises(ModelError, match="only heads whose embedding is the target's head"):
        load_drafter(place, TARGET)
    del stored["lm_head.weight"], stored["clover_embed_tokens.weight"]
    load(write(place, stored, CLOVER2))


# Refusals


def refused(name, error: type[JaxspecError], *fragments: str, target=TARGET, **options) -> None:
    with pytest.raises(error) as raised:
        load_drafter(name, target, kind="heads", **options)
    message = str(raised.value)
    for fragment in fragments:
        assert fragment in message
    assert "\n" not in message
    assert message.endswith(".")


def test_heads_of_another_target(place):
    write(place, medusa_tensors(), MEDUSA, "medusa_lm_head.safetensors")
    wide = toy.model(family="llama", has_qk_norm=False, width=64)
    refused(place, ModelError, "have width 32", "has width 64", target=wide)
    large = toy.model(family="llama", has_qk_norm=False, vocab_size=99)
    refused(place, ModelError, "a vocabulary of 61", "a vocabulary of 99", target=large)
    refused(place, SettingError, "is 4 deep, and there are 3 heads", tree="2x4:5")
    refused(place, ModelError, "leave it out", revision="main")


def test_tensors_that_are_no_heads(place):
    whole, square = medusa_tensors(), np.zeros((WIDTH, WIDTH), np.float32)
    for case, (changes, fragment) in enumerate(
        {
            "1.0.linear.bias": ({"1.0.linear.bias": None}, "lacks 1.0.linear.bias"),
            "a gap": (
                {"7.0.linear.weight": square},
                "lacks 3.0.linear.weight",
            ),
            "an extra": ({"optimizer": square}, "the unexpected tensors optimizer"),
            "a shape": ({"2.1.linear.weight": square[1:]}, "[31, 32] instead of [32, 32]"),
            "integers": ({"0.0.linear.bias": np.zeros(WIDTH, np.int32)}, "in a dtype other than"),
            "no first": ({"0.0.linear.weight": None}, "no 0.0.linear.weight"),
        }.values()
    ):
        tensors = {k: v for k, v in (whole | changes).items() if v is not None}
        directory = write(place / str(case), tensors, MEDUSA, "medusa_lm_head.safetensors")
        refused(directory, JaxspecError, fragment)
    write(place / "none", {"x": square}, MEDUSA, "medusa_lm_head.safetensors")
    refused(place / "none", ModelError, "holds no {k}.{j}.linear.weight")
    write(place / "broken", whole, MEDUSA, "medusa_lm_head.safetensors")
    (place / "broken" / "medusa_lm_head.safetensors").write_bytes(b"no such file")
    refused(place / "broken", CheckpointError, "cannot be read as safetensors")


@pytest.mark.parametrize(
    ("fields", "changes", "fragment"),
    [
        ({"medusa_fc_bias": False}, {}, "the unexpected tensors blocks.0.layers.0.bias"),
        ({}, {"blocks.2.layers.1.bias": None}, "lacks blocks.2.layers.1.bias"),
        ({}, {"lm_heads.2.weight": None}, "lacks lm_heads.2.weight"),
        ({"truncated_vocab_size": 5}, {}, "lacks token_map"),
        ({"truncated_vocab_size": 3}, {"token_map": np.array([0, 1, 99])}, "3 different tokens"),
        ({"truncated_vocab_size": 3}, {"token_map": np.array([0, 1, 1])}, "3 different tokens"),
        ({"truncated_vocab_size": 2}, {"token_map": np.ones(2, np.float32)}, "int32 and int64"),
        ({"truncated_vocab_size": 99}, {}, "num_head_tokens is 99"),
        ({"logit_scale": 0.5}, {}, "logit_scale to 0.5"),
        ({"vocab_size": "many"}, {}, "vocab_size to 'many'"),
    ],
)
def test_what_vllm_would_not_load_either(fields, changes, fragment, place):
    tensors = {k: v for k, v in (vllm_tensors() | changes).items() if v is not None}
    refused(write(place, tensors, VLLM | fields), JaxspecError, fragment)


@pytest.mark.parametrize(
    ("fields", "changes", "fragment"),
    [
        ({"clover": {"num_layers": 2}}, {}, "does not state 'num_heads'"),
        ({"clover": []}, {}, "must be an object"),
        ({"architectures": ["OPTForCausalLM"]}, {}, "OPTForCausalLM"),
        ({}, {"clover_norm.weight": None}, "lacks clover_norm.weight"),
        ({}, {"layers.1.mlp.up_proj.weight": None}, "lacks layers.1.mlp.up_proj.weight"),
        ({}, {"clover_head_mlp.weight": None}, "no clover_head_mlp.weight"),
        ({}, {"lm_head.weight": HEAD[1:]}, "[60, 32] instead of [61, 32]"),
    ],
)
def test_what_is_no_clover2(fields, changes, fragment, place):
    tensors = {k: v for k, v in (clover2_tensors() | changes).items() if v is not None}
    refused(write(place, tensors, CLOVER2 | fields), JaxspecError, fragment)


def test_directories_without_heads(place, tmp_path):
    write(place, {"lm_head.weight": HEAD}, LLAMA)
    refused(place, ModelError, "holds no heads in a layout that is known", "draft_model:MODEL")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", ModelError, "holds no heads in a layout that is known")
    refused("./no-such", ModelError, "There is no drafter of kind heads at './no-such'")


class Program:
    """A pickle of this would run a program."""

    def __reduce__(self):
        return print, ("this must never be printed",)


def test_torch_files_that_are_refused(place, monkeypatch, capsys):
    pytest.importorskip("torch")
    write(place, medusa_tensors(), MEDUSA, "medusa_lm_head.pt")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "torch", None)
        refused(place, CheckpointError, "install the parity extra")
    (place / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.0.linear.weight": Program()}))
    refused(place, CheckpointError, "cannot be read as a torch state dict")
    assert "never" not in capsys.readouterr().out


# From the hub, with its answers played back


@contextlib.contextmanager
def hub_of(directory: Path, monkeypatch, others: tuple[str, ...] = ()):
    """A hub that knows `org/heads`, whose files are those of `directory` and some that must not be
    fetched; yields the patterns that were."""
    import huggingface_hub as hub

    fetched: list[list[str]] = []

    def model_info(self, name, *, revision=None, files_metadata=False):
        sizes = {file.name: file.stat().st_size for file in directory.iterdir()}
        sizes |= dict.fromkeys(others, 2**50)  # larger than any disk
        siblings = [types.SimpleNamespace(rfilename=n, size=size) for n, size in sizes.items()]
        return types.SimpleNamespace(sha="c0ffee", siblings=siblings)

    def snapshot_download(name, *, revision=None, allow_patterns=None, local_files_only=False):
        fetched.append(list(allow_patterns))
        return str(directory)

    with monkeypatch.context() as patch:
        patch.setattr(hub.HfApi, "model_info", model_info)
        patch.setattr(hub, "snapshot_download", snapshot_download)
        yield fetched


def test_only_what_holds_heads_is_fetched(place, monkeypatch):
    own = write(place / "own", medusa_tensors(), MEDUSA, "medusa_lm_head.safetensors")
    others = ("medusa_lm_head.pt", "tokenizer.model", "model.safetensors")
    with hub_of(own, monkeypatch, others) as fetched:
        assert load_drafter("org/heads", TARGET, kind="heads").name == "medusa[budget:4]:org/heads"
    assert fetched == [["config.json", "medusa_lm_head.safetensors"]]

    merged = write(place / "merged", medusa_tensors(prefix="medusa_head."), LLAMA, "b.safetensors")
    names = load_file(merged / "b.safetensors")
    weight_map = {"lm_head.weight": "a.safetensors"} | dict.fromkeys(names, "b.safetensors")
    index = "model.safetensors.index.json"
    (merged / index).write_text(json.dumps({"weight_map": weight_map}))
    with hub_of(merged, monkeypatch, ("a.safetensors",)) as fetched:
        load_drafter("org/heads", TARGET, kind="heads")
    first = [["config.json", index]]  # what an index says is read before shards
    assert fetched == [*first, ["config.json", index, "b.safetensors"]]

    # Of an ordinary model in shards, which holds none, no shard is fetched.
    weight_map = dict.fromkeys(names, "a.safetensors")
    weight_map = {name.removeprefix("medusa_head."): file for name, file in weight_map.items()}
    ordinary = {f"model.layers.{name}": file for name, file in weight_map.items()}
    (merged / index).write_text(json.dumps({"weight_map": ordinary}))
    with hub_of(merged, monkeypatch, ("a.safetensors",)) as fetched:
        with pytest.raises(ModelError, match="holds no heads in a layout that is known"):
            load_drafter("org/heads", TARGET, kind="heads")
    assert fetched == first

    write(place / "vllm", vllm_tensors(), VLLM)
    with hub_of(place / "vllm", monkeypatch, ("pytorch_model.bin",)) as fetched:
        load_drafter("heads:org/heads", TARGET, revision="main")
    assert fetched == [["config.json", "model*.safetensors*"]]


@pytest.mark.system
def test_a_truncated_head_drafts_for_its_target(place):
    """It proposes only tokens that it has, and the output is the target's."""
    stored = vllm_tensors(num_own=1, num_rows=len(TOKENS)) | {"token_map": TOKENS}
    fields = {"truncated_vocab_size": len(TOKENS), "original_lm_head": True}
    heads = load(write(place, stored, VLLM | fields), tree="chain")
    shape = {"batch_size": 2, "max_length": 128}
    params = jaxspec.SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = toy.prompts([5, 9])
    drafted = jaxspec.Engine(TARGET, heads, draft_length=3, **shape).generate(prompts, params)
    plain = jaxspec.Engine(TARGET, **shape).generate(prompts, params)
    assert toy.sequences(drafted) == toy.sequences(plain)
