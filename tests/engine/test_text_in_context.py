"""Text of outputs with SentencePiece's pipelines: what follows the prompt, wherever it is given."""

from __future__ import annotations

import asyncio
import dataclasses

import pipelines
import pytest
import toy

from jaxspec import Engine, NGram, SamplingParams
from jaxspec.errors import SettingError
from jaxspec.serving import host_loop
from jaxspec.serving.engine import ServingEngine

PROMPTS = ["the quick brown fox", "a cat a dog", "who", "one two one two one two", "a b c d e f g"]
PARAMS = SamplingParams(max_tokens=24)
TEXT = {kind: pipelines.sentencepiece(kind, is_small=True) for kind in pipelines.KINDS}
VOCAB = len(TEXT["strip"].hf)


@pytest.fixture(scope="module", params=pipelines.KINDS)
def engine(request):
    target = toy.model(vocab_size=VOCAB, num_layers=1, eos_token_ids=(0, 1, 2, 3))
    target = dataclasses.replace(target, tokenizer=TEXT[request.param])
    return Engine(target, NGram(), draft_length=3, batch_size=2, max_length=160)


@pytest.fixture(scope="module")
def done(engine):
    """The completions of `PROMPTS`, some of which begin with a space."""
    found = engine.generate(PROMPTS, PARAMS)
    assert any(one.text.startswith(" ") for one in found)
    return found


def test_completions_and_streams(engine, done):
    tokenizer = engine.target.tokenizer
    for prompt, completion in zip(PROMPTS, done, strict=True):
        before = tokenizer.decode(completion.prompt_token_ids)
        whole = tokenizer.decode(completion.prompt_token_ids + completion.token_ids)
        assert whole == before + completion.text
        pieces = completion.pieces[:-1] if completion.finish_reason == "stop" else completion.pieces
        assert "".join(pieces) == completion.text
        assert "".join(piece.text for piece in engine.stream(prompt, PARAMS)) == completion.text
        submitted = engine.submit(prompt, PARAMS)
        [found] = [one for _ in range(9) for one in engine.step() if one.request_id == submitted]
        assert found.text == completion.text

    async def read():
        return "".join([piece.text async for piece in engine.astream(PROMPTS[0], PARAMS)])

    assert asyncio.run(read()) == done[0].text


def test_stop_strings_are_searched_in_it(engine, done):
    for prompt, completion in zip(PROMPTS, done, strict=True):
        for stop in {completion.text[:2], completion.text[3:6]} - {""}:
            params = dataclasses.replace(PARAMS, stop=(stop,))
            [found] = engine.generate([prompt], params)
            assert found.stop_reason == stop
            assert found.text == completion.text[: completion.text.index(stop)]
            assert "".join(piece.text for piece in engine.stream(prompt, params)) == found.text


def test_sessions_of_text_read_nothing_again(engine):
    for text in PROMPTS:
        with engine.session() as session:
            for _ in range(3):
                completion = session.generate(text, PARAMS)
                assert not completion.num_reread_tokens
                text += completion.text + " and then"
            streamed = "".join(piece.text for piece in session.stream(text, PARAMS))
            [alone] = engine.generate([text], PARAMS)
            assert streamed == alone.text


def test_the_host_loop(engine, done):
    server = ServingEngine(engine.target, batch_size=2, max_length=160)
    texts = dict.fromkeys(range(len(PROMPTS)), "")
    for number, text, _ in host_loop.serve(server, PROMPTS, PARAMS):
        texts[number] += text
    assert list(texts.values()) == [one.text for one in done]


def test_stop_strings_of_special_tokens_end_by_id(engine):
    params = dataclasses.replace(PARAMS, ignore_eos=True, max_tokens=60)
    ended = 0
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        stopping = dataclasses.replace(params, stop=("<s>", "no such text"))
        for found in (
            *engine.generate([prompt], stopping),
            list(engine.stream(prompt, stopping))[-1].completion,
        ):
            if 1 in completion.token_ids:
                ended += 1
                end = completion.token_ids.index(1) + 1
                assert found.token_ids == completion.token_ids[:end]
                assert (found.finish_reason, found.stop_reason) == ("stop", 1)
            else:
                assert found.token_ids == completion.token_ids
    assert ended
    with pytest.raises(SettingError, match="would never end one; give stop_token_ids"):
        engine.submit(PROMPTS[0], SamplingParams(stop=("\n<s>",)))
    assert not engine.has_unfinished
