"""Runs on disk: what is read is what was saved, decodes to the same tokens, and is refused where it
is damaged."""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib
import json
import pickle
import re
import shutil

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import toy
from flax import struct

import jaxspec
from jaxspec.checkpoint.format import weights_digest
from jaxspec.checkpoint.manifest import MANIFEST
from jaxspec.engine.saved_runs import _completion, _line
from jaxspec.errors import CheckpointError, DamagedError, SettingError

pandas = pytest.importorskip("pandas")

PROMPTS = ["aa bb aa", "cc", "dd dd ee"]
PARAMS = [
    jaxspec.SamplingParams(max_tokens=12, temperature=1.0, seed=7, n=2, logprobs=1, top_k=50),
    jaxspec.SamplingParams(max_tokens=9, stop=["\x00"], logit_bias={70: 2.5}),
    jaxspec.SamplingParams(max_tokens=5, temperature=1.2),
]
SETTINGS = {
    "verifier": jaxspec.Typical(epsilon=0.2),  # its outputs depend on the drafts
    "scheduler": jaxspec.Pool(window_size=3),
    "trace": "distributions",
    "max_logprobs": 1,
}
DOMAINS = ["x", "y", "z"]


@pytest.fixture(scope="module")
def engine():
    return engines.engine("text", "draft model", **SETTINGS)


@pytest.fixture(scope="module")
def completions(engine):
    return engine.generate(PROMPTS, PARAMS, draft_length=2)


@pytest.fixture(scope="module")
def saved(completions, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    completions.save(directory, domain=DOMAINS)
    return directory


def test_a_run_is_read_as_it_was(saved, engine, completions):
    run = jaxspec.load_run(saved)
    assert run.completions == completions
    assert [list(one.pieces) for one in run.completions] == [list(c.pieces) for c in completions]
    text = engine.target.tokenizer
    pandas.testing.assert_frame_equal(run.rounds(), completions.rounds(domain=DOMAINS))
    pandas.testing.assert_frame_equal(run.tokens(), completions.tokens(domain=DOMAINS))
    with_text = completions.tokens(tokenizer=text)[["token", "target"]]
    found = run.tokens(tokenizer=text)[["token", "target"]]
    pandas.testing.assert_frame_equal(found, with_text, check_dtype=False)
    seed = completions[3].seed  # one that was chosen
    assert [one.seed for one in run.sampling_params] == [7, 8, None, seed]
    assert run.manifest["seeds"] == [7, 8, None, seed]
    assert run.manifest["settings"]["verifier"] == {
        "class": "Typical",
        "epsilon": 0.2,
        "delta": 0.3,
    }
    weights = run.manifest["weights"]
    assert weights["target"]["digest"] == weights_digest(engine.target.params)
    assert weights["drafter"]["digest"] == weights_digest(engine.drafter.params)
    assert weights["target"]["dtypes"] == ["float32"]
    assert {"versions", "commit", "date", "devices"} < set(run.manifest)
    assert repr(run) == f"<Saved run in {saved}: {completions.summary}>"


def test_a_run_is_decoded_again_to_the_token(saved, engine, completions, caplog):
    run = jaxspec.load_run(saved)
    drafter = jaxspec.DraftModel(engines.stranger(engines.target("text")))
    run.manifest["settings"]["prefill_chunk"] = 64  # as older runs say
    made = jaxspec.Engine(engines.target("text"), drafter, **run.engine_settings)
    assert "read its prompts in chunks of 64 tokens, and they are read in chunks" in caplog.text
    run.check_weights(made)
    again = made.generate(run.prompts, run.sampling_params, **run.manifest["generate"])
    assert [c.token_ids for c in again] == [c.token_ids for c in run.completions]
    frames = [each.drop(columns=["request_id", "index"]) for each in (again.tokens(), run.tokens())]
    pandas.testing.assert_frame_equal(frames[0], frames[1].drop(columns="domain"))
    assert run.rounds().drafted.max() == run.manifest["generate"]["draft_length"] == 2
    made.update_params(draft=jax.tree.map(lambda leaf: 2 * leaf, drafter.params))
    with pytest.raises(SettingError, match=r"The drafter of the engine has .* load the run's own"):
        run.check_weights(made)


def test_other_forms_of_completions_and_weights(completions):
    """Log-probabilities of filtered tokens, turns of a session, parameters of a user's own."""
    more = {"logprobs": ({3: -np.inf, 4: -0.1},), "prompt_logprobs": (None, {5: -np.inf})}
    more |= {"num_reused_tokens": 2, "num_reread_tokens": 0}
    one = dataclasses.replace(completions[0], **more)
    read = _completion(json.loads(json.dumps(_line(one))))
    assert (read, read.num_reread_tokens, read.logprobs) == (one, 0, one.logprobs)
    assert read.prompt_logprobs == one.prompt_logprobs
    values = jnp.arange(3.0)
    forms = [{"head": values}, {"head": 2 * values}, Own(values), Own(2 * values), [Own(values)]]
    assert len({weights_digest(params) for params in forms}) == len(forms)


@struct.dataclass
class Own:
    """Parameters in a pytree of another class."""

    weight: jax.Array


DAMAGE = {
    "rounds.parquet": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes and not"),
    "tokens.parquet": (lambda path: path.unlink(), "No such file"),
    "completions.jsonl": (
        lambda path: path.write_bytes(path.read_bytes().replace(b"70", b"71")),
        "is not as it was written",
    ),
    MANIFEST: (
        lambda path: path.write_text(path.read_text().replace("0.2", "0.3")),
        "was changed after it was written",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_refused(saved, tmp_path, name):
    copied = shutil.copytree(saved, tmp_path / "run")
    damage, expected = DAMAGE[name]
    damage(copied / name)
    with pytest.raises(DamagedError, match=rf"{re.escape(name)} .*{expected}.*save the run again"):
        jaxspec.load_run(copied)


def test_what_is_no_run_of_this_version_is_refused(saved, tmp_path):
    copied = shutil.copytree(saved, tmp_path / "run")
    fields = json.loads((copied / MANIFEST).read_text())
    (copied / MANIFEST).write_text(json.dumps(fields | {"format_version": 99}))
    with pytest.raises(CheckpointError, match=r"format 99.*reads format 2; save the run again"):
        jaxspec.load_run(copied)
    model = tiny.save(tmp_path, "model")
    with pytest.raises(CheckpointError, match=r"holds a model, not a saved run; name another"):
        jaxspec.load_run(model)
    with pytest.raises(CheckpointError, match=r"holds a saved run, not a model; .*load_run"):
        jaxspec.load_model(str(saved))
    with pytest.raises(DamagedError, match=r"absent.jaxspec.json is not readable.*save the run"):
        jaxspec.load_run(tmp_path / "absent")


def test_what_cannot_be_saved(saved, completions, tmp_path, monkeypatch):
    directory = tmp_path / "run"
    for copied in (copy.copy(completions), pickle.loads(pickle.dumps(completions))):
        assert copied == completions
        with pytest.raises(SettingError, match=r"Engine\.generate did not return were to be saved"):
            copied.save(directory)
    with pytest.raises(SettingError, match=r"'domain' was given 1 values"):
        completions.save(directory, domain=["x"])
    with pytest.raises(SettingError, match=r"Parquet has no type for a column .*; give columns of"):
        completions.save(directory, domain=[1, "x", {}])
    with pytest.raises(CheckpointError, match="exists already"):
        completions.save(saved)
    (tmp_path / "mine").write_text("")
    with pytest.raises(CheckpointError, match="was not written by jaxspec"):
        completions.save(tmp_path, overwrite=True)
    completions[:1].save(directory)
    completions[1:2].save(directory, overwrite=True)
    [one] = jaxspec.load_run(directory).completions
    assert one == completions[1]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine", "run"]

    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SettingError, match=r"pyarrow is needed for saved runs.*\[analysis\]"):
        completions.save(tmp_path / "another")
    with pytest.raises(SettingError, match=r"pyarrow is needed for saved runs"):
        jaxspec.load_run(saved).rounds()


def test_an_engine_that_is_not_as_it_was(tmp_path):
    """Its completions are not kept from being freed, and cannot be saved any more; without a trace
    there are no tables."""
    made = jaxspec.Engine(toy.model(num_layers=1), batch_size=1, max_length=128)
    first = made.generate([[5, 6]], {"max_tokens": 3})
    first.save(tmp_path / "run")
    run = jaxspec.load_run(tmp_path / "run")
    assert run.completions == first
    assert run.manifest["weights"]["drafter"] == {"name": "none", "digest": None, "dtypes": []}
    run.check_weights(made)
    for read in (run.rounds, run.tokens):
        with pytest.raises(SettingError, match=r"has no (rounds|tokens); make the engine with"):
            read()
    made.update_params(target=made.target.params)
    with pytest.raises(SettingError, match="has other weights now, and a saved run names"):
        first.save(tmp_path / "other")
    second = made.generate([[5, 6]], {"max_tokens": 3})
    second.save(tmp_path / "other")
    made.shutdown()
    del made
    gc.collect()
    with pytest.raises(SettingError, match="is gone, and a saved run names"):
        second.save(tmp_path / "third")
