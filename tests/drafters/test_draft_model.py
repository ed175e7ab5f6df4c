"""The draft model's cache: kept between rounds, caught up, and never wrong about what it has
seen."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec.cache import pages as kv
from jaxspec.decode.state import batch_view
from jaxspec.drafters import draft_model
from jaxspec.engine.engine import Engine
from jaxspec.errors import JaxspecWarning, ModelError, SettingError
from jaxspec.models.prefill import prefill_chunks
from jaxspec.models.tokenizer import TextTokenizer
from jaxspec.requests.requests import make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.testing import check_drafter


@pytest.fixture(scope="module")
def models():
    return toy.model(), toy.model(seed=9, width=24, num_layers=1)


def seen_kv(state, draft):
    """The draft's KV of every seen token, next to a fresh prefill of the same tokens."""
    drafter = state.drafter
    fresh = draft.init_cache(state.tokens.shape[0], state.cache.capacity)
    for row in range(state.tokens.shape[0]):
        fresh, *_ = prefill_chunks(
            draft,
            draft.params,
            fresh,
            state.tokens,
            rows=jnp.array([row], jnp.int32),
            starts=jnp.array([0], jnp.int32),
            stops=drafter.num_seen[row][None],
            chunk=128,
        )
    slots = jnp.broadcast_to(jnp.arange(128, dtype=jnp.int32), (state.tokens.shape[0], 128))
    is_seen = np.arange(128) < np.asarray(drafter.num_seen)[:, None]
    for cache in (drafter.cache, fresh):
        k, v = kv.read_slots(cache.layers[0], cache.table, slots, jnp.float32)
        yield np.where(is_seen[..., None, None], np.stack([k, v]), 0)


def admit(engine, prompts, params, *, draft_length):
    """Prefills prompt i in row i."""
    requests = make_requests(prompts, params, engine.target, longest=100)
    for row, request in enumerate(requests):
        engine.executor.admit_and_prefill(row, request, draft_length=draft_length, arrival=row)


def run_poisoned(engine):
    """One round, with NaN in the slots that the draft model has not read."""
    state = engine.executor.state
    poisoned = kv.poison_uncommitted(state.drafter.cache, state.drafter.num_seen)
    engine.executor.state = state.replace(drafter=state.drafter.replace(cache=poisoned))
    engine.executor.run(1)


@pytest.mark.parametrize("min_confidence", [0.0, 0.25])
def test_the_cache_is_kept_and_equals_a_fresh_prefill_after_any_rollbacks(models, min_confidence):
    target, draft = models
    engine = Engine(
        target,
        jaxspec.DraftModel(draft, min_confidence),
        scheduler=jaxspec.Static(),
        draft_length=4,
        batch_size=3,
        max_length=128,
        rounds_per_sync=1,
    )
    admit(engine, toy.prompts((1, 9, 30)), SamplingParams(max_tokens=40), draft_length=4)
    draft_lengths = set()
    for _ in range(12):
        run_poisoned(engine)
        draft_lengths.add(tuple(np.asarray(engine.executor.state.drafter.num_steps).tolist()))
        assert set(engine.executor.lags().tolist()) <= {0, 1}  # one after full acceptance
        kept, fresh = seen_kv(engine.executor.state, draft)
        np.testing.assert_allclose(kept, fresh, atol=1e-4)
    assert any(len(set(lengths)) > 1 for lengths in draft_lengths) == (min_confidence > 0)
    # Sabotage: slots that were not read are seen, even without the NaN in them.
    drafter = engine.executor.state.drafter
    stale = engine.executor.state.replace(drafter=drafter.replace(num_seen=drafter.num_seen + 3))
    kept, fresh = seen_kv(stale, draft)
    assert np.abs(np.nan_to_num(kept) - fresh).max() > 1e-2


# n-grams first

# Outputs of few tokens repeat themselves, so copied drafts are accepted.
REPEATING = SamplingParams(max_tokens=90, allowed_token_ids=[3, 4])


class ForgetsCopied(jaxspec.DraftModel):
    """Takes what n-grams drafted as read."""

    def commit(self, shape, params, state, rows, info):
        state = super().commit(shape, params, state, rows, info)
        return state.replace(num_seen=jnp.maximum(state.num_seen, rows.num_committed - 1))


@pytest.mark.parametrize("kind", [jaxspec.DraftModel, ForgetsCopied])
def test_what_n_grams_drafted_is_read_too(models, kind):
    target, draft = models
    engine = Engine(
        target,
        kind(draft, prompt_lookup_min=2),
        scheduler=jaxspec.Static(),
        draft_length=4,
        batch_size=3,
        max_length=128,
        rounds_per_sync=1,
    )
    admit(engine, toy.prompts((1, 9, 30)), REPEATING, draft_length=4)
    lags, is_right = set(), True
    for _ in range(12):
        run_poisoned(engine)
        lags |= set(engine.executor.lags().tolist())
        kept, fresh = seen_kv(engine.executor.state, draft)
        is_right &= np.allclose(kept, fresh, atol=1e-4)
    assert is_right == (kind is jaxspec.DraftModel)
    if is_right:
        assert lags <= set(range(5))
        assert max(lags) > 1  # copied tokens were accepted


@pytest.mark.slow
def test_the_whole_battery_with_n_grams(models):
    target, draft = models
    check_drafter(jaxspec.DraftModel(draft, prompt_lookup_min=2), target).assert_ok()


def test_the_draft_model_drafts_where_n_grams_find_nothing(models):
    target, draft = models
    drafter = jaxspec.DraftModel(draft, prompt_lookup_min=2)
    assert drafter.name == f"ngram:2-4+draft_model:{draft.name}"
    settings = {"draft_length": 4, "batch_size": 3, "max_length": 128}
    prompts = toy.prompts((2, 9, 30, 5, 4, 6))
    engine = Engine(target, drafter, trace="tokens", **settings)
    params = dataclasses.replace(REPEATING, allowed_token_ids=[3, 4, 5])
    found = engine.generate(prompts, params)
    plain = engine.generate(prompts, params, speculate=False)
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]
    contexts, drafts, num_copied = [], [], 0
    for done in found:
        text = [*done.prompt_token_ids, *done.token_ids]
        rounds, tokens = done.trace.rounds, done.trace.tokens
        for index, drafted in enumerate(rounds.drafted):
            length = int(rounds.context_length[index])
            draft_of_round = tokens.token_id[index][1:][:drafted].tolist()
            if ngram := toy.copied(text[:length], 4):
                assert draft_of_round == ngram[:drafted]
                num_copied += 1
            elif drafted == 4:
                contexts.append(text[:length])
                drafts.append(draft_of_round)
    assert num_copied > 5
    assert len(drafts) > 5
    # The draft model's own continuation.
    own = dataclasses.replace(params, max_tokens=4)
    expected = Engine(draft, batch_size=3, max_length=128).generate(contexts, own)
    assert drafts == [list(done.token_ids) for done in expected]


def test_a_drafter_that_fell_behind_drafts_nothing_until_it_has_caught_up(models):
    target, _ = models
    drafter = jaxspec.DraftModel(target)  # always right, once it has read the context
    engine = Engine(
        target,
        drafter,
        scheduler=jaxspec.Static(),
        draft_length=4,
        batch_size=1,
        max_length=256,
        rounds_per_sync=3,
    )
    prompt = toy.prompts((50,))[0]
    truth = Engine(target, batch_size=1, max_length=256).generate(
        [prompt], SamplingParams(max_tokens=60)
    )
    admit(engine, [prompt], SamplingParams(max_tokens=60), draft_length=0)  # decodes plainly
    for _ in range(10):
        engine.executor.run(2)
    engine.executor.set_draft_limits([4])
    state = engine.executor.state
    rows = batch_view(state)
    assert int(drafter.lag(state.drafter, rows)[0]) == 20
    draft, _ = drafter.propose(engine.shape, drafter.params, state.drafter, rows)
    assert int(draft.num_valid[0]) == 0

    assert engine.executor.catch_up({0: 20}) == 2  # chunks of 16
    engine.executor.run(100)
    state = engine.executor.state
    assert tuple(np.asarray(state.tokens[0, 50:110])) == truth[0].token_ids
    counts = state.counts
    assert int(counts.num_accepted_tokens[0]) == int(counts.num_draft_tokens[0]) > 0


@pytest.fixture(scope="module")
def mid_decode(models):
    """Shape and state of four rows, greedy and sampled, that have decoded for a while; drafts are
    wanted with the distribution of every row."""
    target, draft = models
    engine = Engine(
        target,
        jaxspec.DraftModel(draft),
        verifier=jaxspec.Rejection(),
        scheduler=jaxspec.Static(),
        draft_length=5,
        batch_size=4,
        max_length=128,
    )
    params = [
        SamplingParams(max_tokens=30, temperature=temperature, top_k=top_k, seed=seed)
        for seed, (temperature, top_k) in enumerate([(0, 0), (0.7, 0), (1.2, 5), (1, 0)])
    ]
    admit(engine, toy.prompts((5, 9, 30, 70)), params, draft_length=5)
    engine.executor.run(4)
    state = engine.executor.state
    return dataclasses.replace(engine.shape, needs_greedy_probs=True), state


def propose(drafter, shape, state, **changes):
    """The draft and the drafter's state after it."""
    rows = batch_view(state).replace(**changes)
    return jax.jit(lambda *given: drafter.propose(shape, *given))(
        drafter.params, state.drafter, rows
    )


def ends_behind(q, tokens, min_confidence):
    """Draft lengths `[B]` by the distributions `[B, N, V]` and tokens `[B, N]` of whole drafts."""
    unsure = np.take_along_axis(q, tokens[..., None], axis=2)[..., 0] < min_confidence
    return np.where(unsure.any(axis=1), unsure.argmax(axis=1) + 1, tokens.shape[1])


def test_a_draft_ends_behind_the_first_token_below_min_confidence(models, mid_decode):
    shape, state = mid_decode
    whole, _ = propose(jaxspec.DraftModel(models[1]), shape, state)
    seen = set()
    for min_confidence in (0.05, 0.1, 0.2):
        draft, after = propose(jaxspec.DraftModel(models[1], min_confidence), shape, state)
        length = np.asarray(draft.num_valid)
        expected = ends_behind(np.asarray(whole.q), np.asarray(whole.tokens), min_confidence)
        np.testing.assert_array_equal(length, expected)
        for row in range(4):
            for ours, theirs in ((draft.tokens, whole.tokens), (draft.q, whole.q)):
                np.testing.assert_array_equal(ours[row, : length[row]], theirs[row, : length[row]])
        # The loop ended with the longest draft, and a row has read what its own draft needed.
        assert not np.any(draft.q[:, length.max() :])
        num_lagging = np.sum(np.asarray(state.drafter.num_seen < state.num_committed - 1))
        num_prefilled = int(after.num_positions - state.drafter.num_positions)
        assert num_prefilled == length.sum() + num_lagging
        seen |= set(length.tolist())
    assert len(seen) >= 3


def test_steps_that_no_row_wants_change_nothing(models, mid_decode):
    """On a GPU every step is taken, whatever rows want."""
    shape, state = mid_decode
    drafter = jaxspec.DraftModel(models[1])
    limits = jnp.array([0, 2, 1, 0], jnp.int32)
    for draft_limit in (limits, jnp.zeros_like(limits), batch_view(state).draft_limit):
        draft, after = propose(drafter, shape, state, draft_limit=draft_limit)
        on_gpu = dataclasses.replace(shape, loops_run_on_host=True)
        static, static_after = propose(drafter, on_gpu, state, draft_limit=draft_limit)
        np.testing.assert_array_equal(draft.num_valid, static.num_valid)
        np.testing.assert_array_equal(after.num_positions, static_after.num_positions)
        for row, length in enumerate(np.asarray(draft.num_valid)):
            for one, other in ((draft.tokens, static.tokens), (draft.q, static.q)):
                np.testing.assert_array_equal(one[row, :length], other[row, :length])
        jax.tree.map(np.testing.assert_array_equal, after.cache, static_after.cache)


@pytest.mark.parametrize("min_confidence", [0.0, 0.25])
def test_on_a_gpu_steps_have_a_known_number(models, mid_decode, min_confidence):
    """But for drafts that end early, which is what the loop's end is for."""
    shape, state = mid_decode
    drafter = jaxspec.DraftModel(models[1], min_confidence)
    rows = batch_view(state)

    def loops(shape):
        propose = functools.partial(drafter.propose, shape)
        traced = jax.make_jaxpr(propose)(drafter.params, state.drafter, rows)
        return {each.primitive.name for each in traced.eqns} & {"while", "scan"}

    assert loops(shape) == {"while"}
    on_gpu = dataclasses.replace(shape, loops_run_on_host=True)
    assert loops(on_gpu) == ({"while"} if min_confidence else {"scan"})


def draft_of_a_row(drafter, shape, state, row, *, is_alone):
    limit = batch_view(state).draft_limit
    limit = jnp.where(jnp.arange(4) == row, limit, 0) if is_alone else limit
    draft, _ = propose(drafter, shape, state, draft_limit=limit)
    length = int(draft.num_valid[row])
    return np.asarray(draft.tokens)[row, :length].tolist(), np.asarray(draft.q)[row, :length]


def whole_batch_ends(num_valid, node, *, is_sure):
    """As soon as one row is not sure, no row drafts on."""
    return jnp.where(jnp.all(is_sure), num_valid, jnp.minimum(num_valid, node + 1))


@pytest.mark.parametrize("is_broken", [False, True])
def test_where_a_draft_ends_does_not_depend_on_neighbours(
    models, mid_decode, monkeypatch, is_broken
):
    if is_broken:
        monkeypatch.setattr(draft_model, "end_draft", whole_batch_ends)
    drafter = jaxspec.DraftModel(models[1], 0.2)
    same = []
    for row in range(4):
        alone, among = (
            draft_of_a_row(drafter, *mid_decode, row, is_alone=is_alone)
            for is_alone in (True, False)
        )
        same.append(alone[0] == among[0] and np.array_equal(alone[1], among[1]))
    assert all(same) != is_broken


@pytest.mark.parametrize("min_confidence", [-0.1, 1.5, float("nan")])
def test_a_confidence_that_is_no_probability_is_refused(models, min_confidence):
    with pytest.raises(SettingError, match="it is a probability"):
        jaxspec.DraftModel(models[1], min_confidence)


def test_vocabularies_padded_differently_are_handled(models):
    target, _ = models
    prompts = toy.prompts((5, 40))
    plain = Engine(target, batch_size=2, max_length=128).generate(
        prompts, SamplingParams(max_tokens=30)
    )
    for vocab_size in (toy.VOCAB - 9, toy.VOCAB + 9):
        draft = toy.model(seed=3, vocab_size=vocab_size, width=24)
        engine = Engine(target, jaxspec.DraftModel(draft), batch_size=2, max_length=128)
        drafted = engine.generate(prompts, SamplingParams(max_tokens=30))
        assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]


class Words:
    """A tokenizer as far as `DraftModel.check` looks."""

    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: index for index, word in enumerate(self.words)}


def with_words(model, *words):
    return dataclasses.replace(model, tokenizer=TextTokenizer(Words(*words), ()))


def test_different_tokenizers_are_refused_and_shorter_ones_are_not(models):
    target, draft = models
    target = with_words(target, "a", "b", "c")
    Engine(target, jaxspec.DraftModel(with_words(draft, "a", "b")), batch_size=1, max_length=128)
    with pytest.raises(ModelError, match=r"different tokenizers \(2 of 3 ids differ; id 1 is 'x'"):
        Engine(
            target,
            jaxspec.DraftModel(with_words(draft, "a", "x", "y")),
            batch_size=1,
            max_length=128,
        )


TREE = jaxspec.trees.BeamTree(2, 2, 4)


@pytest.mark.parametrize(
    ("temperature", "tree"),
    [
        (1.0, TREE),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((0.0, None), (0.0, TREE), (1.0, None))
        ),
    ],
)
def test_ids_of_different_tokens_are_never_drafted_and_the_output_stays(tree, temperature):
    target = toy.model()
    prompts, params = (
        toy.prompts((3, 9)),
        SamplingParams(max_tokens=30, temperature=temperature, seed=1),
    )
    shape = {"batch_size": 2, "max_length": 128}
    plain = [each.token_ids for each in Engine(target, **shape).generate(prompts, params)]
    emitted = collections.Counter(token for ids in plain for token in ids)
    # The target drafts for itself, except for its own commonest token.
    [(common, _)] = emitted.most_common(1)
    words = [f"w{index}" for index in range(target.vocab_size)]
    others = [*words[:common], "another", *words[common + 1 :]]
    target, draft = with_words(target, *words), with_words(target, *others)
    drafter = jaxspec.DraftModel(draft, tree=tree)
    with pytest.warns(JaxspecWarning, match=rf"1 of {len(words)} ids differ.*never drafted"):
        engine = Engine(target, drafter, draft_length=4, verify_length=5, trace="tokens", **shape)
    completions = engine.generate(prompts, params)
    assert [each.token_ids for each in completions] == plain
    drafted = completions.tokens()
    drafted = drafted[drafted["kind"] == "drafted"]
    assert drafted["accepted"].any()
    assert common not in set(drafted["token_id"])
