"""What cannot fit is refused before anything is allocated, probed or compiled, at any size."""

import bisect
import random
import time

import heads
import jax
import pytest
import toy

from jaxspec import Continuous, DraftModel, Engine, NGram, Pool
from jaxspec.engine import memory
from jaxspec.engine.executor import make_executor
from jaxspec.engine.memory import largest_that_fits
from jaxspec.errors import SettingError
from jaxspec.serving import ServingEngine
from jaxspec.trees import BeamTree

LIMIT_S = 1.0  # of this process's own time
FREE = 2**28
HUGE = 2**31, 2**63, 10**400


@pytest.fixture(scope="module")
def target():
    return toy.model(num_layers=1)


@pytest.fixture(scope="module")
def drafters(target):
    draft = toy.model(seed=1, num_layers=1)
    return {
        "none": None,
        "ngram": NGram(),
        "draft model": DraftModel(draft),
        "tree": DraftModel(draft, tree=BeamTree()),
        "window": DraftModel(draft, kv_window=128),
    }


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Little is free; whatever compiles or probes fails. Returns what was measured."""

    def refuse(*_, **__):
        raise AssertionError("something was compiled or probed")

    calls = []

    def measure(*args, **kwargs):
        calls.append(kwargs)
        return of_shapes(*args, **kwargs)

    of_shapes = memory.measure_parts
    monkeypatch.setattr(memory, "measure_parts", measure)
    monkeypatch.setattr(memory, "free_memory", lambda: (FREE, "on this host"))
    monkeypatch.setattr("jaxspec.decode.buckets.is_width_invariant", refuse)
    monkeypatch.setattr("jaxspec.engine.memory.compile_programs", refuse)
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    return calls


def refused(call, message="most that fits|choose a smaller model"):
    started_s = time.thread_time()
    with pytest.raises(SettingError, match=message):
        call()
    assert time.thread_time() - started_s < LIMIT_S


@pytest.mark.parametrize("batch_size", [20_000, 200_000, 2**20])
@pytest.mark.parametrize("name", ["none", "ngram", "draft model", "tree", "window"])
def test_rows_that_do_not_fit(target, drafters, measured, name, batch_size):
    refused(lambda: Engine(target, drafters[name], batch_size=batch_size), "fits is a batch_size")
    assert len(measured) < 20  # each is traced


@pytest.mark.parametrize(
    "options",
    [
        {"draft_length": "auto"},
        {"exactness": "ties"},
        {"layout": "aligned"},
        {"trace": "distributions"},
        {"max_logprobs": 61},
        {"verifier": "rejection"},
        {"scheduler": "static"},
        {"scheduler": Pool(window_size=200_000)},
        {"scheduler": Continuous(waiting=2**30), "batch_size": 1},
        {"mesh": True},
        {"check_invariants": True},
        {"batch_size": 8, "max_length": 2**26},
        {"batch_size": 8, "max_length": 2**20, "verify_length": 2**19},
        {"batch_size": 1, "max_length": 2**30, "budget_bytes": 2**62},
    ],
    ids=str,
)
def test_other_settings_that_do_not_fit(target, drafters, options):
    options = {"batch_size": 200_000, **options}
    if "mesh" in options:
        options["mesh"] = jax.make_mesh((1, 1), ("data", "model"))
    refused(lambda: Engine(target, drafters["draft model"], **options))


def test_other_doors(target):
    own = heads.target()
    refused(lambda: make_executor(target, NGram(), batch_size=200_000))
    refused(lambda: ServingEngine(target, NGram(), batch_size=200_000))
    refused(lambda: Engine(own, heads.random_heads("clover2", own), batch_size=200_000))


@pytest.mark.parametrize("name", ["batch_size", "max_length", "verify_length"])
def test_sizes_beyond_what_the_device_counts(target, name):
    for size in HUGE:
        for make in (Engine, ServingEngine, make_executor):
            refused(lambda make=make, size=size: make(target, NGram(), **{name: size}), "at most")


def test_the_largest_that_is_named_is_the_largest(target, drafters, monkeypatch):
    monkeypatch.setattr("jaxspec.decode.buckets.is_width_invariant", lambda *_, **__: False)
    for name, drafter in drafters.items():
        for batch_size in (3000, 200_000):
            with pytest.raises(SettingError, match="fits is a batch_size of") as raised:
                make_executor(target, drafter, batch_size=batch_size)
            named = int(str(raised.value).split("fits is a batch_size of ")[1].split()[0])
            with pytest.raises(SettingError, match=f"fits is a batch_size of {named} "):
                make_executor(target, drafter, batch_size=named + 1)
            made = make_executor(target, drafter, batch_size=named)
            assert made.memory.needed_bytes <= FREE, name


def test_the_search_is_exact_and_short():
    draw = random.Random(0)
    for _ in range(2000):
        fixed, each = draw.choice([0, 10**6, 10**12]), draw.randint(0, 10**5)
        cap, capped, square = draw.randint(0, 10**6), draw.randint(0, 10**5), draw.randint(0, 3)
        limit = draw.choice([1, 2, 3, draw.randint(1, 100), draw.randint(1, 2**30)])
        num_calls = 0

        def needed(n):
            nonlocal num_calls
            num_calls += 1
            return fixed + each * (n + n // 4) + capped * min(n, cap) + square * n * n // 1000  # noqa: B023

        free = needed(draw.randint(1, limit)) + draw.randint(-1, 1)
        expected = bisect.bisect_right(range(1, limit + 1), False, key=lambda n: needed(n) > free)
        num_calls = 0
        assert largest_that_fits(needed, limit, free) == expected
        assert num_calls < 70
