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
from jaxspec import SamplingParams, StaticTree, sampling
from jaxspec.decode.state import batch_view
from jaxspec.drafters.heads import drafter as heads_drafter
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
from jaxspec.types import EngineShape

PROMPTS = toy.prompts((5, 1, 40, 12, 2))
PARAMS = [
    SamplingParams(max_tokens=22 + index, temperature=0.8 * (index % 2), seed=index)
    for index in range(len(PROMPTS))
]
SMALL = {"batch_size": 2, "max_length": 128, "prefill_chunk": 16}
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


class Reference:
    """What heads make of a text, from the text alone; all in float64 but for the layers."""

    def __init__(self, heads, target, params, text):
        as_floats = functools.partial(jax.tree.map, lambda leaf: np.asarray(leaf, np.float64))
        self.config, own, params = heads.config, unpacked(heads.params), unpacked(params)
        self.own, self.final_norm = as_floats(own), as_floats(params["final_norm"])
        head = params["embedding"].T if target.config.is_tied else params["head"]
        self.head = np.asarray(head, np.float64)
        self.epsilon = self.config.norm_epsilon
        tokens = jnp.asarray(text, jnp.int32)[None]
        segments = jnp.zeros_like(tokens)
        taps = (target.config.num_layers,)
        stream = decoder.training_features(target.config, params, tokens, segments, taps)[:, :, 0]
        if self.config.kind == "clover2":
            following = self.head.T[np.asarray(text)[1:]]
            mixed = np.asarray(stream[0, :-1], np.float64)
            mixed = mixed + self.attention_decoder(self.own["first"], mixed, following)
            stream, segments = jnp.asarray(mixed[None], jnp.float32), segments[:, :-1]
        if self.config.block is not None:
            stream = decoder.training_layers(
                self.config.block,
                own,
                stream,
                segments,
                has_feed_forward=self.config.block_part == "whole",
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
            return x @ (self.head if config.shares_head else head["head"])
        if config.kind == "clover2":
            h = self.normed(state, own["norm"])
            out = h @ own["head"]["weight"] + own["head"]["bias"]
            for e in rows[1:]:
                h = h + self.attention_decoder(own["connection"], h[None], e[None])[0]
                both = np.concatenate([h, e])
                out = both @ own["next"]["weight"] + own["next"]["bias"]
            return self.normed(out, own["head_norm"]) @ self.head
        h = state
        for step, row in enumerate(rows):
            e = row / np.linalg.norm(row)
            if config.connection != "none":
                connection = own["connections"][0 if config.shares_connection else step]
            if config.connection == "attention":
                h = h + self.attention_decoder(connection, h[None], e[None])[0]
            elif config.connection == "mlp":
                both = np.concatenate([self.normed(h, connection["norm"]), e])
                h = h + silu(both @ connection["weight"] + connection["bias"])
        o = self.normed(h, self.final_norm)
        last = own["heads"][index]
        return (o + silu(o @ last["weight"] + last["bias"])) @ self.head


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
        for path, worth in level:
            found = scores(path)
            shares = np.exp(found - found.max())
            shares, mass = shares / shares.sum(), 0.0
            for token in best(path)[: tree.num_children]:
                is_good = isinstance(tree, BeamTree) or (
                    mass < tree.top_p and shares[token] >= tree.min_ratio * shares.max()
                )
                if is_good:
                    candidates.append(((*path, int(token)), worth + np.log(shares[token])))
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
            drafts = tokens.token_id[index][:drafted], tokens.parent[index][:drafted]
            assert_drafted(heads, reference, text, length, params, *drafts)
            num_drafts += 1
            verdicts.add((int(rounds.accepted[index]), int(rounds.draft_depth[index])))
    return num_drafts, verdicts


def drafted_by(heads, target, **settings):
    engine = Engine(target, heads, trace="tokens", **SMALL | settings)
    return engine, engine.generate(PROMPTS, PARAMS)


CASES = [
    ("medusa", STATIC),
    ("hydra", "chain"),
    ("clover", None),
    ("clover2", STATIC),
    *[
        pytest.param(*case, marks=pytest.mark.system)
        for case in (
            ("medusa", "chain"),
            ("medusa", None),
            ("hydra", STATIC),
            ("clover", "chain"),
            ("clover", STATIC),
            ("clover", BeamTree(width=3, depth=3, nodes=6)),
            ("clover2", "chain"),
            ("clover2", BudgetTree(nodes=8, depth=3)),
            *[(form, STATIC) for form in toys.FORMS],
            *[(form, "chain") for form in toys.FORMS],
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
    print(name, tree, num_drafts, sorted(verdicts))


