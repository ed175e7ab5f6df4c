"""Heads in other projects' layouts: written here from random arrays, and read; what is refused; and
what is fetched from the hub. (What these heads compute is compared with the projects' own code in
`tests/golden`.)"""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hf_checkpoints import play_hub
from safetensors.numpy import load_file, save_file

from jaxspec.drafters.heads.config import HeadsConfig
from jaxspec.drafters.heads.drafter import Heads
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


def blocks_of(stored: Tensors, name: str) -> list[dict]:
    """Our parameters of heads whose residual blocks are stored under this name, with places for
    the numbers of head and block."""

    def block(k: int, j: int) -> dict[str, np.ndarray]:
        weight = stored[f"{name.format(k, j)}.weight"]
        bias = stored.get(f"{name.format(k, j)}.bias", np.zeros(WIDTH, np.float32))
        return {"weight": weight.T, "bias": bias}

    return [{"blocks": tuple(block(k, j) for j in range(NUM_LAYERS))} for k in range(NUM_HEADS)]


def assert_params(heads: Heads, expected: list[dict], **others: np.ndarray) -> None:
    """The goldens say what is computed with them."""
    jax.tree.map(np.testing.assert_array_equal, heads.params, {"heads": tuple(expected), **others})


def load(directory: Path, *, target=TARGET, **options) -> Heads:
    """Without warnings, which are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", JaxspecWarning)
        return load_drafter(directory, target, kind="heads", **options)


# Medusa


def test_medusa_as_released(place):
    stored = medusa_tensors()
    expected = blocks_of(stored, "{}.{}.linear")
    for k, head in enumerate(expected):
        head["head"] = stored[f"{k}.{NUM_LAYERS}.weight"].T
    write(place, stored, MEDUSA, "medusa_lm_head.safetensors")
    heads = load(place)
    assert heads.config == HeadsConfig(
        kind="medusa",
        width=WIDTH,
        vocab_size=VOCAB,
        num_heads=3,
        num_layers=2,
        norm_epsilon=1e-5,
        shares_head=False,
    )
    assert heads.name == f"medusa[budget:4]:{place}"
    assert_params(heads, expected)
    (place / "medusa_lm_head.safetensors").unlink()
    (place / "config.json").unlink()  # nothing of it is used
    assert_params(load(write(place, stored, None, "medusa_lm_head.pt")), expected)
    # Sabotage: blocks that change places are seen.
    expected[0]["blocks"] = expected[0]["blocks"][::-1]
    with pytest.raises(AssertionError, match="not equal"):
        assert_params(heads, expected)


def test_medusa_heads_that_use_the_targets_head(place):
    """TGI's second version stores none; others store copies of the target's."""
    stored = medusa_tensors(has_own=False)
    copies = {f"{k}.{NUM_LAYERS}.weight": HEAD for k in range(NUM_HEADS)}
    changed = copies | {"2.2.weight": HEAD + 1e-3}
    for name, more, is_shared in (("none", {}, 1), ("copies", copies, 1), ("one", changed, 0)):
        heads = load(write(place / name, stored | more, MEDUSA, "medusa_lm_head.safetensors"))
        assert heads.config.shares_head == is_shared
        if is_shared:
            assert_params(heads, blocks_of(stored, "{}.{}.linear"))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_medusa_in_a_merged_model(is_sharded, place):
    """Of the shards only those with heads are opened."""
    stored = medusa_tensors(has_own=False, prefix="medusa_head.")
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
    assert_params(load(place), blocks_of(stored, "medusa_head.{}.{}.linear"))


# vLLM


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("has_bias", [False, True])
def test_vllm(prefix, has_bias, place):
    stored = vllm_tensors(has_bias=has_bias, prefix=prefix)
    expected = blocks_of(stored, prefix + "blocks.{}.layers.{}")
    for k, head in enumerate(expected):
        head["head"] = stored[f"{prefix}lm_heads.{k}.weight"].T
    heads = load(write(place, stored, VLLM | {"medusa_fc_bias": has_bias or None}))
    assert_params(heads, expected)


def test_vllm_with_one_head_for_all(place):
    stored = vllm_tensors(num_own=1)
    blocks = blocks_of(stored, "blocks.{}.layers.{}")
    heads = load(write(place, stored, VLLM | {"original_lm_head": True}))
    assert_params(heads, [head | {"head": stored["lm_heads.0.weight"].T} for head in blocks])
    assert len({id(head["head"]) for head in heads.params["heads"]}) == 1  # in memory once too
    stored["lm_heads.0.weight"] = HEAD
    heads = load(write(place, stored, VLLM | {"original_lm_head": True}))
    assert heads.config.shares_head
    assert_params(heads, blocks)


@pytest.mark.parametrize("num_rows", [len(TOKENS), VOCAB])
@pytest.mark.parametrize(("num_own", "prefix"), [(1, "medusa_heads."), (NUM_HEADS, "")])
def test_vllm_with_a_truncated_vocabulary(num_rows, num_own, prefix, place):
    stored = vllm_tensors(num_rows=num_rows, num_own=num_own) | {"token_map": TOKENS}
    expected = blocks_of(stored, "blocks.{}.layers.{}")
    for k, head in enumerate(expected):
        rows = stored[f"lm_heads.{0 if num_own == 1 else k}.weight"]
        head["head"] = (rows if num_rows < VOCAB else rows[TOKENS]).T
    fields = {"truncated_vocab_size": len(TOKENS), "original_lm_head": num_own == 1}
    prefixed = {f"{prefix}{name}": tensor for name, tensor in stored.items()}
    heads = load(write(place, prefixed, VLLM | fields))
    assert heads.config.num_head_tokens == len(TOKENS)
    assert_params(heads, expected, token_map=TOKENS)
    if num_rows < VOCAB:  # its rows as the target has them: the whole head is there already
        stored |= {f"lm_heads.{k}.weight": HEAD[TOKENS] for k in range(num_own)}
        heads = load(write(place, stored, VLLM | fields))
        assert (heads.config.shares_head, heads.config.num_head_tokens) == (True, None)


# Clover-2, whose parameters the goldens compare


def test_clover2_rotates_with_its_own_base(place):
    """Whatever the target does; files of an earlier jaxspec may state another."""
    for stated, theta in (({}, 1e4), ({"rope_theta": 5e5}, 5e5)):
        fields = CLOVER2 | {"clover": {**CLOVER2["clover"], **stated}}
        config = load(write(place, clover2_tensors(), fields)).config
        assert (config.kind, config.num_heads, config.num_gate_heads) == ("clover2", 5, 4)
        assert (config.block.num_layers, config.block.rope.theta) == (2, theta)


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


SQUARE = np.zeros((WIDTH, WIDTH), np.float32)
LAYOUTS = {
    "medusa": (medusa_tensors, MEDUSA, "medusa_lm_head.safetensors"),
    "vllm": (vllm_tensors, VLLM, "model.safetensors"),
    "clover2": (clover2_tensors, CLOVER2, "model.safetensors"),
}


@pytest.mark.parametrize(
    ("layout", "fields", "changes", "fragment"),
    [
        ("medusa", {}, {"1.0.linear.bias": None}, "lacks 1.0.linear.bias"),
        ("medusa", {}, {"7.0.linear.weight": SQUARE}, "lacks 3.0.linear.weight"),
        ("medusa", {}, {"optimizer": SQUARE}, "the unexpected tensors optimizer"),
        ("medusa", {}, {"2.1.linear.weight": SQUARE[1:]}, "[31, 32] instead of [32, 32]"),
        ("medusa", {}, {"0.0.linear.bias": np.zeros(WIDTH, np.int32)}, "in a dtype other than"),
        ("medusa", {}, {"0.0.linear.weight": None}, "no 0.0.linear.weight"),
        ("medusa", {}, dict.fromkeys(medusa_tensors()) | {"x": SQUARE}, "no {k}.{j}.linear.weight"),
        ("vllm", {"medusa_fc_bias": False}, {}, "the unexpected tensors blocks.0.layers.0.bias"),
        ("vllm", {}, {"blocks.2.layers.1.bias": None}, "lacks blocks.2.layers.1.bias"),
        ("vllm", {}, {"lm_heads.2.weight": None}, "lacks lm_heads.2.weight"),
        ("vllm", {"truncated_vocab_size": 5}, {}, "lacks token_map"),
        ("vllm", {"truncated_vocab_size": 3}, {"token_map": np.array([0, 1, 99])}, "3 different"),
        ("vllm", {"truncated_vocab_size": 3}, {"token_map": np.array([0, 1, 1])}, "3 different"),
        ("vllm", {"truncated_vocab_size": 2}, {"token_map": np.ones(2, np.float32)}, "and int64"),
        ("vllm", {"truncated_vocab_size": 99}, {}, "num_head_tokens is 99"),
        ("vllm", {"logit_scale": 0.5}, {}, "logit_scale to 0.5"),
        ("vllm", {"vocab_size": "many"}, {}, "vocab_size to 'many'"),
        ("clover2", {"clover": {"num_layers": 2}}, {}, "does not state 'num_heads'"),
        ("clover2", {"clover": []}, {}, "must be an object"),
        ("clover2", {"architectures": ["OPTForCausalLM"]}, {}, "OPTForCausalLM"),
        ("clover2", {}, {"clover_norm.weight": None}, "lacks clover_norm.weight"),
        ("clover2", {}, {"layers.1.mlp.up_proj.weight": None}, "lacks layers.1.mlp.up_proj.weight"),
        ("clover2", {}, {"clover_head_mlp.weight": None}, "no clover_head_mlp.weight"),
        ("clover2", {}, {"lm_head.weight": HEAD[1:]}, "[60, 32] instead of [61, 32]"),
    ],
)
def test_tensors_that_are_no_heads(layout, fields, changes, fragment, place):
    make, config, file = LAYOUTS[layout]
    tensors = {k: v for k, v in (make() | changes).items() if v is not None}
    refused(write(place, tensors, config | fields, file), JaxspecError, fragment)


def test_directories_without_heads(place, tmp_path):
    write(place, {"lm_head.weight": HEAD}, LLAMA)
    refused(place, ModelError, "holds no heads in a layout that is known", "draft_model:MODEL")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", ModelError, "holds no heads in a layout that is known")
    refused("./no-such", ModelError, "There is no drafter of kind heads at './no-such'")
    write(tmp_path / "broken", medusa_tensors(), MEDUSA, "medusa_lm_head.safetensors")
    (tmp_path / "broken" / "medusa_lm_head.safetensors").write_bytes(b"no such file")
    refused(tmp_path / "broken", CheckpointError, "cannot be read as safetensors")


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


# From the hub


def test_only_what_holds_heads_is_fetched(place, monkeypatch):
    def fetched(directory: Path, *others: str, name: str = "org/heads", **options) -> list:
        """The patterns that are fetched to load heads, and last why they are refused."""
        with monkeypatch.context() as patch:
            downloads = play_hub(patch, directory, name="org/heads", others=others)
            try:
                loaded = load_drafter(name, TARGET, **options).name
                assert loaded == "medusa[budget:4]:org/heads"
            except ModelError as error:
                return [*(patterns for *_, patterns in downloads), str(error)]
            return [patterns for *_, patterns in downloads]

    heads = {"kind": "heads"}
    own = write(place / "own", medusa_tensors(), MEDUSA, "medusa_lm_head.safetensors")
    others = ("medusa_lm_head.pt", "tokenizer.model", "model.safetensors")
    assert fetched(own, *others, **heads) == [["config.json", "medusa_lm_head.safetensors"]]

    merged = write(place / "merged", medusa_tensors(prefix="medusa_head."), LLAMA, "b.safetensors")
    names = load_file(merged / "b.safetensors")
    weight_map = {"lm_head.weight": "a.safetensors"} | dict.fromkeys(names, "b.safetensors")
    index = "model.safetensors.index.json"
    (merged / index).write_text(json.dumps({"weight_map": weight_map}))
    first = ["config.json", index]  # what an index says is read before shards
    assert fetched(merged, "a.safetensors", **heads) == [first, [*first, "b.safetensors"]]

    # Of an ordinary model in shards, which holds none, no shard is fetched.
    ordinary = [f"model.layers.{name.removeprefix('medusa_head.')}" for name in names]
    weight_map = dict.fromkeys(ordinary, "a.safetensors")
    (merged / index).write_text(json.dumps({"weight_map": weight_map}))
    patterns, refusal = fetched(merged, "a.safetensors", **heads)
    assert patterns == first
    assert "holds no heads in a layout that is known" in refusal

    vllm = write(place / "vllm", vllm_tensors(), VLLM)
    options = {"name": "heads:org/heads", "revision": "main"}
    expected = [["config.json", "model*.safetensors*"]]
    assert fetched(vllm, "pytorch_model.bin", **options) == expected
