"""The judge: a changed token is a fault, a tie is a tie, another seed is sampling."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec import sampling
from jaxspec.audit.judge import (
    ALPHA,
    Filters,
    Finding,
    first_difference,
    judge,
    judge_alone,
    margin_of,
)
from jaxspec.audit.scoring import SEGMENT, Scorer, with_dtype
from jaxspec.engine.engine import Engine
from jaxspec.requests.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
FILTERED = SamplingParams(max_tokens=24, temperature=1.0, top_k=7, top_p=0.8, seed=3)
PENALISED = SamplingParams(
    max_tokens=24,
    min_tokens=5,
    temperature=0.9,
    min_p=0.05,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    stop_token_ids=(3,),
    seed=3,
)
EACH = {"greedy": GREEDY, "sampled": SAMPLED, "filtered": FILTERED, "penalised": PENALISED}
LENGTHS = (1, 2, 30, 129, 5, 140, 77, 12)


@dataclasses.dataclass
class Setting:
    """A target, its plain engine and a scorer; outputs are made once per parameters."""

    dtype: str

    def __post_init__(self):
        self.target = toy.model(dtype=jnp.dtype(self.dtype), num_layers=1)
        self.engine = Engine(self.target, batch_size=4, max_length=256)
        self.scorer = Scorer(self.target, max_length=256)
        self.prompts = toy.prompts(LENGTHS)
        self.made = {}

    def outputs(self, params):
        if params not in self.made:
            self.made[params] = self.engine.generate(self.prompts, params)
        return self.made[params]

    def judge(self, completion, output_ids, params):
        return judge(
            self.scorer,
            prompt_ids=completion.prompt_token_ids,
            output_ids=output_ids,
            reference_ids=completion.token_ids,
            params=params,
        )

    def alone(self, completion, output_ids, params):
        return judge_alone(
            self.scorer,
            prompt_ids=completion.prompt_token_ids,
            output_ids=output_ids,
            params=params,
        )


@pytest.fixture(scope="module")
def fp32():
    return Setting("float32")


@pytest.fixture(scope="module")
def bf16():
    return Setting("bfloat16")


def is_of_the_distribution(own):
    """Whether nothing speaks against an output drawn from the target's distribution."""
    is_faulty = any(d.finding == Finding.FAULT for d in own.divergences)
    return not is_faulty and (own.log_evidence or 0.0) <= -math.log(ALPHA)


def changed(ids, index, by=1):
    ids = list(ids)
    ids[index] = (ids[index] + by) % toy.VOCAB
    return ids


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == first_difference([1, 2], [1, 2, 3]) == 2


@pytest.mark.parametrize("name", list(EACH))
def test_an_output_of_the_target_itself_is_clean_in_fp32(fp32, name):
    for completion in fp32.outputs(EACH[name]):
        assert fp32.judge(completion, completion.token_ids, EACH[name]) is None
        own = fp32.alone(completion, completion.token_ids, EACH[name])
        assert own.divergences == ()
        assert is_of_the_distribution(own)
        assert own.num_tokens == len(completion.token_ids)


@pytest.mark.parametrize("name", ["greedy", "filtered"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_changed_token_is_a_fault(request, dtype, name):
    setting = request.getfixturevalue(dtype)
    for completion in setting.outputs(EACH[name]):
        output = list(completion.token_ids)
        segment = next(setting.scorer.segments(completion.prompt_token_ids, output, EACH[name]))
        output[7] = int(np.argmin(segment.logits_at(7)[0]))  # a token that the filters exclude
        found = setting.judge(completion, output, EACH[name])
        assert (found.index, found.token, found.expected) == (
            7,
            output[7],
            completion.token_ids[7],
        )
        assert found.finding == Finding.FAULT
        assert found.margin > found.bound
        own = setting.alone(completion, output, EACH[name])
        assert own.first.index == 7


def test_rounding_in_bf16_makes_ties_and_nothing_else(bf16):
    ties = []
    for params in EACH.values():
        for completion in bf16.outputs(params):
            own = bf16.alone(completion, completion.token_ids, params)
            assert own.first is None, own.first
            assert is_of_the_distribution(own)
            ties += own.divergences
    assert ties
    assert all(0 <= d.margin <= d.bound < 1 for d in ties)


def test_programs_that_round_differently_diverge_at_ties(bf16):
    prompts = toy.prompts([20] * 24, seed=5)
    params = SamplingParams(max_tokens=40)
    exact = Engine(with_dtype(bf16.target, "float32"), batch_size=8, max_length=128)
    num_diverged = 0
    ours, theirs = exact.generate(prompts, params), bf16.engine.generate(prompts, params)
    for one, other in zip(ours, theirs, strict=True):
        found = bf16.judge(other, one.token_ids, params)
        if found is not None:
            num_diverged += 1
            assert found.finding == Finding.TIE
    assert num_diverged


def twins(dtype, difference):
    """A target with two tokens whose scores differ by a fraction of a rounding, and an output in
    which one of them stands; the output with the other in its place."""
    target = toy.model(seed=4, dtype=dtype, num_layers=1)
    prompt = toy.prompts([9])[0]
    completion = Engine(target, batch_size=1, max_length=128).generate([prompt], GREEDY)[0]
    token = completion.token_ids[-1]
    other = next(i for i in range(toy.VOCAB) if i not in completion.token_ids)
    head = np.array(target.params["head"], np.float32)
    head[:, other] = head[:, token] * (1 + difference)
    params = {**target.params, "head": jnp.asarray(head).astype(dtype)}
    return dataclasses.replace(target, params=params), completion, token, other


@pytest.mark.parametrize(
    ("dtype", "difference", "finding"),
    [
        ("float32", 0.0, Finding.TIE),
        ("float32", 1e-3, Finding.FAULT),
        ("bfloat16", 2**-8, Finding.TIE),
    ],
)
def test_twins(dtype, difference, finding):
    target, completion, token, other = twins(jnp.dtype(dtype), -difference)
    scorer = Scorer(target, max_length=64)
    index = completion.token_ids.index(token)
    ids = completion.token_ids[: index + 1]
    found = judge(
        scorer,
        prompt_ids=completion.prompt_token_ids,
        output_ids=[*ids[:-1], other],
        reference_ids=ids,
        params=GREEDY,
    )
    assert (found.token, found.expected, found.finding) == (other, token, finding)


def test_another_seed_is_sampling_and_the_same_seed_is_not(fp32):
    others = fp32.outputs(dataclasses.replace(SAMPLED, seed=11))
    num_diverged = 0
    for ours, theirs in zip(fp32.outputs(SAMPLED), others, strict=True):
        found = fp32.judge(ours, theirs.token_ids, SAMPLED)
        if found is not None:
            num_diverged += 1
            assert found.finding == Finding.SAMPLING
            assert found.margin > found.bound
        unkeyed = dataclasses.replace(SAMPLED, seed=None)
        assert is_of_the_distribution(fp32.alone(theirs, theirs.token_ids, unkeyed))
    assert num_diverged >= 6


def test_a_sampled_output_of_another_distribution_is_a_fault(fp32):
    rng = np.random.default_rng(0)
    for completion in fp32.outputs(SAMPLED):
        output = rng.integers(0, toy.VOCAB, 24).tolist()
        found = fp32.judge(completion, output, SAMPLED)
        assert found.finding == Finding.FAULT
        assert found.log_evidence > -math.log(ALPHA)


def test_what_the_filters_exclude_is_a_fault_in_a_sampled_output(fp32):
    unkeyed = dataclasses.replace(FILTERED, seed=None)
    completion = fp32.outputs(FILTERED)[4]
    own = fp32.alone(completion, changed(completion.token_ids, 5, by=9), unkeyed)
    assert own.first.index == 5
    assert own.first.log_probs == -math.inf
    assert not is_of_the_distribution(own)


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize(
    "biases",
    [
        {"allowed_token_ids": range(20, 60)},
        {"logit_bias": {30: 4, 31: -100}, "allowed_token_ids": range(20, 60)},
        {"min_tokens": 16, "stop_token_ids": (7, 8)},
    ],
)
def test_a_token_that_is_barred_is_a_fault(fp32, biases, temperature, seed):
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=3, **biases)
    completion = fp32.outputs(params)[1]
    unkeyed = dataclasses.replace(params, seed=seed)
    assert is_of_the_distribution(fp32.alone(completion, completion.token_ids, unkeyed))
    barred = list(completion.token_ids)
    barred[5] = 7
    own = fp32.alone(completion, barred, unkeyed)
    assert own.first.index == 5
    assert own.first.finding == Finding.FAULT
    if temperature == 0 and "allowed_token_ids" in biases:
        plain = SamplingParams(max_tokens=16)
        assert fp32.alone(completion, completion.token_ids, plain).first.finding == Finding.FAULT


def test_an_output_that_ends_too_early_or_too_late_is_a_fault(fp32):
    completion = fp32.outputs(GREEDY)[0]
    short = fp32.judge(completion, completion.token_ids[:-4], GREEDY)
    assert (short.index, short.token, short.finding) == (20, -1, Finding.FAULT)
    late = fp32.judge(completion, (*completion.token_ids, 5), GREEDY)
    assert (late.index, late.expected, late.finding) == (24, -1, Finding.FAULT)
    foreign = fp32.alone(completion, (*completion.token_ids[:3], toy.VOCAB), GREEDY)
    assert (foreign.first.index, foreign.first.token) == (3, toy.VOCAB)


def test_evidence_is_a_fair_bet(fp32):
    """The mean of the product of q / p is 1, so it rarely exceeds 20."""
    prompts = toy.prompts([6] * 64, seed=8)
    params = [dataclasses.replace(SAMPLED, seed=seed) for seed in range(64)]
    unkeyed = dataclasses.replace(SAMPLED, seed=None)
    found = [
        fp32.alone(one, one.token_ids, unkeyed).log_evidence
        for one in fp32.engine.generate(prompts, params)
    ]
    assert np.mean(np.exp(found)) < 3
    assert np.mean(np.array(found) > math.log(20)) < 0.05


def test_scores_across_segments_agree_with_decoding(fp32):
    params = SamplingParams(max_tokens=SEGMENT + 40)
    completion = fp32.engine.generate([fp32.prompts[2]], params)[0]
    segments = list(fp32.scorer.segments(completion.prompt_token_ids, completion.token_ids, params))
    assert [len(segment.tokens) for segment in segments] == [SEGMENT, 40]
    chosen = np.concatenate([segment.chosen for segment in segments])
    assert chosen.tolist() == list(completion.token_ids)
    found = fp32.judge(completion, changed(completion.token_ids, SEGMENT + 7), params)
    assert (found.index, found.finding) == (SEGMENT + 7, Finding.FAULT)


def test_one_program_serves_all_lengths_and_parameters():
    scorer = Scorer(toy.model(num_layers=1), max_length=256)
    for length, params in zip(LENGTHS, (*EACH.values(), *EACH.values()), strict=True):
        list(scorer.segments(toy.prompts([length])[0], [1, 2, 3], params))
    again = [(one.read, *one.by_width.values()) for one in scorer._rescorings]
    programs = [scorer._read_wide, scorer._score, *itertools.chain.from_iterable(again)]
    assert [program.num_compilations() for program in programs] == [1] * len(programs)


def test_noise_is_that_of_the_dtype(fp32, bf16):
    def noise(scorer):
        *_, segment = scorer.segments(fp32.prompts[2], [1, 2, 3, 4], GREEDY)
        return segment.noise

    assert np.all(noise(fp32.scorer) < 1e-4)
    assert np.all(noise(bf16.scorer) > 1e-3)
    as_bf16 = Scorer(fp32.target, max_length=256, dtype="bfloat16")
    assert np.all(noise(as_bf16) > 1e-3)


def test_what_cannot_be_scored_is_refused(fp32):
    for prompt, output, said in (
        ([], [1], "there must be a prompt"),
        ([1], [1] * 400, "a larger max_length"),
        ([1], [toy.VOCAB], "ends at 60"),
    ):
        with pytest.raises(jaxspec.errors.PromptError, match=said):
            list(fp32.scorer.segments(prompt, output, GREEDY))


# The filters as the judge sees them, against the ones that decode.

DISTRIBUTIONS = [
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=1.3, min_p=0.1),
    SamplingParams(temperature=0.9, top_k=9, top_p=0.6, min_p=0.05),
]


filtered_logits = jax.jit(sampling.filtered_logits)


def kept_by_decoding(logits, params):
    row = jax.tree.map(lambda value: value[None], params.of_row(prompt_length=1))
    distribution = filtered_logits(np.asarray(logits, np.float32)[None, None], row)
    return np.isfinite(np.asarray(distribution)[0, 0])


@pytest.mark.parametrize("params", DISTRIBUTIONS)
def test_filters_keep_what_decoding_keeps(params):
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits = rng.normal(0, 2, 30).astype(np.float32)
        filters = Filters(logits.astype(np.float64), params)
        may, must = filters.kept(0.0)
        np.testing.assert_array_equal(may, kept_by_decoding(logits, params))
        np.testing.assert_array_equal(must, may)


@pytest.mark.parametrize("params", DISTRIBUTIONS)
def test_no_change_within_the_margin_draws_the_token(params):
    """Soundness: a token's margin is at most what the scores must really move apart."""
    rng = np.random.default_rng(1)
    num_drawn = 0
    for _ in range(12):
        logits = rng.normal(0, 1, 12)
        noise = params.temperature * rng.gumbel(size=12)
        filters = Filters(logits, params)
        margins = np.array([margin_of(t, logits + noise, filters) for t in range(12)])
        assert np.sum(margins == 0) == 1
        for size in (0.02, 0.1, 0.4, 1.0):
            for _ in range(10):
                # Corners reach further than the inside.
                moved = logits + size * rng.choice([-1, 1], 12)
                kept = kept_by_decoding(moved, params)
                drawn = int(np.argmax(np.where(kept, moved + noise, -np.inf)))
                assert margins[drawn] <= 2 * size + 1e-5
                num_drawn += margins[drawn] > 0
    assert num_drawn > 20


def test_without_filters_the_margin_is_the_gap():
    logits = np.array([1.0, 3.0, 2.5])
    filters = Filters(logits, GREEDY)
    assert [margin_of(t, logits, filters) for t in range(3)] == [2.0, 0.0, 0.5]


def test_a_token_next_to_a_filter_has_a_small_distance():
    logits = np.array([5.0, 4.0, 3.0, 2.999, 0.0])
    filters = Filters(logits, SamplingParams(temperature=1.0, top_k=3))
    distances = [filters.distance(token) for token in range(5)]
    assert distances[2] == pytest.approx(0.001, abs=1e-6)
    assert distances[3] == pytest.approx(0.001, abs=1e-6)
    assert distances[0] > 1
    assert not filters.keeps(3)
