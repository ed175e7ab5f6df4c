"""Trees of a draft model: their shape against a search in Python, their KV against fresh
prefills, what is decoded with them against plain decoding."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxspec import DraftModel, Engine, SamplingParams
from jaxspec.cache import pages as kv
from jaxspec.drafters import draft_model
from jaxspec.drafters.draft_tree import GREEDY_SHARPNESS, SAMPLED_SHARPNESS
from jaxspec.drafters.oracle import Oracle
from jaxspec.engine.executor import make_executor
from jaxspec.errors import SettingError
from jaxspec.models.prefill import chain_window
from jaxspec.sampling import (
    Stream,
    filtered_logits,
    gumbel,
    neutral_sampling,
    position_keys,
    request_key,
    round_keys,
)
from jaxspec.testing import check_drafter
from jaxspec.trees import BeamTree, StaticTree
from jaxspec.types import BatchView, EngineShape, Verdict

MODEL = toy.model(seed=9, width=24, num_layers=1)
TEXTS = toy.prompts((5, 9, 30, 126))  # after the last one 128 slots have no room for six nodes
BEAM = BeamTree(width=3, depth=3, nodes=9)
STATIC = StaticTree(((0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,), (0, 1, 0)))
SHAPE = EngineShape(
    batch_size=4, max_length=128, verify_length=10, prefill_chunk=128, vocab_size=toy.VOCAB,
    tree_depth=3,
)  # fmt: skip
NARROW = dataclasses.replace(SHAPE, verify_length=4)  # has no room for more than a chain of BEAM's
PROBS = dataclasses.replace(SHAPE, is_noise_shared=False, needs_draft_probs=True)
SAMPLING = neutral_sampling(4).replace(
    temperature=jnp.asarray([0, 0.7, 1.2, 1], jnp.float32),
    top_k=jnp.asarray([0, 0, 2, 0], jnp.int32),
    key=jnp.asarray(np.stack([request_key(seed) for seed in range(4)])),
)


def rows_of(texts, *, limit=9, depth_limit=9):
    tokens = np.zeros((4, 128), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return BatchView(
        tokens=jnp.asarray(tokens),
        num_committed=jnp.asarray([len(text) for text in texts], jnp.int32),
        draft_limit=jnp.asarray(np.broadcast_to(np.asarray(limit, np.int32), (4,))),
        depth_limit=jnp.asarray(np.broadcast_to(np.asarray(depth_limit, np.int32), (4,))),
        stop_tokens=jnp.asarray(np.full((4, 2), -1, np.int32)),
        sampling=SAMPLING,
    )


@functools.cache
def compiled(tree, shape):
    drafter = DraftModel(MODEL, tree=tree)
    if shape.num_nodes < SHAPE.num_nodes:
        drafter = drafter.within(shape.num_nodes)

    def fresh(rows):
        """The state of a drafter that has read all but the newest token of each row, in a cache
        that is NaN elsewhere."""

        state, each = drafter.init(shape), jnp.arange(4, dtype=jnp.int32)
        return poisoned(drafter.catch_up(shape, drafter.params, state, rows, each))

    def poisoned(state):
        return state.replace(cache=kv.poison_uncommitted(state.cache, state.num_seen))

    def propose(state, rows):
        return drafter.propose(shape, drafter.params, state, rows)

    def commit(state, before, path, after):
        verdict = Verdict(num_accepted=jnp.sum(path >= 0, axis=1), path=path, next_token=path[:, 0])
        info = types.SimpleNamespace(rows=before, verdict=verdict)
        return poisoned(drafter.commit(shape, drafter.params, state, after, info))

    return jax.jit(fresh), jax.jit(propose), jax.jit(commit)


def drafted(tree, rows, shape=SHAPE):
    fresh, propose, _ = compiled(tree, shape)
    return propose(fresh(rows), rows)[0]


def paths_of(draft, row):
    """The tokens on the way to each node of a row; None for holes and what follows them."""
    paths = []
    for node in range(int(draft.num_valid[row])):
        parent, token = int(draft.parents[row, node]), int(draft.tokens[row, node])
        assert parent < node
        above = paths[parent] if parent >= 0 else ()
        assert above is not None or token < 0  # no node hangs from a hole
        paths.append(None if above is None or token < 0 else (*above, token))
    return paths


@jax.jit
def scores_of(rows, row, tokens, length, number):
    """Logits `[V]` after the first `length` tokens of `[1, 128]`, read as a chain; the scores with
    the position's noise, and with that of a node; the distribution."""
    window = chain_window(jnp.zeros((1,), jnp.int32), 128, stop=length[None])
    hidden, _ = MODEL.forward(MODEL.params, tokens, window, MODEL.init_cache(1, 128))
    logits = MODEL.logits(MODEL.params, hidden)[:, length - 1][:, None]
    rows = jax.tree.map(lambda values: values[row][None], rows)
    law = filtered_logits(logits, rows.sampling)
    shared = gumbel(position_keys(rows.sampling, length[None, None]), toy.VOCAB)
    own = gumbel(round_keys(rows, number[None, None], Stream.DRAFT), toy.VOCAB)
    return [each[0, 0] for each in (logits, law + shared, law + own, jax.nn.softmax(law))]


@functools.cache
def scores_after(row, path, number=None):
    """`[V]` by which the children of a path are chosen, and their distribution. `number` is that of
    the node in a draft plus one, where its noise is its own."""
    text = [*TEXTS[row], *path]
    tokens = np.asarray([text + [0] * (128 - len(text))], np.int32)
    logits, shared, own, law = jax.device_get(
        scores_of(rows_of(TEXTS), np.int32(row), tokens, np.int32(len(text)), np.int32(number or 0))
    )
    if SAMPLING.temperature[row] == 0:
        return logits, None
    return (shared if number is None else own), law


def beam_search(row, tree):
    """The paths of `tree`, best first."""
    pool, level = [], [((), 0.0)]
    sharpness = GREEDY_SHARPNESS if SAMPLING.temperature[row] == 0 else SAMPLED_SHARPNESS
    for _ in range(tree.depth):
        candidates = []
        for path, value in level:
            scores = sharpness * scores_after(row, path)[0]
            total = np.log(np.sum(np.exp(scores - scores.max()))) + scores.max()
            for token in np.argsort(-scores, kind="stable")[: tree.width]:
                if np.isfinite(scores[token]):
                    candidates.append(((*path, int(token)), value + scores[token] - total))
        pool += candidates
        level = sorted(candidates, key=lambda each: -each[1])[: tree.width]
    return [path for path, _ in sorted(pool, key=lambda each: -each[1])[: tree.nodes]]


@pytest.mark.parametrize(
    "tree", [BEAM, pytest.param(BeamTree(width=4, depth=1, nodes=3), marks=pytest.mark.system)]
)
def test_a_beam_tree_is_that_of_a_search(tree):
    draft = drafted(tree, rows_of(TEXTS))
    for row in range(4):
        paths = paths_of(draft, row)
        assert [path for path in paths if path] == beam_search(row, tree)
    assert draft.q is None
    assert draft.tokens.shape == (4, SHAPE.num_nodes)
    assert set(draft.num_valid.tolist()) == {tree.nodes}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SHAPE, PROBS])
def test_a_static_tree_has_the_highest_of_each_node(shape):
    draft = drafted(STATIC, rows_of(TEXTS), shape)
    np.testing.assert_array_equal(draft.parents[0, :8], STATIC.parents)
    for row in range(4):
        paths = paths_of(draft, row)
        for node, (parent, rank) in enumerate(zip(STATIC.parents, STATIC.rank, strict=True)):
            above = paths[parent] if parent >= 0 else ()
            if above is None:
                assert paths[node] is None
                continue
            number = None if shape.is_noise_shared else int(parent) + 1
            scores, law = scores_after(row, above, number)
            token = int(np.argsort(-scores, kind="stable")[rank])
            is_hole = not np.isfinite(scores[token])
            assert paths[node] == (None if is_hole else (*above, token))
            # Only top-k 2 leaves fewer tokens than the root has candidates.
            assert is_hole == (row == 2 and STATIC.choices[node] == (2,))
            if shape.needs_draft_probs and law is not None:
                np.testing.assert_allclose(draft.q[row, node], law, atol=1e-5)


@pytest.mark.system
@pytest.mark.parametrize("shape", [SHAPE, PROBS])
def test_with_first_candidates_alone_it_is_the_chain(shape):
    chain = StaticTree(tuple((0,) * depth for depth in range(1, 6)))
    rows = rows_of(TEXTS, limit=5)
    one, other = drafted(chain, rows, shape), drafted(None, rows, shape)
    # The cache of a chain has no room for all five after the last text.
    np.testing.assert_array_equal(one.tokens[:3, :5], other.tokens[:3, :5])
    np.testing.assert_array_equal(one.num_valid, other.num_valid)
    if shape.needs_draft_probs:
        np.testing.assert_allclose(one.q[1:3, :5], other.q[1:3, :5], atol=1e-5)


@pytest.mark.system
@pytest.mark.parametrize("tree", [BEAM, STATIC])
def test_a_row_drafts_as_much_as_it_wants_whatever_its_neighbours_want(tree):
    whole = drafted(tree, rows_of(TEXTS))
    mixed = drafted(tree, rows_of(TEXTS, limit=[2, 0, 9, 5], depth_limit=[9, 9, 9, 2]))
    assert mixed.num_valid.tolist() == [2, 0, tree.num_nodes, 5]
    for row in (0, 2):
        assert paths_of(mixed, row) == paths_of(whole, row)[: int(mixed.num_valid[row])]
    alone = drafted(tree, rows_of(TEXTS, limit=[0, 0, 0, 5], depth_limit=2))
    assert paths_of(alone, 3) == paths_of(mixed, 3)
    assert max(len(path) for path in paths_of(mixed, 3) if path) == 2
    wider = drafted(tree, rows_of(TEXTS), dataclasses.replace(SHAPE, verify_length=14))
    fewer = drafted(tree, rows_of(TEXTS), NARROW)
    assert paths_of(wider, 3) == paths_of(whole, 3)
    assert paths_of(fewer, 3) == paths_of(whole, 3)[:3]


@pytest.mark.slow
def test_a_narrow_window_gets_a_chain_without_the_work_of_a_tree():
    parts = make_executor(MODEL, DraftModel(MODEL, tree=BEAM), batch_size=4, max_length=128).parts
    narrow, narrower = parts.at(4), parts.at(6)
    assert (parts.drafter.is_chain, parts.shape.tree_depth) == (False, 3)
    assert (narrower.drafter.is_chain, narrower.shape.tree_depth) == (False, 3)
    assert (narrow.drafter.is_chain, narrow.shape.tree_depth) == (True, 0)
    chain, other = drafted(BEAM, rows_of(TEXTS), NARROW), drafted(None, rows_of(TEXTS), NARROW)
    np.testing.assert_array_equal(chain.tokens, other.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [BEAM, STATIC])
def test_after_any_verdict_it_drafts_as_if_it_had_read_the_text(tree):
    """Whole paths and parts of them; the last node's KV may be missing, every other round row 3
    rests, and every third one is narrow. What has not been seen is NaN."""
    fresh, propose, _ = compiled(tree, SHAPE)
    rng, texts, lags = np.random.default_rng(0), [list(text) for text in TEXTS], set()
    texts[3] = texts[3][:70]
    state = fresh(rows_of(texts))
    for round_index in range(8):
        rows = rows_of(texts, limit=[9, 9, 9, 9 * (round_index % 2)])
        _, propose_here, commit = compiled(tree, NARROW if round_index % 3 == 2 else SHAPE)
        draft, state = propose_here(state, rows)
        path = np.full((4, 3), -1, np.int32)
        for row, text in enumerate(texts):
            nodes = [node for node, way in enumerate(paths_of(draft, row)) if way]
            if not nodes:
                continue
            node = int(rng.choice(nodes))
            text += [*paths_of(draft, row)[node], int(rng.integers(toy.VOCAB))]
            way = []
            while node >= 0:
                way, node = [node, *way], int(draft.parents[row, node])
            path[row, : len(way)] = way
        after = rows_of(texts)
        state = commit(state, rows, jnp.asarray(path), after)
        lag = np.asarray(after.num_committed) - 1 - np.asarray(state.num_seen)
        lags |= set(lag.tolist())
        mine, theirs = propose(state, after)[0], propose(fresh(after), after)[0]
        for row in range(4):
            assert paths_of(mine, row) == paths_of(theirs, row)
    assert lags == {0, 1}


@pytest.fixture(scope="module")
def target():
    return toy.model(num_layers=1)


@pytest.fixture(scope="module")
def close(target):
    """A draft model that is right about half of the time."""
    keys = iter(jax.random.split(jax.random.key(3), 64))
    params = jax.tree.map(
        lambda leaf: leaf + 0.06 * jax.random.normal(next(keys), leaf.shape, leaf.dtype),
        target.params,
    )
    return dataclasses.replace(target, params=params, name="close")


def params_of(num_requests):
    return [
        SamplingParams(
            max_tokens=24 + index,
            temperature=0.8 * (index % 2),
            repetition_penalty=1.2 if index == 3 else 1.0,
            seed=index,
        )
        for index in range(num_requests)
    ]


@pytest.mark.parametrize(
    ("tree", "batch_size"),
    [
        (BEAM, 3),
        pytest.param(STATIC, 3, marks=pytest.mark.system),
        pytest.param(BeamTree(width=3, depth=1, nodes=2), 3, marks=pytest.mark.system),
    ],
)
def test_the_output_is_plain_decodings(target, close, tree, batch_size):
    prompts, params = toy.prompts((5, 1, 30, 12, 40)), params_of(5)
    shape = {"batch_size": batch_size, "max_length": 128}
    engine = Engine(target, DraftModel(close, tree=tree), **shape)
    assert engine.draft_length == tree.num_nodes
    found = engine.generate(prompts, params)
    plain = engine.generate(prompts, params, speculate=False)
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]
    counts = [c.acceptance for c in found]
    assert counts[0].depth <= tree.max_depth
    # Some node that no chain has was accepted, of greedy and of sampled rows.
    for parity in (0, 1):
        by_node = np.sum([c.num_accepted_tokens_per_node for c in counts[parity::2]], axis=0)
        assert np.count_nonzero(by_node) > (tree.max_depth if tree.max_depth > 1 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [BEAM, STATIC])
def test_the_whole_battery(target, tree):
    check_drafter(DraftModel(MODEL, tree=tree), target).assert_ok()


@pytest.mark.slow
def test_an_oracle_may_cost_what_a_tree_costs(target):
    """Holes of the drafts that are thrown away do not matter."""
    many = SamplingParams(max_tokens=8, temperature=1, top_k=1)
    shape = {"batch_size": 1, "max_length": 128}
    prompts = toy.prompts((4,))
    truth = Engine(target, **shape).generate(prompts, many)
    oracle = Oracle(toy.sequences(truth), cost_of=DraftModel(MODEL, tree=STATIC))
    found = Engine(target, oracle, **shape).generate(prompts, many)
    assert found[0].acceptance.num_accepted_tokens > 0


def test_trees_that_do_not_fit_are_refused(target):
    with pytest.raises(SettingError, match=r"min_confidence of 0.5 and the tree 3x3:9 were given"):
        DraftModel(MODEL, 0.5, BEAM)
    wide = DraftModel(MODEL, tree=BeamTree(width=99, depth=1, nodes=1))
    with pytest.raises(
        SettingError, match=r"nodes of 99 children, and toy9 can draft 61 tokens of toy0"
    ):
        wide.check(target)
    with pytest.raises(SettingError, match="leaves out nodes because of their own tokens"):
        Engine(target, DraftModel(MODEL, tree=BEAM), verifier="rejection")


@pytest.mark.slow
def test_without_slots_for_expanded_nodes_a_long_text_gets_another_tree(monkeypatch):
    """What has no slot of its own is stored nowhere, and what is read in its place is not it."""
    rows = rows_of(TEXTS)

    def trees():
        fresh, propose, _ = compiled.__wrapped__(BEAM, SHAPE)
        draft = propose(fresh(rows), rows)[0]
        return [paths_of(draft, row) for row in range(4)]

    found = trees()
    monkeypatch.setattr(draft_model, "num_offsets", lambda tree: 0)
    short = trees()
    assert short[:3] == found[:3]
    assert short[3] != found[3]
