"""Committed results: whole, of a known commit and machine, and with counts that stand."""

import itertools
import json
import re

import page_tables
import pytest

import jaxspec
from jaxspec.requests.prompts import encode_prompts, sample_prompts

RESULTS = sorted(page_tables.RESULTS.rglob("*.json"))
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in page_tables.PAGES)


def document(name):
    return json.loads((page_tables.RESULTS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_result_is_cited_and_says_what_it_was_measured_on(path):
    assert path.relative_to(page_tables.RESULTS).as_posix() in TEXT
    found = document(path)
    for part in found.get("measurements", {"": found}).values():
        assert part["commit"]
        assert part.get("date") or part["commit_date"]
        assert part["versions"]
        assert part["devices"]["kernels"]
    text = path.read_text(encoding="utf-8")
    assert not re.search(r'"[/~][^"]*/|/(home|root|tmp|Users)\b', text)  # directories


def test_the_results_are_short():
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in RESULTS) < 12_000


def test_a_page_says_on_which_day_a_result_was_measured(monkeypatch):
    old = document("kv-cpu.json")
    assert page_tables.origin("kv-cpu.json").startswith("`0d50680` of 2026-11-23 on 2 cores")
    monkeypatch.setattr(page_tables, "document", lambda name: old | {"date": "2026-11-26"})
    assert page_tables.origin("kv-cpu.json").endswith(" kernels, 2026-11-26")


def test_the_parts_of_flexdraft_are_compared_in_the_papers_order():
    found = document("flexdraft-cpu.json")
    steps = found["ablation"]
    assert [step["parts"] for step in steps] == [
        "attention tuning",
        "+ calibration",
        "+ selective verification",
    ]
    for before, step in itertools.pairwise(steps):
        gain = step["emitted_gain"]
        assert gain["low"] <= gain["mean"] <= gain["high"]
        assert gain["num_prompts"] == found["num_prompts"]
        assert step["drafted_per_round"] <= before["drafted_per_round"]
    assert steps[1]["emitted_gain"]["low"] > 0  # as docs/flexdraft.md says
    assert all(step["tokens_per_s"] > 0 for step in steps)


# ---- counts, one of each kind counted again: they do not depend on the machine


@pytest.fixture(scope="module")
def target():
    return jaxspec.load_model("demo-target", dtype="float32")


@pytest.fixture(scope="module")
def draft():
    return jaxspec.load_model("demo-draft", dtype="float32")


def total(engine, prompts, params):
    """What the outputs of prompts accepted in all."""
    completions = engine.generate(prompts, params)
    return completions.acceptance


def of_samples(target, drafter, nodes, max_tokens):
    """Tokens per round of the 48 sample prompts, greedily."""
    engine = jaxspec.Engine(target, drafter, draft_length=nodes, batch_size=8, max_length=512)
    params = jaxspec.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return total(engine, [line.prompt for line in sample_prompts()], params).emitted_per_round


@pytest.mark.parametrize("length", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6))])
def test_rounds_of_a_draft_model(target, draft, length):
    """They are the same on every processor, and with every batch."""
    found = document("decode-cpu.json")
    config = found["config"]
    lines = sample_prompts()[: config["limit"]]
    prompts = encode_prompts(lines, target, max_prompt_tokens=config["max_prompt_tokens"])
    engine = jaxspec.Engine(
        target, jaxspec.DraftModel(draft), draft_length=length, batch_size=8, max_length=512
    )
    params = jaxspec.SamplingParams(max_tokens=config["max_tokens"], ignore_eos=True)
    counted = total(engine, prompts, params)
    for name in ("decode-cpu", "decode-avx2-cpu", "decode-avx512-cpu", "decode-avx512-amd-cpu"):
        runs = document(f"{name}.json")["runs"]
        wanted = page_tables.one(runs, draft_length=length, batch_size=1)
        assert counted.num_rounds == wanted["loop_rounds"]
        assert counted.emitted_per_round == wanted["emitted_per_round"]


def test_rounds_of_an_n_gram(target):
    found = document("ngram-cpu.json")["demo"]
    wanted = found["with_repetition"]["emitted_per_round"]
    assert of_samples(target, jaxspec.NGram(), 4, found["max_tokens"]) == wanted


def test_bytes_of_an_engine(target, draft):
    found = document("memory-cpu.json")
    wanted = page_tables.one(found["results"], name="without a budget")
    engine = jaxspec.Engine(
        target, jaxspec.DraftModel(draft), batch_size=1, draft_length=3,
        max_length=found["config"]["max_length"],
    )  # fmt: skip
    kv_bytes = wanted["target_kv_bytes"] + wanted["draft_kv_bytes"]
    assert engine.memory.kv_bytes == kv_bytes == wanted["kv_bytes"]


def test_tokens_that_a_session_prefills(target):
    found = document("sessions-cpu.json")
    wanted = page_tables.one(found["results"], history=200, name="session in its row")
    config = found["config"]
    answer = config["answer_tokens"]
    prompt = list(range(2, 2 + wanted["history"] - answer))
    engine = jaxspec.Engine(target, batch_size=1, max_length=256, scheduler="static")
    with engine.session() as session:
        params = jaxspec.SamplingParams(max_tokens=answer, ignore_eos=True)
        done = session.generate(prompt, params)
        prompt += [*done.token_ids, *range(config["new_tokens"])]
        second = session.generate(prompt, jaxspec.SamplingParams(max_tokens=1))
    assert len(prompt) == wanted["prompt_tokens"]
    assert second.num_reused_tokens == wanted["num_reused"]


@pytest.mark.slow
def test_rounds_of_a_tree(target, draft):
    found = document("trees-cpu.json")
    wanted = page_tables.one(found["acceptance"], tree="beam", num_nodes=16, temperature=0.0)
    drafter = jaxspec.DraftModel(draft, tree=jaxspec.trees.BeamTree(width=4, depth=8, nodes=16))
    counted = of_samples(target, drafter, 16, found["config"]["max_tokens"])
    assert counted == wanted["emitted_per_round"]


@pytest.mark.slow
def test_rounds_of_flexdraft(target):
    found = document("flexdraft-cpu.json")
    wanted = page_tables.one(found["acceptance"], drafter="FlexDraft")["emitted_per_round"]
    drafter = jaxspec.load_drafter("demo-flexdraft", target)
    assert of_samples(target, drafter, 7, found["config"]["max_tokens"]) == wanted


@pytest.mark.slow
def test_rounds_under_a_verifier(target, draft):
    found = document("verifiers-cpu.json")
    config = found["config"]
    wanted = page_tables.one(found["results"], verifier="coupled", domain="fairy_tales")
    engine = jaxspec.Engine(
        target, jaxspec.DraftModel(draft), draft_length=4, batch_size=8, max_length=512
    )
    chosen = [
        (line.prompt, jaxspec.SamplingParams(
            max_tokens=config["max_tokens"], temperature=config["temperature"],
            n=config["samples"], seed=index * config["samples"], ignore_eos=True,
        ))
        for index, line in enumerate(sample_prompts()) if line.fields["domain"] == "fairy_tales"
    ]  # fmt: skip
    counted = total(engine, *map(list, zip(*chosen, strict=True)))
    assert counted.emitted_per_round == wanted["emitted_per_round"]
