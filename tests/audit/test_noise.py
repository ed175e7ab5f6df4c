"""The noise of a pair of tokens, and the number of ties that it explains."""

import dataclasses

import numpy as np
import pytest
import scipy.stats
import toy

from jaxspec.audit import noise
from jaxspec.audit.noise import GapNoise, contexts, measure_noise, tie_p_value, tie_tests
from jaxspec.audit.scoring import Scorer
from jaxspec.engine.engine import Engine
from jaxspec.requests.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=40)


def drawn(rng, num=4000):
    """Changes with a heavier tail than a normal variable's: a median of .05, 99 % below .26."""
    return 0.074 * rng.standard_t(3.2, num) * 0.9


def test_the_scale_is_that_of_a_normal_variable_and_large_changes_do_not_move_it():
    rng = np.random.default_rng(0)
    changes = rng.normal(0, 0.3, 20_000)
    assert GapNoise.of(changes).scale == pytest.approx(0.3, rel=0.03)
    changes[:200] = 50
    assert GapNoise.of(changes).scale == pytest.approx(0.3, rel=0.05)
    mostly_equal = np.where(rng.random(20_000) < 0.7, 0, changes)
    assert 0 < GapNoise.of(mostly_equal).scale < 0.4
    assert GapNoise.of([]).bound == 0


def test_what_was_observed_is_counted_and_the_tail_goes_on():
    rng = np.random.default_rng(1)
    known = GapNoise.of(rng.normal(0, 1, 5000))
    gaps = np.array([0.1, 0.5, 1.0, 2.0])
    expected = 2 * scipy.stats.norm.sf(gaps)
    np.testing.assert_allclose(known.exceeds(gaps), expected, rtol=0.1)
    beyond = known.exceeds(np.linspace(known.changes[-1], known.changes[-1] + 3, 20))
    assert np.all(np.diff(beyond) < 0)
    assert np.all(beyond > 0)
    # Continuous where counting ends.
    edge = known.changes[-noise.TAIL_COUNT - 1]
    assert known.exceeds(edge + 1e-9) == pytest.approx(known.exceeds(edge - 1e-9), rel=0.1)


def test_two_equal_logits_may_be_exchanged():
    assert GapNoise.of([0.0, 0.1, 0.2]).flips(np.array([0.0]))[0] == 0.5
    assert GapNoise.of([0.0]).flips(np.array([1e-6]))[0] == 0


@pytest.mark.parametrize("spread", [1.0, 1.5])
def test_healthy_files_have_p_values_that_are_not_below_the_uniform(spread):
    """Also of an engine whose changes are half as large again."""
    rng = np.random.default_rng(2)
    p_values = []
    for _ in range(300):
        known = GapNoise.of(drawn(rng))
        gaps = rng.exponential(3, 2304)
        is_tie = (spread * drawn(rng, 2304)) < -gaps
        p_values.append(tie_p_value(tie_tests(known, gaps, is_tie)))
    for level in (0.01, 0.05, 0.2):
        assert np.mean(np.array(p_values) < level) <= level + 3 * np.sqrt(level / 300)


@pytest.mark.parametrize(("share", "found"), [(0.0, 0.0), (0.03, 0.99), (0.1, 1.0)])
def test_second_best_tokens_are_found(share, found):
    rng = np.random.default_rng(3)
    num_found = 0
    for _ in range(60):
        known = GapNoise.of(drawn(rng))
        gaps = rng.exponential(3, 2304)
        is_tie = (drawn(rng, 2304) < -gaps) | (rng.random(2304) < share)
        num_found += tie_p_value(tie_tests(known, gaps, is_tie)) < noise.TIE_ALPHA
    assert num_found / 60 == pytest.approx(found, abs=0.02)


def test_single_tokens_below_the_bound_are_ties_and_many_of_them_are_found(monkeypatch):
    rng = np.random.default_rng(5)
    known, gaps = GapNoise.of(drawn(rng)), rng.exponential(3, 2304)
    is_near = (gaps > 4 * known.scale) & (gaps <= known.bound)
    is_tie = drawn(rng, 2304) < -gaps
    for num, is_found in ((1, False), (14, True)):
        planted = is_tie.copy()
        planted[np.flatnonzero(is_near)[:num]] = True
        assert (tie_p_value(tie_tests(known, gaps, planted)) < noise.TIE_ALPHA) == is_found
    # The size of their own is what finds them.
    monkeypatch.setattr(noise, "TIE_SIZES", noise.TIE_SIZES[:-1])
    assert tie_p_value(tie_tests(known, gaps, planted)) > noise.TIE_ALPHA


def test_a_wider_noise_would_not_find_them():
    """The sabotage: pooled changes that are ten times too large."""
    rng = np.random.default_rng(4)
    gaps = rng.exponential(3, 2304)
    is_tie = (drawn(rng, 2304) < -gaps) | (rng.random(2304) < 0.03) & (gaps < 1)
    known = GapNoise.of(drawn(rng))
    too_wide = dataclasses.replace(known, changes=10 * known.changes)
    assert tie_p_value(tie_tests(known, gaps, is_tie)) < noise.TIE_ALPHA
    assert tie_p_value(tie_tests(too_wide, gaps, is_tie)) > 0.1


def test_ties_that_come_together_count_for_less():
    gaps, is_tie = np.full(200, 0.1), np.arange(200) < 12
    known = GapNoise.of(np.append(np.full(980, 0.01), np.linspace(0.2, 0.3, 20)))
    alone = tie_p_value(tie_tests(known, gaps, is_tie))
    clustered = dataclasses.replace(known, dispersion=4.0)
    assert alone < 1e-3 < tie_p_value(tie_tests(clustered, gaps, is_tie))


def test_p_values_are_those_of_poisson_and_at_most_one():
    known = GapNoise.of(np.linspace(0, 1, 999))
    (every, *_) = tie_tests(known, np.zeros(8), np.arange(8) < 6, factor=1.0)
    assert (every.expected, every.observed) == (pytest.approx(4.0), 6)
    assert every.p_value == pytest.approx(scipy.stats.poisson.sf(5, 4))
    none = tie_tests(known, np.zeros(8), np.zeros(8, bool))
    assert tie_p_value(none) == 1
    assert np.isnan(tie_p_value(()))


def test_equal_contexts_have_equal_numbers():
    one, other = contexts([1, 2], [3, 4, 5]), contexts([1, 2], [3, 4, 9])
    assert one == other
    assert contexts([1, 2], [7, 4, 5])[:1] == one[:1]
    assert contexts([1, 2], [7, 4, 5])[1:] != one[1:]
    assert contexts([1, 2, 3], [4])[0] != contexts([1], [2, 3, 4])[0]


@pytest.fixture(scope="module")
def outputs():
    target = toy.model(num_layers=2)
    done = Engine(target, batch_size=4, max_length=128).generate(toy.prompts([20] * 4), GREEDY)
    return target, [(one.prompt_token_ids, one.token_ids, GREEDY) for one in done]


def test_noise_grows_with_the_rounding(outputs):
    target, done = outputs
    exact = measure_noise(Scorer(target, max_length=128), done)
    coarse = measure_noise(Scorer(target, max_length=128, dtype="bfloat16"), done)
    assert 0 < exact.scale < 1e-4 < coarse.scale < 0.5
    assert coarse.dispersion >= 1


def test_equal_outputs_are_measured_once(outputs):
    target, done = outputs
    scorer = Scorer(target, max_length=128, dtype="bfloat16")
    once, twice = measure_noise(scorer, done), measure_noise(scorer, [*done, *done])
    np.testing.assert_array_equal(once.changes, twice.changes)
