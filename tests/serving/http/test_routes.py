"""Routes, errors, limits, clients that go away, and the end of a server."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import select
import socket
import threading
import time
import types
from typing import Any

import engines
import httpx
import jax.numpy as jnp
import pytest
import toy
from served import MODEL, served, until
from starlette.testclient import TestClient

from jaxspec import Engine, SamplingParams
from jaxspec.engine import fingerprint as module
from jaxspec.engine.fingerprint import fingerprint
from jaxspec.errors import QueueFullError, SettingError
from jaxspec.serving.http import generation, protocol
from jaxspec.serving.http.app import Gate, make_app
from jaxspec.serving.http.listener import Connection, Server, open_listener
from jaxspec.serving.http.service import ServerSettings, Service, Sessions

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LONG = {"model": MODEL, "prompt": "ab", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 5}
LIMITS = {
    **{"max_body_bytes": 20_000, "max_prompts": 3, "max_n": 4, "header_timeout_s": 1.0},
    **{"max_sessions": 2, "session_header": "x-session-id"},
}


@pytest.fixture(scope="module")
def engine():
    return engines.engine("text", "ngram", max_logprobs=3, max_queue=6)


@pytest.fixture(scope="module")
def server(engine):
    with served(engine, **LIMITS) as (url, server):
        yield url, server


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server[0], timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def other():
    """For tests that make servers of their own."""
    return engines.engine("text", "ngram", max_logprobs=3)


@pytest.fixture
def is_slow(engine, other, monkeypatch):
    """Slows the rounds down, so that clients leave while their requests run."""
    for programs in (engine.executor.programs, other.executor.programs):
        run = programs["run"]
        slow = lambda *args, run=run: (time.sleep(0.02), run(*args))[1]  # noqa: E731
        monkeypatch.setitem(programs, "run", slow)


def post(client, path, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content)


def events(response):
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def with_prompt(**fields):
    return {"model": MODEL, "prompt": "ab", "max_tokens": 3, **fields}


# Path, body, status, `param`, words of the message.
ERRORS = [
    (COMPLETIONS, with_prompt(max_tokens=0), 400, "max_tokens", "must be from 1"),
    (COMPLETIONS, with_prompt(max_tokens=2**70), 400, "max_tokens", "must be from 1"),
    (COMPLETIONS, with_prompt(max_tokens="5"), 400, "max_tokens", "valid integer"),
    (COMPLETIONS, with_prompt(max_tokens=True), 400, "max_tokens", "valid integer"),
    (COMPLETIONS, with_prompt(temperature=-1), 400, "temperature", "0 (greedy)"),
    (COMPLETIONS, with_prompt(top_p=0), 400, "top_p", "above 0"),
    (COMPLETIONS, with_prompt(n=5), 400, "n", "from 1 to 4"),
    (COMPLETIONS, with_prompt(n=0), 400, "n", "from 1 to 4"),
    (COMPLETIONS, with_prompt(seed=2**70, temperature=1), 400, "seed", "2**63"),
    (COMPLETIONS, with_prompt(logprobs=9), 400, "logprobs", "this server keeps 3"),
    (CHATS, {**CHAT, "logprobs": True, "top_logprobs": 9}, 400, "top_logprobs", "keeps 3"),
    (CHATS, {**CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens", "from 1"),
    (COMPLETIONS, with_prompt(stop_token_ids=[99999]), 400, "stop_token_ids", "vocabulary"),
    (COMPLETIONS, with_prompt(stop_token_ids=[*range(5, 15)]), 400, "stop_token_ids", "room for 8"),
    (COMPLETIONS, with_prompt(allowed_token_ids=[99999]), 400, "allowed_token_ids", "vocabulary"),
    (COMPLETIONS, with_prompt(stop="</s>x"), 400, "stop", "is a special token"),
    (COMPLETIONS, with_prompt(max_tokens=0, echo=True), 400, "max_tokens", "must be from 1"),
    (COMPLETIONS, with_prompt(max_tokens=0, logprobs=1), 400, "max_tokens", "must be from 1"),
    (COMPLETIONS, with_prompt(logprobs=1, echo=True, stream=True), 400, "echo", "with stream"),
    (COMPLETIONS, with_prompt(prompt_logprobs=9), 400, "prompt_logprobs", "keeps 3"),
    (COMPLETIONS, with_prompt(prompt_logprobs=-1), 400, "prompt_logprobs", "at least 0"),
    (CHATS, {**CHAT, "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "with stream"),
    (COMPLETIONS, with_prompt(best_of=2), 400, "best_of", "does not support"),
    (COMPLETIONS, with_prompt(suffix="x"), 400, "suffix", "does not support"),
    (COMPLETIONS, with_prompt(stop=""), 400, "stop", "not empty"),
    (COMPLETIONS, with_prompt(logit_bias={"9999": 1}), 400, "logit_bias", "vocabulary"),
    (COMPLETIONS, with_prompt(draft_length=99), 400, "draft_length", "from 1 to 3"),
    (COMPLETIONS, with_prompt(stream_options={}), 400, "stream_options", "without stream"),
    (COMPLETIONS, with_prompt(session_id=""), 400, "session_id", "has 0 characters"),
    (COMPLETIONS, with_prompt(session_id="a", n=2), 400, "session_id", "with 2 completions"),
    (COMPLETIONS, with_prompt(prompt=[]), 400, "prompt", "empty"),
    (COMPLETIONS, with_prompt(prompt=""), 400, "prompt", "empty"),
    (COMPLETIONS, with_prompt(prompt=["a"] * 4), 400, "prompt", "from 1 to 3"),
    (COMPLETIONS, with_prompt(prompt=[99999]), 400, "prompt", "vocabulary"),
    (COMPLETIONS, with_prompt(prompt=[-1]), 400, "prompt", "vocabulary"),
    (COMPLETIONS, with_prompt(prompt="ab" * 900), 400, "prompt", "room for"),
    (COMPLETIONS, with_prompt(prompt={"a": 1}), 400, "prompt", "should be"),
    (COMPLETIONS, {"model": MODEL}, 400, "prompt", "missing"),
    (COMPLETIONS, with_prompt(model="other"), 404, "model", "does not exist"),
    (COMPLETIONS, [1, 2], 400, None, "no JSON object"),
    (COMPLETIONS, b"{", 400, None, "JSON"),
    (COMPLETIONS, b"\xff\xfe", 400, None, "UTF-8"),
    (COMPLETIONS, b"[" * 10_000, 400, None, "JSON"),
    (COMPLETIONS, b'{"prompt": NaN}', 400, None, "NaN"),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, None, "half a character"),
    (COMPLETIONS, b'{"max_tokens": ' + b"9" * 5000 + b"}", 400, None, "JSON"),
    (COMPLETIONS, with_prompt(prompt="a" * 30_000), 413, None, "max_body_bytes"),
    (CHATS, {"model": MODEL, "messages": []}, 400, "messages", "empty"),
    (
        CHATS,
        {**CHAT, "messages": [{"content": "a"}]},
        400,
        "messages",
        "messages[0].role is missing",
    ),
    (CHATS, {**CHAT, "messages": [{"role": 5}]}, 400, "messages", "messages[0].role 5 was given"),
    (CHATS, {**CHAT, "messages": [{"role": "user"}]}, 400, "messages", "content is missing"),
    (
        CHATS,
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages",
        "text only",
    ),
    (CHATS, {**CHAT, "tools": [{"type": "function"}]}, 400, "tools", "does not support"),
    (CHATS, {**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format", "supp"),
    (CHATS, {**CHAT, "chat_template": "x"}, 400, "chat_template", "takes none"),
    (CHATS, {**CHAT, "top_logprobs": 2}, 400, "top_logprobs", "without logprobs"),
    ("/tokenize", {}, 400, "prompt", "not both"),
    ("/tokenize", {"prompt": "a", "tools": [{}]}, 400, "tools", "does not support"),
    (
        "/tokenize",
        {"messages": CHAT["messages"], "add_generation_prompt": False},
        400,
        "add_generation_prompt",
        "does not support",
    ),
    (
        "/tokenize",
        {"messages": CHAT["messages"], "chat_template": "x"},
        400,
        "chat_template",
        "takes none",
    ),
    ("/detokenize", {"tokens": [99999]}, 400, "tokens", "vocabulary"),
    ("/v1/nothing", {}, 404, None, "Not Found"),
    ("/v1/models", {}, 405, None, "Not Allowed"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), ERRORS)
def test_what_is_refused(client, engine, path, body, status, param, words):
    response = post(client, path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not engine.queue.unfinished


def test_neutral_values_are_accepted_and_unknown_fields_named(client):
    neutral = dict.fromkeys(("tools", "suffix", "best_of", "response_format", "logit_bias", "user"))
    more = {"best_of": 1, "response_format": {"type": "text"}, "tools": [], "store": False}
    for fields in (neutral, more):
        response = post(client, COMPLETIONS, with_prompt(**fields))
        assert response.status_code == 200, response.text
        assert "x-ignored-fields" not in response.headers
    response = post(client, COMPLETIONS, with_prompt(wizardry=1, **{"no\r\nheader": 2}))
    assert response.headers["x-ignored-fields"] == "wizardry, no??header"


def test_forms_of_prompts_and_what_speculation_did(client, engine):
    ids = engine.target.tokenizer.encode("abab")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = engine.generate([ids], params)[0]
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for prompt in ("abab", ["abab", "abab"], ids, [ids, ids]):
        body = post(client, COMPLETIONS, with_prompt(prompt=prompt, n=2, **fields)).json()
        assert len(body["choices"]) == (4 if isinstance(prompt[0], list) or len(prompt) == 2 else 2)
        for index, choice in enumerate(body["choices"]):
            assert choice["index"] == index
            assert choice["token_ids"] == list(expected.token_ids)
            assert choice["prompt_token_ids"] == ids
    usage = post(client, COMPLETIONS, with_prompt(prompt="abab", n=2, **fields)).json()
    counts, details = expected.acceptance, usage["usage"]["completion_tokens_details"]
    assert usage["usage"]["completion_tokens"] == 24
    assert usage["usage"]["prompt_tokens"] == len(ids)
    assert details["accepted_prediction_tokens"] == 2 * counts.num_accepted_tokens
    assert sum(details.values()) == 2 * counts.num_draft_tokens
    told = usage["metrics"]["speculative_decoding"]
    assert told["num_draft_tokens"] == counts.num_draft_tokens
    assert sum(told["acceptance_histogram"]) == counts.num_drafts
    assert usage["metrics"]["time_to_first_token_ms"] > 0


def test_turns_of_a_session_are_those_without_one_and_reuse_its_kv(client):
    """Some in the body and some in the header; of three conversations, two are kept."""
    texts = {name: name * 20 for name in "abc"}
    cached = []
    for turn, name in enumerate("ababcba"):
        in_header = {"x-session-id": name} if turn % 2 else {}
        body = with_prompt(prompt=texts[name], max_tokens=8, seed=turn, return_token_ids=True)
        plain = post(client, COMPLETIONS, body).json()
        if not in_header:
            body["session_id"] = name
        found = client.post(COMPLETIONS, json=body, headers=in_header).json()
        assert found["choices"] == plain["choices"]
        assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        texts[name] += found["choices"][0]["text"] + " and"
    #      a  b  a  b  c (which drops a)  b  a
    assert cached == [False, False, True, True, False, True, False]


def test_a_system_prompt_is_prefilled_once_and_changes_no_response(other):
    system = {"role": "system", "content": "Answer in one short sentence, as a sailor would."}
    body = {**CHAT, "messages": [system, *CHAT["messages"]], "seed": 3}
    found = []
    try:
        for settings in ({}, {"system_prompt": system["content"]}):
            with (
                served(other, **settings) as (url, _),
                httpx.Client(base_url=url, timeout=60) as client,
            ):
                found.append(post(client, CHATS, body).json())
                alone = post(client, CHATS, CHAT).json()
    finally:
        other.forget_prefixes()
    assert found[0]["choices"] == found[1]["choices"]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found]
    assert cached[0] == 0 < len(system["content"]) - 16 < cached[1]
    num_prompt = len("[user] ab\n[assistant]") + 1  # no message is added
    assert alone["usage"]["prompt_tokens"] == num_prompt


MERGING = (  # as Mistral's: the system text is in the user's message
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}"
    "{% for m in messages %}[INST] {{ s if loop.first else '' }} {{ m['content'] }}[/INST]"
    "{% endfor %}"
)


def test_a_system_prompt_within_the_users_message_is_prefilled(other):
    system = {"role": "system", "content": "Answer in one short sentence, as a sailor would."}
    body = {**CHAT, "messages": [system, *CHAT["messages"]]}
    settings = {"system_prompt": system["content"], "chat_template": MERGING}
    before = other.metrics()["num_requests"]
    try:
        with (
            served(other, **settings) as (url, _),
            httpx.Client(base_url=url, timeout=60) as client,
        ):
            assert other.metrics()["num_requests"] == before
            usage = post(client, CHATS, body).json()["usage"]
    finally:
        other.forget_prefixes()
    assert usage["prompt_tokens_details"]["cached_tokens"] > len(system["content"]) - 16


def test_a_system_prompt_that_the_template_leaves_out_is_refused(other):
    template = "{% for m in messages[1:] %}{{ m['content'] }}{% endfor %}"
    settings = ServerSettings(served_model_name="a", system_prompt="Hi.", chat_template=template)
    with pytest.raises(SettingError, match=r"\(--system-prompt\) cannot be prefilled: "):
        Service(other, settings).prepare()


def test_a_session_answers_one_request_at_a_time(client, engine, monkeypatch):
    body, may_run = {**LONG, "session_id": "busy"}, threading.Event()
    run = engine.executor.programs["run"]
    monkeypatch.setitem(engine.executor.programs, "run", lambda *a: (may_run.wait(20), run(*a))[1])
    with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
        refused = post(client, COMPLETIONS, body)
        may_run.set()
        assert events(response)
    assert (refused.status_code, refused.headers["retry-after"]) == (409, "1")
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("session_id", "session_busy")
    assert until(lambda: post(client, COMPLETIONS, body).status_code == 200, limit_s=10)


def test_sessions_that_are_being_made_count():
    """Two others are taken while the first session is being made, and it becomes the third."""
    is_asked, may_go_on, closed = threading.Event(), threading.Event(), []

    def session(**_):
        is_asked.set()
        may_go_on.wait(30)
        made = types.SimpleNamespace()
        made.close = lambda: closed.append(made)
        return made

    row_store = types.SimpleNamespace(keeps_prompt_bits=True)
    fake: Any = types.SimpleNamespace(session=session, row_store=row_store)

    async def run():
        sessions = Sessions(fake, most=2)
        may_go_on.set()
        for name in ("a", "b"):
            await sessions.take(name)
            sessions.give_back(name)
        may_go_on.clear()
        is_asked.clear()
        third = asyncio.create_task(sessions.take("c"))
        await asyncio.to_thread(is_asked.wait, 30)
        first = await sessions.take("a")
        with pytest.raises(QueueFullError, match="as many as there may be"):
            await sessions.take("b")
        may_go_on.set()
        await third
        return first

    first = asyncio.run(run())
    assert len(closed) == 1
    assert first not in closed


@pytest.mark.slow
def test_an_engine_that_traces_tells_each_steps_acceptance():
    traced = engines.engine("text", "ngram", trace="rounds")
    done = traced.generate(["abab", "ba"], SamplingParams(max_tokens=30, ignore_eos=True))
    told = protocol.speculation(done)["speculative_decoding"]
    steps = told["per_step_accepted"]
    assert (sum(steps), len(steps)) == (told["num_accepted_draft_tokens"], told["num_spec_steps"])
    assert max(steps) > 0
    histogram = told["acceptance_histogram"]
    assert [steps.count(n) for n in range(len(histogram))] == histogram


def test_streams_join_to_the_response(client):
    body = {**CHAT, "max_tokens": 40, "seed": 5, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole = post(client, CHATS, body).json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    with client.stream(
        "POST", CHATS, json={**body, "stream": True, "stream_options": options}
    ) as r:
        assert r.headers["content-type"].startswith("text/event-stream")
        *chunks, last = events(r)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(one["delta"]["content"] for one in mine) == choice["message"]["content"]
        content = [each for one in mine for each in one["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
        assert [one["finish_reason"] for one in mine][-1] == choice["finish_reason"]
        assert mine[0]["delta"]["role"] == "assistant"
        assert len(content[0]["top_logprobs"]) == 2
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    echoed = post(client, COMPLETIONS, with_prompt(echo=True, temperature=0)).json()
    plain = post(client, COMPLETIONS, with_prompt(temperature=0)).json()
    assert echoed["choices"][0]["text"] == "ab" + plain["choices"][0]["text"]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("is_text", [False, True])
def test_echo_with_logprobs_is_what_lm_eval_sends_for_log_likelihoods(
    client, engine, is_text, max_tokens
):
    tokenizer, texts = engine.target.tokenizer, ["The sum of", "é"]
    ids = [tokenizer.encode(text) for text in texts]
    params = SamplingParams(max_tokens=max_tokens, logprobs=1, prompt_logprobs=1)
    body = {"model": MODEL, "prompt": texts if is_text else ids, "max_tokens": max_tokens}
    body |= {"logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    found = post(client, COMPLETIONS, body).json()
    for choice, one in zip(found["choices"], engine.generate(ids, params), strict=True):
        whole = one.prompt_token_ids + one.token_ids
        named = {
            *whole,
            *(token for of in (*one.prompt_logprobs[1:], *one.logprobs) for token in of),
        }
        texts = protocol.token_texts(tokenizer, named)
        texts_of = [texts[token] for token in whole]
        each = [*one.prompt_logprobs[1:], *one.logprobs]
        offsets = choice["logprobs"].pop("text_offset")
        assert choice["logprobs"] == {
            "tokens": texts_of,
            "token_logprobs": [None, *(of[t] for of, t in zip(each, whole[1:], strict=True))],
            "top_logprobs": [
                None,
                *({texts[t]: v for t, v in of.items()} for of in each),
            ],
        }
        assert choice["text"] == tokenizer.decode(one.prompt_token_ids) + one.text
        assert (len(one.token_ids), choice["finish_reason"]) == (max_tokens, "length")
        assert "prompt_logprobs" not in choice
        assert offsets[:2] == [0, 0]  # the special prefix is not in the text
        for token, offset in zip(texts_of[1:11], offsets[1:], strict=False):
            if not token.startswith("token_id:"):
                assert choice["text"].startswith(token, offset)
    assert found["usage"]["completion_tokens"] == 2 * max_tokens


@pytest.mark.parametrize("prompt", ["ab</s>cd", "<s>ab<s>cd"])
def test_offsets_count_the_special_tokens_that_a_prompt_was_given_with(client, prompt):
    fields = {"prompt": prompt, "logprobs": 1, "echo": True, "temperature": 0}
    [choice] = post(client, COMPLETIONS, with_prompt(**fields)).json()["choices"]
    found = choice["logprobs"]
    offsets = dict(zip(found["tokens"], found["text_offset"], strict=True))
    assert offsets["c"] == choice["text"].index("c") == len(prompt) - 2
    # As ids, they are not in the text.
    ids = post(client, "/tokenize", {"model": MODEL, "prompt": prompt}).json()["tokens"]
    [choice] = post(client, COMPLETIONS, with_prompt(**{**fields, "prompt": ids})).json()["choices"]
    assert choice["text"].startswith("abcd")
    assert choice["logprobs"]["text_offset"][found["tokens"].index("c")] == 2


def test_prompt_logprobs_have_the_form_of_vllm(client, engine):
    """Per choice for completions, for the whole response for chats."""
    fields = {"prompt_logprobs": 2, "max_tokens": 0, "return_token_ids": True}
    completions = post(client, COMPLETIONS, with_prompt(prompt=["abc", "ba"], **fields)).json()
    chat = post(client, CHATS, {**CHAT, **fields}).json()
    [answer] = chat["choices"]
    assert answer["message"]["content"] == ""
    assert "prompt_logprobs" not in answer
    cases = [(one, one["prompt_logprobs"]) for one in completions["choices"]]
    for choice, found in [*cases, (answer, chat["prompt_logprobs"])]:
        prompt = choice["prompt_token_ids"]
        [expected] = engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=2))
        assert found[0] is None
        assert len(found) == len(prompt)
        lists = (prompt[1:], expected.prompt_logprobs[1:], found[1:])
        for token, of, entries in zip(*lists, strict=True):
            assert {int(key): entry["logprob"] for key, entry in entries.items()} == of
            ranks = {entry["rank"]: int(key) for key, entry in entries.items()}
            assert set(ranks) == ({1, 2} if len(of) == 2 else {1, 2, None})
            assert ranks.get(None, token) == token
            assert of[ranks[1]] == max(of.values())
            text = entries[str(token)]["decoded_token"]
            assert text == protocol.token_texts(engine.target.tokenizer, [token])[token]


def test_what_the_server_says_about_itself(client, engine):
    [entry] = client.get("/v1/models").json()["data"]
    assert entry == client.get(f"/v1/models/{MODEL}").json()
    assert entry["max_model_len"] == 256
    assert (entry["drafter"], entry["exactness"]) == (engine.drafter.name, engine.exactness)
    assert client.get("/v1/models/no/such").status_code == 404
    ids = post(client, "/tokenize", {"prompt": "abc", "model": MODEL}).json()
    assert ids["tokens"] == engine.target.tokenizer.encode("abc")
    text = post(client, "/detokenize", {"tokens": ids["tokens"]}).json()["prompt"]
    assert text.endswith("abc")
    assert client.get("/tokenizer_info").json()["chat_template"]
    assert post(client, "/tokenize", {"messages": CHAT["messages"]}).json()["count"] > 0
    for path in ("/health", "/ping", "/version", "/docs"):
        assert client.get(path).status_code == 200
    assert COMPLETIONS in client.get("/openapi.json").json()["paths"]
    before = engine.metrics()["num_requests"]
    post(client, COMPLETIONS, LONG)
    metrics = client.get("/metrics").text
    for line in (
        f'vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}}',
        'vllm:request_success_total{engine="0",finished_reason="length"',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0"',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001"',
        'vllm:inter_token_latency_seconds_count{engine="0"',
        f'jaxspec:requests_total{{engine="0",model_name="{MODEL}"}} {before + 1}.0',
    ):
        assert line in metrics


def test_health_says_why_while_programs_are_compiled(other, monkeypatch):
    service, may_end = Service(other, ServerSettings(served_model_name=MODEL)), threading.Event()
    monkeypatch.setattr(service, "prepare", lambda: may_end.wait(20))
    listener = open_listener("127.0.0.1", 0)
    url, server = f"http://127.0.0.1:{listener.getsockname()[1]}", Server(service, listener)
    thread = threading.Thread(target=server.run)
    thread.start()
    refused = [httpx.get(url + "/health"), httpx.post(url + COMPLETIONS, json=LONG)]
    may_end.set()
    assert until(lambda: httpx.get(url + "/health").status_code == 200)
    server.drain()
    thread.join(60)
    for response in refused:
        assert response.status_code == 503
        assert "programs are being compiled" in response.json()["error"]["message"]


def test_a_full_queue_is_refused_at_once(client, engine, is_slow):
    bodies = [{**LONG, "prompt": ["a", "b", "c"], "n": 1} for _ in range(5)]
    found = []

    def ask(body):
        found.append(post(client, COMPLETIONS, body))

    threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [one for one in found if one.status_code == 429]
    assert refused
    assert all(one.status_code in (200, 429) for one in found)
    assert refused[0].headers["retry-after"] == "1"
    assert until(lambda: not engine.queue.unfinished)


def leave_a_stream(url):
    with httpx.stream("POST", url + COMPLETIONS, json={**LONG, "n": 2, "stream": True}) as response:
        next(response.iter_lines())


def leave_a_plain_response(url):
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(url + COMPLETIONS, json={**LONG, "prompt": ["a", "b", "c"]}, timeout=0.3)


@pytest.fixture
def steps(engine, monkeypatch):
    """One entry for each step that begins; a step takes so long that leaving is seen within it."""
    steps, step = [], engine._core._step
    monkeypatch.setattr(engine._core, "_step", lambda: (steps.append(1), time.sleep(0.1), step()))
    return steps


@pytest.mark.parametrize("leave", [leave_a_stream, leave_a_plain_response])
def test_a_client_that_goes_away_frees_its_rows_within_two_steps_without_other_traffic(
    server, engine, steps, leave
):
    before = engine.metrics()["num_by_finish_reason"]
    leave(server[0])
    num_before = len(steps)
    assert until(lambda: not engine.queue.unfinished)
    assert len(steps) <= num_before + 2
    after = engine.metrics()["num_by_finish_reason"]
    assert after["cancelled"] > before.get("cancelled", 0)
    assert after.get("length") == before.get("length")


@pytest.mark.slow
def test_a_handler_that_does_not_await_the_disconnect_is_seen(server, engine, steps, monkeypatch):
    async def never(receive):
        await asyncio.Event().wait()

    monkeypatch.setattr(generation, "disconnected", never)
    leave_a_plain_response(server[0])
    num_before = len(steps)
    assert until(lambda: not engine.queue.unfinished)
    assert len(steps) > num_before + 2


def send_raw(url, content, *, wait_s=5.0) -> bytes:
    """What the server answers to bytes, until it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(content)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(2**16):
                answer += part
    return answer


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"2000\r\n" + b" " * 0x2000 + b"\r\n"
) + (b"2000\r\n" + b" " * 0x2000 + b"\r\n") * 9 + b"0\r\n\r\n"  # fmt: skip


def test_a_body_is_counted_as_it_comes(server, monkeypatch):
    assert send_raw(server[0], CHUNKED).startswith(b"HTTP/1.1 413")

    async def trusting(gate, receive):
        content = b""
        while True:
            message = await receive()
            content += message.get("body", b"")
            if not message.get("more_body"):
                return content

    monkeypatch.setattr(Gate, "body", trusting)  # as if Content-Length, which is absent, had told
    assert not send_raw(server[0], CHUNKED).startswith(b"HTTP/1.1 413")


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n"


@pytest.mark.parametrize("half", [b"", b"POST /v1/comp", HEAD + b"{"])
def test_half_a_request_is_dropped_in_time(server, half):
    start_s = time.monotonic()
    answer = send_raw(server[0], half)
    assert time.monotonic() - start_s < 4
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408")


def test_keys_and_connections(other):
    with served(other, api_key="secret", max_connections=2) as (url, _):
        assert httpx.get(url + "/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}):
            response = httpx.get(url + "/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        right = {"authorization": "Bearer secret"}
        assert httpx.get(url + "/v1/models", headers=right).status_code == 200
        host, port = url.removeprefix("http://").split(":")
        held = [socket.create_connection((host, int(port))) for _ in range(2)]
        time.sleep(0.1)
        assert httpx.get(url + "/health").status_code == 503
        for connection in held:
            connection.close()


def is_dropped(url, path, body) -> bool:
    """Whether the server drops a client that takes nothing for two seconds once its response has
    begun to come."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + content)
        assert select.select([connection], [], [], 60)[0], "nothing has come"
        time.sleep(2)
        with contextlib.suppress(ConnectionError):
            connection.settimeout(1)
            try:
                while connection.recv(2**20):
                    pass
            except TimeoutError:  # it has sent everything, and keeps the connection
                return False
        return True


def test_a_client_that_takes_nothing_is_dropped(other, monkeypatch):
    """By a response of several megabytes, which no buffer of a socket holds."""
    body = {"prompt": "a" * 500_000, "return_token_strs": True}
    with served(other, write_timeout_s=0.3) as (url, _):
        assert is_dropped(url, "/tokenize", body)
        monkeypatch.delattr(Connection, "pause_writing")  # as if nobody measured the time
        assert not is_dropped(url, "/tokenize", body)


def test_a_drain_lets_running_requests_end_and_refuses_others(other, is_slow):
    with served(other) as (url, server), httpx.Client(base_url=url, timeout=60) as client:
        with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
            server.drain()
            assert until(lambda: server.service.unavailable is not None)
            assert httpx.post(url + COMPLETIONS, json=LONG).status_code == 503
            assert httpx.get(url + "/health").status_code == 503
            *_, last = events(response)
        assert last["choices"][0]["finish_reason"] == "length"


def test_a_drain_cancels_what_does_not_end_in_time(other, is_slow):
    with served(other, drain_timeout_s=0.1) as (url, server):
        with httpx.stream("POST", url + COMPLETIONS, json={**LONG, "stream": True}) as response:
            server.drain()
            *_, last = events(response)
        assert "because the server is ending" in last["error"]["message"]


def test_another_asgi_server_starts_and_ends_the_app_by_its_lifespan(other):
    service = Service(other, ServerSettings(served_model_name=MODEL))
    assert service.trouble is not None
    with TestClient(make_app(service)) as client:
        assert client.get("/health").status_code == 200
        response = client.post(COMPLETIONS, json=LONG)
        assert response.json()["choices"][0]["finish_reason"] == "length"
    assert "is ending" in service.trouble
    with other.driven():  # nobody drives it any more
        pass
    with other.driven():  # nobody drives it any more
        pass


def test_a_drain_waits_for_requests_that_are_not_queued_yet(other, monkeypatch):
    encode = Service.token_ids
    begins, may_go_on, is_drained = (threading.Event() for _ in range(3))

    def token_ids(*args):
        begins.set()
        assert may_go_on.wait(60)
        return encode(*args)

    monkeypatch.setattr(Service, "token_ids", token_ids)
    monkeypatch.setattr(other.queue, "give_up", lambda tickets: is_drained.set())
    with served(other) as (url, server), concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, url + COMPLETIONS, json=LONG, timeout=60)
        assert begins.wait(60)
        assert not other.queue.unfinished
        server.drain()
        assert not is_drained.wait(0.5)
        may_go_on.set()
        assert asked.result().json()["choices"][0]["finish_reason"] == "length"


def test_fingerprints_differ_by_what_decides_outputs():
    plain, other = engines.engine("toy"), engines.engine("toy", "ngram")
    bf16 = engines.engine("toy", dtype="bfloat16")
    assert fingerprint(plain) == fingerprint(plain)
    found = {fingerprint(plain), fingerprint(bf16), fingerprint(plain, {"defaults": "x"})}
    assert len(found) == 3
    processed = engines.engine("toy", max_logprobs=3, logprobs_mode="processed_logprobs")
    assert fingerprint(processed) != fingerprint(engines.engine("toy", max_logprobs=3))
    assert len(fingerprint(other)) == 16
    ended = toy.model(num_layers=1, eos_token_ids=(3,))  # a checkpoint's generation config says so
    shape = {"batch_size": 2, "max_length": 256}
    assert fingerprint(Engine(ended, **shape)) != fingerprint(plain)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_a_fingerprint_without_the_dtype_is_seen(dtype):
    """Of the same bytes: weights of zeros with two dtypes."""
    digest = module._digest({"a": jnp.zeros((4,), dtype)})
    assert (digest == module._digest({"a": jnp.zeros((4,), jnp.float32)})) == (dtype == jnp.float32)


def test_settings_are_checked():
    wrong = {"max_n": 0, "write_timeout_s": 0, "generation_config": "all", "cors_origins": "a"}
    wrong |= {
        "system_prompt": 4,
        "allow_request_template": 1,
        "chat_template": 2,
        "session_header": 3,
    }
    for name, value in {**wrong, "max_sessions": 0}.items():
        with pytest.raises(SettingError, match=name):
            ServerSettings(served_model_name="a", **{name: value})
