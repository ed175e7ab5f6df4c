"""The draft length that chooses itself: the controller in a world of chances, then in engines."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest
import ties
import tiny
import toy

import jaxspec
from jaxspec.decode.buckets import window_buckets
from jaxspec.drafters.base import Drafter
from jaxspec.engine import adaptive, round_times
from jaxspec.engine.adaptive import DraftLengthController
from jaxspec.engine.engine import Engine
from jaxspec.engine.round_times import PLAIN, LearnedTimes, RoundKind, RoundTimes
from jaxspec.errors import SettingError
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.types import Finish

LONGEST = 4


def times(plain=1.0, step=0.1, window=0.05, chunk=1.0, long=1.0):
    """Round times that grow with the draft length; `long` times as long at the long context."""
    short = of_lengths({n: plain + n * (step + window) for n in range(LONGEST + 1)})
    return RoundTimes(
        short_context=0,
        long_context=1000,
        short_s=short,
        long_s={kind: long * s for kind, s in short.items()},
        chunk_s=chunk,
    )


def of_lengths(seconds, *others):
    """Seconds by kind of round, from those by draft length of each variant of a drafter."""
    found = {RoundKind(n): s for n, s in seconds.items()}
    for variant, own in enumerate(others, start=1):
        found |= {RoundKind(n, variant): s for n, s in own.items() if n}
    return found


def with_seconds(base, *seconds):
    """Times that are the same at every context."""
    kinds = of_lengths(*seconds)
    return dataclasses.replace(base, short_s=kinds, long_s=kinds)


class World:
    """Rows whose drafts are accepted with a given chance, decoded as a controller chooses.

    Rounds take what was measured, or as long as `true_s` says, by variant and draft length; then a
    shared machine makes some calls longer by up to a half, and one in ten three times as long,
    which the controller hears of unless `is_timed` is false.
    """

    def __init__(self, controller, *, num_rows=8, seed=0, true_s=None, is_timed=True):
        self.controller, self.num_rows, self.true_s = controller, num_rows, true_s
        self.is_timed = is_timed and true_s is not None
        self.random = np.random.default_rng(seed)
        self.lag, self.chosen = 0, []

    def decode(self, chance, num_rounds):
        """Tokens emitted and seconds taken by so many rounds."""
        controller, emitted, seconds, done = self.controller, 0, 0.0, 0
        while done < num_rounds:
            chunks = self.num_rows * -(-self.lag // 128)
            choice = controller.choose(
                context=100, num_rounds=32, count_unprefilled=functools.partial(int, chunks)
            )
            n, rounds = choice.draft_length, choice.num_rounds
            self.chosen.append(n)
            right = self.random.random((rounds, self.num_rows, n)) < chance
            accepted = np.cumprod(right, axis=2)
            emitted += rounds * self.num_rows + int(accepted.sum())
            round_s = controller.times.times.of(choice.kind, 100)
            if self.true_s is not None:
                round_s = self.true_s[choice.variant][n]
            seconds += rounds * round_s
            seconds += chunks * controller.times.chunk_s if n else 0
            self.lag = 0 if n else min(self.lag + rounds, 512)  # rows end, others come
            controller.note(
                draft_length=n,
                variant=choice.variant,
                context=100,
                num_rounds=rounds,
                num_row_rounds=rounds * self.num_rows,
                num_accepted_at=accepted.sum(axis=(0, 1)).tolist(),
                seconds=rounds * round_s * self._slowness() if self.is_timed else None,
            )
            done += rounds
        return emitted, seconds

    def _slowness(self):
        return 3.0 if self.random.random() < 0.1 else self.random.uniform(1.0, 1.5)


def speed(world, chance, num_rounds=4000):
    """Tokens per second beside plain decoding's."""
    emitted, seconds = world.decode(chance, num_rounds)
    return emitted / seconds / (world.num_rows / world.controller.times.times.of(PLAIN, 100))


def test_nodes_of_a_tree_count_for_themselves():
    """Always right to depth three, with six nodes: the wrong ones are worth nothing."""
    seconds = {nodes: 1.0 + 0.1 * nodes for nodes in range(7)}
    of_tree = with_seconds(times(), seconds)
    controller = DraftLengthController(of_tree, is_chain=False)
    for _ in range(20):
        controller.note(
            draft_length=6,
            context=100,
            num_rounds=50,
            num_row_rounds=200,
            num_accepted_at=(0, 200, 0, 200, 200, 0),
        )
    np.testing.assert_allclose(controller.acceptance(), (0, 1, 0, 1, 1, 0), atol=0.02)


@pytest.mark.parametrize(("second", "best"), [(0.01, 8), (0.06, 4), (0.3, 0)])
def test_a_tree_is_as_large_as_pays(second, best):
    """A round costs 0.2 plain ones for drafting at all, and `second` for each node."""
    lengths = adaptive.draft_lengths_to_try(8, drafts_one_by_one=False)
    assert lengths == (0, 2, 4, 8)
    worth = [0.4, 0.3, 0.15, 0.1, 0.06, 0.06, 0.05, 0.05]
    seconds = {n: 1.0 + second * n + 0.2 * (n > 0) for n in lengths}
    measured = with_seconds(times(), seconds)
    controller, random = DraftLengthController(measured, is_chain=False), np.random.default_rng(0)
    for _ in range(300):
        choice = controller.choose(context=100, num_rounds=32, count_unprefilled=lambda: 0)
        controller.note(
            draft_length=choice.draft_length,
            context=100,
            num_rounds=choice.num_rounds,
            num_row_rounds=4 * choice.num_rounds,
            num_accepted_at=[
                int(random.binomial(4 * choice.num_rounds, chance))
                for chance in worth[: choice.draft_length]
            ],
        )
    rates = {n: (1 + sum(worth[:n])) / seconds[n] for n in lengths}
    assert max(rates, key=rates.__getitem__) == best  # the case is what it says it is
    assert controller.draft_length == best


def test_after_bad_luck_a_tree_is_tried_with_as_many_nodes_as_a_trial_can_afford():
    """Two nodes or four win an eighth, sixteen lose a third. At first two were unlucky, a long
    prompt to be read ended all drafting, and more nodes have never been drafted."""
    worth = [0.68 / (1 + 0.55 * node) for node in range(16)]
    seconds = {0: 1.0, 2: 1.9, 4: 2.4, 8: 4.8, 16: 6.2}
    rates = {n: (1 + sum(worth[:n])) / seconds[n] for n in seconds}
    assert rates[16] < 0.8 < 1.1 < rates[2] < rates[4]  # the case is what it says it is
    measured = with_seconds(times(chunk=0.5), seconds)
    controller = DraftLengthController(measured, is_chain=False, num_rows=2)
    random, nodes = np.random.default_rng(0), []

    def note(n, num_rounds, num_accepted_at):
        controller.note(
            draft_length=n,
            context=100,
            num_rounds=num_rounds,
            num_row_rounds=2 * num_rounds,
            num_accepted_at=num_accepted_at,
            seconds=num_rounds * seconds[n] * random.uniform(1.0, 1.2),
        )

    note(2, 32, (30, 20))
    settings = {"context": 100, "num_rounds": 32, "count_unprefilled": lambda: 8}
    assert controller.choose(**settings, chunks_per_token=10.0).draft_length == 0
    for _ in range(200):
        choice = controller.choose(**settings)
        n, num_row_rounds = choice.draft_length, 2 * choice.num_rounds
        nodes.append(n)
        note(n, choice.num_rounds, [int(random.binomial(num_row_rounds, p)) for p in worth[:n]])
    # Sixteen seem best, and are not affordable for long; two and four gain nearly the same.
    assert next(filter(None, nodes[:40])) in (2, 4)
    assert np.mean(np.array(nodes[100:]) > 0) > 0.8


@pytest.mark.parametrize(
    ("chance", "best"), [(0.95, LONGEST), (0.0, 0), (0.05, 0)], ids=["right", "wrong", "poor"]
)
def test_it_finds_the_best_draft_length(chance, best):
    world = World(DraftLengthController(times()))
    speed(world, chance)
    assert np.mean(np.array(world.chosen[20:]) == best) > 0.9
    by_rate = [
        sum(chance**j for j in range(n + 1)) / times().of(RoundKind(n), 100)
        for n in range(LONGEST + 1)
    ]
    assert int(np.argmax(by_rate)) == best  # the case is what it says it is


@pytest.mark.parametrize("chance", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("chunk", [0.0, 1.0, 50.0])
def test_once_drafts_were_declined_it_stays_within_three_percent_of_plain_decoding(chance, chunk):
    world = World(DraftLengthController(times(chunk=chunk)))
    while world.controller.draft_length != 0:
        world.decode(chance, 1)
    assert speed(world, chance) > 0.97


def test_the_check_above_sees_trials_that_cost_too_much(monkeypatch):
    monkeypatch.setattr(adaptive, "LEAST_TRIAL_SHARE", 1.0)
    world = World(DraftLengthController(times(chunk=1.0)))
    while world.controller.draft_length != 0:
        world.decode(0.0, 1)
    assert speed(world, 0.0) < 0.97


def test_drafts_that_become_good_are_found_again():
    world = World(DraftLengthController(times(chunk=0.2)))
    world.decode(0.0, 2000)
    assert world.controller.draft_length == 0
    world.decode(0.9, 3000)
    assert world.controller.draft_length == LONGEST
    assert speed(world, 0.9) > 1.5


# Round times by draft length, plain decoding's being 1, with costs per drafted token as measured on
# two cores: the larger the batch, the dearer (see docs/results/decode-cpu.json).
ROUND_TIMES = {
    batch_size: (1.0, *(1.15 + per_token * n for n in range(1, LONGEST + 1)))
    for batch_size, per_token in ((1, 0.11), (4, 0.18), (8, 0.27))
}


def regret(*, batch_size, chance, seed, num_rounds=400, per_request=14):
    """Share of the tokens per second that the best fixed length has over the controller, of a few
    hundred rounds from the start. Acceptance varies from request to request, about `chance`."""
    seconds = ROUND_TIMES[batch_size]
    measured = dict(enumerate(seconds))
    fixed = with_seconds(times(chunk=0.2), measured)
    controller, random = DraftLengthController(fixed), np.random.default_rng(seed)

    odds = chance / (1 - chance) * np.exp(np.random.default_rng(0).normal(size=4000))
    every = odds / (1 + odds)
    emitted = [np.mean(sum(every**j for j in range(n + 1))) for n in range(LONGEST + 1)]
    best = max(e / s for e, s in zip(emitted, seconds, strict=True))
    num_tokens = num_s = done = 0
    while done < num_rounds:
        choice = controller.choose(context=100, num_rounds=32, count_unprefilled=lambda: 0)
        n, rounds = choice.draft_length, min(choice.num_rounds, per_request)
        of_rows = random.choice(every, size=(batch_size, 1))
        accepted = np.cumprod(random.random((rounds, batch_size, n)) < of_rows, axis=2)
        # What such rounds emit in the mean: the luck of these draws is no merit.
        num_tokens += rounds * emitted[n]
        num_s += rounds * seconds[n]
        controller.note(
            draft_length=n,
            context=100,
            num_rounds=rounds,
            num_row_rounds=rounds * batch_size,
            num_accepted_at=accepted.sum(axis=(0, 1)).tolist(),
        )
        done += rounds
    return 1 - num_tokens / num_s / best


@pytest.mark.parametrize("batch_size", ROUND_TIMES)
@pytest.mark.parametrize("chance", [0.3, 0.5, 0.8])
def test_it_is_within_three_percent_of_the_best_fixed_length(batch_size, chance):
    found = [regret(batch_size=batch_size, chance=chance, seed=seed) for seed in range(10)]
    assert np.mean(found) < 0.03


def test_the_check_above_sees_decisions_without_evidence(monkeypatch):
    monkeypatch.setattr(adaptive, "CLEAR_GAIN", 0.05)
    monkeypatch.setattr(adaptive, "DOUBT", 0.0)
    found = [regret(batch_size=1, chance=0.5, seed=seed) for seed in range(10)]
    assert np.mean(found) > 0.03


def share_of_the_best(*, wrong, factor, is_timed=True, num_rounds_before=2000):
    """Tokens per second beside those of the best fixed length, where one round time was measured
    `factor` times too long. The acceptance is 0.6; two drafts are the best, one or three lose 8 to
    10 %, plain decoding a third."""
    true_s = dict(enumerate((1.0, 1.15, 1.3, 1.6, 2.0)))
    measured = {n: s * (factor if n == wrong else 1) for n, s in true_s.items()}
    wrong_times = with_seconds(times(chunk=0.1), measured)
    best = max(sum(0.6**j for j in range(n + 1)) / s for n, s in true_s.items())
    found = []
    for seed in range(12):
        controller = DraftLengthController(wrong_times, num_rows=8)
        world = World(controller, true_s=(true_s,), seed=seed, is_timed=is_timed)
        world.decode(0.6, num_rounds_before)
        emitted, seconds = world.decode(0.6, 4000)
        found.append(emitted / seconds / (world.num_rows * best))
    return np.mean(found)


@pytest.mark.parametrize(("wrong", "factor"), [(2, 1.0), (0, 0.5), (0, 3.0), (4, 0.6), (1, 0.7)])
def test_round_times_are_corrected_by_the_rounds_that_are_run(wrong, factor):
    assert share_of_the_best(wrong=wrong, factor=factor) > 0.97


def test_a_draft_length_that_seemed_dear_is_found_in_the_end():
    """It is tried seldom, as such a trial seems to cost much."""
    assert share_of_the_best(wrong=2, factor=2.0, num_rounds_before=20000) > 0.97


@pytest.mark.parametrize(("wrong", "factor"), [(0, 0.5), (4, 0.6), (2, 2.0)])
def test_the_check_above_sees_times_that_stay_wrong(wrong, factor):
    assert share_of_the_best(wrong=wrong, factor=factor, is_timed=False) < 0.97


class SharedMachine:
    """Rounds on a machine whose speed wanders, and halves by turns of a tenth of a second to some
    seconds, as that of a virtual machine beside others was seen to do. Its clock is `now_s`."""

    def __init__(self, round_s, *, seed, chunk_s=1e-3):
        self.round_s, self.chunk_s = round_s, chunk_s
        self.random, self.now_s = np.random.default_rng(seed), 0.0
        self.wander, self.until_s, self.factors = 0.0, [0.0, 0.0], [1.0, 1.0]

    def spend(self, seconds):
        """Lets the clock go on by what so much work takes now; returns it."""
        for index, (factor, mean_s) in enumerate(((1.5, 0.15), (1.8, 4.0))):
            while self.now_s > self.until_s[index]:
                self.factors[index] = factor if self.random.random() < 0.5 else 1.0
                self.until_s[index] += self.random.exponential(mean_s)
        self.wander = 0.99 * self.wander + 0.014 * self.random.normal()
        noise = self.wander + 0.15 * abs(self.random.normal())
        seconds *= np.prod(self.factors) * np.exp(noise)
        self.now_s += seconds
        return seconds

    def fill(self, prompt_length):
        self.spend(self.chunk_s)

    def run(self, kind, num_rounds):
        return self.spend(2e-4 + num_rounds * self.round_s[kind.draft_length])

    def catch_up(self):
        self.spend(8 * self.chunk_s)
        return 8


# Milliseconds per round by draft length at batch 4 on two such cores, and the chance of each
# position to be accepted with all before it. Two drafts gain a fifth, six lose 5 %.
SHARED_MS = dict(enumerate((1.25, 1.9, 2.4, 2.9, 3.4, 3.9, 4.4)))
SHARED_CHANCES = np.array([0.74, 0.55, 0.39, 0.28, 0.22, 0.18])


def share_on_a_shared_machine(seed, monkeypatch, num_tokens=4000):
    """Tokens per second beside those of the best fixed length, as if the machine had been steady,
    of a short run of four rows whose rounds are measured before it."""
    round_s = {n: ms / 1e3 for n, ms in SHARED_MS.items()}
    machine = SharedMachine(round_s, seed=seed)
    with monkeypatch.context() as patch:
        patch.setattr(round_times.time, "perf_counter", lambda: machine.now_s)
        patch.setattr(round_times, "MEASURING_S", 3.0)  # as users have it
        windows = {RoundKind(n): n + 1 for n in round_s}
        measured = round_times.measure_round_times(machine, windows=windows, room=100)
    controller = DraftLengthController(measured, num_rows=4)
    emitted = {n: 1 + float(SHARED_CHANCES[:n].sum()) for n in round_s}
    best = max(emitted[n] / s for n, s in round_s.items())
    conditional = SHARED_CHANCES / np.array([1.0, *SHARED_CHANCES[:-1]])
    done = steady_s = 0.0
    while done < num_tokens:
        choice = controller.choose(context=100, num_rounds=32, count_unprefilled=lambda: 4)
        n, rounds = choice.draft_length, min(choice.num_rounds, 16)
        right = machine.random.random((rounds, 4, n)) < conditional[:n]
        controller.note(
            draft_length=n,
            context=100,
            num_rounds=rounds,
            num_row_rounds=4 * rounds,
            num_accepted_at=np.cumprod(right, axis=2).sum(axis=(0, 1)).tolist(),
            seconds=machine.run(choice.kind, rounds),
        )
        done += 4 * rounds * emitted[n]
        steady_s += rounds * round_s[n]
    return done / steady_s / (4 * best)


def test_a_machine_that_changes_its_speed_does_not_mislead_it(monkeypatch):
    found = [share_on_a_shared_machine(seed, monkeypatch) for seed in range(24)]
    assert np.mean(found) > 0.98
    assert np.min(found) > 0.93


# Milliseconds per round of the embedded pair at batch 1, by draft length; windows are of 1, 3, 5
# and 7 tokens. Three to six drafts are within 3 % of each other.
PAIR_MS = dict(enumerate((0.65, 1.01, 1.12, 1.26, 1.37, 1.51, 1.61)))
PAIR_WINDOWS = {RoundKind(n): 1 + 2 * ((n + 1) // 2) for n in PAIR_MS}


def loss_of_choices(error, *, is_shrunk, round_ms=PAIR_MS, num_draws=400):
    """By how much the draft length that seems the fastest is slower than the fastest, on average
    over measurements with a standard error."""
    random = np.random.default_rng(0)
    emitted = {RoundKind(n): 1 + float(SHARED_CHANCES[:n].sum()) for n in round_ms}
    true = {RoundKind(n): emitted[RoundKind(n)] / ms for n, ms in round_ms.items()}
    losses = []
    for _ in range(num_draws):
        seen = {
            RoundKind(n): ms * float(np.exp(error * random.normal())) for n, ms in round_ms.items()
        }
        if is_shrunk:
            seen, _ = round_times.shrink_to_planes(seen, PAIR_WINDOWS, error)
        chosen = max(seen, key=lambda kind: emitted[kind] / seen[kind])
        losses.append(1 - true[chosen] / max(true.values()))
    return float(np.mean(losses))


def test_neighbours_help_to_choose_between_kinds_that_are_almost_equally_fast():
    for error in (0.02, 0.04):
        alone = loss_of_choices(error, is_shrunk=False)
        assert loss_of_choices(error, is_shrunk=True) < 0.75 * alone


def test_times_far_from_a_plane_stay_as_they_were_measured():
    """A kernel that takes twice as long from four tokens on."""
    step = {n: ms * (2 if n > 2 else 1) for n, ms in PAIR_MS.items()}
    seen = of_lengths(step)
    shrunk, covariance = round_times.shrink_to_planes(seen, PAIR_WINDOWS, 0.02)
    assert shrunk == pytest.approx(seen, rel=0.02)
    np.testing.assert_allclose(covariance, np.eye(7), atol=0.1)
    alone = loss_of_choices(0.02, round_ms=step, is_shrunk=False)
    assert loss_of_choices(0.02, round_ms=step, is_shrunk=True) < alone + 0.001


def test_few_kinds_and_plain_decoding_are_not_shrunk():
    kinds = of_lengths({0: 1.0, 2: 2.0, 4: 2.1, 7: 2.9}, {2: 3.0, 4: 1.0, 7: 2.0})
    windows = {kind: kind.draft_length + 2 * (kind.draft_length == 4) for kind in kinds}
    shrunk, covariance = round_times.shrink_to_planes(kinds, windows, 0.05)
    assert shrunk == pytest.approx(kinds)
    np.testing.assert_allclose(covariance, np.eye(len(kinds)), atol=1e-9)
    plane = of_lengths({n: 1.0 + 0.2 * n + 0.1 * PAIR_WINDOWS[RoundKind(n)] for n in PAIR_MS})
    plane[PLAIN] = 7.0
    shrunk, covariance = round_times.shrink_to_planes(plane, PAIR_WINDOWS, 0.05)
    assert shrunk == pytest.approx(plane)
    assert covariance[0].tolist() == [1, 0, 0, 0, 0, 0, 0]


def test_the_covariance_of_shrunk_times_is_that_of_their_errors():
    """True times vary about a plane as the prior says; measurements vary about true times."""
    error, random = 0.05, np.random.default_rng(0)
    plane = {n: 1.0 + 0.2 * n + 0.1 * PAIR_WINDOWS[RoundKind(n)] for n in PAIR_MS}
    errors, expected = [], []
    for _ in range(2000):
        true = {n: s * (1 + round_times.LEAST_RESIDUAL * random.normal()) for n, s in plane.items()}
        seen = of_lengths({n: s * (1 + error * random.normal()) for n, s in true.items()})
        shrunk, covariance = round_times.shrink_to_planes(seen, PAIR_WINDOWS, error)
        errors.append([shrunk[RoundKind(n)] / true[n] - 1 for n in true])
        expected.append(error**2 * covariance)
    found = np.cov(np.array(errors).T)
    # The variance of the residuals is itself an estimate, from three degrees of freedom.
    np.testing.assert_allclose(found, np.mean(expected, axis=0), atol=0.25 * error**2)
    assert np.trace(found[1:, 1:]) < 0.75 * 6 * error**2


def test_what_is_learnt_of_some_kinds_is_learnt_of_those_like_them():
    measured = of_lengths({n: ms / 1e3 for n, ms in PAIR_MS.items()})
    _, covariance = round_times.shrink_to_planes(measured, PAIR_WINDOWS, 0.05)
    base = dataclasses.replace(times(), short_s=measured, long_s=measured, error=0.05)
    related = LearnedTimes(dataclasses.replace(base, covariance=covariance))
    independent = LearnedTimes(base)
    for learnt in (related, independent):
        for n in (2, 3, 6) * 10:  # cost a tenth more than was measured; plain steps do not
            for kind, factor in ((RoundKind(n), 1.1), (PLAIN, 1.0)):
                learnt.note(kind, 100, 32, factor * 32 * measured[kind])
                learnt.pass_rounds(32)

    def factor(learnt, n):
        beside_plain = learnt.round_s(RoundKind(n), 100) / learnt.round_s(PLAIN, 100)
        return beside_plain / (measured[RoundKind(n)] / measured[PLAIN])

    for n in (4, 5):
        assert factor(related, n) == pytest.approx(1.1, abs=0.03)
        assert factor(independent, n) < 1.03
        assert related.error(RoundKind(n), PLAIN) < independent.error(RoundKind(n), PLAIN)


class Least(LearnedTimes):
    """The fastest call of each kind counts, in whatever moment it was: of kinds that are run often,
    it is found in a better one."""

    def __init__(self, measured):
        super().__init__(measured)
        self.ratios = {kind: [] for kind in measured.kinds}

    def round_s(self, kind, context):
        ratios = self.ratios[kind][-64:]
        return self.times.of(kind, context) * min((*ratios, *(() if len(ratios) >= 4 else (1.0,))))

    def note(self, kind, context, num_rounds, seconds):
        self._num_timed[kind] += 1
        self.ratios[kind].append(seconds / num_rounds / self.times.of(kind, context))


def test_the_check_above_sees_the_fastest_moments_of_each_kind(monkeypatch):
    monkeypatch.setattr(adaptive, "LearnedTimes", Least)
    monkeypatch.setattr(round_times, "MOST_TURNS", round_times.FEWEST_TURNS)
    monkeypatch.setattr(round_times.np, "median", np.min)
    found = [share_on_a_shared_machine(seed, monkeypatch) for seed in range(24)]
    assert np.mean(found) < 0.96
    assert np.min(found) < 0.9


def test_what_is_learnt_tells_the_machine_from_the_kind():
    """A machine that takes twice as long makes no kind look worse; a kind that does is found."""
    settings = {"context": 100, "num_rounds": 32}
    one, two = RoundKind(1), RoundKind(2)
    slower = LearnedTimes(times())
    for index in range(40):
        kind = (one, two)[index % 4 == 3]
        slower.note(kind, seconds=2 * 32 * slower.times.of(kind, 100), **settings)
        slower.pass_rounds(32)
    ratio = slower.times.of(one, 100) / slower.times.of(two, 100)
    assert slower.round_s(one, 100) / slower.round_s(two, 100) == pytest.approx(ratio, rel=0.02)
    assert slower.round_s(PLAIN, 100) > 1.15 * slower.times.of(PLAIN, 100)  # it was not run
    dearer = LearnedTimes(times())
    for index in range(40):
        kind = (one, two)[index % 4 == 3]
        factor = 1.5 if kind == two else 1.0
        dearer.note(kind, seconds=factor * 32 * dearer.times.of(kind, 100), **settings)
        dearer.pass_rounds(32)
    assert dearer.round_s(two, 100) / dearer.round_s(one, 100) == pytest.approx(
        1.5 / ratio, rel=0.03
    )
    assert dearer.error(one, two) < 0.04 < dearer.error(one, RoundKind(3))


def test_a_plain_step_that_was_timed_in_a_bad_moment_is_timed_again():
    """Drafts are accepted too seldom to pay, and plain decoding seemed to take twice as long."""
    true_s = {0: 1.0, 1: 1.4, 2: 1.8, 3: 2.2, 4: 2.6}
    measured = {n: s * (2 if n == 0 else 1) for n, s in true_s.items()}
    wrong_times = with_seconds(times(chunk=0.1), measured)

    def rests(seed, **settings):
        controller = DraftLengthController(wrong_times, num_rows=8)
        World(controller, true_s=(true_s,), seed=seed, **settings).decode(0.2, 12000)
        return controller.draft_length == 0

    assert sum(rests(seed) for seed in range(6)) >= 4
    assert not any(rests(seed, is_timed=False) for seed in range(2))


# Rounds of two cores at batch 1, plain decoding's being 1, for drafts that are seldom accepted: by
# draft length, in FlexDraft's parallel mode and in its sequential one (see flexdraft-cpu.json).
MODES_S = ({0: 1.0, 2: 3.1, 4: 3.4, 7: 3.8}, {0: 1.0, 2: 2.0, 4: 2.1, 7: 2.1})


def of_modes(*seconds, chunk=0.0):
    """Round times of variants, by draft length each."""
    return with_seconds(times(chunk=chunk), *seconds)


def share_of_plain(seed):
    """Tokens per second beside plain decoding's, of the first 48 requests. They are of four kinds,
    of which none is drafted so well that drafts pay for more than a few requests."""
    controller = DraftLengthController(of_modes(*MODES_S))
    random, num_tokens, total_s = np.random.default_rng(seed), 48, 0.0
    chances = np.repeat([0.52, 0.25, 0.43, 0.38], 12)
    for chance in chances:
        odds = chance / (1 - chance) * np.exp(random.normal(scale=0.5))
        left = num_tokens
        while left > 0:
            choice = controller.choose(context=100, num_rounds=32, count_unprefilled=lambda: 0)
            n, rounds, accepted = choice.draft_length, 0, np.zeros((choice.draft_length,), int)
            while left > 0 and rounds < choice.num_rounds:
                right = np.cumprod(random.random(n) < odds / (1 + odds))
                accepted += right
                left -= 1 + int(right.sum())
                rounds += 1
            seconds = rounds * MODES_S[choice.variant][n]
            total_s += seconds
            controller.note(
                draft_length=n,
                variant=choice.variant,
                context=100,
                num_rounds=rounds,
                num_row_rounds=rounds,
                num_accepted_at=accepted.tolist(),
                seconds=seconds * random.uniform(1.0, 1.3),
            )
    return len(chances) * num_tokens / total_s


def test_with_drafts_that_do_not_pay_it_is_about_as_fast_as_plain_decoding():
    assert np.mean([share_of_plain(seed) for seed in range(8)]) > 0.97


def with_errors_of_every_position(self, doubt=0.0, *, is_cautious=False):
    """Each chance of a chain is as high as may be, all at once."""
    found, chance, all_before = [], adaptive.PRIOR_ACCEPTANCE, 1.0
    for reached, accepted in zip(self._reached, self._accepted, strict=True):
        weight = reached + adaptive.PRIOR_ROUNDS
        chance = (accepted + adaptive.PRIOR_ROUNDS * chance) / weight
        all_before *= min(chance + doubt * np.sqrt(chance * (1 - chance) / weight), 1.0)
        found.append(all_before)
    return tuple(found)


def test_the_check_above_sees_doubts_that_add_up(monkeypatch):
    monkeypatch.setattr(DraftLengthController, "acceptance", with_errors_of_every_position)
    assert np.mean([share_of_plain(seed) for seed in range(8)]) < 0.97


def test_doubt_adds_the_error_of_the_tokens_of_a_round():
    """It is linear in the errors of the chances, which are independent."""
    controller = DraftLengthController(times())
    controller.note(
        draft_length=4,
        context=100,
        num_rounds=50,
        num_row_rounds=50,
        num_accepted_at=(30, 15, 9, 3),
    )
    reached = np.array([50, 30, 15, 9])
    found, doubtful = (np.array(controller.acceptance(doubt)) for doubt in (0.0, 1.0))
    chances = found / np.array([1.0, *found[:-1]])
    variances = chances * (1 - chances) / (reached + adaptive.PRIOR_ROUNDS)
    for n in range(1, LONGEST + 1):
        slopes = []
        for index in range(LONGEST):
            moved = chances + 1e-6 * (np.arange(LONGEST) == index)
            slopes.append((np.cumprod(moved)[:n].sum() - found[:n].sum()) / 1e-6)
        error = np.sqrt(np.sum(np.square(slopes) * variances))
        assert doubtful[:n].sum() - found[:n].sum() == pytest.approx(error, rel=1e-3)


def rounds_to_recover(seed):
    """Plain steps until two drafts, which gain a fifth as at batch 4 on two cores, are drafted
    again; the first rounds were so unlucky that drafting was ended."""
    seconds = {0: 1.0, 1: 1.5, 2: 1.75, 3: 2.7, 4: 2.9}
    measured = with_seconds(times(chunk=0.5), seconds)
    controller = DraftLengthController(measured, num_rows=4)
    controller.note(
        draft_length=2,
        context=100,
        num_rounds=40,
        num_row_rounds=160,
        num_accepted_at=(64, 16),
        seconds=40 * seconds[2],
    )
    world = World(controller, num_rows=4, seed=seed, true_s=(seconds,))
    num_rounds = 0
    while controller.draft_length != 2 and num_rounds < 10000:
        world.decode(0.77, 1)
        num_rounds = sum(controller.num_rounds.values()) - 40
    return num_rounds


def test_after_bad_luck_at_the_start_it_soon_drafts_again():
    assert np.median([rounds_to_recover(seed) for seed in range(9)]) < 500


def test_the_check_above_sees_trials_that_come_late(monkeypatch):
    monkeypatch.setattr(adaptive, "FIRST_TRIAL_SHARE", 0.005)
    assert np.median([rounds_to_recover(seed) for seed in range(9)]) > 500


DRAFTS_S = {0: 1.0, 1: 1.15, 2: 1.3, 3: 1.6, 4: 2.0}


def scaled(factor):
    return {n: seconds * (factor if n else 1) for n, seconds in DRAFTS_S.items()}


def share_of_the_best_mode(*, true, measured, chance=0.6, num_rounds_before=40000):
    """Tokens per second beside those of the best fixed length and variant, where the variants'
    rounds take `true` times `DRAFTS_S`, and seemed to take `measured` times that."""
    true_s = [scaled(factor) for factor in true]
    seemed = [scaled(a * b) for a, b in zip(true, measured, strict=True)]
    rates = [
        sum(chance**j for j in range(n + 1)) / seconds[n] for seconds in true_s for n in seconds
    ]
    found = []
    for seed in range(4):
        controller = DraftLengthController(of_modes(*seemed, chunk=0.1), num_rows=8)
        world = World(controller, true_s=true_s, seed=seed)
        world.decode(chance, num_rounds_before)
        emitted, seconds = world.decode(chance, 4000)
        found.append(emitted / seconds / (world.num_rows * max(rates)))
    return np.mean(found)


@pytest.mark.parametrize(
    ("true", "measured"),
    [
        ((1.0, 0.8), (1.0, 2.0)),  # the faster one seemed slow
        ((1.0, 1.3), (1.0, 0.5)),  # the slower one seemed fast
        ((1.0, 1.3), (1.0, 1.0)),
        ((2.5, 1.0), (1.0, 3.0)),  # no drafts seemed to pay
    ],
)
def test_the_faster_mode_is_found_whatever_was_measured(true, measured):
    assert share_of_the_best_mode(true=true, measured=measured) > 0.96


def test_the_check_above_sees_a_mode_that_is_never_tried(monkeypatch):
    real = DraftLengthController._affordable_trial

    def of_the_first(self, rates, *arguments):
        return real(
            self, {kind: rate for kind, rate in rates.items() if not kind.variant}, *arguments
        )

    monkeypatch.setattr(DraftLengthController, "_affordable_trial", of_the_first)
    assert share_of_the_best_mode(true=(2.5, 1.0), measured=(1.0, 3.0)) < 0.9


def test_the_check_above_sees_times_that_modes_share(monkeypatch):
    """What one mode's rounds took is taken for the other's, too."""
    real = LearnedTimes.__init__

    def with_one_place_for_both(self, times):
        real(self, times)
        self._index = {kind: self._index[RoundKind(kind.draft_length)] for kind in self._index}

    monkeypatch.setattr(LearnedTimes, "__init__", with_one_place_for_both)
    assert share_of_the_best_mode(true=(1.0, 1.3), measured=(1.0, 0.5)) < 0.9


def test_prompts_that_the_drafter_must_read_count_against_drafts():
    settings = {"context": 100, "num_rounds": 32, "count_unprefilled": lambda: 0}
    seen = {"draft_length": 4, "context": 100, "num_rounds": 99, "num_row_rounds": 800}

    def chosen(chunks_per_token):
        controller = DraftLengthController(times(chunk=1.0))
        controller.note(**seen, num_accepted_at=(560, 392, 274, 192))  # 0.7 each: 2.77 a round
        return controller.choose(**settings, chunks_per_token=chunks_per_token).draft_length

    # Three drafts take 1.45 s for 2.53 tokens, plain decoding 1 s for one; then prompts are read.
    assert chosen(0.0) >= 3
    assert chosen(0.3) >= 3
    assert chosen(0.5) == 0


def test_a_short_request_at_the_start_does_not_end_drafting_for_longer_ones():
    """To draft one token of a long prompt does not pay; the next request is another matter."""
    controller = DraftLengthController(times(chunk=1.0))
    settings = {"context": 100, "num_rounds": 32, "count_unprefilled": lambda: 1}
    assert controller.choose(**settings, chunks_per_token=2.0).draft_length == 0
    controller.note(draft_length=0, context=100, num_rounds=1, num_row_rounds=1, num_accepted_at=())
    assert controller.choose(**settings, chunks_per_token=2.0).draft_length == 0
    assert controller.choose(**settings, chunks_per_token=0.05).draft_length > 0


def test_it_keeps_its_mind_between_equals():
    """Where two draft lengths are equally fast, noise makes it change seldom."""
    chance = 0.5
    equal = 1 + chance + chance**2  # E(2); E(1) = 1.5, so t(2) / t(1) = 1.75 / 1.5
    seconds = {0: 1.0, 1: 1.5 * 0.7, 2: equal * 0.7, 3: 9.0, 4: 9.0}
    world = World(DraftLengthController(with_seconds(times(), seconds)))
    world.decode(chance, 6000)
    chosen = np.array(world.chosen)
    assert set(chosen[5:].tolist()) <= {1, 2}
    assert np.sum(chosen[1:] != chosen[:-1]) < 0.05 * len(chosen)


def test_times_are_linear_between_the_contexts_that_were_measured():
    measured = times(long=3.0)
    kind = RoundKind(2)
    assert measured.of(kind, 0) == pytest.approx(1.3)
    assert measured.of(kind, 500) == pytest.approx(2.6)
    assert measured.of(kind, 10**6) == pytest.approx(3.9)


class Clockwork:
    """Made-up rounds that take known times by a clock of their own: a call costs something, and
    the first of every length is compiled."""

    def __init__(self):
        self.now_s, self.calls, self.compiled = 0.0, [], set()

    def fill(self, prompt_length):
        self.calls.append(prompt_length)

    def run(self, kind, num_rounds):
        is_long = self.calls[-1] > 1
        self.now_s += 0.7 + num_rounds * (1 + kind.draft_length) * (2 if is_long else 1)
        self.now_s += 0 if kind in self.compiled else 100
        self.compiled.add(kind)

    def catch_up(self):
        self.now_s += 6.0
        return 3


@pytest.mark.parametrize("room", [200, 5000])
def test_round_times_are_measured_without_compiling_and_calling(monkeypatch, room):
    clockwork = Clockwork()
    monkeypatch.setattr(round_times.time, "perf_counter", lambda: clockwork.now_s)
    windows = {RoundKind(n): n + 1 for n in (0, 1, 3)}
    found = round_times.measure_round_times(clockwork, windows=windows, room=room)
    assert found.kinds == tuple(windows)
    assert found.short_s == pytest.approx(of_lengths({0: 1, 1: 2, 3: 4}))
    factor = 2 if room == 5000 else 1
    assert found.long_s == pytest.approx(of_lengths({n: factor * (n + 1) for n in (0, 1, 3)}))
    assert found.chunk_s == pytest.approx(2.0)
    assert found.call_s == pytest.approx(0.7)
    assert found.noise == pytest.approx(0.0)


def test_the_ladder_doubles_up_to_the_widest_window():
    assert window_buckets(2) == (1, 2)
    assert window_buckets(5) == (1, 3, 5)
    assert window_buckets(8) == (1, 3, 5, 8)
    assert window_buckets(17) == (1, 3, 5, 9, 17)


# Engines: of one layer and one window pair, for every window is a program to compile.

PROMPTS = toy.prompts((3, 20, 1, 40, 7))
PARAMS = [
    SamplingParams(max_tokens=30 + 4 * i, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]
FIXED = RoundTimes(  # drafts must be accepted to be worth their while
    short_context=0,
    long_context=1,
    short_s=of_lengths({0: 1, 1: 1.3, 2: 1.6}),
    long_s=of_lengths({0: 1, 1: 1.3, 2: 1.6}),
    chunk_s=1e-6,
)


def with_fixed_times(measured, **settings):
    """A controller to which rounds take what was measured, whatever the clock says."""
    controller = DraftLengthController(measured, **settings)
    controller.times.note = lambda *arguments: None
    return controller


def of(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def target():
    return tiny.model(eos_token_ids=())


@pytest.fixture(scope="module")
def make(target):
    """Makes engines of one shape; the adaptive ones with fixed times, so that nothing is left to
    the clock."""

    def make(drafter=None, **settings):
        made = Engine(
            target,
            drafter,
            scheduler=jaxspec.Static(),
            batch_size=2,
            max_length=256,
            prefill_chunk=16,
            rounds_per_sync=4,
            **settings,
        )
        if made.adaptive is not None:
            made.adaptive.controller = with_fixed_times(FIXED)
        return made

    return make


@pytest.fixture(scope="module")
def plain_engine(make):
    return make()


@pytest.fixture(scope="module")
def plain(plain_engine):
    return plain_engine.generate(PROMPTS, PARAMS)


def wrong():
    """A draft model of the target's shape, so that its weights can be replaced by the target's."""
    return jaxspec.DraftModel(tiny.model(seed=5, eos_token_ids=()))


def assert_equal_or_ties(target, completions, witness, params):
    for ours, theirs, its_own in zip(completions, witness, params, strict=True):
        ties.divergences(target, [ours], [theirs], its_own)


def test_bitwise_outputs_do_not_depend_on_the_choice(make):
    made = make(wrong(), draft_length="auto", verify_length=3)
    expected = of(made.generate(PROMPTS, PARAMS, speculate=False))
    assert made.adaptive.controller.draft_length is None
    assert of(made.generate(PROMPTS, PARAMS)) == expected
    assert made.adaptive.controller.draft_length == 0
    assert made.adaptive.controller.num_rounds[2] > 0
    assert made.exactness == "bitwise"
    assert made.verify_lengths == (3,)
    assert [made.executor.compile_counts()[name] for name in ("run", "prefill")] == [1, 1]


@pytest.fixture(scope="module")
def adaptive_engine(make):
    return make(wrong(), draft_length="auto", exactness="ties", verify_length=3)


def test_a_drafter_that_is_declined_reads_nothing_and_catches_up_when_it_is_right(
    adaptive_engine, plain_engine, target, monkeypatch
):
    """Wrong weights, then right ones: the drafter rests, its prompts are not read, and it returns
    with everything read."""
    made, long = adaptive_engine, SamplingParams(max_tokens=150, ignore_eos=True)

    def check(completions):
        prompts = [completion.prompt_token_ids for completion in completions]
        witness = plain_engine.generate(prompts, long)
        assert_equal_or_ties(target, completions, witness, [long] * len(prompts))

    check(made.generate(PROMPTS, long))
    assert made.adaptive.controller.draft_length == 0
    # No trial is worth this.
    learned = made.adaptive.controller.times
    monkeypatch.setattr(learned, "times", dataclasses.replace(FIXED, chunk_s=1e9))
    num_rounds, num_prefilled = (
        dict(made.adaptive.controller.num_rounds),
        int(made.state.drafter.num_positions),
    )
    check(made.generate(PROMPTS, long))
    assert int(made.state.drafter.num_positions) == num_prefilled
    assert made.adaptive.controller.num_rounds[0] > num_rounds.pop(0)
    assert {n: made.adaptive.controller.num_rounds[n] for n in num_rounds} == num_rounds

    monkeypatch.setattr(learned, "times", FIXED)
    made.executor.update_params(drafter=target.params)  # the controller is not told
    check(made.generate(PROMPTS * 4, long))
    assert made.adaptive.controller.draft_length == 2
    assert made.adaptive.controller.acceptance()[0] > 0.9
    counts = made.executor.compile_counts()
    narrow = [count for name, count in counts.items() if name.startswith("run_")]
    assert {*narrow, counts["catch_up"], counts["prefill_target"]} == {1}


def test_new_weights_are_tried_at_once(make, target):
    """What was seen of the old weights says nothing of the new ones."""
    made, long = make(wrong(), draft_length="auto", exactness="ties"), SamplingParams(max_tokens=64)
    made.generate(PROMPTS, long)
    assert made.adaptive.is_resting
    num_plain = made.rounds_by_draft_length[0]
    made.update_params(draft=target.params)
    made.generate(PROMPTS, long)
    assert made.adaptive.controller.draft_length == 2
    assert made.rounds_by_draft_length[0] == num_plain


@pytest.mark.parametrize("drafts", ["right", pytest.param("wrong", marks=pytest.mark.system)])
def test_an_engine_chooses_the_number_of_nodes(make, target, plain, drafts):
    model = target if drafts == "right" else wrong().model
    beams = jaxspec.DraftModel(model, tree=jaxspec.trees.BeamTree(width=2, depth=2, nodes=4))
    made = make(beams, draft_length="auto", exactness="ties")
    assert (made.draft_length, made.shape.tree_depth, made.verify_lengths) == (4, 2, (1, 3, 5))
    seconds = {0: 1, 2: 1.2, 4: 1.4}
    measured = with_seconds(FIXED, seconds)
    made.adaptive.controller = with_fixed_times(measured, is_chain=False)
    assert_equal_or_ties(target, made.generate(PROMPTS, PARAMS), plain, PARAMS)
    long = SamplingParams(max_tokens=150, ignore_eos=True)
    made.generate(PROMPTS, long)
    assert set(made.rounds_by_draft_length) <= set(seconds)
    # Of the right model's own tree the two nodes of the likeliest path are always accepted, and a
    # window for two nodes gets a chain of them.
    assert made.adaptive.controller.draft_length == (2 if drafts == "right" else 0)


def test_the_host_works_ahead_of_the_device_except_to_time_rounds(adaptive_engine, monkeypatch):
    """On a device that is never idle by itself, now and then a call waits for it."""
    made, events = adaptive_engine, []
    made.update_params(draft=wrong().params)
    made.adaptive.controller = with_fixed_times(FIXED)
    for n in FIXED.kinds:  # enough is known of all
        made.adaptive.controller.times._num_timed[n] = 9
    monkeypatch.setattr(
        type(made.executor), "is_idle", property(lambda self: "wait" in events[-1:])
    )
    monkeypatch.setattr(type(made.executor), "wait", lambda self: events.append("wait"))
    run = made.executor.run
    monkeypatch.setattr(made.executor, "run", lambda *a, **k: (events.append("run"), run(*a, **k)))
    made.generate(PROMPTS * 2, SamplingParams(max_tokens=150, ignore_eos=True))
    waits = [index for index, event in enumerate(events) if event == "wait"]
    # Trials are timed, too, so that some waits follow each other sooner.
    assert max(np.diff(waits)) == adaptive.UNTIMED_CALLS + 2


def test_draft_limits_are_set_only_when_they_change(make, target, monkeypatch):
    made = make(jaxspec.DraftModel(target), draft_length="auto", exactness="ties")
    made.adaptive.controller = controller = with_fixed_times(FIXED)
    for n in FIXED.kinds:
        controller.times._num_timed[n] = 9
    events, executor = [], made.executor

    def choose(draft_length):
        choice = adaptive.Choice(kind=RoundKind(draft_length), num_rounds=4)
        controller._current = choice.kind
        monkeypatch.setattr(controller, "choose", lambda **_: choice)

    def generate(draft_length):
        events.clear()
        made.generate(PROMPTS, [dataclasses.replace(one, max_tokens=20) for one in PARAMS])
        # What every running row drafts at most, when rounds begin.
        assert all(limits == [draft_length] for limits in events if isinstance(limits, list))
        return events.count("set")

    set_limits, run = executor.set_draft_limits, executor.run

    def note_set(limits):
        events.append("set")
        set_limits(limits)

    def note_run(*args, **settings):
        is_running = np.asarray(executor.state.is_running)
        events.append(sorted(set(np.asarray(executor.state.draft_limit)[is_running].tolist())))
        run(*args, **settings)

    monkeypatch.setattr(executor, "set_draft_limits", note_set)
    monkeypatch.setattr(executor, "run", note_run)
    choose(2)
    assert generate(2) == 0  # rows begin with it
    # A row admitted for one draft, and a choice of another.
    choose(1)
    controller._current = RoundKind(2)
    assert generate(1) == 3  # once for each batch of rows
    choose(1)
    assert generate(1) == 0


def test_single_requests_adapt_too(adaptive_engine, target, plain):
    made = adaptive_engine
    made.update_params(draft=wrong().params)
    made.adaptive.controller = with_fixed_times(FIXED)
    names = [made.submit(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
    done = {}
    while made.has_unfinished:
        done |= {c.request_id: c for c in made.step()}
    assert_equal_or_ties(target, [done[name] for name in names], plain, PARAMS)
    assert made.rounds_by_draft_length[0] > made.rounds_by_draft_length[2] > 0


@pytest.fixture(scope="module")
def oracle_engine(make, plain):
    oracle = jaxspec.Oracle(toy.sequences(plain), acceptance=0.8)
    return make(oracle, draft_length=4, exactness="ties", trace="tokens")


def test_the_narrowest_rung_is_plain_decoding_to_the_bit(oracle_engine, plain):
    made = oracle_engine
    assert made.verify_lengths == (1, 3, 5)
    assert made.exactness == "ties"
    assert of(made.generate(PROMPTS, PARAMS, speculate=False)) == of(plain)
    assert made.executor.compile_counts()["run"] == 0  # only plain steps were compiled


def test_short_drafts_are_scored_in_short_windows(oracle_engine, target, plain):
    """Requests of one draft length take the rung that it needs, and are traced as ever."""
    made = oracle_engine
    done = made.generate(PROMPTS, PARAMS, draft_length=2)
    counts = made.executor.compile_counts()
    assert (counts["run_3"], counts["run"]) == (1, 0)
    assert_equal_or_ties(target, done, plain, PARAMS)
    tokens, rounds = done.tokens(), done.rounds()
    assert len(tokens) == rounds["drafted"].sum() > 0
    assert tokens["accepted"].sum() == rounds["accepted"].sum() > 0
    assert rounds["drafted"].max() == 2
    assert tokens["node"].max() == 1
    assert rounds["emitted"].sum() == sum(len(c.token_ids) for c in done)
    for completion in done:
        acceptance = completion.acceptance
        assert acceptance.num_emitted_tokens == (
            acceptance.num_rounds + acceptance.num_accepted_tokens
        )


def test_a_round_of_the_wrong_width_is_seen(oracle_engine, plain, target, monkeypatch):
    """Were drafts committed beyond the window that scored them, the outputs would differ."""
    made = oracle_engine
    programs = made.executor.programs
    plain_steps = programs["run_1"]
    monkeypatch.setitem(programs, "run_3", lambda *args: skip_a_token(plain_steps(*args)))
    done = made.generate(PROMPTS[:1], PARAMS[:1], draft_length=2)
    with pytest.raises(AssertionError):
        assert_equal_or_ties(target, done, plain[:1], PARAMS[:1])


def skip_a_token(state):
    """The state with every newest token replaced by its successor."""
    row = jax.numpy.arange(len(state.num_committed))
    newest = state.num_committed - 1
    return state.replace(tokens=state.tokens.at[row, newest].add(1))


def test_engines_measure_their_rounds_before_the_first_request(target, monkeypatch):
    made = Engine(
        target,
        wrong(),
        scheduler=jaxspec.Static(),
        draft_length="auto",
        verify_length=2,
        batch_size=2,
        max_length=128,
    )
    seen = []
    real = adaptive.measure_round_times
    monkeypatch.setattr(
        adaptive, "measure_round_times", lambda *a, **k: seen.append(real(*a, **k)) or seen[-1]
    )
    done = made.generate(PROMPTS[:3], PARAMS[:3])
    [measured] = seen
    assert len(measured.short_s) == len(measured.long_s) == 2
    assert min(*measured.short_s.values(), *measured.long_s.values()) > 0
    assert made.metrics()["num_requests"] == 3
    assert made.metrics()["num_emitted_tokens"] == sum(len(c.token_ids) for c in done)
    made.generate(PROMPTS[:1], PARAMS[:1])
    assert len(seen) == 1


@pytest.fixture
def measured(monkeypatch):
    """Collects what was measured, which takes no time."""
    found = []
    monkeypatch.setattr(
        adaptive, "measure_round_times", lambda *_, **__: found.append(FIXED) or FIXED
    )
    return found


def of_nine_drafts(target):
    """An engine whose drafts are always accepted, and may be longer than the default."""
    return Engine(
        target,
        jaxspec.DraftModel(target),
        draft_length="auto",
        verify_length=9,
        batch_size=2,
        max_length=128,
        prefill_chunk=16,
    )


async def read(stream):
    *_, last = [piece async for piece in stream]
    return last.completion


def test_single_requests_do_not_wait_for_rounds_to_be_measured(target, plain, measured):
    """They draft as many tokens as by default; a list measures, and a session keeps its KV."""
    made, [params, *_] = of_nine_drafts(target), PARAMS
    made.submit(PROMPTS[0], params)
    with made.session() as session:
        *_, of_session = session.stream(PROMPTS[0], params)
        *_, streamed = made.stream(PROMPTS[0], params)
        awaited = asyncio.run(read(made.astream(PROMPTS[0], params)))
        [submitted] = made.step()
        assert measured == []
        for done in (submitted, of_session.completion, streamed.completion, awaited):
            assert done.acceptance.depth == 4
            assert done.token_ids == plain[0].token_ids
        kept = session.num_kept_tokens
        assert session.place == "device"
        # Not while requests have rows.
        stream = made.stream(PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        made.generate(PROMPTS[:1], params)
        made.warm_up()
        assert measured == []
        stream.close()
        made.generate(PROMPTS[:1], params)
        made.warm_up()
        assert measured == [FIXED]
        turn = session.generate([*session.token_ids, 1, 2], params)
        assert turn.num_reused_tokens == kept > 0


def test_an_interrupted_measurement_leaves_no_rows(target, plain, monkeypatch):
    def interrupted(rounds, **_):
        rounds.fill(1)
        raise KeyboardInterrupt

    made = of_nine_drafts(target)
    monkeypatch.setattr(adaptive, "measure_round_times", interrupted)
    for call in (made.warm_up, lambda: made.generate(PROMPTS[:1], PARAMS[:1])):
        with pytest.raises(KeyboardInterrupt):
            call()
        assert not np.any(made.executor.fetch("finish").finish == Finish.RUNNING)
    *_, last = made.stream(PROMPTS[0], PARAMS[0])
    assert last.completion.token_ids == plain[0].token_ids


def test_a_warm_up_measures(target, plain, measured):
    made = of_nine_drafts(target)
    made.warm_up()
    assert measured == [FIXED]
    asyncio.run(read(made.astream(PROMPTS[0], PARAMS[0])))
    made.generate(PROMPTS[:1], PARAMS[:1])
    assert measured == [FIXED]


@dataclasses.dataclass(frozen=True)
class WindowKeeper(Drafter):
    """Keeps a state as large as the window."""

    name: str = "window-keeper"

    def init(self, shape):
        return jax.numpy.zeros((shape.batch_size, shape.verify_length))

    def propose(self, shape, params, state, rows):
        return toy.WrongDrafter().propose(shape, params, state, rows)[0], state


def test_what_does_not_fit_is_refused(target):
    with pytest.raises(SettingError, match="window-keeper, which keeps a state that depends on"):
        Engine(target, WindowKeeper(), exactness="ties", max_length=128)
    with pytest.raises(SettingError, match="exactness 'exact' was given"):
        Engine(target, toy.WrongDrafter(), exactness="exact", max_length=128)
