"""Prompts in every form, and variables of chat templates, at every door that takes a prompt."""

from __future__ import annotations

import asyncio

import engines
import numpy as np
import pytest

import jaxspec
from jaxspec import NGram, SamplingParams
from jaxspec.audit import self_audit
from jaxspec.errors import PromptError, SettingError
from jaxspec.lab import compare
from jaxspec.serving.engine import ServingEngine

CHAT = [{"role": "user", "content": "hello"}]
PARAMS = SamplingParams(max_tokens=3)


class Reached(Exception):
    """Raised with the prompts that a call was about to decode."""


@pytest.fixture(scope="module")
def target():
    return engines.target("text")


@pytest.fixture(scope="module")
def engine():
    return engines.engine("text", "ngram")


@pytest.fixture(scope="module")
def server(target):
    return ServingEngine(target, **engines.SHAPE)


@pytest.fixture
def doors(engine, server, target, monkeypatch):
    """Calls that return the token ids of a prompt, by name."""

    def submitted(prompt, **options):
        engine.submit(prompt, PARAMS, **options)
        [done] = [done for _ in range(9) for done in engine.step()]
        return done.prompt_token_ids

    def streamed_async(prompt, **options):
        async def read():
            pieces = [piece async for piece in engine.astream(prompt, PARAMS, **options)]
            return pieces[-1].completion.prompt_token_ids

        return asyncio.run(read())

    def in_session(prompt, **options):
        with engine.session() as session:
            return session.generate(prompt, PARAMS, **options).prompt_token_ids

    def streamed_in_session(prompt, **options):
        with engine.session() as session:
            *_, last = session.stream(prompt, PARAMS, **options)
            return last.completion.prompt_token_ids

    def compared(prompt, **options):
        real = compare.make_requests

        def reached(*args, **options):
            raise Reached(args[0])

        monkeypatch.setattr(compare, "make_requests", reached)
        with pytest.raises(Reached) as raised:
            jaxspec.compare(
                target, {"a": None, "b": NGram()}, prompt, PARAMS, max_length=128, **options
            )
        monkeypatch.setattr(compare, "make_requests", real)
        [ids] = raised.value.args[0]
        return ids

    def audited(prompt, **options):
        real = self_audit.make_requests

        def reached(*args, **options):
            raise Reached(real(*args, **options))

        monkeypatch.setattr(self_audit, "make_requests", reached)
        with pytest.raises(Reached) as raised:
            self_audit.audit_engine(engine, prompt, PARAMS, **options)
        monkeypatch.setattr(self_audit, "make_requests", real)
        [request] = raised.value.args[0]
        return request.prompt_token_ids

    return {
        "generate": lambda p, **o: engine.generate(p, PARAMS, **o)[0].prompt_token_ids,
        "submit": submitted,
        "stream": lambda p, **o: (
            list(engine.stream(p, PARAMS, **o))[-1].completion.prompt_token_ids
        ),
        "astream": streamed_async,
        "session.generate": in_session,
        "session.stream": streamed_in_session,
        "prefill": lambda p, **o: server.prefill(p, PARAMS, **o).request.prompt_token_ids,
        "compare": compared,
        "audit_engine": audited,
    }


def test_variables_of_a_template(doors, engine, target):
    text = target.tokenizer
    glad = tuple(text.encode_chat(CHAT, template_kwargs={"mood": "glad"}))
    other = "{{ messages[0].content }} {{ mood }}"
    for name, ids_of in doors.items():
        assert ids_of(CHAT, chat_template_kwargs={"mood": "glad"}) == glad, name
        options = {"chat_template": other, "chat_template_kwargs": {"mood": "sad"}}
        assert text.decode(ids_of(CHAT, **options)) == "hello sad", name
        assert ids_of(CHAT) == tuple(text.encode_chat(CHAT)), name
    engine.forget_prefixes()
    assert engine.cache_prefix(CHAT, chat_template_kwargs={"mood": "glad"}) == len(glad)
    engine.forget_prefixes()


def test_one_prompt_in_every_form(doors, engine, target):
    text = target.tokenizer
    ids = text.encode("hello")
    for given in (
        "hello",
        ids,
        tuple(ids),
        np.array(ids),
        np.array([ids]),
        {"prompt": "hello"},
        {"prompt_token_ids": ids},
        text.hf("<s>hello"),
        text.hf("<s>hello", return_tensors="np"),
    ):
        for name, ids_of in doors.items():
            assert ids_of(given) == tuple(ids), (name, given)
        assert engine.cache_prefix(given) == len(ids)
    engine.forget_prefixes()


@pytest.mark.parametrize(
    "given", [None, 5, b"hello", {}, {5}, iter("ab"), {"role": "user", "content": "a"}]
)
def test_what_is_no_prompt(doors, engine, given):
    for name, ids_of in [*doors.items(), ("cache_prefix", engine.cache_prefix)]:
        with pytest.raises(PromptError) as raised:
            ids_of(given)
        assert "\n" not in str(raised.value), name
    assert not engine.has_unfinished


def test_variables_that_are_no_dict(doors):
    for name, ids_of in doors.items():
        with pytest.raises(PromptError, match="chat_template_kwargs") as raised:
            ids_of(CHAT, chat_template_kwargs="glad")
        assert "\n" not in str(raised.value), name


def test_sampling_params_have_vllms_name_and_a_shorter_one(engine):
    ours, theirs = (
        engine.generate("hi", params=PARAMS),
        engine.generate("hi", sampling_params=PARAMS),
    )
    assert ours[0].token_ids == theirs[0].token_ids == engine.generate("hi", PARAMS)[0].token_ids
    assert len(theirs[0].token_ids) == PARAMS.max_tokens
    with pytest.raises(SettingError, match="Both sampling_params and params were given"):
        engine.generate("hi", PARAMS, params=PARAMS)
