"""Directories of drafters with weights of their own: saved, loaded, refused, never half there."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from pathlib import Path

import flex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec.checkpoint.format import as_params, leaf_paths, weights_digest
from jaxspec.checkpoint.manifest import FORMAT_VERSION
from jaxspec.drafters.base import TrainedDrafter
from jaxspec.drafters.heads.config import HeadsConfig, heads_config, param_shapes
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.drafters.trees import BeamTree, BudgetTree
from jaxspec.errors import (
    CheckpointError,
    DamagedError,
    JaxspecError,
    JaxspecWarning,
    ModelError,
    SettingError,
)
from jaxspec.kernels.base import unpacked
from jaxspec.load.drafters import load_drafter, save_drafter

TARGET = toy.model()
CONFIGS = {
    "medusa": heads_config("medusa", TARGET.config, num_heads=3, num_layers=2),
    "medusa-own": heads_config("medusa", TARGET.config, num_heads=2, shares_head=False),
    "medusa-truncated": heads_config(
        "medusa", TARGET.config, num_heads=2, shares_head=False, num_head_tokens=5
    ),
    "hydra": heads_config("hydra", TARGET.config, num_heads=3),
    "clover": heads_config("clover", TARGET.config, shares_connection=False),
    "clover-plain": heads_config("clover", TARGET.config, block=None, connection="none"),
    "clover2": heads_config("clover2", TARGET.config),
}


def heads_of(config: HeadsConfig, *, dtype=jnp.float32, seed: int = 0) -> Heads:
    rng = np.random.default_rng(seed)
    shapes = dict(leaf_paths(param_shapes(config)))
    leaves = {path: jnp.asarray(rng.normal(size=shape), dtype) for path, shape in shapes.items()}
    if config.num_head_tokens is not None:
        leaves["token_map",] = jnp.asarray(range(config.num_head_tokens), jnp.int32)
    params = as_params(param_shapes(config), leaves.__getitem__)
    return Heads(config, params, tree="chain")


def assert_same(one: TrainedDrafter, other: TrainedDrafter) -> None:
    assert one.config == other.config
    ours, theirs = unpacked(one.params), unpacked(other.params)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def load(directory: Path, **options) -> Heads:
    """Without warnings, which are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", JaxspecWarning)
        return load_drafter(directory, TARGET, **options)


@pytest.fixture
def saved(tmp_path) -> Path:
    save_drafter(heads_of(CONFIGS["hydra"]), tmp_path / "saved", target=TARGET)
    return tmp_path / "saved"


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_heads_come_back_bit_for_bit(name, tmp_path):
    heads = heads_of(CONFIGS[name])
    save_drafter(heads, tmp_path / "saved", target=TARGET)
    loaded = load(tmp_path / "saved")
    assert_same(loaded, heads)
    assert loaded.name == f"{heads.config.kind}[budget:4]:{tmp_path / 'saved'}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_flexdraft_comes_back_bit_for_bit(dtype, tmp_path):
    target = flex.target(kernels="xla", dtype=jnp.dtype(dtype))
    drafter = flex.random_flex(target)
    save_drafter(drafter, tmp_path / "saved", target=target)
    loaded = load_drafter(tmp_path / "saved", target, mode="parallel", block_size=3)
    assert_same(drafter, loaded)
    assert (loaded.mode, loaded.block_size, loaded.rule) == ("parallel", 3, "product")
    with pytest.raises(ModelError, match="num_layers 3, and echo0 has num_layers 4"):
        load_drafter(tmp_path / "saved", flex.target(kernels="xla", num_layers=4))


def test_heads_in_other_dtypes(tmp_path):
    heads = heads_of(CONFIGS["medusa-truncated"], dtype=jnp.bfloat16)
    save_drafter(heads, tmp_path / "saved")
    assert_same(load(tmp_path / "saved", dtype="bf16"), heads)
    assert json.loads((tmp_path / "saved" / "jaxspec.json").read_text())["dtype"] == "bfloat16"
    # The target's, unless it is given.
    assert load(tmp_path / "saved").params["heads"][0]["head"].dtype == jnp.float32
    assert load(tmp_path / "saved").params["token_map"].dtype == jnp.int32
    with pytest.raises(ModelError, match="'int8' is not supported"):
        load(tmp_path / "saved", dtype="int8")


def test_heads_that_an_engine_has_packed_are_saved_as_they_were(tmp_path):
    target = dataclasses.replace(TARGET, kernels="native")
    heads = heads_of(CONFIGS["clover"])
    save_drafter(heads.for_target(target), tmp_path / "saved", target=target)
    assert_same(load(tmp_path / "saved"), heads)  # the digest is that of other kernels too


def test_what_the_manifest_says(saved):
    fields = json.loads((saved / "jaxspec.json").read_text())
    assert (fields["kind"], fields["format_version"]) == ("heads", FORMAT_VERSION)
    assert fields["config"] == json.loads(json.dumps(dataclasses.asdict(CONFIGS["hydra"])))
    assert (fields["target"], fields["target_weights"]) == ("toy0", weights_digest(TARGET.params))
    assert "jaxspec.json" not in fields["files"]


def test_what_is_saved_names_no_directory_of_this_machine(saved, tmp_path):
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        assert str(tmp_path).encode() not in path.read_bytes(), path


def test_trees_by_name(saved):
    def tree(name):
        return load(saved, tree=name).tree

    assert tree("chain") is None
    assert tree("8") == tree("budget:8") == BudgetTree(nodes=8, depth=3)
    assert tree("2") == BudgetTree(nodes=2, depth=2)
    assert tree("4x3:16") == tree(BeamTree(4, 3, 16)) == BeamTree(4, 3, 16)
    assert tree("vicuna_33b_stage1").num_nodes == 63
    with pytest.raises(SettingError, match="is 4 deep, and there are 3 heads"):
        tree("mc_sim_7b_63")


def test_parameters_stand_where_the_targets_do(saved):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    target = dataclasses.replace(TARGET, params=jax.device_put(TARGET.params, split))
    loaded = load_drafter(saved, target)
    assert {leaf.sharding for leaf in jax.tree.leaves(loaded.params)} == {whole}


# Refusals and warnings


def test_a_target_with_other_weights_is_warned_of(saved, tmp_path):
    other = toy.model(seed=1)
    with pytest.warns(JaxspecWarning) as heard:
        load_drafter(saved, other)
    message = str(heard[0].message)
    assert "made for toy0, whose weights are not those of toy1" in message
    assert "outputs stay the target's own" in message
    save_drafter(heads_of(CONFIGS["hydra"]), tmp_path / "without")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_drafter(tmp_path / "without", other)  # nothing is known of its target


def test_heads_that_do_not_fit(saved):
    for changes, fragments in (
        ({"width": 64}, ("have width 32", "has width 64")),
        ({"vocab_size": 99}, ("a vocabulary of 61", "a vocabulary of 99")),
    ):
        with pytest.raises(ModelError) as raised:
            load_drafter(saved, toy.model(**changes))
        assert all(fragment in str(raised.value) for fragment in fragments)


def test_heads_are_told_from_models(saved, tmp_path):
    jaxspec.save_model(TARGET, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"holds heads, not a model; .*heads:/"):
        jaxspec.load_model(saved)
    with pytest.raises(CheckpointError, match=r"holds a model, not a drafter .*draft_model:/"):
        load(tmp_path / "model", kind="heads")
    assert isinstance(load(tmp_path / "model"), jaxspec.DraftModel)
    with pytest.raises(CheckpointError, match="so it is not overwritten"):
        save_drafter(heads_of(CONFIGS["hydra"]), tmp_path / "model", overwrite=True)


def test_kinds_are_told_apart(saved, tmp_path):
    save_drafter(flex.random_flex(flex.target(kernels="xla")), tmp_path / "flex")
    assert isinstance(load(saved), Heads)
    for error, words, directory, settings in (
        (CheckpointError, "holds flexdraft, not a drafter of kind", "flex", {"kind": "heads"}),
        (SettingError, "tree was given for the drafter flexdraft", "flex", {"tree": "4"}),
        (CheckpointError, "holds heads, not a drafter of kind", "saved", {"kind": "flexdraft"}),
        (SettingError, "mode was given for the drafter heads", "saved", {"mode": "auto"}),
    ):
        with pytest.raises(error, match=words):
            load(tmp_path / directory, **settings)
    with pytest.raises(CheckpointError, match="was not written by jaxspec"):
        save_drafter(heads_of(CONFIGS["hydra"]), tmp_path / "flex", overwrite=True)


def test_damage_is_found(saved):
    large = max(saved.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(large.read_bytes())
    content[len(content) // 2] ^= 1
    large.write_bytes(content)
    with pytest.raises(DamagedError, match="is damaged; train or fetch the drafter again"):
        load(saved)
    shutil.rmtree(saved / "params")
    with pytest.raises(DamagedError, match="train or fetch the drafter again"):
        load(saved, verify=False)
    (saved / "jaxspec.json").write_text("{")
    with pytest.raises(DamagedError, match="train or fetch the drafter again"):
        load(saved, kind="heads")


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_heads": 2**40}, "num_heads is 1099511627776"),
        ({"num_heads": 2}, "num_params is"),
        ({"kind": "eagle"}, "kind is 'eagle'"),
        ({"width": "wide"}, "width is 'wide'"),
        ({"gate": None}, "gate is 'None'"),
        ({"block": {}}, "has other fields"),
    ],
)
def test_manifests_that_describe_no_heads(changes, fragment, saved):
    path = saved / "jaxspec.json"
    fields = json.loads(path.read_text())
    fields["config"] |= changes
    path.write_text(json.dumps(fields))
    with pytest.raises(DamagedError, match="was changed after it was written"):
        load(saved)
    with pytest.raises(JaxspecError) as raised:
        load(saved, verify=False)
    assert fragment in str(raised.value)


# Writing


def test_heads_replace_nothing_but_heads(saved):
    new = heads_of(CONFIGS["clover"])
    with pytest.raises(CheckpointError, match="exists already"):
        save_drafter(new, saved)
    save_drafter(new, saved, overwrite=True)
    assert load(saved).config == new.config
    (saved.parent / "text").mkdir()
    (saved.parent / "text" / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="was not written by jaxspec"):
        save_drafter(new, saved.parent / "text", overwrite=True)


def test_a_replacement_that_was_interrupted_is_finished_by_its_reader(saved):
    saved.rename(saved.with_name(".saved.complete"))
    assert load(saved).config == CONFIGS["hydra"]
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
