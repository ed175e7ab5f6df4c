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
from jaxspec.engine.engine import Engine
from jaxspec.requests.prompts import encode_prompts, read_prompts
from jaxspec.requests.sampling_params import SamplingParams

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path(os.environ.get("JAXSPEC_TEST_DATA", ROOT.parent / "shared" / "data"))
QUESTIONS = DATA / "spec_bench" / "question.jsonl"
MT_BENCH = {
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
}
PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)
WINDOW = 8
NUM_FOR_RANDOM_PAIRS = 80
DRAFT_NOISE = 0.004  # on weights of standard deviation 0.2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not QUESTIONS.exists(), reason="Spec-Bench's question.jsonl is not here"),
]


def questions(num_questions=80):
    """The same number of questions of each task, in the file's order."""
    tasks: dict[str, list] = {}
    for line in read_prompts(QUESTIONS):
        category = line.fields["category"]
        tasks.setdefault("mt_bench" if category in MT_BENCH else category, []).append(line)
    assert len(tasks) == 6
    chosen = [line for together in zip(*tasks.values(), strict=True) for line in together]
    return chosen[:num_questions]


def check(target, draft, prompts, report):
    """E1 for both drafters and draft lengths 1, 4, 7; every difference from the witness is a tie.

    Returns accepted / drafted of each run, the plain ones (0) included.
    """
    max_length = max(map(len, prompts)) + PARAMS.max_tokens + WINDOW
    shape = {"batch_size": 8, "max_length": max_length}
    witness = Engine(target, **shape).generate(prompts, PARAMS)
    plain, acceptance = None, []
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
            acceptance.append(total.num_accepted_tokens / max(total.num_draft_tokens, 1))
    scorer = Scorer(target, max_length=max_length)
    parted = ties.divergences(target, plain, witness, PARAMS, scorer=scorer)
    for found in parted:
        report(
            f"parts from the window-1 loop at token {found.index}: margin {found.margin:.2e}, "
            f"bound {found.bound:.2e}"
        )
    report(f"{len(parted)}/{len(prompts)} outputs differ from the window-1 loop, all at ties")
    return acceptance


@pytest.fixture
def report(capsys):
    def write(line):
        with capsys.disabled():
            print(f"  {line}")

    return write


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_pair(dtype, report):
    target = jaxspec.load_model("demo-target", dtype=dtype)
    draft = jaxspec.load_model("demo-draft", dtype=dtype)
    report(f"\nembedded pair, {dtype}")
    check(target, draft, encode_prompts(questions(), target, max_prompt_tokens=768), report)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4"])
def test_random_pairs_that_transformers_wrote(family, dtype, tmp_path, report):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tokenizer = jaxspec.load_model("demo-target")
    chosen = questions(num_questions=NUM_FOR_RANDOM_PAIRS)
    prompts = encode_prompts(chosen, tokenizer, max_prompt_tokens=768)
    config_class = {
        "llama": transformers.LlamaConfig,
        "qwen3": transformers.Qwen3Config,
        "glm4": transformers.Glm4Config,
    }[family]
    config = config_class(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        pad_token_id=0,
        rms_norm_eps=1e-5,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "target")
    # The draft is the target with noise on its weights: it agrees with it, but not always.
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(DRAFT_NOISE * torch.randn_like(weight))
    model.save_pretrained(tmp_path / "draft")
    report(f"\nrandom {family}, {dtype}")
    target, draft = (
        jaxspec.load_model(tmp_path / name, dtype=dtype) for name in ("target", "draft")
    )
    acceptance = check(target, draft, prompts, report)
    of_draft_model = acceptance[1:4]
    assert all(0.1 < share < 0.95 for share in of_draft_model), of_draft_model
