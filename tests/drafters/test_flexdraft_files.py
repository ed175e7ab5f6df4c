"""FlexDraft's weights by name, and in the layout of its release."""

from __future__ import annotations

import json

import flex
import jax
import numpy as np
import pytest
import toy
from safetensors.numpy import save_file

from jaxspec.errors import CheckpointError, ModelError, SettingError
from jaxspec.load.drafters import choose_drafter, load_drafter, save_drafter
from jaxspec.load.models import load_model
from jaxspec.models.base import LanguageModel

TARGET = flex.target(kernels="xla")
CONFIG = flex.config_of(TARGET)
WIDTH, RANK, VOCAB = TARGET.config.width, CONFIG.rank, TARGET.vocab_size
RELEASE = {
    "model_type": "qwen3",
    "hidden_size": WIDTH,
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "num_target_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "block_size": flex.BLOCK,
}
SECTION = {"target_layer_ids": [1, 2], "enable_anchor_bias_logits": True, "anchor_bias_rank": RANK}


def assert_same(one, other):
    ours, theirs = jax.tree.leaves(one.params), jax.tree.leaves(other.params)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert one.config == other.config


def release_tensors():
    """Tensors as the release has them, and the drafter that they hold."""
    drafter = flex.random_flex(TARGET)
    params = jax.tree.map(np.asarray, drafter.params)
    tensors = {"mask_embedding": params["mask"], "norm.weight": np.zeros(WIDTH, np.float32)}
    for index, layer in enumerate(params["layers"]):
        own = f"layers.{index}.self_attn."
        q, k, v = layer["qkv"][:, :, :-2], layer["qkv"][:, :, -2], layer["qkv"][:, :, -1]
        for name, weight in (("q", q), ("k", k), ("v", v)):
            tensors[f"{own}{name}_proj.weight"] = weight.reshape(WIDTH, -1).T
        tensors[f"{own}o_proj.weight"] = layer["output"].reshape(-1, WIDTH).T
        for name in ("q_norm", "k_norm"):
            tensors[f"{own}{name}.weight"] = layer[name]
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm"):
            tensors[f"layers.{index}.{name}.weight"] = np.full((2, 3), np.nan, np.float32)
    own = params["calibrator"]
    both = np.concatenate([own["embedding"], own["hidden"]])
    tensors |= {
        "anchor_bias_mlp.0.weight": both.T,
        "anchor_bias_mlp.0.bias": own["hidden_bias"],
        "anchor_bias_mlp.2.weight": own["logits"].T,
        "anchor_bias_mlp.2.bias": own["logits_bias"],
    }
    return {name: np.ascontiguousarray(each) for name, each in tensors.items()}, drafter


def write_release(directory, tensors, *, name="flexdraft_config", section=SECTION, **changes):
    directory.mkdir(exist_ok=True)
    fields = {**RELEASE, name: section, **changes}
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_names(tmp_path):
    save_drafter(flex.random_flex(TARGET), tmp_path / "flex")
    named = {"kind": "flexdraft", "model": str(tmp_path / "flex")}
    assert choose_drafter(f"flexdraft:{tmp_path / 'flex'}")(TARGET).mode == "auto"
    assert choose_drafter(named | {"mode": "sequential"})(TARGET).mode == "sequential"
    for name, words in (
        ("flexdraft", "without a model"),
        (named | {"mode": "fast"}, "must be one of auto, parallel, sequential"),
        (named | {"confidence": 2}, "confidence"),
    ):
        with pytest.raises(SettingError, match=words):
            choose_drafter(name)


# The release


@pytest.mark.parametrize("name", ["flexdraft_config", "dflash_config"])
def test_weights_of_the_release_are_read(tmp_path, name):
    tensors, drafter = release_tensors()
    write_release(tmp_path / "release", tensors, name=name)
    assert_same(drafter, load_drafter(tmp_path / "release", TARGET))
    # Sabotage: halves of the calibrator's first matrix in the other order are noticed.
    weight = tensors["anchor_bias_mlp.0.weight"]
    swapped = np.concatenate([weight[:, WIDTH:], weight[:, :WIDTH]], axis=1)
    write_release(tmp_path / "swapped", tensors | {"anchor_bias_mlp.0.weight": swapped}, name=name)
    with pytest.raises(AssertionError):
        assert_same(drafter, load_drafter(tmp_path / "swapped", TARGET))


def test_releases_that_do_not_fit_are_refused(tmp_path):
    tensors, _ = release_tensors()
    without = {each: value for each, value in tensors.items() if "mlp.2" not in each}
    cases = [
        ("a target with num_layers 36, and echo0 has num_layers 3", {"num_target_layers": 36}),
        ("width 64, and echo0 has width 32", {"hidden_size": 64}),
        (f"vocab_size 7, and echo0 has vocab_size {VOCAB}", {"vocab_size": 7}),
        (
            r"layers \[0, 1\] of their target; only the last ones, here \[1, 2\]",
            {"section": SECTION | {"target_layer_ids": [0, 1]}},
        ),
        (
            "have no calibrator",
            {"section": SECTION | {"enable_anchor_bias_logits": False}},
        ),
        ("anchor_bias_mlp.0.weight", {"section": SECTION | {"anchor_bias_rank": 5}}),
        ("anchor_bias_mlp.2", {"tensors": without}),
    ]
    for words, changes in cases:
        given = {"tensors": tensors} | changes
        directory = write_release(tmp_path / "release", **given)
        with pytest.raises((ModelError, CheckpointError), match=words):
            load_drafter(directory, TARGET, kind="flexdraft")
    none = write_release(tmp_path / "none", tensors, section=None)
    with pytest.raises(ModelError, match="holds no weights of FlexDraft"):
        load_drafter(none, TARGET, kind="flexdraft")
    target = toy.model(family="llama", has_qk_norm=False)
    assert isinstance(target, LanguageModel)
    with pytest.raises(ModelError, match="FlexDraft"):
        load_drafter(write_release(tmp_path / "release", tensors), target)


def test_the_embedded_weights_fit_the_embedded_target():
    target = load_model("demo-target", dtype="bfloat16", kernels="xla")
    drafter = load_drafter("demo-flexdraft", target)
    config = drafter.config
    assert (config.num_deep_layers, config.block_size, config.rank) == (3, 8, 64)
    assert choose_drafter("demo-flexdraft", {"mode": "parallel"})(target).mode == "parallel"
    assert all(np.isfinite(np.float32(leaf)).all() for leaf in jax.tree.leaves(drafter.params))
