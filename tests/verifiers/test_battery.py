"""Every verifier the package exports through the same checks."""

import functools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.sampling import chain_prefix
from jaxspec.types import Draft, chain_parents
from jaxspec.verifiers.base import Verifier

VERIFIERS = {
    "Coupled": jaxspec.Coupled(),
    "Coupled, noise not shared": jaxspec.Coupled(is_noise_shared=False),
    "Rejection": jaxspec.Rejection(),
    "Block": jaxspec.Block(),
    "Typical": jaxspec.Typical(),
}
B, N, V = 12, 3, 7
TEMPERATURES = np.array([0, 0.7, 1.0, 1.5] * 3, np.float32)


def test_the_table_holds_every_verifier_the_package_exports():
    exported = {
        name
        for name, value in vars(jaxspec).items()
        if isinstance(value, type) and hasattr(value, "verify") and name != "Verifier"
    }
    assert exported == {name.split(",")[0] for name in VERIFIERS}


def test_names_differ_and_promises_fit():
    names = [verifier.name for verifier in VERIFIERS.values()]
    assert len(set(names)) == len(names)
    for verifier in VERIFIERS.values():
        assert isinstance(verifier, Verifier)
        assert ("lossy" in verifier.promise) == ("lossy" in verifier.name)
        assert verifier.is_lossless == ("lossy" not in verifier.name)
        assert verifier.is_lossless or not verifier.is_coupled


@pytest.fixture(scope="module", params=VERIFIERS)
def verify(request):
    verifier = VERIFIERS[request.param]

    @jax.jit
    def run(logits, draft, rows):
        return verifier.verify(logits, draft, rows, chain_prefix(rows, draft.tokens))

    return verifier, run


def inputs(*, num_valid=N, seed=0):
    """Logits, a sampled chain and rows, some of them greedy; drafts are likely tokens."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(B, N + 1, V)).astype(np.float32)
    q = rng.dirichlet(np.ones(V), (B, N)).astype(np.float32)
    best = np.argmax(logits[:, :N], axis=-1)
    tokens = np.where(rng.random((B, N)) < 0.6, best, rng.integers(0, V, (B, N)))
    keys = rng.integers(0, 2**32, (B, 2), dtype=np.uint32)
    rows = enumeration.make_rows(rng.integers(3, 9, B), keys=keys, temperature=TEMPERATURES)
    draft = Draft(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=chain_parents(B, N),
        num_valid=jnp.broadcast_to(jnp.asarray(num_valid, jnp.int32), (B,)),
        q=jnp.asarray(q),
    )
    return jnp.asarray(logits), draft, rows


def tree_inputs(*, seed=0):
    """As `inputs`, with a random tree in each row; some nodes are holes, and q of siblings is
    one."""
    logits, draft, rows = inputs(seed=seed)
    rng = np.random.default_rng(seed)
    parents = np.stack([rng.integers(-1, node, B) for node in range(N)], axis=1)
    row = np.arange(B)[:, None]
    likely = np.argmax(np.asarray(logits), axis=-1)[row, parents + 1]
    tokens = np.where(rng.random((B, N)) < 0.6, likely, np.asarray(draft.tokens))
    tokens = np.where(rng.random((B, N)) < 0.15, -1, tokens)
    q = rng.dirichlet(np.ones(V), (B, N + 1)).astype(np.float32)[row, parents + 1]
    draft = draft.replace(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.asarray(parents, jnp.int32),
        num_valid=jnp.asarray(rng.integers(0, N + 1, B), jnp.int32),
        q=jnp.asarray(q),
    )
    return logits, draft, rows


@pytest.fixture(scope="module")
def verify_trees(verify):
    if not verify[0].takes_trees:
        pytest.skip("takes chains only")
    return verify[1]


FORMS = {
    **{
        f"chains of {words}": functools.partial(inputs, num_valid=num_valid)
        for words, num_valid in {
            "none": 0,
            "one": 1,
            "all": N,
            "all lengths": (np.arange(B) + 3) % (N + 1),
        }.items()
    },
    "trees": tree_inputs,
}


@pytest.fixture(params=FORMS)
def given(request, verify):
    """Inputs of a form, by their seed."""
    if request.param == "trees" and not verify[0].takes_trees:
        pytest.skip("takes chains only")
    return FORMS[request.param]


def arrays(verdict):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(verdict)]


def test_verdicts_are_paths_of_nodes(verify, given):
    longest = 0
    for seed in range(20):
        logits, draft, rows = given(seed=seed)
        verdict = verify[1](logits, draft, rows)
        is_node, parents = np.asarray(draft.is_node), np.asarray(draft.parents)
        for row, path in enumerate(np.asarray(verdict.path)):
            length = int(verdict.num_accepted[row])
            assert np.all(path[length:] == -1)
            above = [-1, *path[: max(length - 1, 0)]]
            np.testing.assert_array_equal(parents[row, path[:length]], above[:length])
            assert np.all(is_node[row, path[:length]])
            longest = max(longest, length)
        assert np.all((np.asarray(verdict.next_token) >= 0) & (np.asarray(verdict.next_token) < V))
        assert {leaf.dtype for leaf in arrays(verdict)} == {np.dtype(np.int32)}
    assert longest == np.max(given.keywords["num_valid"] if given is not tree_inputs else N)


def test_greedy_rows_follow_the_arg_max(verify):
    logits, draft, rows = inputs()
    verdict = verify[1](logits, draft, rows)
    best, tokens = np.argmax(logits, axis=-1), np.asarray(draft.tokens)
    for row in np.flatnonzero(TEMPERATURES == 0):
        length = 0
        while length < N and tokens[row, length] == best[row, length]:
            length += 1
        assert verdict.num_accepted[row] == length
        assert verdict.next_token[row] == best[row, length]


def test_a_row_does_not_depend_on_its_neighbours(verify, given):
    logits, draft, rows = given()
    expected = arrays(verify[1](logits, draft, rows))
    order = np.random.default_rng(1).permutation(B)
    moved = arrays(verify[1](*jax.tree.map(lambda leaf: leaf[order], (logits, draft, rows))))
    for ours, theirs in zip(moved, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs[order])
    # Neighbours all greedy, and neighbours that use every filter.
    others = np.arange(B) != 5
    for changes in ({"temperature": 0.0}, {"top_k": 2, "top_p": 0.5}, {"min_p": 0.3}):
        changed = {
            name: jnp.where(
                others,
                jnp.asarray(value, getattr(rows.sampling, name).dtype),
                getattr(rows.sampling, name),
            )
            for name, value in changes.items()
        }
        beside = rows.replace(sampling=rows.sampling.replace(**changed))
        for ours, theirs in zip(arrays(verify[1](logits, draft, beside)), expected, strict=True):
            np.testing.assert_array_equal(ours[5], theirs[5])


def test_padding_and_holes_are_not_read(verify, given):
    for seed in range(5):
        logits, draft, rows = given(seed=seed)
        is_node = draft.is_node
        is_scored = jnp.pad(is_node, ((0, 0), (1, 0)), constant_values=True)
        index = jnp.arange(N, dtype=jnp.int32)[None]
        garbage = draft.replace(
            tokens=jnp.where(index < draft.num_valid[:, None], draft.tokens, V + 5),
            parents=jnp.where(is_node, draft.parents, 99),
            q=jnp.where(is_node[..., None], draft.q, jnp.nan),
        )
        scores = jnp.where(is_scored[..., None], logits, jnp.nan)
        expected, found = (
            verify[1](*given, rows) for given in ((logits, draft), (scores, garbage))
        )
        if expected.chosen is not None:  # of no use after what is no node
            expected, found = (
                each.replace(chosen=jnp.where(is_scored, each.chosen, 0))
                for each in (expected, found)
            )
        expected, found = arrays(expected), arrays(found)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_scores_that_are_not_numbers_give_no_token(verify):
    logits, draft, rows = inputs(num_valid=0)
    verdict = verify[1](logits.at[3:6, 0].set(jnp.nan), draft, rows)
    is_none = np.asarray(verdict.next_token) == -1
    np.testing.assert_array_equal(is_none, (np.arange(B) >= 3) & (np.arange(B) < 6))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nothing_is_accepted_on_scores_that_are_not_numbers(verify, value):
    logits, draft, rows = inputs()
    verdict = verify[1](logits.at[:, 1, 2].set(value), draft, rows)
    assert np.all(np.asarray(verdict.num_accepted) <= 1)
    stopped_there = np.asarray(verdict.num_accepted) == 1
    assert stopped_there.any()
    assert np.all(np.asarray(verdict.next_token)[stopped_there] == -1)


def test_drafts_without_a_distribution_are_deterministic(verify):
    """The same verdict as of a distribution that is a point mass."""
    logits, draft, rows = inputs()
    point = draft.replace(q=jax.nn.one_hot(draft.tokens, V, dtype=jnp.float32))
    for ours, theirs in zip(
        arrays(verify[1](logits, draft.replace(q=None), rows)),
        arrays(verify[1](logits, point, rows)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_equal_distributions_accept_everything(verify):
    """Not with `coupled` or `typical`, which do not look at q."""
    verifier, run = verify
    if not verifier.needs_draft_probs:
        pytest.skip("does not look at the draft's distribution")
    logits, draft, rows = inputs()
    rows = rows.replace(sampling=rows.sampling.replace(temperature=jnp.ones((B,), jnp.float32)))
    same = draft.replace(q=jax.nn.softmax(logits[:, :N]))
    assert np.all(np.asarray(run(logits, same, rows).num_accepted) == N)
    # A token that the target cannot draw is never accepted.
    impossible = logits.at[np.arange(B), 0, np.asarray(draft.tokens)[:, 0]].set(-jnp.inf)
    verdict = run(impossible, draft, rows)
    assert np.all(
        np.asarray(verdict.next_token)[np.asarray(verdict.num_accepted) == 0]
        != np.asarray(draft.tokens)[np.asarray(verdict.num_accepted) == 0, 0]
    )


@pytest.mark.parametrize("has_q", [True, False])
def test_a_chain_gets_the_same_verdict_by_the_code_for_trees(verify_trees, has_q):
    for seed in range(20):
        num_valid = (np.arange(B) + seed) % (N + 1)
        logits, draft, rows = inputs(num_valid=num_valid, seed=seed)
        draft = draft if has_q else draft.replace(q=None)
        if seed % 2:
            draft = draft.replace(tokens=draft.tokens.at[::3, 1].set(-1))
        as_tree = arrays(verify_trees(logits, draft, rows))
        as_chain = arrays(verify_trees(logits, draft.replace(is_chain=True), rows))
        for ours, theirs in zip(as_tree, as_chain, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_typical_takes_the_longest_path_and_of_several_the_likeliest():
    verifier = jaxspec.Typical()
    rng = np.random.default_rng(0)
    for seed in range(30):
        logits, draft, _ = tree_inputs(seed=seed)
        p = np.asarray(jax.nn.softmax(logits))
        path, _ = verifier.accept(jnp.asarray(p), draft, jnp.asarray(rng.random((B, N))))
        entropy = -np.sum(p * np.log(p), axis=2)
        threshold = np.minimum(verifier.epsilon, verifier.delta * np.exp(-entropy))
        for row in range(B):
            best = (0, 0.0, [])
            reached = {-1: (0, 0.0, [])}
            for node in np.flatnonzero(draft.is_node[row]):
                parent, token = int(draft.parents[row, node]), int(draft.tokens[row, node])
                of_token = p[row, parent + 1, token]
                if parent in reached and of_token > threshold[row, parent + 1]:
                    length, total, above = reached[parent]
                    reached[node] = (length + 1, total + np.log(of_token), [*above, node])
                    best = max(best, reached[node], key=lambda found: (found[0], found[1]))
            assert path[row].tolist() == best[2] + [-1] * (N - len(best[2]))


@pytest.mark.parametrize("values", [{"epsilon": 0.0}, {"delta": 1.5}, {"epsilon": -1}])
def test_typical_refuses_thresholds_that_are_no_probabilities(values):
    with pytest.raises(jaxspec.errors.SettingError, match=f"{next(iter(values))} .* was given"):
        jaxspec.Typical(**values)
