"""`jaxspec study scaling`: a tiny study, resumed and extended; rows of one's own; mistakes."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from training.test_training import tiny, write_corpus

from jaxspec import cli
from jaxspec.errors import CheckpointError, SettingError
from jaxspec.lab.studies import scaling
from jaxspec.lab.studies.scaling import study
from jaxspec.lab.studies.scaling.decoding import Decoder, given_prompts, rows_of
from jaxspec.load.models import load_model
from jaxspec.training import lm, schedule, trainer
from jaxspec.training.texts import TextsConfig, read_texts, write_texts

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "docs" / "results" / "scaling-cpu"
TOKENS = (512, 768, 1024)


@pytest.fixture(scope="module", autouse=True)
def standard_promotion():
    """The models here are in bfloat16, and JAX lowers the gradients of its own attention in it only
    with its standard promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def target(tmp_path_factory, corpora):
    """The exported model of a short training run."""
    out = tmp_path_factory.mktemp("run") / "target"
    return lm.train_lm(tiny(out, corpora))["model"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        {"prompt": f"The {noun}", "domain": "tales"}
        for noun in ("fox", "king", "lamp", "hen", "sea")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options_of(out, corpora, target, prompts, **changes):
    settings = {
        "target": str(target),
        "corpora": corpora,
        "prompts": prompts,
        "out": out,
        "layers": (1, 2),
        "widths": (32,),
        "tokens": TOKENS,
        "other_tokens": TOKENS[1:],
        "seeds": (0, 1),
        "batch_tokens": 64,
        "sequence_length": 32,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "epochs": 5,
        "evaluate_tokens": 64,
        "draft_lengths": (1, 2),
        "batch_sizes": (1, 2),
        "time_draft_lengths": (2,),
        "max_tokens": 8,
        "repeats": 1,
    }
    return scaling.ScalingStudy(**(settings | changes))


def quiet():
    return Console(quiet=True)


def as_records(rows):
    """A dictionary for every row, without where it was made."""
    records = rows.drop(columns=["commit", "version"]).to_dict("records")
    for record in records:
        for name in ("offered_at", "accepted_at"):
            record[name] = list(record[name])
    return records


@pytest.fixture(scope="module")
def studied(tmp_path_factory, corpora, target, prompts):
    """A finished study: its options and its document."""
    options = options_of(tmp_path_factory.mktemp("study") / "out", corpora, target, prompts)
    return options, options.run(quiet())


@pytest.mark.slow
def test_rows_are_possible_and_complete(studied):
    options, document = studied
    rows = pd.read_parquet(options.out / "rows.parquet")
    cells = rows.groupby(["drafter", "seed", "training_tokens", "verifier", "temperature"])
    assert set(rows[rows.drafter == "1x32"].seed) == {0, 1}
    assert set(rows[rows.drafter == "2x32"].seed) == {0}
    assert set(rows[rows.drafter == "1x32"].training_tokens) == set(TOKENS)
    assert set(rows[rows.drafter == "2x32"].training_tokens) == set(TOKENS[1:])
    assert len(cells) == (2 * 3 + 2) * 3
    assert set(rows.prompt_set) == {"prompts", "held_out"}
    for row in rows.to_dict("records"):
        offered, accepted = row["offered_at"], row["accepted_at"]
        assert len(offered) == len(accepted) == row["draft_length"]
        assert (accepted <= offered).all()
        assert (np.diff(offered) <= 0).all()
        assert (np.diff(accepted) <= 0).all()
        assert row["emitted"] == 8
        # Every round adds what it accepted and a token of the target's, but where the row ends.
        assert 0 <= row["rounds"] + accepted.sum() - row["emitted"] <= 1
    assert document["holds"]
    assert document["checks"]["num_compared_with_plain"] > 0
    written = json.loads((options.out / "scaling.json").read_text())
    assert written["command"] == "study scaling"
    assert (options.out / "scaling.html").is_file()
    assert str(options.out) not in (options.out / "scaling.json").read_text()


@pytest.mark.slow
def test_tokens_and_rounds_are_the_same_at_every_batch_size(studied):
    options, document = studied
    cells = json.loads((options.out / scaling.CELLS).read_text())["cells"]
    for batch_size in options.batch_sizes:
        cell = cells[f"batch-{batch_size}-{TOKENS[-1]}"]
        assert cell["num_compared"] == 10  # five prompts, greedy and sampled
        assert cell["num_equal_to_plain"] == cell["num_same_counts"] == 10
    checks = document["checks"]
    assert checks["num_same_counts_over_batches"] == checks["num_compared_over_batches"] == 20


@pytest.mark.slow
def test_other_tokens_and_counts_are_noticed(studied):
    """Sabotage: one output that is not the target's, one row that took other rounds."""
    options, _ = studied
    running = scaling.Running(dataclasses.replace(options, resume=True))
    cells, target = running.store.cells, running.target
    assert study.holds(cells, target)
    for name in ("num_equal_to_plain", "num_same_counts"):
        cells["batch-1-1024"][name] -= 1
        assert not study.holds(cells, target)
        cells["batch-1-1024"][name] += 1


@pytest.mark.slow
def test_an_interrupted_study_is_resumed_and_extended(
    tmp_path, corpora, target, prompts, studied, monkeypatch
):
    """First with fewer tokens, sizes and seeds, and killed at its third cell."""
    options = options_of(tmp_path / "out", corpora, target, prompts)
    few = dataclasses.replace(options, tokens=TOKENS[:2], layers=(1,), seeds=(0,))
    measure = scaling.Running.measure_drafter
    calls = []

    def killed(self, *args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, *args)

    monkeypatch.setattr(scaling.Running, "measure_drafter", killed)
    with pytest.raises(KeyboardInterrupt):
        few.run(quiet())
    monkeypatch.setattr(scaling.Running, "measure_drafter", measure)
    with pytest.raises(SettingError, match="add --resume"):
        options.run(quiet())
    grown = dataclasses.replace(options, resume=True)
    running = scaling.Running(grown)
    assert len(running.store.cells) == 1
    cells = running.cells()
    drafters = {name: cells[name] for name in cells if "-seed" in name}
    running.store.run(drafters, say=lambda _: None)
    whole = pd.read_parquet(studied[0].out / "rows.parquet")
    found = as_records(study.rows_table(running.store.cells))
    assert found == as_records(whole)
    found[0]["rounds"] += 1  # sabotage: other counts are noticed
    assert found != as_records(whole)
    with pytest.raises(SettingError, match=r"its config is another \(max_tokens was 8 and is 9\)"):
        scaling.Running(dataclasses.replace(grown, max_tokens=9))
    others = tmp_path / "other" / "prompts.jsonl"
    others.parent.mkdir()
    others.write_text(prompts.read_text().replace("fox", "dog"))
    with pytest.raises(SettingError, match=r"its inputs is another \(prompts.jsonl was"):
        scaling.Running(dataclasses.replace(grown, prompts=others))
    running.drafters.settings = dataclasses.replace(grown, learning_rate=1e-3)
    with pytest.raises(CheckpointError, match="other values of learning_rate"):
        running.drafters.trained(options.reference, 0, TOKENS[0])


@pytest.mark.slow
def test_a_file_that_holds_no_cells_is_refused(tmp_path, studied):
    path = tmp_path / "out" / scaling.CELLS
    path.parent.mkdir()
    options = dataclasses.replace(studied[0], out=path.parent, resume=True)
    for content in ("", "[]", '{"cells": [1]}', '{"cells": {"ceilings": 3}}'):
        path.write_text(content)
        with pytest.raises(SettingError, match="is not the file of a grid of cells"):
            options.run(quiet())
    path.write_text('{"cells": {}}')
    with pytest.raises(SettingError, match="its format is another"):
        options.run(quiet())


@pytest.mark.slow
def test_nothing_is_compiled_for_further_drafters_of_a_size(studied):
    options, _ = studied
    running = scaling.Running(dataclasses.replace(options, resume=True))
    drafters = [running.drafters.model(options.reference, seed, TOKENS[0]) for seed in (0, 1)]
    given = running.given
    outputs, counts = [], []
    for draft in drafters:
        engine = running.decoder.engine(draft, "coupled", 2)
        done = engine.generate(given.token_ids, running.decoder.params(given, 1.0))
        outputs.append([each.token_ids for each in done])
        counts.append(engine.executor.compile_counts())
    assert counts[0] == counts[1]
    assert outputs[0] == outputs[1]  # the target's own, whoever drafts
    leaves = zip(*(jax.tree.leaves(each.params) for each in drafters), strict=True)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in leaves)


@pytest.mark.slow
def test_drafters_are_trained_on_texts_that_the_target_wrote(tmp_path, corpora, target, prompts):
    """The texts alone; the teacher reads them once for all drafters."""
    written = tmp_path / "texts.jsonl"
    texts = TextsConfig(
        target=target, corpora=corpora, out=written, tokens=2000, output_tokens=24, drafter="none"
    )
    write_texts(dataclasses.replace(texts, prompt_tokens=(4, 8)))
    options = options_of(tmp_path / "out", written, target, prompts, layers=(1,), seeds=(0,))
    options = dataclasses.replace(options, draft_lengths=(1,), batch_sizes=(2,))
    document = options.run(quiet())
    assert document["holds"]
    assert sorted(options.out.rglob("*tops")) == [options.out / "teacher" / "tops"]
    rows = pd.read_parquet(options.out / "rows.parquet")
    held_out = [text.prompt for text in read_texts(written).texts[::20]]
    found = scaling.Running(dataclasses.replace(options, resume=True)).prompt_sets[1].token_ids
    assert all(prompt in held_out for prompt in found)
    assert rows[rows.prompt_set == "held_out"].prompt.nunique() == len(found) > 0


@pytest.mark.slow
def test_rows_of_ones_own_are_fitted(tmp_path, studied):
    options, document = studied
    command = ["study", "scaling", "--rows", str(options.out / "rows.parquet")]
    assert cli.main([*command, "--out", str(tmp_path / "own")]) == 0
    found = json.loads((tmp_path / "own" / "scaling.json").read_text())
    assert found["axes"] == document["axes"]
    assert found["batch"] == document["batch"]


def test_branches_cost_little_more_than_the_longest_run():
    """In training steps; branches trained one by one would cost far more."""
    settings = scaling.ScalingSettings(first_seed_tokens=(4_000_000,))  # as shipped
    branches = schedule.plan_branches(
        settings.tokens_of(settings.reference, 0),
        step_tokens=settings.batch_tokens,
        warmup_steps=settings.warmup_steps,
    )
    longest = branches[-1].num_steps
    together = branches[-1].leaves_at + sum(b.num_steps - b.leaves_at for b in branches)
    assert f"cost {together / longest:.2f} times the longest run" in page_of_the_study()
    assert sum(branch.num_steps for branch in branches) > 1.5 * longest


def page_of_the_study():
    return " ".join((SHIPPED.parents[1] / "scaling.md").read_text().split())


@pytest.mark.slow
def test_the_page_says_how_the_shipped_draft_model_does_beside_the_study():
    """Rounds of the study's prompts, greedily with drafts of 4."""
    settings = scaling.ScalingSettings()
    target = load_model("demo-target", dtype="float32")
    given, _ = given_prompts(settings, target)
    decoder = Decoder(settings, target, [given])
    draft = load_model("demo-draft", dtype="float32")
    done = decoder.decode(decoder.engine(draft, "coupled", 16), given, 0.0, 4)
    shipped = pd.DataFrame(rows_of(done, given, "coupled", 0.0, 4))
    rows = pd.read_parquet(SHIPPED / "rows.parquet")
    rows = rows[(rows.drafter == "2x128") & (rows.training_tokens == rows.training_tokens.max())]
    own = rows[
        (rows.prompt_set == "prompts") & (rows.verifier == "coupled") & (rows.temperature == 0)
        & (rows.draft_length == 4)
    ]  # fmt: skip

    def emitted(rows):
        return rows.emitted.sum() / rows.rounds.sum()

    page = page_of_the_study()
    assert f"emits {emitted(shipped):.2f} tokens with it and {emitted(own):.2f} with" in page
    loss, overlap = own.held_out_loss.iloc[0], own.overlap.iloc[0]
    assert f"is 4.01 and {loss:.2f} (0.5 % more)" in page
    assert f"is .659 and {overlap:.3f}".replace("0.", ".") in page


def test_mistakes_are_named(tmp_path, corpora, target, prompts, capsys):
    def run(**changes):
        options = options_of(tmp_path / "out", corpora, target, prompts)
        dataclasses.replace(options, **changes).run(quiet())

    cases = [
        ("give numbers that increase", {"tokens": (768, 512), "other_tokens": ()}),
        ("would begin before the 2 steps", {"tokens": (64, 512)}),
        ("32 tokens has 0 steps of 64", {"tokens": (32, 512), "warmup_steps": 0}),
        ("set epochs to", {"tokens": (512, 100_000), "epochs": 1, "seeds": (0,)}),
        ("different numbers", {"seeds": (0, 0)}),
        ("multiples of 32", {"widths": (40,)}),
        ("held_out names novels", {"held_out": ("novels",)}),
        ("leave one of them out", {"corpora": prompts, "texts": prompts}),
    ]
    for words, changes in cases:
        with pytest.raises(SettingError, match=words):
            run(**changes)
    rows = pd.DataFrame({"target": ["a"]})
    rows.to_parquet(tmp_path / "rows.parquet")
    assert cli.main(["study", "scaling", "--rows", str(tmp_path / "rows.parquet")]) == 1
    assert "error:" in capsys.readouterr().err


def run_until(is_there, *arguments):
    """Kills the program as soon as it has come so far."""
    process = subprocess.Popen([sys.executable, "-m", "jaxspec", *arguments], cwd=ROOT)
    try:
        while not is_there():
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.as_shipped
@pytest.mark.timeout(1800)
def test_the_quick_study_ends_with_the_same_rows_after_kills(tmp_path):
    """Three sizes and four numbers of tokens, on the standard library's source; killed in its first
    trunk and in its second cell."""
    out, trunk = tmp_path / "out", tmp_path / "out" / "trunks" / "2x128-seed0"
    command = ["study", "scaling", "--quick", "--out", str(out)]
    run_until((trunk / "branches" / "62500" / "result.json").is_file, *command)
    assert not (trunk / trainer.RESULT).exists()
    run_until((out / scaling.CELLS).is_file, *command, "--resume")
    assert cli.main([*command, "--resume"]) == 0
    document = json.loads((out / "scaling.json").read_text())
    rows = pd.read_parquet(out / "rows.parquet")
    assert document["holds"]
    assert rows.groupby(["drafter", "training_tokens"]).ngroups == 12
    assert rows.groupby("training_tokens").overlap.mean().is_monotonic_increasing
    # The first drafters once more, without an interruption.
    whole = scaling.ScalingStudy(quick=True, out=tmp_path / "whole").made_quick()
    whole = dataclasses.replace(
        whole, quick=False, layers=(2,), tokens=whole.tokens[:3], batch_sizes=(4,),
        time_draft_lengths=(1,),
    )  # fmt: skip
    whole.run(quiet())
    expected = pd.read_parquet(whole.out / "rows.parquet")
    assert as_records(rows[rows.drafter == "2x128"])[: len(expected)] == as_records(expected)
