"""Heads: every draft against one computed from the committed tokens alone.

`Reference` reads a finished text in one pass without a cache, and then scores any path after any of
its beginnings with NumPy, written from the papers' formulas. What an engine has recorded of each
round must be the tree that these scores make: after the prompt, after verdicts of all kinds, after
plain steps, in every engine. Sabotaged heads show that the comparison can fail.
"""

import dataclasses
import functools

import heads as toys
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec import SamplingParams, sampling
from jaxspec.decode.state import batch_view
from jaxspec.drafters.heads.config import heads_config
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.drafters.trees import BeamTree, BudgetTree
from jaxspec.engine.engine import Engine
from jaxspec.errors import ModelError, SettingError
from jaxspec.kernels.base import unpacked
from jaxspec.models import decoder
from jaxspec.requests.requests import Request
from jaxspec.serving import ServingEngine
from jaxspec.testing import check_drafter
from jaxspec.trees import StaticTree

PROMPTS = toy.prompts((5, 1, 40, 12, 2))
PARAMS = [
    SamplingParams(max_tokens=22 + index, temperature=0.8 * (index % 2), seed=index)
    for index in range(len(PROMPTS))
]
SMALL = {"batch_size": 2, "max_length": 128}
STATIC = StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0)))
STDDEV = 0.3  # so large that the tokens on the way to a node decide what follows it


@pytest.fixture(scope="module")
def target():
    return toys.target(num_layers=1)


@pytest.fixture(scope="module")
def plain(target):
    return [c.token_ids for c in Engine(target, **SMALL).generate(PROMPTS, PARAMS)]


def heads_named(name, target, tree, **fields):
    kind, more = toys.FORMS.get(name, (name, {}))
    if name == "clover2" and "block" not in fields:
        # One layer instead of two: a quicker test.
        more = {"block": dataclasses.replace(target.config, num_layers=1)}
    return toys.random_heads(kind, target, tree=tree, stddev=STDDEV, **{**more, **fields})


def silu(x):
    return x / (1 + np.exp(-x))


features_of = jax.jit(decoder.training_features, static_argnums=(0, 4))
layers_of = jax.jit(decoder.training_layers, static_argnums=0, static_argnames="has_feed_forward")


class Reference:
    """What heads make of a text, from the text alone; all in float64 but for the layers."""

    def __init__(self, heads, target, params, text):
        as_floats = functools.partial(jax.tree.map, lambda leaf: np.asarray(leaf, np.float64))
        self.config, own, params = heads.config, unpacked(heads.params), unpacked(params)
        self.own, self.final_norm = as_floats(own), as_floats(params["final_norm"])
        head = params["embedding"].T if target.config.is_tied else params["head"]
        self.head = np.asarray(head, np.float64)
        self.epsilon = self.config.norm_epsilon
        # Padded, so that texts of all lengths share a program.
        tokens = jnp.asarray([*text, *[0] * (-len(text) % 128)], jnp.int32)[None]
        segments = jnp.zeros_like(tokens)
        taps = (target.config.num_layers,)
        stream = features_of(target.config, params, tokens, segments, taps)[:, :, 0]
        if self.config.kind == "clover2":
            following = self.head.T[np.asarray(tokens[0, 1:])]
            mixed = np.asarray(stream[0, :-1], np.float64)
            mixed = mixed + self.attention_decoder(self.own["first"], mixed, following)
            stream, segments = jnp.asarray(mixed[None], jnp.float32), segments[:, :-1]
        if self.config.block is not None:
            has_feed_forward = self.config.block_part == "whole"
            stream = layers_of(
                self.config.block, own, stream, segments, has_feed_forward=has_feed_forward
            )
        self.stream = np.asarray(stream[0], np.float64)

    def normed(self, x, weight):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.epsilon) * weight

    def attention_decoder(self, params, x, e):
        """`[n, E]` each."""
        parts = []
        normed = self.normed(x, params["norm"])
        for name, read in (("query", normed), ("key", e), ("value", e)):
            made = read @ params[name] + params.get(f"{name}_bias", 0)
            parts.append(made.reshape(len(x), self.config.num_gate_heads, -1))
        query, key, value = parts
        gate = np.sum(query * key, axis=-1, keepdims=True)
        if self.config.gate == "dot":
            gate = gate / np.sqrt(query.shape[-1])
        else:
            gate = gate / np.linalg.norm(query, axis=-1, keepdims=True)
            gate = gate / np.linalg.norm(key, axis=-1, keepdims=True)
        mixed = (gate * value).reshape(x.shape)
        return silu(mixed) if self.config.has_silu else mixed

    def logits(self, length, path):
        """`[V]` after the first `length` tokens of the text and then `path`; `newest` first."""
        output = self.output(length, path)
        if self.config.shares_head:
            output = output @ self.head
        if self.config.num_head_tokens is None:
            return output
        tokens, every = self.own["token_map"].astype(int), np.full(toy.VOCAB, -np.inf)
        every[tokens] = output[tokens] if self.config.shares_head else output
        return every

    def output(self, length, path):
        """Logits of a head of its own, or what the target's head reads."""
        config, own, (newest, *more) = self.config, self.own, path
        state, index = self.stream[length - 2], len(more)
        rows = self.head.T[[newest, *more]]
        if config.kind in ("medusa", "hydra"):
            x = self.normed(state, self.final_norm)
            head = own["heads"][index]
            read = np.concatenate([x, *rows]) if config.kind == "hydra" else x
            for block in head["blocks"]:
                x = x + silu(read @ block["weight"] + block["bias"])
                read = x
            return x if config.shares_head else x @ head["head"]
        if config.kind == "clover2":
            h = self.normed(state, own["norm"])
            out = h @ own["head"]["weight"] + own["head"]["bias"]
            for e in rows[1:]:
                h = h + self.attention_decoder(own["connection"], h[None], e[None])[0]
                both = np.concatenate([h, e])
                out = both @ own["next"]["weight"] + own["next"]["bias"]
            return self.normed(out, own["head_norm"])
        h = state
        if config.has_normed_inputs:
            h = self.normed(h, 1)
        for step, row in enumerate(rows):
            e = self.normed(row, 1) if config.has_normed_inputs else row / np.linalg.norm(row)
            if config.connection != "none":
                connection = own["connections"][0 if config.shares_connection else step]
            if config.connection == "attention":
                h = h + self.attention_decoder(connection, h[None], e[None])[0]
            elif config.connection == "mlp":
                both = np.concatenate([self.normed(h, connection["norm"]), e])
                h = h + silu(both @ connection["weight"] + connection["bias"])
        o = self.normed(h, self.final_norm)
        last = own["heads"][index]
        return o + silu(o @ last["weight"] + last["bias"])


@jax.jit
def noise_at(key, position):
    """Gumbel noise `[V]` of a request's position."""
    row = sampling.neutral_sampling(1).replace(key=key[None])
    return sampling.gumbel(sampling.position_keys(row, position[None, None]), toy.VOCAB)[0, 0]


def scores_after(reference, text, length, path, params):
    """By which the children of a path are chosen, `[V]`."""
    logits = reference.logits(length, [text[length - 1], *path])
    if params.temperature == 0:
        return logits
    noise = noise_at(jnp.asarray(sampling.request_key(params.seed)), jnp.int32(length + len(path)))
    return logits / params.temperature + np.asarray(noise, np.float64)


def expected_paths(tree, num_heads, num_nodes, scores):
    """The paths to a draft's nodes in their order, None for holes; `scores(path)` is `[V]`."""

    def best(path):
        return np.argsort(-scores(path), kind="stable")

    if tree is None:
        tree = StaticTree(tuple((0,) * depth for depth in range(1, num_heads + 1)))
    if isinstance(tree, StaticTree):
        paths = {}
        for choice in tree.choices:
            above = paths.get(choice[:-1], ())
            paths[choice] = (*above, int(best(above)[choice[-1]]))
        return list(paths.values())[:num_nodes]
    tree, nodes, level = tree.within(num_nodes), [], [((), 0.0)]
    for _ in range(tree.depth):
        candidates = []
        for path, value in level:
            found = scores(path)
            shares = np.exp(found - found.max())
            shares, mass = shares / shares.sum(), 0.0
            for token in best(path)[: tree.num_children]:
                is_good = isinstance(tree, BeamTree) or (
                    mass < tree.top_p and shares[token] >= tree.min_ratio * shares.max()
                )
                if is_good:
                    candidates.append(((*path, int(token)), value + np.log(shares[token])))
                mass += shares[token]
        level = sorted(candidates, key=lambda each: -each[1])
        level = level[: tree.width if isinstance(tree, BeamTree) else tree.nodes - len(nodes)]
        nodes += candidates if isinstance(tree, BeamTree) else level
    nodes = [path for path, _ in sorted(nodes, key=lambda each: -each[1])[:num_nodes]]
    return nodes + [None] * (num_nodes - len(nodes))


def assert_drafted(heads, reference, text, length, params, tokens, parents):
    """A draft `[n]` after the first `length` tokens is what the reference makes of them."""
    paths = []
    for token, parent in zip(tokens, parents, strict=True):
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, int(token)) if token >= 0 and above is not None else None)
    expected = expected_paths(
        heads.tree,
        heads.config.num_heads,
        len(tokens),
        lambda path: scores_after(reference, text, length, path, params),
    )
    # A tree that ends early at the row's limit has fewer nodes; those it has are the same.
    assert paths == expected, f"after {length} tokens of {text}: {paths} instead of {expected}"


def check_rounds(heads, target, completions, all_params, *, weights=None):
    """What was drafted in every recorded round; returns how many drafts and which acceptances."""
    num_drafts, verdicts = 0, set()
    for completion, params in zip(completions, all_params, strict=True):
        text = [*completion.prompt_token_ids, *completion.token_ids]
        if len(text) < 3:
            continue
        reference = Reference(heads, target, weights or target.params, text)
        rounds, tokens = completion.trace.rounds, completion.trace.tokens
        room = len(completion.prompt_token_ids) + params.max_tokens
        for index, drafted in enumerate(rounds.drafted):
            length = int(rounds.context_length[index])
            if length == 1:
                assert drafted == 0  # there is no feature yet
                continue
            # Near its end a row's tree is cut by depth, which the reference does not know.
            if not drafted or room - length <= heads.config.num_heads:
                continue
            drafts = tokens.token_id[index][1:][:drafted], tokens.parent[index][1:][:drafted]
            found = toy.copied(text[:length], heads.config.num_heads) if heads.ngram else []
            if found:
                assert [each.tolist() for each in drafts] == [found, list(range(-1, drafted - 1))]
                verdicts.add(("copied", int(rounds.accepted[index])))
                continue
            assert_drafted(heads, reference, text, length, params, *drafts)
            num_drafts += 1
            verdicts.add((int(rounds.accepted[index]), int(rounds.draft_depth[index])))
    return num_drafts, verdicts


def drafted_by(heads, target, **settings):
    engine = Engine(target, heads, trace="tokens", **SMALL | settings)
    return engine, engine.generate(PROMPTS, PARAMS)


CASES = [
    ("clover", None),
    ("clover for some tokens", STATIC),
    *[
        pytest.param(name, tree, marks=mark)
        for name, tree, mark in (  # the slow ones are more trees and heads
            ("medusa", STATIC, pytest.mark.slow),
            ("hydra", "chain", pytest.mark.slow),
            ("clover2", "chain", pytest.mark.slow),
            ("clover2", STATIC, pytest.mark.slow),
            ("medusa", "chain", pytest.mark.slow),
            ("medusa", None, pytest.mark.slow),
            ("hydra", STATIC, pytest.mark.slow),
            ("clover", "chain", pytest.mark.slow),
            ("clover", STATIC, pytest.mark.slow),
            ("clover", BeamTree(width=3, depth=3, nodes=6), pytest.mark.slow),
            ("clover2", BudgetTree(nodes=8, depth=3), pytest.mark.slow),
            *[(form, STATIC, pytest.mark.slow) for form in toys.FORMS],
            *[(form, "chain", pytest.mark.slow) for form in toys.FORMS],
        )
    ],
]


@pytest.mark.parametrize(("name", "tree"), CASES)
def test_every_draft_is_that_of_the_committed_tokens(target, plain, name, tree):
    heads = heads_named(name, target, tree)
    engine, found = drafted_by(heads, target)
    assert [c.token_ids for c in found] == plain
    num_drafts, verdicts = check_rounds(heads, target, found, PARAMS)
    assert num_drafts > 40
    assert any(accepted == 0 for accepted, _ in verdicts)
    assert any(0 < accepted < depth for accepted, depth in verdicts)
    assert not np.any(engine.executor.lags())


REPEATING = [[1, 2, 3, 4, 5] * 4, [7, 7, 8, 7, 7, 9, 3], *PROMPTS[2:]]


@pytest.mark.parametrize(
    ("name", "tree"), [("clover", None), pytest.param("hydra", "chain", marks=pytest.mark.slow)]
)
def test_heads_draft_where_n_grams_find_nothing(target, name, tree):
    alone = heads_named(name, target, tree)
    heads = Heads(alone.config, alone.params, tree=tree, prompt_lookup_min=2)
    assert heads.name == f"ngram:2-4+{alone.name}"
    expected = Engine(target, **SMALL).generate(REPEATING, PARAMS)
    engine = Engine(target, heads, trace="tokens", **SMALL)
    found = engine.generate(REPEATING, PARAMS)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    num_drafts, verdicts = check_rounds(heads, target, found, PARAMS)
    of_copies = {accepted for kind, accepted in verdicts if kind == "copied"}
    assert num_drafts > 20
    assert 0 in of_copies
    assert max(of_copies) > 0
    assert any(kind != "copied" and kind > 0 for kind, _ in verdicts)


class NothingIsFound(Heads):
    """Leaves all rows to the heads."""

    def propose(self, shape, params, state, rows):
        return self._propose(shape, params, state, rows), state


@pytest.mark.slow
def test_another_draft_than_the_copied_one_is_seen(target):
    alone = heads_named("clover", target, None)
    heads = NothingIsFound(alone.config, alone.params, prompt_lookup_min=2)
    found = Engine(target, heads, trace="tokens", **SMALL).generate(REPEATING, PARAMS)
    with pytest.raises(AssertionError):
        check_rounds(heads, target, found, PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [None, "chain", STATIC], ids=["budget", "chain", "static"])
def test_the_whole_battery_with_n_grams(target, tree):
    alone = heads_named("clover", target, tree)
    heads = Heads(alone.config, alone.params, tree=tree, prompt_lookup_min=2)
    check_drafter(heads, target).assert_ok()


# Sabotage: each of these is a bug that heads are known for. The comparison must see it.


class Late(Heads):
    """Takes the features of one position for those of the next."""

    def _read(self, params, cache, features, tokens, window, last):
        features = jnp.roll(features, 1, axis=1)
        return super()._read(params, cache, features, tokens, window, last)


class KeepsRejected(Heads):
    """Keeps the features of the first nodes, whichever were accepted."""

    def commit(self, shape, params, state, rows, info):
        path = jnp.broadcast_to(jnp.arange(info.verdict.path.shape[1]), info.verdict.path.shape)
        info = info.replace(verdict=info.verdict.replace(path=path))
        return super().commit(shape, params, state, rows, info)


class PostNorm(Heads):
    """Reads hidden states after the final norm instead of before it."""

    def _read(self, params, cache, features, tokens, window, last):
        features = self._parts(params).final_norm(features)
        return super()._read(params, cache, features, tokens, window, last)


class WrongPath(Heads):
    """Tells a head the tokens before those on the way to a node."""

    def _scorer(self, shape, params, anchor, num_heads, wanted):
        score = super()._scorer(shape, params, anchor, num_heads, wanted)
        return lambda index, hidden, tokens, num_live: score(
            index, hidden, jnp.roll(tokens, 1, axis=-1), num_live
        )


class WrongEntry(Heads):
    """Reads each token together with its own feature, not with the one before."""

    def _read(self, params, cache, features, tokens, window, last):
        tokens = jnp.roll(tokens, 1, axis=1)
        return super()._read(params, cache, features, tokens, window, last)


class Stale(Heads):
    """Has a copy of the target's head."""

    def _parts(self, params, num_live=None):
        own = self.derive_params(params["own"], self.target.params)
        return super()._parts({"own": own, "target": self.target.params}, num_live)


@pytest.mark.parametrize(
    ("sabotage", "name", "tree"),
    [
        (Late, "medusa", "chain"),
        *[
            pytest.param(*case, marks=mark)
            for *case, mark in (  # the slow ones are the same faults in other heads
                (Late, "clover", "chain", pytest.mark.slow),
                (KeepsRejected, "medusa", STATIC, pytest.mark.slow),
                (KeepsRejected, "clover", STATIC, pytest.mark.slow),
                (PostNorm, "medusa", "chain", pytest.mark.slow),
                (PostNorm, "clover", "chain", pytest.mark.slow),
                (WrongPath, "hydra", "chain", pytest.mark.slow),
                (WrongPath, "clover", STATIC, pytest.mark.slow),
                (WrongPath, "clover2", "chain", pytest.mark.slow),
                (WrongEntry, "clover2", "chain", pytest.mark.slow),
            )
        ],
    ],
)
def test_sabotage_changes_drafts_and_no_output(target, plain, sabotage, name, tree):
    sound = heads_named(name, target, tree)
    heads = sabotage(sound.config, sound.params, tree=tree)
    found = drafted_by(heads, target)[1]
    assert [c.token_ids for c in found] == plain
    with pytest.raises(AssertionError, match="instead of"):
        check_rounds(heads, target, found, PARAMS)


@pytest.mark.parametrize(
    "name",
    [
        "medusa for some tokens",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("medusa", "clover")),
    ],
)
def test_new_weights_of_the_target_reach_its_heads(target, name):
    other = toys.target(seed=5, num_layers=1)
    sound = heads_named(name, target, "chain")
    for heads in (sound, Stale(sound.config, sound.params, tree="chain")):
        engine = Engine(target, heads, trace="tokens", **SMALL)
        weights = jax.tree.leaves((target.params, heads.params))  # the target's, counted once
        copied = 4 * target.config.width * (sound.config.num_head_tokens or 0)
        assert engine.memory.weights_bytes == sum(leaf.nbytes for leaf in weights) + copied
        engine.update_params(target=other.params)
        found = engine.generate(PROMPTS[:3], PARAMS[:3])
        if heads is sound:
            check_rounds(heads, target, found, PARAMS[:3], weights=other.params)
    with pytest.raises(AssertionError, match="instead of"):
        check_rounds(heads, target, found, PARAMS[:3], weights=other.params)


def recorded_rows(state, prompts, first_round):
    """What `check_rounds` reads of a completion, of the rows of a state that is still running."""
    state = jax.device_get(state)
    found = []
    for row, prompt in enumerate(prompts):
        rounds = slice(first_round[row], int(state.counts.num_rounds[row]))
        trace = jax.tree.map(
            lambda values, row=row, rounds=rounds: values[row, rounds], state.trace
        )
        output = state.tokens[row, len(prompt) : int(state.num_committed[row])].tolist()
        found.append(toys.Recorded(tuple(prompt), tuple(output), trace))
    return found


LONG = SamplingParams(max_tokens=180, ignore_eos=True)


def long_run(heads, target, prompts, *, num_tokens=LONG.max_tokens, **settings):
    """An executor of two rows that have read their prompts."""
    settings = {"batch_size": 2, "max_length": 256} | settings
    params = dataclasses.replace(LONG, max_tokens=num_tokens)
    executor = Engine(target, heads, trace="tokens", **settings).executor
    for row, prompt in enumerate(prompts):
        request = Request(request_id=str(row), prompt_token_ids=tuple(prompt), params=params)
        executor.admit_and_prefill(row, request, draft_length=heads.num_nodes)
    return executor


def catch_up(executor):
    executor.catch_up(dict(enumerate(executor.lags().tolist())))
    assert not np.any(executor.lags())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("medusa", marks=pytest.mark.slow),
        pytest.param("clover", marks=pytest.mark.slow),
        "clover2",
    ],
)
def test_nothing_is_missed_in_plain_steps(target, name):
    heads, prompts = heads_named(name, target, "chain"), toy.prompts((40, 1))
    executor = long_run(heads, target, prompts, exactness="ties", verify_length=4)
    has_block = heads.config.block is not None
    for _ in range(2):
        executor.run(30, draft_length=0)
        # A block rests meanwhile, and reads what has piled up before the next draft.
        assert executor.lags()[:2].tolist() == [30 * has_block] * 2
        catch_up(executor)
        executor.run(4, draft_length=3)
    found = recorded_rows(executor.state, prompts, (0, 0))
    num_drafts, _ = check_rounds(heads, target, found, [LONG] * 2)
    assert num_drafts == 16  # of two rows, in four rounds, twice


@pytest.mark.slow
def test_rounds_make_up_for_a_few_plain_steps(target):
    heads, prompts = heads_named("clover2", target, "chain"), toy.prompts((40, 9))
    executor = long_run(heads, target, prompts, exactness="ties", verify_length=4)
    executor.run(5, draft_length=0)
    assert executor.lags()[:2].tolist() == [5, 5]
    executor.run(8, draft_length=3)
    found = recorded_rows(executor.state, prompts, (5, 5))
    assert [one.trace.rounds.drafted.tolist() for one in found] == [[0, 0] + [3] * 6] * 2
    assert check_rounds(heads, target, found, [LONG] * 2)[0] == 12


class ForgetsPlainSteps(Heads):
    """Takes no features in plain steps."""

    def commit(self, shape, params, state, rows, info):
        after = super().commit(shape, params, state, rows, info)
        if info.draft.tokens.shape[1]:
            return after
        return after.replace(features=state.features)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Heads, ForgetsPlainSteps])
def test_after_hundreds_of_plain_steps_heads_draft_as_if_they_had_read_all_along(target, kind):
    sound = heads_named("clover", target, "chain")
    heads = kind(sound.config, sound.params, tree="chain")
    settings = {"max_length": 512, "exactness": "ties", "verify_length": 4}
    executor = long_run(heads, target, toy.prompts((40, 9)), num_tokens=400, **settings)
    executor.run(300, draft_length=0)
    catch_up(executor)
    executor.run(4, draft_length=3)
    params = dataclasses.replace(LONG, max_tokens=400)
    found = recorded_rows(executor.state, toy.prompts((40, 9)), (300, 300))
    if kind is Heads:
        assert check_rounds(heads, target, found, [params] * 2)[0] == 8
    else:
        with pytest.raises(AssertionError, match="instead of"):
            check_rounds(heads, target, found, [params] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clover2", pytest.param("clover", marks=pytest.mark.slow)])
def test_a_row_that_was_cut_back_drafts_again_after_a_round(target, name):
    heads, prompts = heads_named(name, target, "chain").for_target(target), toy.prompts((40, 9))
    executor = long_run(heads, target, prompts)
    executor.run(8)
    state, kept = executor.state, 44
    assert int(state.num_committed[0]) > kept
    before = jax.device_get(state.counts.num_rounds).tolist()
    rows = batch_view(state)
    rewound = heads.rewind(
        executor.shape, heads.params, state.drafter, rows, jnp.int32(0), jnp.int32(kept)
    )
    assert rewound.num_seen[0] == kept - (name == "clover2")
    committed = state.num_committed.at[0].set(kept)
    executor.state = state.replace(drafter=rewound, num_committed=committed)
    executor.run(6)
    found = recorded_rows(executor.state, prompts, before)
    assert found[0].trace.rounds.drafted.tolist() == [0, 3, 3, 3, 3, 3]
    assert found[1].trace.rounds.drafted.tolist() == [3] * 6
    num_drafts, _ = check_rounds(heads, target, found, [LONG] * 2)
    assert num_drafts == 11


@pytest.mark.slow
def test_in_a_serving_engine_they_draft_the_same(target):
    heads, prompt, params = heads_named("clover2", target, STATIC), PROMPTS[2], PARAMS[3]
    expected = Engine(target, heads, **SMALL).generate([prompt], [params])[0]
    engine = ServingEngine(target, heads, **SMALL)
    state = engine.init_decode_state()
    state = engine.insert(engine.prefill(prompt, params), state, 1)
    tokens, done = [], False
    while not done:
        state, result = engine.generate(state)
        tokens += [int(t) for t in result.tokens[1] if t >= 0]
        done = bool(result.done[1])
    assert tuple(tokens) == expected.token_ids
    num_accepted = expected.acceptance.num_accepted_tokens
    assert int(state.counts.num_accepted_tokens[1]) == num_accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tree"), [("medusa", None), ("clover", "chain")])
def test_weights_that_are_no_numbers_cost_acceptance_and_nothing_else(target, plain, name, tree):
    heads = heads_named(name, target, tree)
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), heads.params)
    broken = Heads(heads.config, broken, tree=tree)
    found = Engine(target, broken, **SMALL).generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in found] == plain
    # Nodes of a tree are left out; a chain has some token in each place.
    num_drafted = sum(c.acceptance.num_draft_tokens for c in found)
    assert (num_drafted > 0) == (tree == "chain")
    if tree == "chain":
        found = Engine(target, broken, verifier=jaxspec.Rejection(), **SMALL).generate(
            PROMPTS, PARAMS
        )
        assert [len(c.token_ids) for c in found] == [params.max_tokens for params in PARAMS]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*toys.KINDS, *toys.FORMS])
@pytest.mark.parametrize("tree", [None, "chain", STATIC], ids=["budget", "chain", "static"])
def test_the_whole_battery(target, name, tree):
    check_drafter(heads_named(name, target, tree), target).assert_ok()


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        pytest.param(  # all spent on the first level
            BudgetTree(nodes=3, depth=3, top_p=1, min_ratio=0), {0}, id="spent at once"
        ),
        pytest.param(  # one node on each
            BudgetTree(nodes=3, depth=3, top_p=1e-6),
            {0, 1, 2},
            id="one by one",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_heads_after_a_spent_budget_are_not_computed(target, tree, expected):
    computed = []

    class Noted(Heads):
        """Notes which heads are computed."""

        def _scorer(self, shape, params, anchor, num_heads, wanted):
            score = super()._scorer(shape, params, anchor, num_heads, wanted)

            def note(index, *inputs):
                jax.debug.callback(lambda: computed.append(index))
                return score(index, *inputs)

            return note

    sound = heads_named("clover", target, tree, block=None)
    engine = Engine(target, Noted(sound.config, sound.params, tree=tree), **SMALL)
    found = engine.generate(PROMPTS[:1], PARAMS[:1])
    jax.effects_barrier()
    assert found[0].acceptance.num_drafts > 10
    assert set(computed) == expected


def test_heads_that_do_not_fit_are_refused(target):
    heads = heads_named("medusa", target, "chain")
    config, params = heads.config, heads.params

    def make(config=config, params=params, tree="chain"):
        return Heads(config, params, tree=tree).check(target)

    def of_other(**changes):
        other = heads_config("medusa", toy.config(**changes))
        return make(other, toys.random_params(other))

    def engine(heads, **settings):
        return Engine(target, heads, batch_size=1, max_length=64, **settings)

    in_bfloat16 = toys.random_params(config, dtype=jnp.bfloat16)
    deep = StaticTree(tuple((0,) * depth for depth in (1, 2, 3, 4)))
    for error, call, message in (
        (ModelError, lambda: of_other(width=64), "width 64, and the target calm0 has width 32"),
        (ModelError, lambda: of_other(vocab_size=99), "vocabulary of 99, and the target calm0 has"),
        (ModelError, lambda: heads_config("hydra", target.config, connection="none"),
         "must be 'attention' for hydra, so check"),
        (ModelError, lambda: heads_config("medusa", target.config, gate="cosine"),
         "must be 'dot' for medusa, so check"),
        (ModelError, lambda: make(params=in_bfloat16), "have dtype bfloat16, and the target calm0"),
        (ModelError, lambda: make(params={"heads": params["heads"][:1]}),
         r"heads weights have nothing at params\['heads'\]\[1\]"),
        (SettingError, lambda: make(tree=deep), "static:4 is 4 deep, and there are 3 heads"),
        (SettingError, lambda: make(tree=BeamTree(width=70, depth=1, nodes=4)),
         "nodes of 70 children, and these heads propose 61 tokens"),
        (SettingError, lambda: engine(heads, draft_length=4), r"4 was given, and medusa\[chain\]"),
        (ModelError, lambda: heads.check(Headless()),
         "headless has no final_norm, head, head_rows; add them"),
        (ModelError, lambda: heads._parts(target.params), "used without a target; take those that"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


class Headless:
    """A model without the parts of a head."""

    name, params, vocab_size = "headless", {}, toy.VOCAB
    logits = None


def test_they_say_what_they_are(target):
    for tree, name, is_chain, num_nodes, max_depth, prunes_by_token in (
        ("chain", "clover[chain]", True, 3, None, False),
        (STATIC, "clover[static:6]", False, 6, 3, False),
        (None, "clover[budget:4]", False, 4, 3, True),
    ):
        heads = heads_named("clover", target, tree)
        assert (heads.name, heads.is_chain, heads.num_nodes) == (name, is_chain, num_nodes)
        assert (heads.max_depth, heads.prunes_by_token) == (max_depth, prunes_by_token)
    assert Heads(heads.config, heads.params, name="mine").name == "clover[budget:4]:mine"
    bound = heads.for_target(target)
    assert (bound.target, heads.target) == (target, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"layout": "aligned", "scheduler": jaxspec.Static()}, marks=pytest.mark.slow),
        {"layout": "aligned", "scheduler": jaxspec.Pool(4)},
        pytest.param({"scheduler": jaxspec.Continuous(waiting=2)}, marks=pytest.mark.slow),
    ],
    ids=["aligned", "pool", "waiting"],
)
def test_layouts_and_rows_that_wait_change_no_draft(target, settings):
    heads = heads_named("clover2", target, STATIC)
    found = drafted_by(heads, target, **settings)[1]
    num_drafts, _ = check_rounds(heads, target, found, PARAMS)
    assert num_drafts > 40
