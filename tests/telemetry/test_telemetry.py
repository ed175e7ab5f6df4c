"""Traces: what they say equals counters, outputs and an independent scoring of every draft."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import toy

import jaxspec
from jaxspec.decode import recorders
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.requests.completions import Completions
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.telemetry import trace as telemetry
from jaxspec.telemetry.counters import Acceptance, Metrics
from jaxspec.types import Origin, Window

MAX_LENGTH = 128
DRAFT_LENGTH = 4
LENGTHS = (3, 20, 7, 1, 12, 30, 5)
GREEDY = [SamplingParams(max_tokens=n) for n in (20, 3, 17, 9, 1, 12, 25)]
SAMPLED = [
    SamplingParams(max_tokens=18, temperature=0.9, seed=1),
    SamplingParams(max_tokens=11, temperature=1.3, top_k=9, seed=2),
    SamplingParams(max_tokens=6),
    SamplingParams(max_tokens=22, temperature=1.0, top_p=0.8, seed=3),
    SamplingParams(max_tokens=15, temperature=0.7, repetition_penalty=1.3, seed=4),
    SamplingParams(max_tokens=9, temperature=1.5, seed=5),
    SamplingParams(max_tokens=13, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def target():
    return toy.model(num_layers=1)


@pytest.fixture(scope="module")
def draft(target):
    """The target with noise on its weights: it agrees often, not always."""
    leaves, structure = jax.tree.flatten(target.params)
    keys = jax.random.split(jax.random.key(9), len(leaves))
    noisy = [
        leaf + 0.04 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return dataclasses.replace(target, name="noisy", params=jax.tree.unflatten(structure, noisy))


def make_engine(target, drafter, **settings):
    settings = {
        "draft_length": DRAFT_LENGTH,
        "batch_size": 3,
        "max_length": MAX_LENGTH,
        "scheduler": jaxspec.Continuous(),
        "rounds_per_sync": 3,
        "trace": "distributions",
    } | settings
    return Engine(target, drafter, **settings)


def assert_sums_equal_counters(completions):
    """Every sum over a request's rows is what its counters say, and rounds follow each other."""
    rounds, tokens = completions.rounds(), completions.tokens()
    assert len(rounds) == sum(c.acceptance.num_rounds for c in completions)
    for completion in completions:
        counts, name = completion.acceptance, completion.request_id
        own = rounds[rounds.request_id == name]
        both = tokens[tokens.request_id == name]
        drafted = both[both.kind == "drafted"]
        assert own["round"].tolist() == list(range(counts.num_rounds))
        assert own.emitted.sum() == counts.num_emitted_tokens
        assert own.accepted.sum() == drafted.accepted.sum() == counts.num_accepted_tokens
        assert own.drafted.sum() == len(drafted) == counts.num_draft_tokens
        assert (own.drafted > 0).sum() == counts.num_drafts
        for depth, accepted in enumerate(counts.num_accepted_tokens_per_pos, 1):
            assert (own.accepted >= depth).sum() == accepted
            assert drafted.accepted[drafted.depth == depth].sum() == accepted
        start = len(completion.prompt_token_ids)
        ends = start + np.cumsum(own.emitted)
        assert own.context_length.tolist() == [start, *ends[:-1]]
        assert np.all(np.diff(own.engine_round) > 0)
        by_round = drafted.groupby("round")
        expected = own.set_index("round").loc[lambda frame: frame.drafted > 0]
        assert by_round.size().tolist() == expected.drafted.tolist()
        assert by_round.depth.max().tolist() == expected.draft_depth.tolist()
        assert by_round.accepted.sum().tolist() == expected.accepted.tolist()
        assert (own.prompt_length == start).all()
        assert own.output_position.tolist() == (own.context_length - start).tolist()
        assert both.groupby("round").emitted.sum().tolist() == own.emitted.tolist()
        kinds = np.where(own.accepted < own.drafted, "corrected", "bonus")
        kinds = np.where(own.drafted == 0, "plain", kinds)[own.emitted > own.accepted]
        assert both.kind[both.kind != "drafted"].tolist() == kinds.tolist()


def assert_outputs_are_rebuilt(completions):
    """Accepted tokens stand in the output where the trace says; the rest is the target's own."""
    rounds, tokens = completions.rounds(), completions.tokens()
    for completion in completions:
        start, output = len(completion.prompt_token_ids), np.array(completion.token_ids)
        own = rounds[rounds.request_id == completion.request_id]
        kept = tokens[(tokens.request_id == completion.request_id) & tokens.accepted]
        rebuilt = np.full(len(output), -1)
        rebuilt[kept.position - start] = kept.token_id
        added = (own.context_length + own.emitted - 1)[own.emitted > own.accepted] - start
        assert np.flatnonzero(rebuilt < 0).tolist() == added.tolist()
        rebuilt[added] = output[added]
        assert rebuilt.tolist() == output.tolist()
        emitted = tokens[(tokens.request_id == completion.request_id) & tokens.emitted]
        assert emitted.token_id.tolist() == output.tolist()
        assert emitted.output_position.tolist() == list(range(len(output)))
        assert (emitted.position - emitted.output_position == start).all()
        kinds = [Origin[kind.upper()] for kind in emitted.kind.replace("drafted", "accepted")]
        assert kinds == list(completion.origins)
        is_accepted = [origin == Origin.ACCEPTED for origin in completion.origins]
        assert np.flatnonzero(is_accepted).tolist() == (kept.position - start).tolist()


def assert_scores_are_right(completions, params, target, draft=None):
    """Distributions of every token, by feeding the model the whole text that stands before it."""
    tokens = completions.tokens()
    assert len(tokens) > 50
    assert 0 < tokens.accepted.sum() < (tokens.kind == "drafted").sum()
    contexts, of_request = contexts_of(completions)
    prompts = [len(c.prompt_token_ids) for c in completions]
    settings = [(params[index], prompts[index]) for index in of_request]
    _assert_distributions(tokens, contexts, settings, target, draft)


def contexts_of(completions):
    """For each row of `tokens()`: the tokens before it, and the index of its request."""
    rounds, tokens = completions.rounds(), completions.tokens()
    contexts, of_request = [], []
    whole = {c.request_id: c.prompt_token_ids + c.token_ids for c in completions}
    which = {c.request_id: index for index, c in enumerate(completions)}
    lengths = {(r.request_id, r.round): r.context_length for r in rounds.itertuples()}
    seen = {}
    for row in tokens.itertuples():
        key = (row.request_id, row.round)
        path = seen[*key, row.parent] if row.parent >= 0 else ()
        if row.node >= 0:
            seen[*key, row.node] = (*path, row.token_id)
        assert row.depth == len(path) + 1
        assert row.position == lengths[key] + len(path)
        contexts.append(whole[row.request_id][: lengths[key]] + path)
        of_request.append(which[row.request_id])
    return contexts, of_request


def _assert_distributions(tokens, contexts, settings, target, draft):
    logits = scores_after(target, contexts)
    if draft is not None:
        q_logits = scores_after(draft, contexts)
    for n, row in enumerate(tokens.itertuples()):
        scores, log_p = distribution(logits[n], contexts[n], *settings[n])
        score = scores[row.token_id]
        lowest, highest = np.sum(scores > score + 1e-3), np.sum(scores > score - 1e-3)
        assert lowest < row.rank <= highest + 1 or row.rank == 1 + lowest
        np.testing.assert_allclose(row.logprob_p, log_p[row.token_id], atol=2e-3)
        p = np.exp(log_p)
        np.testing.assert_allclose(row.entropy_p, entropy(p), atol=5e-3)
        if row.kind != "drafted":
            assert np.isnan([row.logprob_q, row.entropy_q, row.overlap]).all()
            continue
        if draft is None:
            assert np.isnan(row.logprob_q)
            assert row.entropy_q == 0
            np.testing.assert_allclose(row.overlap, p[row.token_id], atol=2e-3)
            continue
        _, log_q = distribution(q_logits[n], contexts[n], *settings[n])
        q = np.exp(log_q)
        np.testing.assert_allclose(row.logprob_q, log_q[row.token_id], atol=2e-3)
        np.testing.assert_allclose(row.entropy_q, entropy(q), atol=5e-3)
        np.testing.assert_allclose(row.overlap, np.minimum(p, q).sum(), atol=2e-3)


def scores_after(model, contexts):
    """`[M, V]`, the model's logits after each context, read as one long prompt without a cache that
    anything else has written to."""
    longest = 64
    assert max(map(len, contexts)) <= longest
    tokens = np.zeros((len(contexts), longest), np.int32)
    for row, context in enumerate(contexts):
        tokens[row, : len(context)] = context
    index = np.broadcast_to(np.arange(longest, dtype=np.int32), tokens.shape)
    last = np.array([len(context) - 1 for context in contexts])

    @jax.jit
    def read(tokens, index, last):
        cache = model.init_cache(len(tokens), MAX_LENGTH)
        window = Window(start=index[:, 0], positions=index, slots=index)
        hidden, _ = model.forward(model.params, tokens, window, cache)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        return model.logits(model.params, hidden)[:, 0]

    return np.asarray(read(tokens, index, last), np.float64)


def distribution(logits, context, params, prompt_length):
    """Penalised scores, and the logarithm of the distribution that is sampled from, in float64."""
    scores = logits.copy()
    for token in set(context):
        score = scores[token]
        penalty = params.repetition_penalty
        scores[token] = score / penalty if score > 0 else score * penalty
    scaled = scores / (params.temperature or 1)
    if params.top_k:
        scaled[scaled < np.sort(scaled)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-scaled)
        mass = np.cumsum(np.exp(scaled - scaled.max())[order])
        num_kept = np.searchsorted(mass, params.top_p * mass[-1]) + 1
        scaled[order[num_kept:]] = -np.inf
    return scores, scaled - scaled.max() - np.log(np.sum(np.exp(scaled - scaled.max())))


def entropy(p):
    return -sum(x * np.log(x) for x in p if x > 0)


@pytest.fixture(scope="module")
def engines(target, draft):
    """An engine for every verifier, by its class, with a draft model; rows change batch_size."""
    verifiers = (jaxspec.Coupled, jaxspec.Rejection, jaxspec.Block, jaxspec.Typical)
    return {
        verifier: make_engine(target, jaxspec.DraftModel(draft), verifier=verifier())
        for verifier in verifiers
    }


@pytest.fixture(scope="module")
def greedy(engines):
    return engines[jaxspec.Coupled].generate(toy.prompts(LENGTHS), GREEDY)


@pytest.mark.parametrize(
    "verifier",
    [
        jaxspec.Rejection,
        pytest.param(jaxspec.Coupled, marks=pytest.mark.slow),
        pytest.param(jaxspec.Block, marks=pytest.mark.slow),
        pytest.param(jaxspec.Typical, marks=pytest.mark.slow),
    ],
)
def test_traces_of_sampled_rows_under_every_verifier(engines, target, draft, verifier):
    completions = engines[verifier].generate(toy.prompts(LENGTHS), SAMPLED)
    assert_sums_equal_counters(completions)
    assert_outputs_are_rebuilt(completions)
    assert_scores_are_right(completions, SAMPLED, target, draft)
    assert np.isneginf(completions.tokens().logprob_p).any()  # top-k and top-p removed some


@pytest.mark.parametrize(
    "verifier", [pytest.param(jaxspec.Coupled, marks=pytest.mark.slow), jaxspec.Rejection]
)
def test_the_target_wanted_what_plain_decoding_draws(engines, target, verifier):
    """With the seed of the request, also after rejected drafts; under other verifiers and in greedy
    rows the arg max of p."""
    completions = engines[verifier].generate(toy.prompts(LENGTHS), SAMPLED)
    tokens = completions.tokens()
    is_coupled = verifier is jaxspec.Coupled
    contexts, of_request = contexts_of(completions)
    params = [dataclasses.replace(SAMPLED[index], max_tokens=1) for index in of_request]
    if not is_coupled:
        params = [dataclasses.replace(each, temperature=0.0) for each in params]
    plain = make_engine(target, None, batch_size=7, draft_length=None, trace=None)
    wanted = [one.token_ids[0] for one in plain.generate(list(map(list, contexts)), params)]
    assert tokens.target_token_id.tolist() == wanted
    judged = tokens[tokens.reached]
    is_wanted = judged.token_id == judged.target_token_id
    assert (is_wanted == judged.accepted).all() == is_coupled
    assert (tokens.target_token_id != tokens.token_id)[~tokens.reached].any()
    own = tokens[tokens.kind != "drafted"]
    assert (own.token_id == own.target_token_id).all() == is_coupled


def test_traces_of_greedy_rows(greedy, target, draft):
    assert_sums_equal_counters(greedy)
    assert_outputs_are_rebuilt(greedy)
    assert_scores_are_right(greedy, GREEDY, target, draft)
    tokens = greedy.tokens()
    reached = tokens[tokens.reached]
    assert reached.accepted.tolist() == (reached["rank"] == 1).tolist()
    assert (reached.logprob_q < 0).all()


def test_rows_that_share_a_round_were_in_seats_together(greedy):
    seated = greedy.rounds().groupby("engine_round").size()
    assert seated.max() == 3
    assert seated.index.tolist() == list(range(seated.index[0], seated.index[-1] + 1))


@pytest.fixture(scope="module")
def plain(target):
    engine = make_engine(target, None, batch_size=7, draft_length=1, trace="tokens")
    return engine.generate(toy.prompts(LENGTHS), [SamplingParams(max_tokens=40)] * len(LENGTHS))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["oracle", "tree"])
def test_deterministic_drafters_and_trees(target, plain, drafter):
    prompts = toy.prompts(LENGTHS)
    settings = {"scheduler": jaxspec.Static(), "batch_size": len(LENGTHS)}
    table = tuple(map(tuple, toy.sequences(plain)))
    made = {
        "oracle": lambda: jaxspec.Oracle(table, acceptance=0.6),
        "tree": lambda: toy.TreeOracle(table=table, right_until=30),
    }[drafter]()
    engine = make_engine(target, made, draft_length=6, **settings)
    completions = engine.generate(prompts, GREEDY)
    for completion, true in zip(completions, plain, strict=True):
        assert completion.token_ids == true.token_ids[: len(completion.token_ids)]
    assert_sums_equal_counters(completions)
    assert_outputs_are_rebuilt(completions)
    assert_scores_are_right(completions, GREEDY, target)
    rounds, tokens = completions.rounds(), completions.tokens()
    if drafter == "tree":
        tokens = tokens[tokens.kind == "drafted"]
        assert (rounds.draft_depth[rounds.drafted == 6] == 3).all()
        assert tokens.parent[tokens.node == 5].unique().tolist() == [3]
        siblings = tokens[tokens.reached].groupby(["request_id", "round", "depth"]).size()
        assert siblings.unique().tolist() == [2]  # both siblings of a kept node were judged
    else:
        assert (rounds.draft_depth == rounds.drafted).all()


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [jaxspec.Coupled, jaxspec.Rejection])
def test_recording_changes_no_output(engines, verifier):
    prompts, recording = toy.prompts(LENGTHS), engines[verifier]
    silent = make_engine(
        recording.target, recording.drafter, verifier=recording.verifier, trace=None
    )
    for params in (SAMPLED, GREEDY):
        pairs = zip(
            recording.generate(prompts, params), silent.generate(prompts, params), strict=True
        )
        for recorded, unrecorded in pairs:
            assert unrecorded.token_ids == recorded.token_ids
            assert unrecorded.origins == recorded.origins
            assert unrecorded.acceptance == recorded.acceptance
            assert unrecorded.trace is None


@pytest.mark.slow
def test_stop_tokens_cut_rounds_and_what_is_behind_was_not_judged(target, plain):
    prompts = toy.prompts(LENGTHS)[1:3]
    oracle = jaxspec.Oracle(toy.sequences(plain))
    engine = make_engine(target, oracle, batch_size=2, scheduler=jaxspec.Static())
    for at in range(1, 6):
        stop = plain[1].token_ids[at]
        params = SamplingParams(max_tokens=30, stop_token_ids=(stop,))
        completions = engine.generate(prompts, params)
        assert completions[0].finish_reason == "stop"
        assert_sums_equal_counters(completions)
        assert_outputs_are_rebuilt(completions)
        tokens = completions.tokens()
        assert (tokens.reached == tokens.accepted).all()  # right drafts: none is rejected


def test_the_probability_of_acceptance_is_the_overlap(engines):
    """Rejection sampling keeps a token of q with probability sum(min(p, q)) (2211.17192, 3.1)."""
    params = [SamplingParams(max_tokens=60, temperature=1.0, seed=i) for i in range(24)]
    tokens = engines[jaxspec.Rejection].generate(toy.prompts([5] * 24), params).tokens()
    reached = tokens[tokens.reached]
    variance = (reached.overlap * (1 - reached.overlap)).sum()
    deviation = (reached.accepted - reached.overlap).sum() / np.sqrt(variance)
    assert len(reached) > 500
    assert abs(deviation) < 4
    # With rejected tokens dropped the same figure is far off.
    kept = reached[reached.accepted]
    assert (kept.accepted - kept.overlap).sum() / np.sqrt(variance) > 4


def _one_round_late(trace):
    """As if every round had been written one place too far."""
    return jax.tree.map(lambda values: np.roll(values, 1, axis=0), trace)


def _without_rejected(trace):
    """Forgets drafted tokens that were not accepted."""
    return trace.replace(rounds=trace.rounds.replace(drafted=trace.rounds.accepted))


def _scores_of_the_next_node(trace):
    """Takes each node's probability from the scores after it."""
    scores = np.roll(trace.tokens.logprob_p, -1, axis=1)
    return trace.replace(tokens=trace.tokens.replace(logprob_p=scores))


def _accepted_beside_rejected(trace):
    """Marks the wrong nodes as accepted, as many of them."""
    is_accepted = np.roll(trace.tokens.is_accepted, 1, axis=1)
    return trace.replace(tokens=trace.tokens.replace(is_accepted=is_accepted))


@pytest.mark.parametrize(
    "fault",
    [_one_round_late, _without_rejected, _scores_of_the_next_node, _accepted_beside_rejected],
)
def test_a_wrong_trace_is_caught(greedy, target, draft, fault):
    wrong = Completions(dataclasses.replace(c, trace=fault(c.trace)) for c in greedy)
    caught = []
    for check in (
        assert_sums_equal_counters,
        assert_outputs_are_rebuilt,
        lambda completions: assert_scores_are_right(completions, GREEDY, target, draft),
    ):
        try:
            check(wrong)
        except AssertionError:
            caught.append(check)
    assert caught


@pytest.mark.slow
def test_a_loop_that_writes_to_the_wrong_round_is_caught(target, draft, monkeypatch):
    write = telemetry._write

    def write_late(state, new, num_emitted):
        counts = state.counts.replace(num_rounds=state.counts.num_rounds + 1)
        return write(state.replace(counts=counts), new, num_emitted)

    monkeypatch.setattr(telemetry, "_write", write_late)
    engine = make_engine(target, jaxspec.DraftModel(draft))
    completions = engine.generate(toy.prompts(LENGTHS), SAMPLED)
    with pytest.raises(AssertionError):
        assert_sums_equal_counters(completions)


def test_nothing_is_recorded_unless_asked_for(target, draft, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something was recorded")

    monkeypatch.setattr(recorders, "record_round", refuse)
    for drafter in (jaxspec.DraftModel(draft), None):
        settings = {} if drafter else {"draft_length": 1}
        engine = make_engine(target, drafter, trace=None, **settings)
        state = engine.executor.eval_state()
        assert state.trace is None
        engine.executor.lower_run()
        recording = make_engine(target, drafter, trace="rounds", **settings)
        with pytest.raises(AssertionError, match="something was recorded"):
            recording.executor.lower_run()


@pytest.mark.parametrize("level", telemetry.LEVELS)
def test_bytes_are_as_documented(target, level):
    engine = make_engine(target, jaxspec.NGram(), trace=level)
    state = engine.executor.eval_state()
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.trace))
    per_slot = {"rounds": 24, "tokens": 24 + 23 * 5, "distributions": 24 + (23 + 12) * 5}[level]
    assert num_bytes == engine.num_residents * MAX_LENGTH * per_slot


@pytest.mark.slow
def test_a_row_has_room_for_every_round_it_can_take(target):
    [prompt] = toy.prompts((1,))
    engine = make_engine(target, toy.WrongDrafter(token=60), batch_size=1, trace="tokens")
    [completion] = completions = engine.generate([prompt], SamplingParams(max_tokens=1000))
    assert completion.stop_reason == "max_length"
    rounds = completions.rounds()
    assert len(rounds) == len(completion.token_ids) > MAX_LENGTH - 10
    assert_sums_equal_counters(completions)


def test_plain_decoding_has_one_token_a_round(plain):
    rounds, tokens = plain[:2].rounds(), plain.tokens()
    assert rounds.context_length.tolist() == [*range(3, 43), *range(20, 60)]
    assert (rounds.emitted == 1).all()
    assert rounds.drafted.sum() == 0
    assert set(tokens.kind) == {"plain"}
    assert_outputs_are_rebuilt(plain)
    assert (tokens.target_token_id == tokens.token_id).all()
    assert (tokens["rank"] == 1).all()
    assert not (tokens.reached | tokens.accepted).any()
    assert len(Completions().rounds()) == 0


def test_columns_and_their_types(greedy):
    rounds, tokens = greedy.rounds(), greedy.tokens()
    for frame in (rounds, tokens):
        for name, dtype in frame.dtypes.items():
            if name in ("logprob_p", "logprob_q", "entropy_p", "entropy_q", "overlap"):
                assert dtype == np.float32, name
            elif name in ("accepted", "emitted", "reached") and frame is tokens:
                assert dtype == np.bool_, name
            elif name not in ("request_id", "kind"):
                assert dtype == np.int32, name
    assert len(greedy[1:3].rounds()) == sum(c.acceptance.num_rounds for c in greedy[1:3])


def test_texts_of_tokens(greedy):
    """As they stand after other text; a part of a character is shown as such."""
    text = tiny.tokenizer()
    for frame in (greedy.tokens(tokenizer=text), greedy[:0].tokens(tokenizer=text)):
        for name, of in (("token", "token_id"), ("target", "target_token_id")):
            expected = [text.hf.decode([token]) for token in frame[of]]
            assert frame[name].tolist() == expected
    assert text.texts([tiny.BOS, -1]) == ["<s>", ""]
    assert "token" not in greedy.tokens()


def test_columns_of_the_caller(engines):
    params = [SamplingParams(temperature=1.0, n=n, seed=5, max_tokens=4) for n in (2, 1, 3)]
    completions = engines[jaxspec.Coupled].generate(toy.prompts((3, 4, 5)), params)
    frame = completions.rounds(domain=["a", "b", "c"], number=range(6))
    of_request = frame.groupby("request_id", sort=False).first()
    assert of_request.domain.tolist() == ["a", "a", "b", "c", "c", "c"]
    assert of_request.number.tolist() == list(range(6))
    assert of_request["index"].tolist() == [0, 1, 0, 0, 1, 2]
    with pytest.raises(SettingError, match=r"'domain' was given 2 values.*6, one per comp.*or 3"):
        completions.rounds(domain=["a", "b"])
    for value in (True, "abc"):
        with pytest.raises(SettingError, match=r"'text' was given .*; it is a list of values"):
            completions.rounds(text=value)  # pyright: ignore
    with pytest.raises(SettingError, match="'round' was given, and the frame has one"):
        completions.rounds(round=range(6))


def test_what_is_missing_is_said(target, greedy, monkeypatch):
    with pytest.raises(SettingError, match="trace 'all' was given"):
        make_engine(target, jaxspec.NGram(), trace="all")

    def with_trace(trace):
        return Completions(dataclasses.replace(c, trace=trace(c)) for c in greedy)

    with pytest.raises(SettingError, match=r"7 of 7 completions have no trace"):
        with_trace(lambda c: None).rounds()
    with pytest.raises(SettingError, match="holds rounds only"):
        with_trace(lambda c: c.trace.replace(tokens=None)).tokens()

    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SettingError, match=r"pandas is needed for frames.*\[analysis\]"):
        greedy.rounds()


OF_SESSIONS = (
    "num_resident_tokens",
    "num_parked_tokens",
    "parked_bytes",
    "num_reused_tokens",
    "num_reread_tokens",
    "num_dropped_tokens",
)


def test_metrics_count_the_engines_life(target):
    engine = make_engine(target, jaxspec.NGram(), trace=None)
    assert engine.metrics()["num_requests"] == 0
    prompts = toy.prompts(LENGTHS)
    first, second = engine.generate(prompts, GREEDY), engine.generate(prompts, SAMPLED)
    total = Acceptance.total([c.acceptance for c in (*first, *second)])
    metrics = engine.metrics()
    latencies = metrics.pop("latencies")  # see tests/engine/test_times.py
    assert sum(latencies["e2e_latency_s"]["counts"]) == 2 * len(prompts)
    reasons = collections.Counter(one.finish_reason for one in (*first, *second))
    assert metrics == {
        "num_running": 0,
        "num_waiting": 0,
        "num_prompt_tokens": 2 * sum(map(len, prompts)),
        "num_by_finish_reason": reasons,
        "num_requests": 2 * len(prompts),
        "num_rounds": total.num_rounds,
        "num_emitted_tokens": total.num_emitted_tokens,
        "num_drafts": total.num_drafts,
        "num_draft_tokens": total.num_draft_tokens,
        "num_accepted_tokens": total.num_accepted_tokens,
        "num_accepted_tokens_per_pos": list(total.num_accepted_tokens_per_pos),
        **dict.fromkeys(OF_SESSIONS, 0),
    }
    requests = jaxspec.requests.requests.make_requests(prompts, GREEDY, target, longest=64)
    run = engine.run(requests)
    next(run)
    during = engine.metrics()
    run.close()  # rows that no one finishes still count for what they did
    after = engine.metrics()
    assert metrics["num_rounds"] < during["num_rounds"] == after["num_rounds"]
    assert during["num_requests"] > metrics["num_requests"]


def test_metrics_of_one_update_are_seen_together():
    metrics = Metrics()
    one = Acceptance(num_rounds=1, num_drafts=1, num_accepted_tokens_per_pos=(1, 0))
    torn, is_done = [], threading.Event()

    def look():
        while not is_done.is_set():
            seen = metrics.snapshot()
            if seen["num_rounds"] != seen["num_drafts"] or seen["num_rounds"] % 5:
                torn.append(seen)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(300):
        metrics.update(ended=[one] * 5, running=[one] * 10)
    is_done.set()
    thread.join()
    assert not torn
    assert metrics.snapshot()["num_rounds"] == 300 * 5 + 10
    assert metrics.snapshot()["num_accepted_tokens_per_pos"] == [1510, 0]
    metrics.abandon()
    metrics.update(ended=[], running=[])
    assert metrics.snapshot()["num_rounds"] == 1510
