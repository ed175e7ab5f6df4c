"""Sampled output under `coupled`: a request's tokens depend on the request alone.

Whatever drafts, however much, in whatever company, row and order: the same seed gives the same
tokens as plain decoding, and the same KV, bit for bit. Scores that are not numbers end a row at the
same place, drafted or not, and no one beside it notices.
"""

import collections
import dataclasses
import functools
import itertools

import flex
import heads
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from live import live_kv, poison

import jaxspec
from jaxspec import sampling
from jaxspec.engine.engine import Engine
from jaxspec.models.base import LanguageModel
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.verifiers import coupled

WINDOW = 7
LENGTHS = (1, 2, 30, 129, 5, 77)
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.8, seed=1),
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.8, seed=2, top_p=0.9),
    SamplingParams(max_tokens=9, temperature=1.3, seed=3, top_k=20, min_p=0.01),
    SamplingParams(max_tokens=24, temperature=0.8, seed=4, presence_penalty=0.5),
    SamplingParams(
        max_tokens=24,
        temperature=0.8,
        seed=5,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        min_tokens=20,
        stop_token_ids=tuple(range(8)),
    ),
]
CHAINS = ("DraftModel", "DraftModel of the target", "NGram", "Oracle")


FLEX = {"block_size": 5, "num_deep_layers": 1, "confidence": 0.0}


def drafter_named(name, target, truth):
    if name == "DraftModel":
        return jaxspec.DraftModel(toy.model(seed=9, dtype=target.dtype, width=24, num_layers=1))
    return {
        "DraftModel of the target": lambda: jaxspec.DraftModel(target),
        "NGram": lambda: jaxspec.NGram(1, 3),
        "Oracle": lambda: jaxspec.Oracle(truth, acceptance=0.7),
        "a beam tree": lambda: jaxspec.DraftModel(
            target, tree=jaxspec.trees.BeamTree(3, 3, WINDOW - 1)
        ),
        "heads": lambda: heads.random_heads("clover", target),
        "FlexDraft, parallel": lambda: flex.copied_flex(target, mode="parallel", **FLEX),
        "FlexDraft, sequential": lambda: flex.copied_flex(target, mode="sequential", **FLEX),
        "branches": lambda: jaxspec.NGram(1, 3, branches=3),
        "a tree": lambda: toy.TreeOracle(tuple(map(tuple, truth)), right_until=90),
    }[name]()


def engine_for(target, drafter, **options):
    settings = {
        "draft_length": 4,
        "verify_length": WINDOW,
        "batch_size": 6,
        "max_length": 256,
    } | options
    return Engine(target, drafter, scheduler=jaxspec.Static(), **settings)  # prompt i is row i


def token_ids(completions):
    return [completion.token_ids for completion in completions]


def num_accepted(completions):
    return sum(completion.acceptance.num_accepted_tokens for completion in completions)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A target and requests, with what the window-1 loop makes of them."""

    target: LanguageModel
    prompts: list
    witness: list


@functools.cache
def make_setting(dtype):
    target = toy.model(dtype=jnp.dtype(dtype))
    prompts = toy.prompts(LENGTHS)
    witness = Engine(target, batch_size=len(LENGTHS), max_length=256).generate(prompts, PARAMS)
    return Setting(target=target, prompts=prompts, witness=witness)


@pytest.fixture(scope="module")
def setting():
    return make_setting("float32")


@pytest.fixture(
    scope="module",
    params=[
        ("float32", "DraftModel"),
        ("float32", "NGram"),
        ("float32", "Oracle"),
        ("float32", "a tree"),
        pytest.param(("float32", "branches"), marks=pytest.mark.system),
        pytest.param(("float32", "heads"), marks=pytest.mark.system),
        pytest.param(("bfloat16", "heads"), marks=pytest.mark.system),
        ("float32", "FlexDraft, parallel"),
        pytest.param(("float32", "FlexDraft, sequential"), marks=pytest.mark.system),
        pytest.param(("bfloat16", "FlexDraft, parallel"), marks=pytest.mark.system),
        ("bfloat16", "Oracle"),
        ("bfloat16", "a beam tree"),
    ],
    ids="-".join,
)
def drafted(request):
    """A setting, and an engine with one of the drafters; the slow run below has more."""
    dtype, name = request.param
    setting = make_setting(dtype)
    truth = toy.sequences(setting.witness)
    return setting, engine_for(setting.target, drafter_named(name, setting.target, truth))


# Tokens by dtype, depth of trees and whether drafts ride in the target's pass, which with XLA's
# products shows in their rounding: every drafter has to emit the same.
expected: dict = {}


def test_sampled_tokens_and_kv_are_plain_decodings(drafted):
    setting, engine = drafted
    plain = engine.generate(setting.prompts, PARAMS, speculate=False)
    plain_kv = live_kv(engine)
    poison(engine)
    speculative = engine.generate(setting.prompts, PARAMS)
    assert token_ids(speculative) == token_ids(plain)
    for ours, theirs in zip(live_kv(engine), plain_kv, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if isinstance(engine.drafter, (jaxspec.Oracle, jaxspec.DraftModel, toy.TreeOracle)):
        assert num_accepted(speculative) > 0
    rides_along = engine.executor.parts.drafter.score is not None
    program = str(setting.target.dtype), engine.shape.tree_depth, rides_along
    assert token_ids(plain) == expected.setdefault(program, token_ids(plain))
    if setting.target.dtype == jnp.float32:
        # Another program, so equal up to ties within rounding; here there are none.
        assert token_ids(plain) == token_ids(setting.witness)


ALLOWED = tuple(range(3, toy.VOCAB, 5))
BIASED = [
    SamplingParams(max_tokens=12, allowed_token_ids=ALLOWED),
    SamplingParams(max_tokens=12, temperature=0.8, seed=1, allowed_token_ids=ALLOWED),
    SamplingParams(max_tokens=12, allowed_token_ids=[9]),
    SamplingParams(max_tokens=12, logit_bias={4: 100}),
    SamplingParams(max_tokens=12),
    SamplingParams(
        max_tokens=12, temperature=1.2, seed=5, allowed_token_ids=ALLOWED,
        logit_bias=dict.fromkeys(ALLOWED[::2], -100), frequency_penalty=0.1,
    ),
]  # fmt: skip


def test_biased_tokens_are_plain_decodings_and_allowed(drafted):
    setting, engine = drafted
    found = engine.generate(setting.prompts, BIASED)
    plain = engine.generate(setting.prompts, BIASED, speculate=False)
    assert token_ids(found) == token_ids(plain)
    tokens = token_ids(found)
    allowed = (ALLOWED, ALLOWED, [9], [4], range(toy.VOCAB), ALLOWED[1::2])
    for own, ids in zip(tokens, allowed, strict=True):
        assert set(own) <= set(ids)
    [alone] = engine.generate([setting.prompts[4]], SamplingParams(max_tokens=12))
    assert tokens[4] == alone.token_ids
    assert len(set(tokens[0])) > 1
    if not isinstance(engine.drafter, (jaxspec.Oracle, toy.TreeOracle, jaxspec.NGram)):
        # Where one token can be emitted, every drafter with logits of its own drafts that token.
        assert all(found[index].acceptance.num_accepted_tokens > 6 for index in (2, 3))


def test_draft_lengths_agree(drafted):
    setting, engine = drafted
    reference = token_ids(engine.generate(setting.prompts, PARAMS))
    for draft_length in (1, WINDOW - 1):
        got = engine.generate(setting.prompts, PARAMS, draft_length=draft_length)
        assert token_ids(got) == reference


def test_order_seats_and_neighbours_do_not_matter(drafted):
    setting, engine = drafted
    if isinstance(engine.drafter, toy.TreeOracle):
        pytest.skip("its table is in the order of the rows of the batch")
    reference = token_ids(engine.generate(setting.prompts, PARAMS))
    order = np.random.default_rng(1).permutation(len(LENGTHS))
    shuffled = engine.generate([setting.prompts[i] for i in order], [PARAMS[i] for i in order])
    assert [shuffled[list(order).index(i)].token_ids for i in range(len(order))] == reference
    for index in (0, 2, 5):
        alone = engine.generate([setting.prompts[index]], PARAMS[index])
        assert alone[0].token_ids == reference[index]


def test_seeds_differ_and_are_reported(drafted):
    setting, engine = drafted
    drawn = engine.generate(
        [setting.prompts[0]] * 6, SamplingParams(max_tokens=12, temperature=0.8)
    )
    assert len({completion.seed for completion in drawn}) == 6
    assert len(set(token_ids(drawn))) == 6
    again = engine.generate(
        [setting.prompts[0]],
        SamplingParams(max_tokens=12, temperature=0.8, seed=drawn[3].seed),
    )
    assert again[0].token_ids == drawn[3].token_ids
    many = engine.generate(
        [setting.prompts[0]], SamplingParams(max_tokens=12, temperature=0.8, seed=7, n=3)
    )
    assert [completion.seed for completion in many] == [7, 8, 9]


@pytest.mark.slow
def test_shared_noise_is_what_makes_sampling_drafts_acceptable(setting):
    target = setting.target
    kept = []
    for verifier in (jaxspec.Coupled(), jaxspec.Coupled(is_noise_shared=False)):
        engine = engine_for(target, jaxspec.DraftModel(target), verifier=verifier)
        plain = engine.generate(setting.prompts, PARAMS, speculate=False)
        found = engine.generate(setting.prompts, PARAMS)
        assert token_ids(found) == token_ids(plain)
        kept.append(num_accepted(found))
    assert kept[0] > 2 * kept[1]


# Sabotage.


def choose_by_place(logits, rows, prefix):
    """Noise by place within the window, not by position."""
    place = prefix.position - prefix.position[:, :1]
    return sampling.choose(logits, rows, prefix.replace(position=place))


def test_sabotage_is_caught(monkeypatch, setting):
    monkeypatch.setattr(coupled, "choose", choose_by_place)
    engine = engine_for(setting.target, jaxspec.Oracle(toy.sequences(setting.witness)))
    plain = engine.generate(setting.prompts, PARAMS, speculate=False)
    engine.update_params(draft=jaxspec.Oracle(toy.sequences(plain)).params)
    found = engine.generate(setting.prompts, PARAMS)
    is_same = [a == b for a, b in zip(token_ids(found), token_ids(plain), strict=True)]
    # Greedy rows use no noise; of the others none comes through.
    assert is_same == [params.temperature == 0 for params in PARAMS]


# Scores that are not numbers.


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
            engine = engine_for(target, drafter_named(name, target, truth), batch_size=8)
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
