"""The verifiers with their own noise, on hundreds of thousands of rows: what exact enumeration
replaces is tested here, and with it the distribution of drawn tokens, round after round."""

import functools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import toy

import jaxspec
from jaxspec import sampling
from jaxspec.audit.chi_square import pooled
from jaxspec.decode.round import emitted_tokens
from jaxspec.types import Draft, EngineShape, chain_parents

ALPHA = 1e-4  # of each test: about ten tests, so one run in a thousand sees a false alarm
ROWS, V, N = 200_000, 3, 3
ROUNDS = 4  # so each row emits at least this many tokens
DEPTH = ROUNDS * (N + 1)
RULES = {
    "coupled": jaxspec.Coupled(),
    "coupled:independent": jaxspec.Coupled(is_noise_shared=False),
    "rejection": jaxspec.Rejection(),
    "block": jaxspec.Block(),
}


def distributions(kind):
    """p and q `[D, V, V]`, by number of emitted tokens and the last of them."""
    if kind == "memoryless":
        p, q = np.array([0.7, 0.3, 0.0]), np.array([0.35, 0.65, 0.0])
        return tuple(np.broadcast_to(distribution, (DEPTH, V, V)) for distribution in (p, q))
    rng = np.random.default_rng(3)
    return tuple(rng.dirichlet(np.full(V, 0.8), (DEPTH, V)) for _ in range(2))


def draw_chain(verifier, q, rows, emitted, last):
    """Drafts of the production drafter's draws."""
    context, drafted, distribution = last, jnp.zeros((last.shape[0], N), jnp.int32), []
    for node in range(N):
        context, of_node, _ = sampling.draw_draft(
            q[emitted + node, context],
            rows,
            drafted,
            jnp.int32(node),
            vocab_size=V,
            is_noise_shared=verifier.is_noise_shared,
            needs_probs=True,
        )
        drafted = drafted.at[:, node].set(context)
        distribution.append(of_node)
    return Draft(
        tokens=drafted,
        parents=chain_parents(last.shape[0], N),
        num_valid=jnp.full(last.shape, N, jnp.int32),
        q=jnp.stack(distribution, axis=1) if verifier.needs_draft_probs else None,
        is_chain=True,
    )


def draw_tree(verifier, drafter, rows, last):
    """Drafts of a drafter that knows the last token only."""
    row = jnp.arange(last.shape[0], dtype=jnp.int32)
    rows = rows.replace(tokens=rows.tokens.at[row, rows.num_committed - 1].set(last))
    shape = EngineShape(
        batch_size=last.shape[0],
        max_length=rows.tokens.shape[1],
        verify_length=drafter.num_nodes + 1,
        prefill_chunk=1,
        vocab_size=V,
        is_noise_shared=verifier.is_noise_shared,
        needs_draft_probs=verifier.needs_draft_probs,
    )
    return drafter.propose(shape, drafter.params, (), rows)[0]


def decode(verifier, kind, *, parents=None, rows=ROWS, num_rounds=ROUNDS):
    """Tokens `[B, R]` and accepted tokens `[B]` of the first round; one request per row. Drafts are
    chains, or trees of these parents."""
    p, q = (jnp.asarray(enumeration.log(distribution)) for distribution in distributions(kind))
    keys = np.stack([np.zeros(rows), np.arange(rows)], axis=1).astype(np.uint32)
    drafter = toy.SampledTree(tuple(range(-1, N - 1)) if parents is None else parents, q[0])

    @jax.jit
    def one_round(state, tokens, emitted):
        state = state.replace(num_committed=enumeration.PROMPT_LENGTH + emitted)
        last = jnp.take_along_axis(tokens, jnp.maximum(emitted - 1, 0)[:, None], axis=1)[:, 0]
        if parents is None:
            draft = draw_chain(verifier, q, state, emitted, last)
        else:
            draft = draw_tree(verifier, drafter, state, last)
            draft = draft.replace(max_depth=drafter.max_depth)
        before = jnp.concatenate([last[:, None], jnp.maximum(draft.tokens, 0)], axis=1)
        depth = jnp.asarray(drafter.depths, jnp.int32)[None]
        prefix = sampling.chain_prefix(state, draft.tokens)
        prefix = prefix.replace(position=state.num_committed[:, None] + depth)
        verdict = verifier.verify(p[emitted[:, None] + depth, before], draft, state, prefix)
        along = emitted_tokens(draft, verdict)
        tokens = jax.vmap(
            lambda row, start, values: jax.lax.dynamic_update_slice(row, values, (start,))
        )(tokens, emitted, along)
        return tokens, emitted + verdict.num_accepted + 1, verdict.num_accepted

    state = enumeration.make_rows(jnp.zeros((rows,), jnp.int32), keys=keys)
    tokens = jnp.zeros((rows, DEPTH + N + 1), jnp.int32)
    emitted = jnp.zeros((rows,), jnp.int32)
    accepted = []
    for _ in range(num_rounds):
        tokens, emitted, now = one_round(state, tokens, emitted)
        accepted.append(np.asarray(now))
    return np.asarray(tokens)[:, :num_rounds], accepted[0]


def p_value(tokens, p):
    """Of the tokens' frequencies under the target's distribution."""
    length = tokens.shape[1]
    expected = enumeration.sequence_probs(p, length) * len(tokens)
    code = tokens @ (V ** np.arange(length - 1, -1, -1))
    observed = np.bincount(code, minlength=len(expected))
    if observed[expected == 0].any():
        return 0.0
    return scipy.stats.chisquare(*pooled(observed, expected)).pvalue


@functools.cache
def run(name, kind):
    return decode(RULES[name], kind)


# One law for every rule, for `block` the one that its sabotage breaks; the others are slow.
IN_GATE = [
    ("coupled", "random"),
    ("coupled:independent", "random"),
    ("rejection", "random"),
    ("block", "memoryless"),
]
LAWS = [
    pytest.param(name, kind, marks=() if (name, kind) in IN_GATE else pytest.mark.slow)
    for name in RULES
    for kind in ("random", "memoryless")
]


@pytest.mark.parametrize(("name", "kind"), LAWS)
def test_tokens_of_four_rounds_follow_the_target(name, kind):
    tokens, _ = run(name, kind)
    assert p_value(tokens, distributions(kind)[0]) > ALPHA


TREES = {"two by two": (-1, -1, 0, 0, 1, 1), "three, two, one": (-1, -1, -1, 0, 0, 3)}


@pytest.mark.parametrize("name", ["coupled", "rejection"])
@pytest.mark.parametrize(
    "tree", [pytest.param("two by two", marks=pytest.mark.slow), "three, two, one"]
)
def test_tokens_of_four_rounds_of_trees_follow_the_target(name, tree):
    tokens, accepted = decode(RULES[name], "random", parents=TREES[tree])
    assert p_value(tokens, distributions("random")[0]) > ALPHA
    assert accepted.mean() > 0.5


def test_coupled_tokens_do_not_depend_on_the_shape_of_the_draft():
    chain = run("coupled", "random")[0]
    tree, _ = decode(RULES["coupled"], "random", parents=TREES["two by two"])
    np.testing.assert_array_equal(tree, chain)


def test_coupled_tokens_do_not_depend_on_the_drafters_noise():
    shared, independent = (run(name, "random")[0] for name in ("coupled", "coupled:independent"))
    np.testing.assert_array_equal(shared, independent)


def overlap(p, q, name):
    """Chance that a drafted token is accepted.

    With shared Gumbel noise, both draw token i where E_i max(p_k / p_i, q_k / q_i) <= E_k for all k
    and E_k exponential.
    """
    if name == "rejection":
        return np.minimum(p, q).sum()
    if name == "coupled:independent":
        return (p * q).sum()
    both = np.flatnonzero((p > 0) & (q > 0))
    return sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in both)


@pytest.mark.parametrize("name", ["coupled", "coupled:independent", "rejection"])
def test_first_drafts_are_accepted_as_often_as_theory_says(name):
    p, q = distributions("random")
    _, accepted = run(name, "random")
    expected = overlap(p[0, 0], q[0, 0], name)
    observed = np.mean(accepted >= 1)
    deviations = (observed - expected) / np.sqrt(expected * (1 - expected) / len(accepted))
    assert abs(deviations) < scipy.stats.norm.isf(ALPHA / 2)


def test_accepted_tokens_of_memoryless_distributions():
    beta = 0.65
    mean, error = {}, {}
    for name in ("coupled", "rejection", "block"):
        _, accepted = run(name, "memoryless")
        mean[name], error[name] = accepted.mean(), accepted.std() / np.sqrt(len(accepted))
    limit = scipy.stats.norm.isf(ALPHA / 2)
    assert abs(mean["rejection"] - (beta + beta**2 + beta**3)) < limit * error["rejection"]
    assert mean["block"] > mean["rejection"] + limit * error["block"]
    # Of two tokens, shared noise makes the best of the overlap: coupled accepts as many.
    assert abs(mean["coupled"] - mean["rejection"]) < limit * 2 * error["rejection"]


# Sabotage.


def test_position_only_keys_under_block_are_caught(monkeypatch):
    monkeypatch.setattr(sampling, "round_keys", enumeration.position_keys_only)
    tokens, _ = decode(jaxspec.Block(), "memoryless")
    assert p_value(tokens, distributions("memoryless")[0]) < 1e-12


def test_position_only_keys_on_trees_are_caught(monkeypatch):
    monkeypatch.setattr(sampling, "round_keys", enumeration.position_keys_only)
    tokens, _ = decode(jaxspec.Rejection(), "random", parents=TREES["three, two, one"])
    assert p_value(tokens, distributions("random")[0]) < 1e-12


def test_lossy_acceptance_is_seen_to_be_lossy():
    tokens, _ = decode(jaxspec.Typical(), "random", rows=20_000)
    assert p_value(tokens, distributions("random")[0]) < 1e-12


def test_draws_follow_weights_down_to_the_rarest():
    weights = np.array([0.6, 0.3, 0.0998, 2e-4, 0.0], np.float32)
    keys = jax.random.split(jax.random.key(0), 1_000_000)
    drawn = jax.jit(sampling.draw_weighted)(keys, jnp.broadcast_to(weights, (len(keys), 5)))
    observed = np.bincount(np.asarray(drawn), minlength=5)
    assert observed[4] == 0
    expected = weights[:4].astype(np.float64)
    expected *= len(keys) / expected.sum()
    assert scipy.stats.chisquare(observed[:4], expected).pvalue > ALPHA
