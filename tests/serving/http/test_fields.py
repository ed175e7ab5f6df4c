"""Fields of bodies mean what they do in `SamplingParams`; what settings of the server change; and
the texts and offsets of log-probabilities."""

from __future__ import annotations

import engines
import httpx
import pipelines
import pytest
from served import MODEL, served

from jaxspec import SamplingParams
from jaxspec.serving.http import protocol

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def engine():
    return engines.engine("text", "ngram", max_logprobs=3)


@pytest.fixture(scope="module")
def client(engine):
    with served(engine) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        yield client


def post(client, path, **body):
    response = client.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return response


FIELDS = [
    {"top_k": 3},
    {"top_p": 0.4},
    {"min_p": 0.3},
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 1.5},
    {"presence_penalty": 1.5},
    {"logit_bias": {"40": 50.0}},
    {"allowed_token_ids": [40, 41, 42]},
    {"stop_token_ids": [125, 166], "min_tokens": 4},  # the fourth and fifth tokens without it
    {"stop": ["\x06"]},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
def test_a_field_does_what_it_does_in_sampling_params(client, engine, fields):
    common = {"max_tokens": 24, "temperature": 1.5, "seed": 3}
    [choice] = post(
        client, COMPLETIONS, prompt="The sum", return_token_ids=True, **common, **fields
    ).json()["choices"]
    [expected] = engine.generate(["The sum"], SamplingParams(**common, **fields))
    [without] = engine.generate(["The sum"], SamplingParams(**common))
    assert tuple(choice["token_ids"]) == expected.token_ids
    assert choice["text"] == expected.text
    assert expected.token_ids != without.token_ids  # so the field did something


def test_drafting_is_chosen_by_a_request_and_changes_no_token(client):
    body = {"prompt": "abababab", "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    found = [
        post(client, COMPLETIONS, **body, **fields).json()
        for fields in ({}, {"draft_length": 1}, {"speculate": False})
    ]
    assert len({tuple(one["choices"][0]["token_ids"]) for one in found}) == 1
    all_drafted, one_each, none = (one["metrics"]["speculative_decoding"] for one in found)
    assert all_drafted["num_draft_tokens"] > all_drafted["num_spec_steps"]
    assert one_each["num_draft_tokens"] == one_each["num_spec_steps"] > 0
    assert none["num_draft_tokens"] == 0


def test_parts_of_texts_and_another_name_of_max_tokens(client):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole, in_parts = (
        post(client, CHATS, messages=[{"role": "user", "content": content}], **fields).json()
        for content, fields in (
            ("a\nb", {"max_tokens": 4, "temperature": 0}),
            (parts, {"max_completion_tokens": 4, "max_tokens": 9, "temperature": 0}),
        )
    )
    assert whole["choices"] == in_parts["choices"]
    assert whole["usage"]["completion_tokens"] == in_parts["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("include_usage", [False, True])
def test_every_stream_says_once_what_speculation_did(client, include_usage):
    body = {"model": MODEL, "prompt": "abab", "max_tokens": 20, "temperature": 0, "stream": True}
    if include_usage:
        body["stream_options"] = {"include_usage": True, "include_obfuscation": False}
    response = client.post(COMPLETIONS, json=body)
    assert response.text.count('"speculative_decoding"') == 1
    ignored = response.headers.get("x-ignored-fields")
    assert ignored == ("stream_options.include_obfuscation" if include_usage else None)


def test_tokens_of_a_text(client, engine):
    tokenizer = engine.target.tokenizer
    found = post(client, "/tokenize", prompt="aé", return_token_strs=True, colour="red")
    assert found.headers["x-ignored-fields"] == "colour"
    ids = tokenizer.encode("aé")
    assert found.json()["tokens"] == ids
    assert found.json()["token_strs"][-3:] == ["a", f"token_id:{ids[-2]}", f"token_id:{ids[-1]}"]
    bare = post(client, "/tokenize", prompt="aé", add_special_tokens=False).json()["tokens"]
    assert bare == ids[len(tokenizer.prefix_token_ids) :]


def test_settings_of_a_server():
    engine = engines.engine("text", "ngram", max_logprobs=2)  # the other one is being driven
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    settings = {"allow_request_template": True, "cors_origins": ("https://a.example",)}
    with served(engine, **settings) as (url, _), httpx.Client(base_url=url) as client:
        ids = post(client, "/tokenize", messages=CHAT["messages"], chat_template=template).json()
        assert ids["tokens"][-4:] == engine.target.tokenizer.encode("[ab]")[-4:]
        for origin, is_allowed in (("https://a.example", True), ("https://b.example", False)):
            response = client.get("/v1/models", headers={"origin": origin})
            assert ("access-control-allow-origin" in response.headers) == is_allowed


def test_metrics_have_the_names_of_vllm(client):
    post(client, COMPLETIONS, prompt="abab", max_tokens=20, temperature=0)
    metrics = client.get("/metrics").text
    counters = (
        "spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens "
        "spec_decode_num_accepted_tokens_per_pos prompt_tokens generation_tokens request_success "
        "prefix_cache_queries prefix_cache_hits"
    ).split()
    histograms = (
        "time_to_first_token inter_token_latency request_time_per_output_token e2e_request_latency "
        "request_queue_time request_prefill_time request_decode_time"
    ).split()
    names = [f"{name}_total" for name in counters]
    names += [f"{name}_seconds_bucket" for name in histograms]
    names += ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
    for name in names:
        assert f'\nvllm:{name}{{engine="0",' in metrics, name


# Texts and offsets of log-probabilities.

LLAMA = pipelines.sentencepiece("strip", words=("▁the", "the", "cat"))
THE, THE_JOINED, CAT = (LLAMA.hf.convert_tokens_to_ids(each) for each in ("▁the", "the", "cat"))


def test_tokens_that_differ_by_a_space_are_told_apart():
    """As lm-eval needs: it compares the emitted token's text with that of the likeliest."""
    found = protocol.completion_logprobs(
        LLAMA,
        [THE_JOINED],
        [{THE: -0.1, THE_JOINED: -3.0}],
        offsets=protocol.TextOffsets(LLAMA),
    )
    assert found["tokens"] == ["the"]
    assert found["top_logprobs"] == [{" the": -0.1, "the": -3.0}]


def test_tokens_with_the_same_text_have_the_value_of_the_likeliest():
    a, byte = LLAMA.hf.convert_tokens_to_ids(["a", "<0x61>"])
    offsets = protocol.TextOffsets(LLAMA)
    found = protocol.completion_logprobs(LLAMA, [byte], [{a: -0.1, byte: -3.0}], offsets=offsets)
    assert found["top_logprobs"] == [{"a": -0.1}]
    assert found["token_logprobs"] == [-3.0]


@pytest.mark.parametrize("text", ["the cat", "the é the", "é"])
def test_offsets_are_places_in_the_text(text):
    ids = LLAMA.encode(text)
    offsets = protocol.TextOffsets(LLAMA, text)
    found = [*offsets.of(ids[:3]), *offsets.of(ids[3:])]  # as pieces of a stream come
    assert found[:2] == [0, 0]  # `<s>` is not in the text
    texts = protocol.token_texts(LLAMA, ids)
    for token, place in zip(ids[2:], found[2:], strict=True):
        if not texts[token].startswith("token_id:"):
            assert text.startswith(texts[token], place)
    if "é" in text:
        assert found.count(text.index("é")) >= 2  # of both its bytes
        assert offsets.of([CAT]) == [len(text)]


def test_parts_of_characters_have_no_bytes_in_chats():
    first, _ = parts = LLAMA.hf.convert_tokens_to_ids(["<0xC3>", "<0xA9>"])
    logprobs = [{token: -1.0} for token in (*parts, CAT)]
    found = protocol.chat_logprobs(LLAMA, [*parts, CAT], logprobs, num_top=1)["content"]
    assert [entry["bytes"] for entry in found] == [None, None, list(b"cat")]
    assert found[0]["token"] == f"token_id:{first}"
