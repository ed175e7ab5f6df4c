"""Thousands of requests from threads and an event loop, some of them to score their prompts, with
cancellations, deadlines, failing device calls and new weights: every output that of the request
alone, nothing lost or given twice, nothing compiled, no memory that grows."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import gc
import random
import threading
import time
from collections.abc import Callable, Sequence

import jax
import psutil
import pytest
import tiny
import toy

from jaxspec import DraftModel, Engine, SamplingParams
from jaxspec.errors import QueueFullError, RequestError
from jaxspec.requests.completions import Completion

SHAPE = {"draft_length": 3, "batch_size": 4, "max_length": 128, "max_logprobs": 2}
NUM_VARIANTS = 24
MAX_TOKENS = (1, 2, 5, 9, 20)
SHORT_S = 0.02  # a deadline that some requests meet and others do not
NUM_STREAMS, NUM_TASKS = 2, 6  # threads that stream; tasks of the event loop
CUT = {"cancelled", "timeout", "device failure"}


class DeviceLostError(RuntimeError):
    """What the failing device raises."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A request, and how it is decoded."""

    prompt: list[int]
    params: SamplingParams
    draft_length: int | None


def variants(rng: random.Random) -> list[Variant]:
    """Few enough to be decoded alone as well."""
    chosen = []
    for index, prompt in enumerate(toy.prompts([1 + 3 * i for i in range(NUM_VARIANTS)])):
        is_sampled, is_scored = rng.random() < 0.4, rng.random() < 0.3
        params = SamplingParams(
            max_tokens=rng.choice((0, 0, *MAX_TOKENS) if is_scored else MAX_TOKENS),
            prompt_logprobs=rng.choice((0, 2)) if is_scored else None,
            temperature=0.8 if is_sampled else 0.0,
            top_p=rng.choice((1.0, 0.9)) if is_sampled else 1.0,
            seed=index,
        )
        chosen.append(Variant(prompt, params, rng.choice((None, None, 1, 3))))
    return chosen


class Check:
    """What became of the requests of one phase, and what is wrong with it."""

    def __init__(self, alone: Sequence[Completion]):
        self.alone = alone
        self.ends: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self._lock = threading.Lock()

    def note(self, index: int, completion: Completion) -> None:
        """Counts how a request of this variant ended, and compares its output."""
        alone, found = self.alone[index], completion.token_ids
        is_cut = completion.finish_reason == "abort"
        end = str(completion.stop_reason) if is_cut else "whole"
        whole = alone.token_ids[: len(found)] if end in CUT else alone.token_ids
        scores = completion.prompt_logprobs  # to the bit
        is_same = found == whole and (scores == alone.prompt_logprobs or (is_cut and not found))
        with self._lock:
            self.ends[end] += 1
            if not is_same:
                problem = f"variant {index} ({end}): {found}, {scores}; alone"
                self.problems.append(f"{problem} {whole}, {alone.prompt_logprobs}")

    def add(self, end: str, number: int = 1) -> None:
        """Counts requests that ended without a completion, as their callers wanted or were told."""
        with self._lock:
            self.ends[end] += number

    def finish(self, num_requests: int) -> None:
        """Asserts that every request ended once, and rightly."""
        assert not self.problems, self.problems[:5]
        assert self.ends.total() == num_requests, self.ends


class Callers:
    """All ways of asking an engine for completions, at once."""

    def __init__(self, engine: Engine, chosen: Sequence[Variant], check: Check):
        self.engine, self.chosen, self.check = engine, chosen, check
        self.errors: list[BaseException] = []
        self.unfinished: dict[str, int] = {}
        self.num_submitting = 0

    def run(self, num_requests: int, seed: int) -> None:
        """Lets all callers make their share of the requests, and waits for them."""
        jobs = [self.submit, self.decode_lists, *[self.stream] * NUM_STREAMS, self.run_event_loop]
        shares = [num_requests // len(jobs)] * len(jobs)
        shares[0] += num_requests - sum(shares)
        self.num_submitting = 1
        threads = [threading.Thread(target=self.guarded, args=(self.step, None, 0))]
        for place, (job, share) in enumerate(zip(jobs, shares, strict=True)):
            rng = random.Random(100 * seed + place)
            threads.append(threading.Thread(target=self.guarded, args=(job, rng, share)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not self.errors, self.errors

    def guarded(self, job: Callable, rng: random.Random | None, share: int) -> None:
        """A caller on its thread."""
        try:
            job(rng, share)
        except BaseException as error:
            self.errors.append(error)

    def options(self, rng: random.Random) -> tuple[int, dict]:
        """A variant's number, and a request of it."""
        index = rng.randrange(len(self.chosen))
        one = self.chosen[index]
        timeout_s = SHORT_S if rng.random() < 0.1 else rng.choice((None, 1000.0))
        fields = {"prompt": one.prompt, "params": one.params, "draft_length": one.draft_length}
        return index, fields | {"timeout_s": timeout_s}

    def submit(self, rng: random.Random, share: int) -> None:
        """Submits requests in bursts, and cancels some."""
        try:
            names = []
            for number in range(share):
                index, options = self.options(rng)
                name = f"submitted-{id(self)}-{number}"
                self.unfinished[name] = index
                names.append(name)
                while True:
                    try:
                        self.engine.submit(**options, request_id=name)
                        break
                    except QueueFullError:
                        time.sleep(0.002)
                if rng.random() < 0.1:
                    try:
                        self.engine.cancel(rng.choice(names[-20:]))
                    except RequestError:
                        pass  # it has ended
                if rng.random() < 0.05:
                    time.sleep(0.01)
        finally:
            self.num_submitting = 0

    def step(self, *_) -> None:
        """Steps the engine, and takes what was submitted and has ended."""
        while self.num_submitting or self.unfinished:
            try:
                completions = self.engine.step()
            except DeviceLostError:
                continue
            for completion in completions:
                self.check.note(self.unfinished.pop(completion.request_id), completion)

    def decode_lists(self, rng: random.Random, share: int) -> None:
        """Decodes lists of a few requests."""
        while share:
            number = min(share, rng.randint(1, 6))
            share -= number
            chosen = [rng.randrange(len(self.chosen)) for _ in range(number)]
            try:
                found = self.engine.generate(
                    [self.chosen[index].prompt for index in chosen],
                    [self.chosen[index].params for index in chosen],
                    timeout_s=SHORT_S if rng.random() < 0.1 else None,
                )
            except DeviceLostError:
                self.check.add("raised", number)
                continue
            for index, completion in zip(chosen, found, strict=True):
                self.check.note(index, completion)

    def stream(self, rng: random.Random, share: int) -> None:
        """Streams one request after the other, and closes some streams."""
        for _ in range(share):
            index, options = self.options(rng)
            closes = rng.random() < 0.1
            while True:
                try:
                    stream = self.engine.stream(**options)
                    break
                except QueueFullError:
                    time.sleep(0.002)
            try:
                for piece in stream:
                    if piece.completion is not None:
                        self.check.note(index, piece.completion)
                    elif closes:
                        stream.close()
                        self.check.add("closed")
            except DeviceLostError:
                self.check.add("raised")

    def run_event_loop(self, rng: random.Random, share: int) -> None:
        """Streams on an event loop, in several tasks."""
        numbers = iter(range(share))

        async def work() -> None:
            for _ in numbers:
                index, options = self.options(rng)
                closes = rng.random() < 0.1
                stream = self.engine.astream(**options)
                try:
                    async for piece in stream:
                        if piece.completion is not None:
                            self.check.note(index, piece.completion)
                        elif closes:
                            self.check.add("closed")
                            break
                except DeviceLostError:
                    self.check.add("raised")
                finally:
                    await stream.aclose()

        async def main() -> None:
            await asyncio.gather(*(work() for _ in range(NUM_TASKS)))

        asyncio.run(main())


def soak(num_requests: int, num_phases: int) -> None:
    """Phases of requests with the weights of two models by turns."""
    models = [tiny.model(seed=seed, eos_token_ids=()) for seed in (0, 1)]
    engine = Engine(models[0], DraftModel(tiny.model(seed=2)), max_queue=16, **SHAPE)
    engine.submit([5], SamplingParams(max_tokens=100), request_id="cancelled")
    engine.step()
    engine.cancel("cancelled")
    assert [done.stop_reason for done in engine.step()] == ["cancelled"]
    chosen, rng = variants(random.Random(0)), random.Random(1)
    alone = []
    for model in models:
        engine.update_params(target=model.params)
        alone.append([engine.generate([v.prompt], v.params)[0] for v in chosen])
    for name in ("token_ids", "prompt_logprobs"):
        assert [getattr(c, name) for c in alone[0]] != [getattr(c, name) for c in alone[1]]
    assert any(v.params.max_tokens == 0 for v in chosen)

    run = engine.executor.programs["run"]

    def failing(*arguments):
        result = run(*arguments)
        if rng.random() < 0.003:
            raise DeviceLostError("the state was given to a call that failed")
        return result

    compiled, footprints = engine.executor.compile_counts(), []
    ends: collections.Counter[str] = collections.Counter()
    for phase in range(num_phases):
        engine.update_params(target=models[phase % 2].params)
        check, share = Check(alone[phase % 2]), num_requests // num_phases
        engine.executor.programs["run"] = failing
        Callers(engine, chosen, check).run(share, seed=phase)
        engine.executor.programs["run"] = run
        assert not engine.has_unfinished
        check.finish(share)
        ends += check.ends
        gc.collect()
        footprints.append((len(jax.live_arrays()), psutil.Process().memory_info().rss))
    print(f"{num_requests} requests: {dict(ends)}; (arrays, bytes): {footprints}")
    assert engine.executor.compile_counts() == compiled
    assert set(ends) <= {"whole", "closed", "raised", *CUT}
    assert ends["whole"] > num_requests / 2
    assert {"whole", "cancelled", "closed"} <= set(ends)
    arrays, resident = zip(*footprints, strict=True)
    assert arrays[-1] <= max(arrays[:-1]), arrays  # it may dip, and comes back to no more
    assert resident[-1] - resident[1] < 32 * 2**20, resident


@pytest.mark.slow
@pytest.mark.as_shipped
def test_twenty_thousand_requests():
    soak(20_000, num_phases=10)


@pytest.mark.slow
def test_six_hundred_requests():
    soak(600, num_phases=3)


def test_the_check_sees_what_is_lost_given_twice_or_of_another_request():
    engine = Engine(tiny.model(eos_token_ids=()), batch_size=1, max_length=128, max_logprobs=0)
    [done] = engine.generate([[5, 6]], SamplingParams(max_tokens=9, prompt_logprobs=0))
    others = dataclasses.replace(done, token_ids=(7,) * 9)
    unscored = dataclasses.replace(done, prompt_logprobs=None)
    for sabotage, num_expected in (
        (lambda check: None, 0),
        (lambda check: [check.note(0, done), check.note(0, done)], 1),
        (lambda check: check.note(1, done), 1),
        (lambda check: check.note(0, dataclasses.replace(done, token_ids=done.token_ids[:4])), 1),
        (lambda check: check.note(0, unscored), 1),
        (lambda check: None, 1),
    ):
        check = Check([done, others])
        sabotage(check)
        if num_expected == 0:
            check.finish(0)
            continue
        with pytest.raises(AssertionError):
            check.finish(num_expected)
