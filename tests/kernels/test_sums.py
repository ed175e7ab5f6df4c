"""What follows from logits depends on their row alone: kept sets, draws and log-probabilities have
the same bits in every batch and in windows of every width, and no draw depends on a setting."""

from __future__ import annotations

import functools
import math

import enumeration
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import sampling
from jaxspec.kernels import sums
from jaxspec.kernels.highest import highest
from jaxspec.types import Draft, EngineShape, chain_parents

VOCABULARIES = (256, 512, 600, 1000, 4096, 32_000, 49_152, 151_936)
BATCHES, WIDTHS = tuple(range(1, 10)), (1, 3, 5, 9)
INF = float("inf")


def total_of(numbers):
    return np.asarray(jax.jit(sums.total)(jnp.asarray(numbers)))[..., 0]


# Sums


@pytest.mark.parametrize("size", [1, 2, 61, 1000, 151_936, 2**18 + 1])
def test_totals_are_exact_to_the_last_bit_of_fp32(size):
    rng = np.random.default_rng(size)
    # That of an fp32 number, and of the last digit of each.
    rtol = 2**-23 + size * 0.5 ** (3 * sums.num_digit_bits(size))
    assert rtol < 5e-7 or size > 2**18
    for numbers in (
        rng.random(size),
        np.exp(-30 * rng.random(size)),
        1e-30 * rng.random(size),
        1e30 * rng.random(size),
        np.r_[1, np.full(size - 1, 1e-9)],  # a long tail of one small number
        np.ones(size),
        np.zeros(size),
    ):
        numbers = numbers.astype(np.float32)
        np.testing.assert_allclose(total_of(numbers), math.fsum(numbers.tolist()), rtol=rtol)


def test_a_total_does_not_depend_on_the_order():
    rng = np.random.default_rng(0)
    numbers = np.exp(-20 * rng.random(4001)).astype(np.float32)
    orders = np.stack([rng.permutation(numbers) for _ in range(20)])
    assert len(set(total_of(orders).tolist())) == 1
    # The check has teeth: fp32 sums do.
    assert len({float(functools.reduce(np.add, order)) for order in orders}) > 1


def test_what_is_no_number_stays_so():
    rows = np.array([[1, np.nan], [INF, 1], [-INF, -INF], [-INF, 2]], np.float32)
    with np.errstate(invalid="ignore"):
        of_row = jax.nn.logsumexp(rows, axis=1)
    for found in (sums.softmax(rows), sums.log_softmax(rows)):
        assert np.isnan(np.asarray(found)[:3]).all(axis=1).tolist() == [True, True, True]
        assert not np.isnan(np.asarray(found)[3]).any()
    found = np.asarray(sums.logsumexp(rows))[:, 0]
    assert np.isnan(found[0])
    assert not np.isfinite(found[1])
    np.testing.assert_array_equal(found[2:], of_row[2:])
    assert np.isnan(total_of(np.abs(rows)))[0]
    assert total_of(np.abs(rows))[1:].tolist() == [INF, INF, INF]


@pytest.mark.parametrize("kind", [0.01, 1.0, 3.0, 12.0])
def test_distributions_are_jaxs_within_rounding(kind):
    logits = jnp.asarray(kind * np.random.default_rng(0).standard_normal((3, 5, 1000)), jnp.float32)
    np.testing.assert_allclose(sums.softmax(logits), jax.nn.softmax(logits), rtol=1e-6)
    np.testing.assert_allclose(
        sums.log_softmax(logits), jax.nn.log_softmax(logits), rtol=1e-6, atol=3e-7
    )


# Bits


@functools.cache
def base(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[9, V]` of very different shapes, and a `top_p` `[9]` for each row that is exactly
    the mass of some of its likeliest tokens, or next to it."""
    rng = np.random.default_rng(vocab_size)
    scale = np.array([3, 1, 0.3, 5, 3, 2, 1, 3, 8], np.float32)[:, None]
    logits = scale * rng.standard_normal((9, vocab_size)).astype(np.float32)
    logits[7] = np.round(logits[7])  # ties
    masses = np.exp(np.float64(logits) - logits.max(axis=1, keepdims=True))
    reached = np.cumsum(-np.sort(-masses, axis=1), axis=1) / masses.sum(axis=1, keepdims=True)
    wanted = np.array([0.5, 0.8, 0.9, 0.95, 0.3, 0.7, 0.99, 0.9, 0.6])
    top_p = np.array(
        [of_row[np.searchsorted(of_row, p)] for of_row, p in zip(reached, wanted, strict=True)]
    )
    return logits, np.minimum(top_p, 1 - 2**-24).astype(np.float32)


def everything(logits, rows):
    """Kept logits, probabilities and log-probabilities `[B, T, V]`, and totals `[B, T]`."""
    kept = sampling.filtered_logits(logits, rows)
    raw = sums.log_softmax(logits)
    return kept, sums.softmax(kept), raw, highest(logits, 2).log_total


def rows_of(top_p, **changes):
    fields = {"top_p": jnp.asarray(top_p), "temperature": jnp.full(len(top_p), 0.9, jnp.float32)}
    return sampling.neutral_sampling(len(top_p)).replace(**fields, **changes)


@functools.cache
def alone(vocab_size: int, *, is_fast: bool):
    """`everything` of each row of `base`, from a program for a single one."""
    compute, (logits, top_p) = jax.jit(lambda *given: everything(*given)), base(vocab_size)
    found = [compute(x[None, None], rows_of(p[None])) for x, p in zip(logits, top_p, strict=True)]
    return [np.concatenate([np.asarray(of_row[i]) for of_row in found]) for i in range(4)]


def assert_bits_are_those_of_a_row_alone(vocab_size, batch_size, width, *, is_fast=True):
    """A window's later entries are the row's logits in another order, so that every one of them has
    its `top_p` where it decides."""
    expected, (logits, top_p) = alone(vocab_size, is_fast=is_fast), base(vocab_size)

    def windows(values):
        return np.stack([np.roll(values, 31 * t, axis=-1) for t in range(width)], axis=1)

    given = jnp.asarray(windows(logits[:batch_size])), rows_of(top_p[:batch_size])
    found = jax.jit(lambda *given: everything(*given))(*given)
    for name, ours, theirs in zip(("kept", "p", "log p"), found[:3], expected[:3], strict=True):
        theirs = windows(theirs[:batch_size, 0])
        same = np.asarray(ours).view(np.uint32) == theirs.view(np.uint32)
        assert same.all(), (name, vocab_size, batch_size, width, np.argwhere(~same)[:3].tolist())
    np.testing.assert_array_equal(found[3], np.repeat(expected[3][:batch_size], width, axis=1))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_bits_depend_on_the_row_alone(vocab_size):
    """Every batch and width with some vocabularies, and large vocabularies in few wide windows; all
    pairs are below, and slow."""
    first = VOCABULARIES.index(vocab_size)
    for batch_size in BATCHES[first % 3 :: 3]:
        width = WIDTHS[(first + batch_size) % len(WIDTHS)]
        if vocab_size > 4096:
            width = WIDTHS[batch_size] if batch_size < len(WIDTHS) else 1
        assert_bits_are_those_of_a_row_alone(vocab_size, batch_size, width)


@pytest.mark.as_shipped
@pytest.mark.parametrize(
    ("vocab_size", "batch_size", "width"),
    [
        *((600, 9, 3), (151_936, 2, 3)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((512, 3, 5), (4096, 1, 9), (49_152, 2, 5))
        ),
    ],
)
def test_bits_depend_on_the_row_alone_as_shipped(vocab_size, batch_size, width):
    assert_bits_are_those_of_a_row_alone(vocab_size, batch_size, width, is_fast=False)


@pytest.mark.slow
@pytest.mark.as_shipped
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_bits_depend_on_the_row_alone_in_every_shape(vocab_size, width):
    for batch_size in BATCHES:
        assert_bits_are_those_of_a_row_alone(vocab_size, batch_size, width, is_fast=False)


@pytest.mark.parametrize("top_p", [2**-32, 0.001, 0.5, 0.75, 0.875, 1 - 2**-24])
def test_a_top_p_that_is_a_cumulative_probability_keeps_no_token_beyond_it(top_p):
    logits = np.log(np.float32([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16])).astype(np.float32)
    masses = np.exp(np.float64(logits)) / np.exp(np.float64(logits)).sum()
    reached = np.cumsum(masses)
    kept = jax.jit(sampling.filtered_logits)(
        jnp.asarray(logits)[None, None],
        rows_of(np.float32([top_p])).replace(temperature=jnp.ones(1, jnp.float32)),
    )
    expected = 1 + int(np.searchsorted(reached[:3], top_p))
    assert np.isfinite(kept[0, 0]).sum() == (expected if expected < 4 else 5)


def test_the_mass_of_a_long_tail_is_counted():
    """150,000 tokens of which none has a whole unit."""
    logits = np.full(150_001, -24, np.float32)
    logits[0] = 0
    tail = 150_000 * math.exp(-24)
    for top_p, num_kept in ((1 - 1.1 * tail, 1), (1 - 0.9 * tail, 150_001)):
        kept = jax.jit(sampling.filtered_logits)(
            jnp.asarray(logits)[None, None],
            rows_of(np.float32([top_p])).replace(temperature=jnp.ones(1, jnp.float32)),
        )
        assert np.isfinite(kept).sum() == num_kept


@pytest.mark.parametrize("vocab_size", [61, 1000, 2**16])
def test_products_of_integers_are_exact(vocab_size):
    rng = np.random.default_rng(vocab_size)
    num_bits = sums.num_digit_bits(vocab_size)
    share = np.r_[rng.random(200), 2**-8, 0.5, 1 - 2**-24].astype(np.float32)
    share = np.maximum(share, np.float32(2**-8))
    units = rng.integers(2**29, 2**30, len(share)).astype(np.uint32)
    fraction = rng.integers(0, 2**num_bits, len(share)).astype(np.uint32)
    found = jax.jit(functools.partial(sampling._share_of, num_bits=num_bits))(
        units, fraction, share
    )
    exact = [
        ((int(u) << num_bits) + int(f)) * int(float(s) * 2**32) >> 32
        for u, f, s in zip(units, fraction, share, strict=True)
    ]
    found = [(int(u) << num_bits) + int(f) for u, f in zip(*map(np.asarray, found), strict=True)]
    np.testing.assert_array_equal(found, exact)


# Draws


@pytest.mark.parametrize(("vocab_size", "batch_size", "width"), [(512, 3, 5), (32_000, 2, 9)])
def test_draws_depend_on_the_row_alone(vocab_size, batch_size, width):
    logits, top_p = base(vocab_size)
    given = np.stack([np.roll(logits[:batch_size], 31 * t, axis=-1) for t in range(width)], axis=1)
    rows = enumeration.make_rows([5] * batch_size, temperature=0.9)
    rows = rows.replace(sampling=rows.sampling.replace(top_p=jnp.asarray(top_p[:batch_size])))
    choose = jax.jit(lambda *given: sampling.choose(*given))
    drafted = jnp.zeros((batch_size, width - 1), jnp.int32)
    together = choose(jnp.asarray(given), rows, sampling.chain_prefix(rows, drafted))
    for row in range(batch_size):
        one = jax.tree.map(lambda values: values[row : row + 1], rows)  # noqa: B023
        for place in (0, width // 2, width - 1):
            here = one.replace(num_committed=one.num_committed + place)
            prefix = sampling.chain_prefix(here, jnp.zeros((1, 0), jnp.int32))
            alone = choose(jnp.asarray(given[row, place][None, None]), here, prefix)
            assert alone[0, 0] == together[row, place]


def a_tree(vocab_size: int, num_rows: int) -> Draft:
    """A tree of four nodes with q: two siblings, and two below the first."""
    rng = np.random.default_rng(3)
    q = rng.dirichlet(np.full(vocab_size, 0.05), (num_rows, 4)).astype(np.float32)
    q[:, 1] = q[:, 0]
    likeliest = np.argsort(-q, axis=-1)
    tokens = likeliest[..., 0]
    tokens[:, 1] = likeliest[:, 1, 1]
    return Draft(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.broadcast_to(jnp.asarray([-1, -1, 0, 2], jnp.int32), (num_rows, 4)),
        num_valid=jnp.full((num_rows,), 4, jnp.int32),
        q=jnp.asarray(q),
        max_depth=3,
    )


def every_draw():
    """Whatever is drawn from noise, always with the same keys."""
    num_rows, vocab_size = 6, 211
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**32, (num_rows, 2), dtype=np.uint32)
    rows = enumeration.make_rows(rng.integers(3, 9, num_rows), keys=keys, temperature=0.9)
    logits = jnp.asarray(2 * rng.standard_normal((num_rows, 5, vocab_size)), jnp.float32)
    tree = a_tree(vocab_size, num_rows)
    chain = tree.replace(parents=chain_parents(num_rows, 4), max_depth=None)
    prefix = sampling.chain_prefix(rows, tree.tokens)
    node = jnp.zeros((num_rows, 1), jnp.int32)

    def draft(*, is_noise_shared):
        return sampling.draw_draft(
            logits[:, 0],
            rows,
            tree.tokens,
            jnp.int32(0),
            vocab_size=vocab_size,
            is_noise_shared=is_noise_shared,
            needs_probs=True,
            needs_confidence=True,
        )

    oracle = jaxspec.Oracle([[0] * 32], acceptance=0.5, seed=3)
    shape = EngineShape(
        batch_size=num_rows, max_length=32, verify_length=5, prefill_chunk=8, vocab_size=vocab_size
    )
    known = {"sequence": jnp.zeros((num_rows,), jnp.int32), "cost": oracle.init(shape)["cost"]}
    return {
        "uniform": sampling.uniform(sampling.round_keys(rows, node, sampling.Stream.ACCEPT)),
        "gumbel": sampling.gumbel(sampling.position_keys(rows.sampling, node), 9),
        "choose": sampling.choose(logits, rows, prefix),
        "draft": draft(is_noise_shared=True),
        "draft with its own noise": draft(is_noise_shared=False),
        "block": sampling.draw_block(logits, rows, is_noise_shared=False, needs_probs=True),
        "rejection": jaxspec.Rejection().verify(logits, chain, rows, prefix),
        "rejection, tree": jaxspec.Rejection().verify(logits, tree, rows, prefix),
        "block verification": jaxspec.Block().verify(logits, chain, rows, prefix),
        "typical": jaxspec.Typical().verify(logits, tree, rows, prefix),
        "oracle": oracle.propose(shape, oracle.params, known, rows)[0].tokens,
    }


@functools.cache
def draws_by_default():
    return jax.device_get(jax.jit(lambda: every_draw())())


SETTINGS = [
    pytest.param("jax_enable_x64", marks=pytest.mark.slow),
    *("jax_threefry_partitionable", "jax_default_prng_impl"),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_draw_depends_on_a_setting_of_the_process(setting):
    expected = draws_by_default()
    before = getattr(jax.config, setting)
    jax.config.update(setting, "rbg" if isinstance(before, str) else not before)
    try:
        found = jax.device_get(jax.jit(lambda: every_draw())())
    finally:
        jax.config.update(setting, before)
    for name in expected:
        pairs = zip(*map(jax.tree.leaves, (found[name], expected[name])), strict=True)
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype, name
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
