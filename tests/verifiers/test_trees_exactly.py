"""The output distribution of rejection on trees is the target's, by exact enumeration over two
rounds; see `enumeration`. Each way to break the rule, its noise or the drawing of siblings is
caught by the same check."""

import enumeration
import numpy as np
import pytest
from enumeration import (
    DEPTH,
    ROUNDING,
    Bench,
    Case,
    V,
    expected_accepted,
    one_hot,
    probs_error,
    random_distributions,
    thinned,
)

import jaxspec
from jaxspec import sampling
from jaxspec.verifiers import rejection

TWO_BY_TWO = (-1, -1, 0, 0, 1, 1)
SHAPES = {
    "chain": (-1, 0, 1),
    "two": (-1, -1),
    "two, one": (-1, -1, 0),
    "siblings apart": (-1, 0, -1, 2),
    "two by two": TWO_BY_TWO,
    "three, two, one": (-1, -1, -1, 0, 0, 3),
}


def tree(parents, p, q=None, **changes):
    number = len(parents)
    settings = {"num_drafted": (number, number), "num_nodes": number, "parents": parents} | changes
    return Case(p=p, q=q, **settings)


def ranked(seed):
    """`[D, V, V]`, tokens in a random order."""
    return np.random.default_rng(seed).random((DEPTH, V, V)).argsort(axis=2)


def repeated(seed):
    """`[D, V, V]`, where the first two are the same token."""
    tokens = ranked(seed)
    tokens[..., 1] = tokens[..., 0]
    return tokens


P, Q = random_distributions(11, sharpness=1), random_distributions(21, sharpness=1)
CASES = {
    **{name: tree(parents, P, Q) for name, parents in SHAPES.items()},
    **{
        f"{name}, deterministic": tree(parents, P, fixed=ranked(2))
        for name, parents in SHAPES.items()
    },
    "equal": tree(TWO_BY_TWO, P, P),
    "thinned target": tree(TWO_BY_TWO, thinned(P, 0), Q),
    "thinned": tree(TWO_BY_TWO, thinned(P, 0), thinned(Q, 1)),
    "thinned, three of two": tree(SHAPES["three, two, one"], thinned(P, 0), thinned(Q, 1)),
    "two of one": tree(TWO_BY_TWO, P, one_hot(3)),
    "one-hot target": tree(TWO_BY_TWO, one_hot(4), Q),
    "flat and peaked": tree(
        TWO_BY_TWO, random_distributions(5, sharpness=5), random_distributions(6, sharpness=0.2)
    ),
    "first child a hole": tree(TWO_BY_TWO, P, Q, holes=(0, 5)),
    "second child a hole": tree(TWO_BY_TWO, P, Q, holes=(1, 2)),
    "holes, deterministic": tree(TWO_BY_TWO, P, fixed=ranked(2), holes=(0, 4)),
    "fewer nodes": tree(TWO_BY_TWO, P, Q, num_drafted=(4, 1)),
    "shared prefixes": tree(TWO_BY_TWO, P, fixed=repeated(7)),
    "small, thinned": tree(SHAPES["two, one"], thinned(P, 0), thinned(Q, 1)),
    "small, two of one": tree(SHAPES["two, one"], P, one_hot(3)),
    "small, with a hole": tree(SHAPES["siblings apart"], P, Q, holes=(0,)),
    "small, shared prefixes": tree(SHAPES["siblings apart"], P, fixed=repeated(7)),
}
# One shape of arrays, one compilation; every other case takes seconds.
QUICK = ("two, one", "small, thinned", "small, two of one", "two, one, deterministic")
IN_GATE = ("first child a hole", "shared prefixes")
NAMES = [
    name
    if name in QUICK
    else pytest.param(name, marks=pytest.mark.system if name in IN_GATE else pytest.mark.slow)
    for name in CASES
]


@pytest.fixture(scope="module")
def bench():
    return Bench(jaxspec.Rejection())


@pytest.mark.parametrize("name", NAMES)
def test_output_distribution_is_the_targets(bench, name):
    assert probs_error(bench, CASES[name]) < ROUNDING


def holes_where_nothing_is_left(case, of_token):
    return of_token == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["thinned, three of two", "thinned", "two of one"])
def test_levels_with_fewer_candidates_than_nodes(bench, name, monkeypatch):
    monkeypatch.setattr(enumeration, "is_left_out", holes_where_nothing_is_left)
    assert probs_error(bench, CASES[name]) < ROUNDING


def test_no_two_draws_of_two_rounds_share_a_key(bench):
    assert enumeration.remembered(enumeration.decide(bench, CASES["two, one"])) == {}


# Expected accepted tokens.


def theory(case, node=-1, last=0):
    """Expected accepted tokens below a node whose token is `last`: a child x passes with
    min(1, p / q), and the next one meets what is left of p and q."""
    depth = case.depths[node + 1]
    children = dict(case.families).get(node, [])
    fixed = None if case.fixed is None else case.fixed[depth, last]

    def from_child(rank, p, q):
        if rank == len(children) or q.sum() == 0:
            return 0.0
        q, total = q / q.sum(), 0.0
        for token in np.flatnonzero(q):
            passes = min(1, p[token] / q[token])
            total += q[token] * passes * (1 + theory(case, children[rank], token))
            left = np.maximum(p - q, 0)
            if passes < 1 and left.sum() > 0:
                law = proposed(rank + 1, np.where(np.arange(V) == token, 0, q))
                total += q[token] * (1 - passes) * from_child(rank + 1, left / left.sum(), law)
        return total

    def proposed(rank, law):
        is_known = fixed is not None and rank < len(children)
        return np.eye(V)[fixed[rank]] if is_known else law

    q = np.zeros(V) if case.q is None else case.q[depth, last]
    return from_child(0, case.p[depth, last], proposed(0, q))


@pytest.mark.system
@pytest.mark.parametrize(
    "name", [*SHAPES, "two, one, deterministic", "two by two, deterministic", "thinned"]
)
def test_expected_accepted_tokens(bench, name):
    case = CASES[name]
    assert expected_accepted(bench, case) == pytest.approx(theory(case), abs=1e-6)


@pytest.mark.system
def test_a_second_sibling_is_accepted_more_often_than_none(bench):
    one = tree((-1,), P, Q)
    assert expected_accepted(bench, CASES["two"]) > expected_accepted(bench, one) + 0.01


# Sabotage: the check above has to see each of these.


def is_biased(bench, case):
    return probs_error(bench, case) > 1e-3


@pytest.mark.system
def test_position_only_keys_are_caught(monkeypatch):
    monkeypatch.setattr(sampling, "round_keys", enumeration.position_keys_only)
    assert is_biased(Bench(jaxspec.Rejection()), CASES["two"])


def q_as_it_was(p, q, *, p_mass, q_mass, real=rejection.residual):
    """The rejected token is missing from q, and the others keep their probabilities."""
    return real(p, q, p_mass=p_mass, q_mass=q_mass * 0 + 1)


def p_as_it_was(p, q, *, p_mass, q_mass, real=rejection.residual):
    return real(p, q, p_mass=p_mass * 0 + 1, q_mass=q_mass)


def nothing_taken_away(p, q, *, p_mass, q_mass):
    return p


@pytest.mark.parametrize(
    "residual",
    [
        pytest.param(q_as_it_was, marks=pytest.mark.system),
        pytest.param(p_as_it_was, marks=pytest.mark.slow),
        pytest.param(nothing_taken_away, marks=pytest.mark.slow),
    ],
)
def test_a_broken_residual_is_caught(monkeypatch, residual):
    monkeypatch.setattr(rejection, "residual", residual)
    assert is_biased(Bench(jaxspec.Rejection()), CASES["two"])


def in_order_of_ids(q, number, *, real=enumeration.sibling_probs):
    """The tokens that were drawn, sorted."""
    probs = real(q, number)
    if number == 1:
        return probs
    probs = probs.reshape(-1, V, V)
    return np.triu(probs + probs.swapaxes(1, 2)).reshape(len(q), -1)


def test_siblings_in_another_order_than_drawn_are_caught(bench, monkeypatch):
    monkeypatch.setattr(enumeration, "sibling_probs", in_order_of_ids)
    assert is_biased(bench, CASES["two, one"])


def unlikely(case, of_token):
    """Nodes whose own token is unlikely are left out."""
    return of_token < 0.4


def below_unlikely(case, of_token):
    """Nodes whose parent's token is unlikely are left out."""
    root = np.ones((len(of_token), 1))
    return np.concatenate([root, of_token], axis=1)[:, case.tree + 1] < 0.4


def after_unlikely(case, of_token):
    """Nodes whose earlier sibling's token is unlikely are left out."""
    earlier = [
        min((m for m in range(n) if case.tree[m] == case.tree[n]), default=-1)
        for n in range(case.num_nodes)
    ]
    root = np.ones((len(of_token), 1))
    return np.concatenate([root, of_token], axis=1)[:, np.array(earlier) + 1] < 0.4


def test_leaving_out_nodes_by_their_own_tokens_biases(bench, monkeypatch):
    monkeypatch.setattr(enumeration, "is_left_out", unlikely)
    assert is_biased(bench, CASES["two, one"])


@pytest.mark.parametrize("left_out", [below_unlikely, after_unlikely])
def test_leaving_out_nodes_by_earlier_tokens_does_not(bench, monkeypatch, left_out):
    monkeypatch.setattr(enumeration, "is_left_out", left_out)
    assert probs_error(bench, CASES["two, one"]) < ROUNDING


@pytest.mark.system
def test_drawing_with_replacement_only_wastes_nodes(bench, monkeypatch):
    """A repeated token is passed over, and any other is drawn from what is left of q."""

    def with_replacement(q, number):
        return np.prod(np.stack(np.broadcast_arrays(q[:, :, None], q[:, None])), axis=0).reshape(
            len(q), -1
        )

    monkeypatch.setattr(enumeration, "sibling_probs", with_replacement)
    monkeypatch.setattr(enumeration, "can_be_drafted", lambda *case: True)
    assert probs_error(bench, CASES["two"]) < ROUNDING


def test_a_token_that_was_not_drawn_is_never_accepted(bench):
    """The second of two siblings where q has one token only: the test `0 < p` would accept it."""
    case = CASES["small, two of one"]
    decisions, num_tested = enumeration.decide(bench, case), 0
    for (emitted, last, drafts), m in decisions.index.items():
        if case.q[emitted, last, drafts[1]] == 0:
            assert not np.any(decisions.path[m] == 1)
            num_tested += 1
    assert num_tested > 0
