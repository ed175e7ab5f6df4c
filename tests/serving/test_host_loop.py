"""The example loop: every prompt's text as `Engine` gives it, in pieces, prompts read ahead."""

from __future__ import annotations

import concurrent.futures
import io
import threading

import pytest
import tiny
import toy

from jaxspec import Engine, NGram, SamplingParams
from jaxspec.errors import PromptError, SettingError
from jaxspec.serving import ServingEngine, host_loop
from jaxspec.types import Finish

SHAPE = {"draft_length": 3, "batch_size": 2, "max_length": 128}
PROMPTS = ["née", "a much longer prompt than the others, read in chunks", "b", "ça", "e", "🙂"]
PARAMS = SamplingParams(max_tokens=20, temperature=1.2, seed=1)


@pytest.fixture(scope="module")
def target():
    return tiny.model(text=tiny.tokenizer())


@pytest.fixture(scope="module")
def engine(target):
    return ServingEngine(target, NGram(), **SHAPE)


def texts(pieces):
    found: dict[int, str] = {}
    for number, text, _ in pieces:
        found[number] = found.get(number, "") + text
    return found


def test_texts_are_the_engines(target, engine):
    pieces = list(host_loop.serve(engine, PROMPTS, PARAMS))
    completions = Engine(target, NGram(), **SHAPE).generate(PROMPTS, PARAMS)
    assert texts(pieces) == {n: done.text for n, done in enumerate(completions)}
    finished = {n: finish for n, _, finish in pieces if finish != Finish.RUNNING}
    reasons = {Finish.MAX_TOKENS: "length", Finish.STOP_TOKEN: "stop"}
    assert {n: reasons[finish] for n, finish in finished.items()} == {
        n: done.finish_reason for n, done in enumerate(completions)
    }


def test_a_prompt_joins_while_others_are_decoded(engine, monkeypatch):
    class AtOnce:
        """An executor without a thread, so that it is no race which prompt is ready."""

        def __init__(self, num_threads):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def submit(self, function, *args):
            future = concurrent.futures.Future()
            future.set_result(function(*args))
            return future

    params = SamplingParams(max_tokens=40, ignore_eos=True)  # greedy rows repeat, and drafts hit
    waited = texts(host_loop.serve(engine, PROMPTS, params))
    monkeypatch.setattr(host_loop, "ThreadPoolExecutor", AtOnce)
    pieces = list(host_loop.serve(engine, PROMPTS, params))
    assert texts(pieces) == waited
    turns = [number for number, _, _ in pieces]
    first = [turns.index(number) for number in range(6)]
    last = [len(turns) - 1 - turns[::-1].index(number) for number in range(6)]
    assert first[1] < last[0]  # seated together
    assert any(first[n + 2] < last[n] or first[n + 2] < last[n + 1] for n in range(4))


def test_prompts_are_read_ahead_on_another_thread(engine, monkeypatch):
    threads = []
    prefill = engine.prefill

    def watched(*args):
        threads.append(threading.current_thread())
        return prefill(*args)

    monkeypatch.setattr(engine, "prefill", watched)
    stream = host_loop.serve(engine, PROMPTS, PARAMS)
    next(stream)
    assert 2 <= len(threads) <= 4  # those in the batch, and as many that wait
    assert len(texts(stream)) == 6
    assert len(threads) == 6
    assert threading.main_thread() not in threads


def test_a_refused_prompt_raises_and_nothing_hangs(engine):
    with pytest.raises(PromptError, match="The prompt has"):
        list(host_loop.serve(engine, ["a", "x" * 200], PARAMS))
    assert list(host_loop.serve(engine, [], PARAMS)) == []


def test_a_model_without_a_tokenizer():
    engine = ServingEngine(toy.model(), **{**SHAPE, "draft_length": 4})
    with pytest.raises(SettingError, match="no tokenizer"):
        next(host_loop.serve(engine, [[1]], PARAMS))


def test_the_program(target, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert host_loop.main(target) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line[:3] for line in lines} == {"0: ", "1: "}
    assert sum("[max_tokens]" in line or "[stop_token]" in line for line in lines) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 2000))
    assert host_loop.main(target) == 2
    assert "The prompt has 2001 tokens" in capsys.readouterr().err
