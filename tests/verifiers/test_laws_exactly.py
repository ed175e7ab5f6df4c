"""The output distribution of every lossless verifier is the target's, by exact enumeration over two
rounds.

See `enumeration`. Each way to break a rule or its noise is caught by the same check, and expected
accepted lengths are those of the theory.
"""

import dataclasses
import itertools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import (
    DEPTH,
    ROUNDING,
    Bench,
    Case,
    V,
    expected_accepted,
    make_rows,
    one_hot,
    position_keys_only,
    probs_error,
    random_distributions,
    sequence_probs,
    thinned,
)

import jaxspec
from jaxspec import sampling
from jaxspec.drafters import draft_model
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.types import Draft, chain_parents
from jaxspec.verifiers import block, chain, coupled, rejection, tree

RULES = {"rejection": jaxspec.Rejection, "block": jaxspec.Block}
N = 3


def constant(distribution, depth=DEPTH):
    """A distribution that depends on nothing."""
    return np.broadcast_to(
        np.array(distribution, float), (depth, len(distribution), len(distribution))
    )


def fixed_drafts(seed):
    return np.random.default_rng(seed).integers(0, V, (DEPTH, V))


MEMORYLESS = Case(p=constant([0.7, 0.3, 0.0]), q=constant([0.35, 0.65, 0.0]), num_drafted=(N, N))
CASES = {
    "random": Case(p=random_distributions(0), q=random_distributions(1), num_drafted=(N, N)),
    "flat and peaked": Case(
        p=random_distributions(2, sharpness=5),
        q=random_distributions(3, sharpness=0.2),
        num_drafted=(N, N),
    ),
    "memoryless": MEMORYLESS,
    "equal": Case(p=random_distributions(4), q=random_distributions(4), num_drafted=(N, N)),
    "disjoint supports": Case(
        p=constant([0.4, 0.6, 0.0]), q=constant([0.0, 0.0, 1.0]), num_drafted=(N, N)
    ),
    "one-hot target": Case(p=one_hot(5), q=random_distributions(6), num_drafted=(N, N)),
    "one-hot drafter": Case(p=random_distributions(7), q=one_hot(8), num_drafted=(N, N)),
    "both one-hot": Case(p=one_hot(9), q=one_hot(10), num_drafted=(N, N)),
    "zero entries": Case(
        p=thinned(random_distributions(11), 0),
        q=thinned(random_distributions(12), 1),
        num_drafted=(N, N),
    ),
    "shorter drafts": Case(
        p=random_distributions(13), q=random_distributions(14), num_drafted=(2, 1)
    ),
    "nothing drafted later": Case(
        p=random_distributions(15), q=random_distributions(16), num_drafted=(1, 0)
    ),
    "deterministic drafts": Case(
        p=random_distributions(17), fixed=fixed_drafts(0), num_drafted=(N, N)
    ),
    "deterministic, impossible": Case(
        p=constant([0.2, 0.8, 0.0]), fixed=np.full((DEPTH, V), 2), num_drafted=(N, N)
    ),
}


@pytest.fixture(scope="module")
def benches():
    return {name: Bench(rule()) for name, rule in RULES.items()}


@pytest.fixture(params=RULES)
def bench(benches, request):
    return benches[request.param]


@pytest.mark.parametrize("name", CASES)
def test_output_distribution_is_the_targets(bench, name):
    assert probs_error(bench, CASES[name]) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_nodes", "num_rounds"), [(5, 2, 2), (4, 3, 2), (2, 2, 3)])
@pytest.mark.parametrize("rule", RULES)
def test_output_distribution_of_larger_vocabularies_and_more_rounds(
    rule, size, num_nodes, num_rounds
):
    bench, depth = Bench(RULES[rule]()), num_rounds * (num_nodes + 1)
    for seed in range(4):
        case = Case(
            p=random_distributions(seed, size=size, depth=depth),
            q=random_distributions(100 + seed, size=size, depth=depth),
            num_drafted=(num_nodes, num_nodes),
            num_nodes=num_nodes,
        )
        assert probs_error(bench, case, num_rounds=num_rounds) < ROUNDING


SHORT_OF_CONFIDENCE = {
    f"{name}, min_confidence {bound}": dataclasses.replace(CASES[name], min_confidence=bound)
    for name in ("random", "flat and peaked", "memoryless", "zero entries")
    for bound in (0.4, 0.6)
}


@pytest.mark.parametrize("name", SHORT_OF_CONFIDENCE)
def test_drafts_that_end_early_leave_the_distribution_alone(bench, name):
    assert probs_error(bench, SHORT_OF_CONFIDENCE[name]) < ROUNDING


def without_the_unsure_token(num_valid, node, *, is_sure):
    """A draft ends before the token that was too unlikely."""
    return jnp.where(is_sure, num_valid, jnp.minimum(num_valid, node))


def test_leaving_out_an_unlikely_token_biases(bench, monkeypatch):
    monkeypatch.setattr(draft_model, "end_draft", without_the_unsure_token)
    for case in SHORT_OF_CONFIDENCE.values():
        assert probs_error(bench, case) > 1000 * ROUNDING


# Biases and allowed tokens, with target and drafter that rule out some of them.
BIASES = {
    "one raised, one lowered": SamplingParams(logit_bias={0: -1.5, 2: 2.0}),
    "one barred": SamplingParams(logit_bias={1: -100}),
    "two allowed": SamplingParams(allowed_token_ids=[0, 2]),
    "two allowed, one raised": SamplingParams(allowed_token_ids=[1, 0], logit_bias={1: 1, 2: 9}),
    "one allowed": SamplingParams(allowed_token_ids=[1]),
}
BIASED = {
    f"{name}, {of}": dataclasses.replace(CASES[of], params=params)
    for name, params in BIASES.items()
    for of in ("random", "disjoint supports", "deterministic drafts")
}
BIASED["one allowed, zero entries"] = dataclasses.replace(
    CASES["zero entries"], params=BIASES["one allowed"]
)
QUICK = ("two allowed, one raised, disjoint supports",)  # no draft of the drafter's own is allowed


def slow_but(quick, names):
    """Parameters of which all but a few are left to the slow run."""
    return [pytest.param(x, marks=[] if x in quick else [pytest.mark.slow]) for x in names]


@pytest.mark.parametrize("name", slow_but(QUICK, BIASED))
def test_the_output_distribution_is_the_biased_one(bench, name):
    case = BIASED[name]
    assert probs_error(bench, case) < ROUNDING
    assert np.abs(case.biased_p - case.p).max() > 0.1


@pytest.mark.parametrize("name", slow_but(["two allowed, one raised"], BIASES))
def test_coupled_tokens_are_those_of_biased_plain_decoding(name):
    for of in ("random", "disjoint supports"):
        case = dataclasses.replace(CASES[of], params=BIASES[name])
        found, expected, share_same = coupled_probs(case.p, case.q, params=case.params)
        assert share_same == 1
        np.testing.assert_allclose(found, expected, atol=1e-12)


class TargetWithoutBias(Bench):
    def _traced_verify(self, *args):
        with enumeration.replaced(add_bias=lambda logits, sampling: logits):
            return super()._traced_verify(*args)


class DrafterWithoutBias(Bench):
    def _traced_draw(self, *args):
        with enumeration.replaced(add_bias=lambda logits, sampling: logits):
            return super()._traced_draw(*args)


def test_a_bias_that_the_target_leaves_out_is_caught():
    case = BIASED["one raised, one lowered, random"]
    assert probs_error(TargetWithoutBias(jaxspec.Rejection()), case) > 1e-3


@pytest.mark.slow
def test_a_bias_that_the_drafter_leaves_out_costs_accepted_tokens_and_nothing_else():
    case = BIASED["one raised, one lowered, random"]
    without = DrafterWithoutBias(jaxspec.Rejection())
    assert probs_error(without, case) < ROUNDING
    both = Bench(jaxspec.Rejection())
    assert expected_accepted(without, case) < expected_accepted(both, case) - 0.1


def test_no_two_draws_of_two_rounds_share_a_key(bench):
    assert enumeration.remembered(enumeration.decide(bench, CASES["random"])) == {}


# Sabotage: the check above has to see each of these.


def one_stream(rows, node, stream, *, real=sampling.round_keys):
    """Drafts, acceptance and residual share their noise."""
    return real(rows, node, sampling.Stream.DRAFT)


def test_position_only_keys_bias_block_and_one_round_cannot_see_it(monkeypatch):
    monkeypatch.setattr(sampling, "round_keys", position_keys_only)
    bench = Bench(jaxspec.Block())
    assert probs_error(bench, MEMORYLESS, num_rounds=1) < ROUNDING
    assert probs_error(bench, MEMORYLESS) > 1e-3


def test_position_only_keys_happen_to_leave_rejection_alone(monkeypatch):
    # It never looks at noise beyond the token it emits last, so none is used twice: the check
    # above tells a bias from a key schedule that merely looks wrong.
    monkeypatch.setattr(sampling, "round_keys", position_keys_only)
    assert probs_error(Bench(jaxspec.Rejection()), MEMORYLESS) < ROUNDING


def loosened(distributions, draws):
    """`u q <= 1.1 p`."""
    return rejection.Rejection().accept(distributions, draws / 1.1)


def without_residual(distributions, draws):
    """The token after a rejected draft comes from p."""
    num_accepted, _ = rejection.Rejection().accept(distributions, draws)
    return num_accepted, tree.at_node(distributions.p, num_accepted)


def residual_of_the_wrong_node(distributions, draws):
    """The residual one node too early."""
    num_accepted, weights = block.Block().accept(distributions, draws)
    early = jnp.maximum(num_accepted - 1, 0)
    residual = jnp.maximum(
        tree.at_node(distributions.p, early) - tree.at_node(distributions.q, early), 0
    )
    return num_accepted, jnp.where((num_accepted == N)[:, None], weights, residual)


def residual_without_reach(distributions, draws):
    """`max(p - q, 0)`, as if block verification were token by token."""
    num_accepted, weights = block.Block().accept(distributions, draws)
    p, q = (
        tree.at_node(distribution, num_accepted)
        for distribution in (distributions.p, distributions.q)
    )
    return num_accepted, jnp.where((num_accepted == N)[:, None], weights, jnp.maximum(p - q, 0))


class Broken:
    """A chain rule with a fault."""

    is_noise_shared = False

    def __init__(self, accept):
        self.accept = accept

    def verify(self, logits, draft, rows, prefix):
        return chain.verify_chain(self.accept, logits, draft, rows, prefix)


@pytest.mark.parametrize(
    "accept",
    [loosened, without_residual, residual_of_the_wrong_node, residual_without_reach],
    ids=lambda accept: accept.__name__,
)
def test_a_broken_rule_is_caught(accept):
    assert probs_error(Bench(Broken(accept)), CASES["random"]) > 1e-3


def test_a_stream_that_serves_two_purposes_is_caught(monkeypatch):
    monkeypatch.setattr(sampling, "round_keys", one_stream)
    assert probs_error(Bench(jaxspec.Rejection()), CASES["random"]) > 1e-3


def test_lossy_acceptance_is_seen_to_be_lossy():
    assert probs_error(Bench(jaxspec.Typical()), CASES["random"]) > 1e-3


# Expected accepted tokens.


def chain_theory(p, q, num_nodes):
    """Expected accepted tokens of `rejection`: the sum over depths of the chance that all nodes up
    to there pass, each with min(1, p / q)."""
    total = 0.0
    for length in range(1, num_nodes + 1):
        for drafted in itertools.product(range(V), repeat=length):
            last, chance = 0, 1.0
            for node, token in enumerate(drafted):
                chance *= min(p[node, last, token], q[node, last, token])
                last = token
            total += chance
    return total


@pytest.mark.parametrize("seed", range(6))
def test_expected_accepted_tokens(benches, seed):
    rng = np.random.default_rng(seed)
    p, q = (
        random_distributions(rng.integers(1e6), sharpness=rng.choice([0.2, 1, 5])) for _ in range(2)
    )
    if seed % 3 == 0:
        q = 0.8 * p + 0.2 * q
    for num_nodes in (1, 2, 3):
        case = Case(p=p, q=q, num_drafted=(num_nodes, num_nodes))
        by_token = expected_accepted(benches["rejection"], case)
        by_block = expected_accepted(benches["block"], case)
        assert by_token == pytest.approx(chain_theory(p, q, num_nodes), abs=1e-6)
        assert by_block >= by_token - 1e-6
        if num_nodes == 1:
            assert by_block == pytest.approx(by_token, abs=1e-6)


def test_expected_accepted_tokens_where_they_are_known(benches):
    beta = 0.35 + 0.3
    assert expected_accepted(benches["rejection"], MEMORYLESS) == pytest.approx(
        beta + beta**2 + beta**3, abs=1e-6
    )
    assert expected_accepted(benches["block"], MEMORYLESS) > beta + beta**2 + beta**3 + 0.01
    for bench in benches.values():
        assert expected_accepted(bench, CASES["equal"]) == pytest.approx(N, abs=1e-6)
        assert expected_accepted(bench, CASES["disjoint supports"]) == 0


# Coupled: its tokens are a function of the noise of each position. A finite set of noise vectors,
# one for each key, is enumerated completely.


def coupled_probs(p, q, *, num_nodes=2, num_noises=3, min_confidence=0.0, params=None):
    """Distribution of two rounds of coupled decoding where the noise of each key takes one of
    `num_noises` values with equal chances; the distribution of the target under such noise; and the
    share of assignments in which the tokens are those of plain decoding."""
    size, length = p.shape[-1], 2 * (num_nodes + 1)
    noises = np.random.default_rng(1).gumbel(size=(num_noises, size)).astype(np.float32)
    worlds = np.array(list(itertools.product(range(num_noises), repeat=length)))
    num_worlds = len(worlds)
    known: dict[int, int] = {}

    def numbers(keys):
        """Keys `[W, T]` numbered as they first appear: same key, same number."""
        data = enumeration.raw(np.asarray(jax.random.key_data(keys)))
        return np.vectorize(lambda key: known.setdefault(int(key), len(known)))(data)

    def gumbel(keys, vocab_size):
        number = np.minimum(numbers(keys), length - 1)
        return jnp.asarray(noises[np.take_along_axis(worlds, number, axis=1)])

    verifier = jaxspec.Coupled()
    tokens, emitted = np.zeros((num_worlds, 2 * length), int), np.zeros(num_worlds, int)
    world = np.arange(num_worlds)
    with enumeration.replaced(gumbel=gumbel), jax.disable_jit():
        for _ in range(2):
            last = np.where(emitted > 0, tokens[world, np.maximum(emitted - 1, 0)], 0)
            rows = make_rows(enumeration.PROMPT_LENGTH + emitted, params=params)
            # Numbered in the order of positions, whatever a round asks for first.
            offsets = jnp.arange(num_nodes + 1, dtype=jnp.int32)[None]
            positions = rows.num_committed[:, None] + offsets
            numbers(sampling.position_keys(rows.sampling, positions))
            context, drafts = last, []
            num_valid = jnp.full((num_worlds,), num_nodes, jnp.int32)
            for node in range(num_nodes):
                drafted = np.zeros((num_worlds, num_nodes), np.int32)
                token, _, confidence = sampling.draw_draft(
                    jnp.asarray(enumeration.log(q[emitted + node, context])),
                    rows,
                    jnp.asarray(drafted),
                    jnp.int32(node),
                    vocab_size=size,
                    is_noise_shared=True,
                    needs_probs=False,
                    needs_confidence=True,
                )
                num_valid = draft_model.end_draft(
                    num_valid, node, is_sure=confidence >= min_confidence
                )
                context = np.asarray(token)
                drafts.append(context)
            drafts = np.stack(drafts, 1)
            before = np.concatenate([last[:, None], drafts], 1)
            depth = emitted[:, None] + np.arange(num_nodes + 1)
            draft = Draft(
                tokens=jnp.asarray(drafts, jnp.int32),
                parents=chain_parents(num_worlds, num_nodes),
                num_valid=num_valid,
            )
            prefix = sampling.chain_prefix(rows, draft.tokens)
            verdict = verifier.verify(
                jnp.asarray(enumeration.log(p[depth, before])), draft, rows, prefix
            )
            num_accepted = np.asarray(verdict.num_accepted)
            for node in range(num_nodes + 1):
                tokens[world, emitted + node] = np.where(
                    node < num_accepted,
                    drafts[:, min(node, num_nodes - 1)],
                    np.asarray(verdict.next_token),
                )
            emitted = emitted + num_accepted + 1

    # The target under the same noise: its distribution, and its own tokens in each world.
    p = enumeration.biased(p, params)
    distribution = np.zeros_like(p)
    for noise in noises:
        distribution += np.eye(size)[np.argmax(enumeration.log(p) + noise, axis=-1)] / num_noises
    is_same, last = np.ones(num_worlds, bool), np.zeros(num_worlds, int)
    for position in range(length):
        plain = np.argmax(enumeration.log(p[position, last]) + noises[worlds[:, position]], axis=-1)
        is_same &= (position >= emitted) | (tokens[:, position] == plain)
        last = plain
    mass = [np.zeros(size**n) for n in range(length + 1)]
    for n in range(1, length + 1):
        here = emitted == n
        code = tokens[here, :n] @ (size ** np.arange(n - 1, -1, -1))
        np.add.at(mass[n], code, 1 / num_worlds)
    return (
        enumeration.complete(mass, distribution),
        sequence_probs(distribution, length),
        is_same.mean(),
    )


COUPLED_CASES = ("random", "flat and peaked", "equal", "disjoint supports", "zero entries")


@pytest.mark.parametrize("name", COUPLED_CASES)
def test_coupled_tokens_are_plain_decodings_for_every_noise(name):
    case = CASES[name]
    for min_confidence in (0.0, 0.5):
        found, expected, share_same = coupled_probs(case.p, case.q, min_confidence=min_confidence)
        assert share_same == 1
        np.testing.assert_allclose(found, expected, atol=1e-12)


def half_positions(rows_sampling, position, *, real=sampling.position_keys):
    """Two positions share their noise."""
    return real(rows_sampling, position // 2)


def first_draft_always(chosen, draft, *, real=coupled.follow):
    """The first draft is taken whatever the target draws."""
    first = jnp.arange(chosen.shape[1], dtype=jnp.int32) == 0
    return real(jnp.where(first, draft.tokens[:, :1], chosen), draft)


@pytest.mark.parametrize(
    ("module", "name", "sabotage"),
    [(sampling, "position_keys", half_positions), (coupled, "follow", first_draft_always)],
)
def test_broken_coupling_is_caught(monkeypatch, module, name, sabotage):
    monkeypatch.setattr(module, name, sabotage)
    found, expected, share_same = coupled_probs(CASES["random"].p, CASES["random"].q)
    assert np.abs(found - expected).max() > 1e-3
    assert share_same < 1
