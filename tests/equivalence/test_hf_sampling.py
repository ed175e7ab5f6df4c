"""Parity with `transformers.generate` on the embedded pair: greedy outputs, and the distribution of
sampled ones.

Hugging Face's effective defaults are pinned (`top_k` would be 50).
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.resources

import numpy as np
import pytest
import ties

import jaxspec
from jaxspec.audit.chi_square import pooled

torch = pytest.importorskip("torch")
stats = pytest.importorskip("scipy.stats")

PROMPTS = ["Once upon a time", "def main():", "The old man", "1 2 3 4 5", "She said", "import os"]
NUM_SAMPLES = 1024
ALPHA = 1e-3  # of each chi-square test; the seeds are fixed
DISTRIBUTIONS = {
    "coupled": {"temperature": 0.8, "top_p": 0.9},
    "rejection": {"temperature": 0.8, "top_p": 0.9},
    "block": {"temperature": 1.2, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.3},
}
VERIFIERS = {"coupled": jaxspec.Coupled, "rejection": jaxspec.Rejection, "block": jaxspec.Block}
PINNED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def theirs():
    """The target in `transformers`."""
    import transformers

    with importlib.resources.as_file(importlib.resources.files("jaxspec") / "assets") as assets:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            assets / "target", dtype=torch.float32
        )
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.fixture(scope="module")
def ours():
    return tuple(
        jaxspec.load_model(f"demo-{name}", dtype="float32") for name in ("target", "draft")
    )


def engine_with(ours, verifier, *, batch_size):
    target, draft = ours
    return jaxspec.Engine(
        target,
        jaxspec.DraftModel(draft),
        verifier=VERIFIERS[verifier](),
        draft_length=3,
        batch_size=batch_size,
        max_length=128,
    )


def test_greedy_outputs_are_theirs(ours, theirs):
    params = jaxspec.SamplingParams(max_tokens=24, ignore_eos=True)
    completions = engine_with(ours, "coupled", batch_size=6).generate(PROMPTS, params)
    witness = []
    for completion in completions:
        prompt = torch.tensor([completion.prompt_token_ids])
        found = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24
        )
        ids = tuple(found[0, prompt.shape[1] :].tolist())
        witness.append(dataclasses.replace(completion, token_ids=ids))
    ties.divergences(ours[0], completions, witness, params)
    same = [a.token_ids == b.token_ids for a, b in zip(completions, witness, strict=True)]
    assert sum(same) >= 5  # ties are rare in fp32
    assert len({completion.token_ids for completion in completions}) == 6


def their_probs(theirs, sequences, options):
    """Distribution `[R, V]` of the token that `generate` draws after each of `sequences`, all of
    one length."""
    prompts = torch.tensor(sequences)
    found = theirs.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        max_new_tokens=1,
        output_scores=True,
        return_dict_in_generate=True,
        **(PINNED | options),
    )
    return torch.softmax(found.scores[0].double(), dim=-1).numpy()


def their_pairs(theirs, prompt, options):
    """Probability of each pair of first tokens."""
    [first] = their_probs(theirs, [prompt], options)
    likely = np.flatnonzero(first)
    second = their_probs(theirs, [[*prompt, int(token)] for token in likely], options)
    return {
        (int(token), int(following)): first[token] * distribution[following]
        for token, distribution in zip(likely, second, strict=True)
        for following in np.flatnonzero(distribution)
    }


def p_value(counts, distribution):
    """Of a chi-square test."""
    observed = np.array([counts[cell] for cell in distribution])
    counts, means = pooled(observed, np.array(list(distribution.values())) * observed.sum())
    assert len(means) > 5
    return stats.chisquare(counts, means * (counts.sum() / means.sum())).pvalue


@pytest.mark.slow
@pytest.mark.parametrize("verifier", list(DISTRIBUTIONS))
def test_sampled_outputs_follow_their_distribution(ours, theirs, verifier):
    options = DISTRIBUTIONS[verifier]
    engine = engine_with(ours, verifier, batch_size=32)
    params = jaxspec.SamplingParams(max_tokens=3, seed=1, n=NUM_SAMPLES, ignore_eos=True, **options)
    completions = engine.generate(["The old man"], params)
    prompt = list(completions[0].prompt_token_ids)
    distribution = their_pairs(theirs, prompt, options)
    assert sum(distribution.values()) == pytest.approx(1)
    counts = collections.Counter(completion.token_ids[:2] for completion in completions)
    assert set(counts) <= set(distribution)  # nothing that they filter out
    total = completions.acceptance
    assert 0 < total.num_accepted_tokens < total.num_draft_tokens
    assert p_value(counts, distribution) > ALPHA
    # The check has teeth: it tells this distribution from that of a temperature a quarter higher.
    warmer = options | {"temperature": options["temperature"] * 1.25}
    assert p_value(counts, their_pairs(theirs, prompt, warmer)) < ALPHA
