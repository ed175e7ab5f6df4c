"""Drafts that end where the drafter is not sure leave the target's distribution as it is, by exact
enumeration over two rounds (see `enumeration`), as long as the drawn tokens have no say in it."""

from __future__ import annotations

import dataclasses
import functools

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import Bench, Case, make_rows, probs_error

import jaxspec
from jaxspec.drafters.flexdraft.formulas import sure_length
from jaxspec.sampling import draw_block, draw_draft

V, N = 3, 3
DEPTH = 2 * (N + 1)
ROUNDING = 2e-7  # of fp32
RULES = {"rejection": jaxspec.Rejection, "block": jaxspec.Block}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCase(Case):
    """A drafter of blocks: a node's distribution depends on where the round begins, on the newest
    token and on its own place, not on the drafts before it.

    Attributes:
      blocks: `[D, V, N, V]`.
      least: confidence with which a draft goes on.
      rule: see `sure_length`.
      is_by_token: the fault: confidence in the token that was drawn.
    """

    blocks: np.ndarray
    least: float
    rule: str = "product"
    is_by_token: bool = False


class BlockRound(enumeration.Round):
    """A round of such a drafter."""

    def __init__(self, bench, case: BlockCase, starts):
        super().__init__(bench, case, starts)
        self.q = case.blocks[self.emitted, self.last]
        confidence = self.q.max(axis=2)
        if case.is_by_token:
            confidence = np.take_along_axis(self.q, self.drafts[..., None], axis=2)[..., 0]
        sure = sure_length(jnp.asarray(confidence), least=case.least, rule=case.rule)
        self.num_valid = np.minimum(self.num_valid, np.asarray(sure))


def block_case(seed, **settings) -> BlockCase:
    rng = np.random.default_rng(seed)
    return BlockCase(
        p=rng.dirichlet(np.full(V, 0.8), (DEPTH, V)),
        q=np.full((DEPTH, V, V), 1 / V),
        blocks=rng.dirichlet(np.full(V, 0.6), (DEPTH, V, N)),
        num_drafted=(N, N),
        **settings,
    )


@pytest.fixture(autouse=True)
def rounds_of_blocks(monkeypatch):
    monkeypatch.setattr(enumeration, "Round", BlockRound)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rule", ["product", pytest.param("minimum", marks=pytest.mark.system)])
def test_a_cut_by_confidence_leaves_the_distribution_alone(name, rule):
    bench = Bench(RULES[name]())
    for seed in range(2):
        case = block_case(seed, least=0.5, rule=rule)
        assert probs_error(bench, case) < ROUNDING


@pytest.mark.parametrize("name", RULES)
def test_a_cut_by_the_drawn_token_is_a_bias(name):
    case = block_case(0, least=0.5, is_by_token=True)
    assert probs_error(Bench(RULES[name]()), case) > 1e-3


def test_the_cut_is_tried_at_every_length():
    case = block_case(0, least=0.5)
    confidence = jnp.asarray(case.blocks.max(axis=3).reshape(-1, N))
    lengths = sure_length(confidence, least=case.least, rule=case.rule)
    assert set(lengths.tolist()) == {1, 2, 3}


@pytest.mark.parametrize(
    ("is_noise_shared", "penalty"),
    [
        (True, 1.5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((True, 1.0), (False, 1.0), (False, 1.5))
        ),
    ],
)
def test_a_block_is_drawn_as_node_by_node(is_noise_shared, penalty):
    """Greedy and sampled rows; with penalties, which count the drafts before."""
    num_rows, vocab_size = 4, 50
    logits = 3 * jax.random.normal(jax.random.key(0), (num_rows, N, vocab_size))
    keys = np.arange(2 * num_rows, dtype=np.uint32).reshape(num_rows, 2)
    rows = make_rows([4, 9, 7, 5], keys=keys)
    own = rows.sampling.replace(
        temperature=jnp.asarray([0, 1, 0.5, 0], jnp.float32),
        repetition_penalty=jnp.asarray([penalty, 1, penalty, 1], jnp.float32),
        top_k=jnp.asarray([0, 9, 0, 0], jnp.int32),
    )
    rows = rows.replace(sampling=own)
    settings = {"is_noise_shared": is_noise_shared, "needs_probs": True}

    @jax.jit
    def one_by_one(rows):
        tokens, distributions = jnp.zeros((num_rows, N), jnp.int32), []
        for node in range(N):
            one = draw_draft(
                logits[:, node], rows, tokens, jnp.int32(node), vocab_size=vocab_size, **settings
            )
            tokens = tokens.at[:, node].set(one.token)
            distributions.append(one.distribution)
        return tokens, jnp.stack(distributions, axis=1)

    at_once = jax.jit(functools.partial(draw_block, **settings))
    greedy = rows.replace(sampling=own.replace(temperature=jnp.zeros((num_rows,))))
    for drawn in (rows, greedy):
        found, (tokens, distributions) = at_once(logits, drawn), one_by_one(drawn)
        np.testing.assert_array_equal(found.tokens, tokens)
        np.testing.assert_allclose(found.distributions, distributions, atol=1e-6)
