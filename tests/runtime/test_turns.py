"""Taking turns."""

import pytest

from jaxspec.runtime import turns
from jaxspec.runtime.turns import take_turns, time_loops


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when told to."""
    now = [0.0]
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    return now


def test_contenders_take_turns_and_ratios_are_of_neighbours(clock):
    log = []
    # The machine is ten times slower in the second turn, for both.
    seconds = iter([99, 99, 1, 2, 10, 30, 1, 4])

    def run(name):
        def it():
            log.append(name)
            clock[0] += next(seconds)
            return len(log)

        return it

    def prepare(name):
        clock[0] += 1000  # not counted

    found = take_turns(
        {"a": run("a"), "b": run("b")},
        3,
        num_warm_ups=1,
        prepare=prepare,
        on_turn=lambda name, turn: log.append(turn),
    )
    assert log == [n for turn in range(4) for n in (turn, "a", turn, "b")]
    assert found.seconds == {"a": [1, 10, 1], "b": [2, 30, 4]}
    assert found.ratios("a", over="b") == [2, 3, 4]
    assert found.speedup("a", over="b") == 3
    assert found.median_s("b") == 4
    assert found.results == {"a": len(log) - 3 + 1, "b": len(log) - 1 + 1}


def test_loops_run_often_enough_to_be_timed(clock):
    calls = []

    def loop(num_times):
        calls.append(num_times)
        clock[0] += 0.001 * num_times

    assert time_loops({"it": loop}, 2).median_s("it") == pytest.approx(0.001)
    assert calls[-1] == turns.LOOP_S / 0.001
