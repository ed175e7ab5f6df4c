"""Rows of all kinds side by side: scores that are not numbers end a row at the same place, drafted
or not, and no one beside it notices; sampling parameters compile nothing; the claim at scale.
"""

import collections
import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import toy
from live import live_kv, poison
from test_equivalence import DRAFTERS, LENGTHS, NUM_ROWS, PARAMS, engine_for, token_ids

import jaxspec
from jaxspec.engine.engine import Engine
from jaxspec.models.base import LanguageModel
from jaxspec.requests.sampling_params import SamplingParams

CHAINS = ("DraftModel", "DraftModel of the target", "NGram", "Oracle")


def num_accepted(completions):
    return sum(completion.acceptance.num_accepted_tokens for completion in completions)


@pytest.mark.slow
def test_shared_noise_is_what_makes_sampling_drafts_acceptable():
    target, prompts, kept = toy.model(), toy.prompts(LENGTHS[:NUM_ROWS]), []
    for verifier in (jaxspec.Coupled(), jaxspec.Coupled(is_noise_shared=False)):
        engine = engine_for(target, jaxspec.DraftModel(target), verifier=verifier)
        plain = engine.generate(prompts, PARAMS[:NUM_ROWS], speculate=False)
        found = engine.generate(prompts, PARAMS[:NUM_ROWS])
        assert token_ids(found) == token_ids(plain)
        kept.append(num_accepted(found))
    assert kept[0] > 2 * kept[1]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Breaking(LanguageModel):
    """Its scores at position `breaks_at` are NaN."""

    breaks_at: int

    def forward(self, params, tokens, window, cache):
        hidden, cache = super().forward(params, tokens, window, cache)
        is_broken = window.positions == self.breaks_at
        return jnp.where(is_broken[..., None], jnp.asarray(jnp.nan, hidden.dtype), hidden), cache


BREAKS_AT = 20
# Prompts that reach that position at different places of a round, and two that never get there.
BREAKING_LENGTHS, BREAKING_LIMITS = (3, 10, 18, 4, 30, 4), (40, 40, 40, 17, 12, 12)
BREAKING_PARAMS = [
    SamplingParams(max_tokens=limit, temperature=temperature, seed=seed)
    for seed, (limit, temperature) in enumerate(
        zip(BREAKING_LIMITS, (0.8, 0, 0.8, 0, 0.8, 0), strict=True)
    )
]


@pytest.fixture(scope="module")
def sound():
    """What the healthy model makes of these requests."""
    engine = Engine(toy.model(num_layers=1), batch_size=6, max_length=128)
    return engine.generate(toy.prompts(BREAKING_LENGTHS), BREAKING_PARAMS)


@pytest.mark.parametrize(
    "rule", ["plain", "coupled", "block", pytest.param("rejection", marks=pytest.mark.slow)]
)
def test_scores_that_are_not_numbers_end_the_row_where_plain_decoding_does(sound, rule):
    healthy = toy.model(num_layers=1)
    target = Breaking(
        name="breaking", config=healthy.config, params=healthy.params, breaks_at=BREAKS_AT
    )
    prompts = toy.prompts(BREAKING_LENGTHS)
    oracle = jaxspec.Oracle(toy.sequences(sound), acceptance=0.8)
    rules = {
        "coupled": jaxspec.Coupled(),
        "rejection": jaxspec.Rejection(),
        "block": jaxspec.Block(),
    }
    if rule == "plain":
        engine = Engine(target, batch_size=6, max_length=128)
    else:
        engine = Engine(
            target, oracle, verifier=rules[rule], draft_length=4, batch_size=6, max_length=128
        )
    found = engine.generate(prompts, BREAKING_PARAMS)
    for ours, truth, params in zip(found, sound, BREAKING_PARAMS, strict=True):
        length = len(ours.prompt_token_ids)
        # The scores at BREAKS_AT would give the token after it.
        num_sound = BREAKS_AT + 1 - length
        if length <= BREAKS_AT and params.max_tokens > num_sound:
            assert (ours.finish_reason, ours.stop_reason) == ("abort", "non-finite")
            assert len(ours.token_ids) == num_sound
        else:
            assert ours.finish_reason == "length"
            assert len(ours.token_ids) == params.max_tokens
        if rule in ("coupled", "plain") or params.temperature == 0:
            assert ours.token_ids == truth.token_ids[: len(ours.token_ids)]
        assert all(0 <= token < toy.VOCAB for token in ours.token_ids)
    assert [c.finish_reason for c in found].count("abort") == 3
    # The rows are as good as new.
    assert token_ids(engine.generate(prompts, BREAKING_PARAMS)) == token_ids(found)


@dataclasses.dataclass(frozen=True)
class WrongInOneRow(toy.WrongDrafter):
    """Proposes its token in the second row only."""

    def propose(self, shape, params, state, rows):
        draft, state = super().propose(shape, params, state, rows)
        is_second = jnp.arange(shape.batch_size, dtype=jnp.int32) == 1
        return draft.replace(num_valid=jnp.where(is_second, draft.num_valid, 0)), state


def test_a_draft_whose_kv_is_not_a_number_does_not_disturb_the_neighbours():
    target = toy.model(num_layers=1)
    embedding = target.params["embedding"].at[toy.VOCAB - 1].set(jnp.nan)
    poisoned = dataclasses.replace(target, params={**target.params, "embedding": embedding})
    engine = engine_for(poisoned, WrongInOneRow(token=toy.VOCAB - 1), batch_size=4)
    prompts = [[token % (toy.VOCAB - 1) for token in p] for p in toy.prompts(LENGTHS[:4])]
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    plain = engine.generate(prompts, params, speculate=False)
    drafted = engine.generate(prompts, params)
    for row in (0, 2, 3):
        assert drafted[row].token_ids == plain[row].token_ids


# Compilation.


@pytest.mark.parametrize(
    "rule",
    [
        jaxspec.Coupled,
        jaxspec.Block,
        pytest.param(jaxspec.Rejection, marks=pytest.mark.slow),
    ],
)
def test_sampling_parameters_compile_nothing(rule):
    target = toy.model(num_layers=1)
    engine = engine_for(target, jaxspec.DraftModel(target), verifier=rule(), batch_size=2)
    prompts = toy.prompts((3, 140))
    engine.generate(prompts)
    before = engine.executor.compile_counts()
    assert [before[name] for name in ("init", "admit", "prefill", "run")] == [1, 1, 1, 1]
    values = {
        "temperature": (0.5, 1, 1.5),
        "top_k": (-1, 5),
        "top_p": (0.4, 1),
        "min_p": (0.1,),
        "seed": (0, 2**63 - 1),
        "min_tokens": (3,),
        "stop_token_ids": ((1, 2, 3),),
        "repetition_penalty": (1.2,),
        "presence_penalty": (-0.5,),
        "frequency_penalty": (1,),
        "logit_bias": ({5: 1.5}, {token: -100 for token in range(20)}),
        "allowed_token_ids": ([3], range(40)),
        "n": (2,),
    }
    for name, choices in values.items():
        for value in choices:
            engine.generate(
                prompts, SamplingParams(**({"temperature": 0.7, "max_tokens": 4} | {name: value}))
            )
    engine.generate(prompts, [SamplingParams(), SamplingParams(temperature=1.0, top_k=3)])
    assert engine.executor.compile_counts() == before


# The claim at scale.


@pytest.mark.slow
def test_two_thousand_requests_are_equal_to_the_bit():
    counts = collections.Counter()
    for dtype in (jnp.float32, jnp.bfloat16):
        target = toy.model(dtype=dtype)
        rng = np.random.default_rng(0)
        lengths = rng.choice([1, 2, 7, 20, 50, 100, 129, 150], 40)
        prompts = toy.prompts(lengths, seed=1)
        params = [
            SamplingParams(
                max_tokens=int(rng.integers(1, 40)),
                temperature=float(rng.choice([0, 0, 0.4, 0.8, 1.0, 1.5])),
                top_p=float(rng.choice([1, 1, 0.9])),
                top_k=int(rng.choice([0, 0, 10])),
                seed=int(rng.integers(2**62)),
                stop_token_ids=(int(rng.integers(toy.VOCAB)),),
            )
            for _ in prompts
        ]
        reference, of_reference = None, None
        for name in CHAINS:
            truth = [[*p, 0] for p in prompts]
            if reference is not None:
                truth = [[*p, *tokens] for p, tokens in zip(prompts, reference, strict=True)]
            engine = engine_for(target, DRAFTERS[name](target, truth), batch_size=8)
            plain = token_ids(engine.generate(prompts, params, speculate=False))
            of_reference = live_kv(engine) if of_reference is None else of_reference
            reference = plain if reference is None else reference
            for draft_length, backwards in itertools.product((1, 2, 3, 4, 6), (False, True)):
                step = -1 if backwards else 1
                poison(engine)
                found = engine.generate(prompts[::step], params[::step], draft_length=draft_length)
                if not backwards:  # the last batch still sits where the first run left it
                    for ours, theirs in zip(live_kv(engine), of_reference, strict=True):
                        np.testing.assert_array_equal(ours, theirs)
                for ours, theirs in zip(token_ids(found)[::step], reference, strict=True):
                    counts[str(jnp.dtype(dtype)), name, ours == theirs] += 1
                counts["accepted tokens"] += num_accepted(found)
            for ours, theirs in zip(plain, reference, strict=True):
                counts[str(jnp.dtype(dtype)), "plain", ours == theirs] += 1
    compared = {key: n for key, n in counts.items() if key != "accepted tokens"}
    total, equal = sum(compared.values()), sum(n for key, n in compared.items() if key[2])
    print(f"\n{equal} of {total} requests equal bit for bit; {dict(counts)}")
    assert total >= 2000
    assert equal == total
    assert counts["accepted tokens"] > 1000
