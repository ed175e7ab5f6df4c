"""Replayed schedules: by hand, and against the compiled pool."""

import pytest
import toy

import jaxspec
from jaxspec.engine.engine import Engine
from jaxspec.lab.studies.replay import emitted_by_round, replay_pool
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.types import Origin

BATCH_SIZE, WINDOW_SIZE = 2, 4


def test_emitted_by_round_splits_at_the_target_s_own_tokens():
    accepted, corrected, bonus = Origin.ACCEPTED, Origin.CORRECTED, Origin.BONUS
    assert emitted_by_round([accepted, corrected, corrected, accepted, accepted, bonus]) == (
        2,
        1,
        3,
    )
    # The last round may be cut after an accepted token: at a limit or a stop token.
    assert emitted_by_round([corrected, accepted]) == (1, 1)
    assert emitted_by_round([]) == ()


def test_the_first_group_that_fills_the_seats_is_decoded():
    # The third row has the first one's length; the second waits.
    schedule = replay_pool([[5, 1], [7, 1], [5, 1]], batch_size=2, window_size=3)
    assert (schedule.num_rounds, schedule.num_grouped_rounds) == (2, 1)
    assert (schedule.num_rows, schedule.num_grouped_rows) == (3, 2)
    # A window of two does not see it.
    narrow = replay_pool([[5, 1], [7, 1], [5, 1]], batch_size=2, window_size=2)
    assert (narrow.num_rounds, narrow.num_grouped_rounds) == (2, 0)


def test_padding_makes_rows_a_group_until_they_accept_differently():
    same = [[5, 2, 2, 2], [7, 2, 2, 2]]
    assert replay_pool(same, batch_size=2, window_size=2).num_grouped_rounds == 0
    aligned = replay_pool(same, batch_size=2, window_size=2, layout="aligned")
    assert aligned.num_grouped_rounds == 2  # all but the first, which pads them
    other = [[5, 2, 1, 3, 2], [7, 2, 2, 2, 2]]
    aligned = replay_pool(other, batch_size=2, window_size=2, layout="aligned")
    assert aligned.num_grouped_rounds == 1  # the second: after it lengths differ twice


def test_with_one_seat_every_call_is_a_group():
    schedule = replay_pool([[5, 1, 2], [3, 1]], batch_size=1, window_size=1)
    assert schedule.grouping_by_calls == 1
    assert schedule.grouping_by_rows == 0


@pytest.fixture(scope="module", params=["ragged", "aligned"])
def pool(request):
    target = toy.model()
    prompts = toy.prompts([3, 5, 3, 9, 4, 3, 6])
    params = SamplingParams(max_tokens=12)
    plain = Engine(target, batch_size=2, max_length=128).generate(prompts, params)
    engine = Engine(
        target,
        jaxspec.Oracle(toy.sequences(plain), acceptance=0.6),
        layout=request.param,
        scheduler=jaxspec.Pool(WINDOW_SIZE),
        draft_length=3,
        batch_size=BATCH_SIZE,
        max_length=128,
    )
    completions = engine.generate(prompts, params)
    counts = {name: int(count) for name, count in vars(engine.state.schedule).items()}
    return request.param, completions, counts


def as_rows(completions):
    return [
        [len(completion.prompt_token_ids), *emitted_by_round(completion.origins)]
        for completion in completions
    ]


def test_the_replay_agrees_with_the_compiled_pool(pool):
    layout, completions, counts = pool
    schedule = replay_pool(
        as_rows(completions), batch_size=BATCH_SIZE, window_size=WINDOW_SIZE, layout=layout
    )
    for name in ("num_rounds", "num_rows", "num_grouped_rounds", "num_grouped_rows"):
        assert getattr(schedule, name) == counts[name], name


def test_the_comparison_sees_a_wrong_replay(pool):
    """Sabotage: another window, or rows that emit a token less in their first round."""
    layout, completions, counts = pool
    histories = as_rows(completions)
    narrow = replay_pool(histories, batch_size=BATCH_SIZE, window_size=BATCH_SIZE, layout=layout)
    off = [[*row, 1] for row in histories]
    longer = replay_pool(off, batch_size=BATCH_SIZE, window_size=WINDOW_SIZE, layout=layout)
    assert narrow.num_grouped_rounds != counts["num_grouped_rounds"]
    assert longer.num_rounds != counts["num_rounds"]
