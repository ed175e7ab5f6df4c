"""Spec-Bench: 80 questions of its six tasks, speculative against plain, bit for bit.

Prompts are cut to 768 tokens, 64 tokens are generated, batch 8. Every drafter and draft length
shares one window of 8. Differences from the window-1 loop are printed with their margins
(`pytest -n 0 -s`). The question file is an input and not part of this repository: name the
directory that holds it in JAXSPEC_TEST_DATA, or keep it beside the checkout in shared/data; without
it the tests are skipped.
"""

import os
import pathlib

import pytest
import ties

import jaxspec
from jaxspec.audit.scoring import Scorer
from jaxspec.commands.compare import MT_BENCH
from jaxspec.engine.engine import Engine
from jaxspec.requests.prompts import encode_prompts, read_prompts
from jaxspec.requests.sampling_params import SamplingParams

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path(os.environ.get("JAXSPEC_TEST_DATA", ROOT.parent / "shared" / "data"))
QUESTIONS = DATA / "spec_bench" / "question.jsonl"
PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)
WINDOW = 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not QUESTIONS.exists(), reason="Spec-Bench's question.jsonl is not here"),
]


def questions():
    """80 of them, the same number of each task, in the file's order."""
    tasks: dict[str, list] = {}
    for line in read_prompts(QUESTIONS):
        category = line.fields["category"]
        tasks.setdefault("mt_bench" if category in MT_BENCH else category, []).append(line)
    assert len(tasks) == 6
    chosen = [line for together in zip(*tasks.values(), strict=True) for line in together]
    return chosen[:80]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_pair(dtype, capsys):
    """E1 for both drafters and draft lengths 1, 4, 7; every difference from the window-1 loop is a
    tie."""

    def report(line):
        with capsys.disabled():
            print(f"  {line}")

    report(f"\nembedded pair, {dtype}")
    target = jaxspec.load_model("demo-target", dtype=dtype)
    draft = jaxspec.load_model("demo-draft", dtype=dtype)
    prompts = encode_prompts(questions(), target, max_prompt_tokens=768)
    max_length = max(map(len, prompts)) + PARAMS.max_tokens + WINDOW
    shape = {"batch_size": 8, "max_length": max_length}
    witness = Engine(target, **shape).generate(prompts, PARAMS)
    plain = None
    for drafter in (jaxspec.DraftModel(draft), jaxspec.NGram()):
        engine = Engine(target, drafter, verify_length=WINDOW, **shape)
        runs = [engine.generate(prompts, PARAMS, speculate=False)]
        runs += [engine.generate(prompts, PARAMS, draft_length=length) for length in (1, 4, 7)]
        plain = plain or runs[0]
        for run, name in zip(runs, ("plain", 1, 4, 7), strict=True):
            equal = sum(a.token_ids == b.token_ids for a, b in zip(run, plain, strict=True))
            total = run.acceptance
            report(
                f"{drafter.name:28} draft length {name!s:5} equal to plain {equal}/{len(prompts)}, "
                f"{total.emitted_per_round:.2f} emitted per round"
            )
            assert equal == len(prompts)
    scorer = Scorer(target, max_length=max_length)
    parted = ties.divergences(target, plain, witness, PARAMS, scorer=scorer)
    for found in parted:
        report(
            f"parts from the window-1 loop at token {found.index}: margin {found.margin:.2e}, "
            f"bound {found.bound:.2e}"
        )
    report(f"{len(parted)}/{len(prompts)} outputs differ from the window-1 loop, all at ties")
