"""Requests and completions: counts, texts and what they refuse."""

from __future__ import annotations

import dataclasses
import html
import json
import re

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.errors import PromptError, SettingError
from jaxspec.requests import (
    Acceptance,
    Completion,
    SamplingParams,
    make_completion,
    make_requests,
    prompt_token_ids,
)
from jaxspec.types import AcceptanceCounts, Finish, Origin

MODEL = tiny.model(text=tiny.tokenizer())
BARE = tiny.model()


def test_sampling_params():
    with pytest.raises(SettingError, match="max_tokens 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(SettingError, match=r"temperature 0.5.*decodes greedily"):
        SamplingParams(temperature=0.5)
    params = SamplingParams(stop_token_ids=[7, 1, 7])
    assert params.stop_tokens(MODEL) == (1, 7)  # the model's EOS is 1
    assert dataclasses.replace(params, ignore_eos=True).stop_tokens(MODEL) == (7, 1)


counts = st.integers(0, 20)
acceptances = st.builds(
    Acceptance,
    num_rounds=counts,
    num_drafts=counts,
    num_draft_tokens=counts,
    num_accepted_tokens=counts,
    num_emitted_tokens=counts,
    num_drafts_per_pos=st.lists(counts, max_size=5).map(tuple),
    num_accepted_tokens_per_pos=st.lists(counts, max_size=5).map(tuple),
)


@settings(deadline=None)
@given(parts=st.lists(acceptances, max_size=4))
def test_total_adds_every_count(parts):
    total = Acceptance.total(parts)
    for field in dataclasses.fields(Acceptance):
        values = [getattr(part, field.name) for part in parts]
        if field.name.endswith("_per_pos"):
            for position in range(max(map(len, values), default=0)):
                expected = sum(v[position] for v in values if position < len(v))
                assert getattr(total, field.name)[position] == expected
        else:
            assert getattr(total, field.name) == sum(values)


def test_acceptance_rates():
    of_row = Acceptance.of_row(
        AcceptanceCounts(
            num_rounds=np.array([9, 6]),
            num_drafts=np.array([9, 4]),
            num_draft_tokens=np.array([9, 10]),
            num_accepted_tokens=np.array([9, 5]),
            drafted_at=np.array([[9, 9, 9], [4, 4, 2]]),
            accepted_at=np.array([[9, 9, 9], [3, 1, 1]]),
        ),
        1,
        num_emitted=11,
    )
    assert of_row.emitted_per_round == 11 / 6
    assert of_row.per_position == (3 / 4, 1 / 4, 1 / 4)  # of the rounds that drafted, cumulative
    assert of_row.to_json()["per_position_acceptance"] == [0.75, 0.25, 0.25]
    plain = Acceptance(num_rounds=3, num_emitted_tokens=3, num_drafts_per_pos=(0, 0))
    assert plain.emitted_per_round == 1
    assert plain.per_position == ()
    assert Acceptance().emitted_per_round == 0


def complete(token_ids, origins=None, *, finish=Finish.MAX_TOKENS, model=MODEL, stop_token=-1):
    [request] = make_requests([[5]], SamplingParams(), model, longest=9)
    return make_completion(
        request,
        model,
        token_ids=token_ids,
        origins=origins or [Origin.PLAIN] * len(token_ids),
        finish=finish,
        stop_token=stop_token,
        acceptance=Acceptance(num_rounds=2, num_emitted_tokens=len(token_ids)),
    )


def bytes_of(text: str) -> list[int]:
    return MODEL.tokenizer.encode(text)[1:]


@pytest.mark.parametrize(
    ("finish", "reasons"),
    [
        (Finish.STOP_TOKEN, ("stop", 1)),
        (Finish.MAX_TOKENS, ("length", None)),
        (Finish.CAPACITY, ("length", "capacity")),
        (Finish.NON_FINITE, ("abort", "non-finite")),
    ],
)
def test_reasons(finish, reasons):
    made = complete([*bytes_of("ab"), tiny.EOS], finish=finish, stop_token=1)
    assert (made.finish_reason, made.stop_reason) == reasons
    assert made.text == "ab"
    assert "".join(made.pieces) == "ab</s>"
    assert json.loads(json.dumps(made.to_json())) == made.to_json()


def test_a_stop_token_of_ordinary_text_is_not_in_the_text():
    [stop] = bytes_of("!")
    made = complete(bytes_of("ab!"), finish=Finish.STOP_TOKEN, stop_token=stop)
    assert made.text == "ab"
    assert made.token_ids[-1] == stop


def test_split_characters_appear_whole():
    made = complete(bytes_of("é🙂"))
    assert made.pieces == ("", "é", "", "", "", "🙂")


@settings(deadline=None, max_examples=150)
@given(text=st.text("aé日🙂 \n<&\ufffd", max_size=24), cut=st.integers(0, 3))
def test_pieces_join_to_the_text(text, cut):
    ids = bytes_of(text)
    ids = ids[: len(ids) - cut] if cut else ids
    made = complete(ids)
    assert len(made.pieces) == len(ids)
    assert "".join(made.pieces) == made.text == made.__rich__().plain


@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(tiny.NUM_SPECIAL, tiny.VOCAB - 1), max_size=24))
def test_pieces_of_any_bytes_join_to_the_text(ids):
    made = complete(ids)
    assert "".join(made.pieces) == made.text


def test_colours_follow_the_origins():
    origins = [Origin.ACCEPTED, Origin.CORRECTED, Origin.BONUS, Origin.PLAIN]
    shown = complete(bytes_of("abcd"), origins).__rich__()
    styles = {shown.plain[span.start : span.end]: str(span.style) for span in shown.spans}
    assert styles == {"a": "green", "b": "bold red", "c": "bold blue"}


def test_html_is_escaped():
    origins = [Origin.ACCEPTED] * 8 + [Origin.CORRECTED] * 5
    made = complete(bytes_of("<b>&amp;x</i>"), origins)
    shown = made._repr_html_()
    spans = re.findall(r"<span[^>]*>(.*?)</span>", shown.split("</div>")[0])
    assert html.unescape("".join(spans)) == made.text == "<b>&amp;x</i>"
    assert "<b>" not in shown
    assert "13 tokens in 2 rounds, 6.50 per round" in shown


def test_without_a_tokenizer_ids_are_shown():
    made = complete([5, 9], [Origin.ACCEPTED, Origin.BONUS], model=BARE)
    assert made.text is None
    assert made.__rich__().plain == "5 9 "
    assert ">9 </span>" in made._repr_html_()


def test_requests_are_numbered_and_keep_their_params():
    params = [SamplingParams(max_tokens=n) for n in (3, 4)]
    found = make_requests(["ab", np.array([5, 6])], params, MODEL, longest=3)
    assert [request.request_id for request in found] == ["0", "1"]
    assert [request.params.max_tokens for request in found] == [3, 4]
    assert found[0].prompt_token_ids == (tiny.BOS, *bytes_of("ab"))
    assert found[1].prompt_token_ids == (5, 6)
    assert all(type(token) is int for token in found[1].prompt_token_ids)
    assert make_requests([], SamplingParams(), MODEL, longest=3) == []


@pytest.mark.parametrize(
    ("prompt", "model", "message"),
    [
        ("", MODEL, "empty"),
        ([], MODEL, "empty"),
        ("text", BARE, "has no tokenizer; give token ids"),
        ([{"role": "user", "content": "x"}], BARE, "has no tokenizer"),
        ([1, 2.5], MODEL, "not of token ids"),
        (["a", "b"], MODEL, "not of token ids"),
        ([5, tiny.VOCAB], MODEL, f"holds the token id {tiny.VOCAB}"),
        ([-1], MODEL, "holds the token id -1"),
        ([2, 3, 4, 5], MODEL, "has 4 tokens, and the engine's capacity leaves room for 3"),
    ],
)
def test_refused_prompts_are_named(prompt, model, message):
    for names, name in ((None, "Prompt 1"), (["first", "second"], "second")):
        with pytest.raises(PromptError, match=f"^{name} ") as raised:
            make_requests([[5], prompt], SamplingParams(), model, longest=3, names=names)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)


def test_refused_calls():
    with pytest.raises(SettingError, match="1 sampling parameters were given for 2 prompts"):
        make_requests([[1], [2]], [SamplingParams()], MODEL, longest=3)
    with pytest.raises(PromptError, match="a list of prompts is expected"):
        make_requests("abc", SamplingParams(), MODEL, longest=3)


def test_chat_prompts():
    messages = [{"role": "user", "content": "Hi"}]
    ids = prompt_token_ids(messages, MODEL, name="it", chat_template_kwargs={"mood": "sad"})
    assert MODEL.tokenizer.hf.decode(ids) == "<s>[user] Hi\n[assistant] (sad)"
    with pytest.raises(PromptError, match=r"^it: The chat template refused"):
        prompt_token_ids(messages, MODEL, name="it", chat_template="{{ 1 / 0 }}")


def test_a_completion_prints_shortly():
    assert "origins" not in repr(complete([5] * 50))
    assert isinstance(complete([5]), Completion)
