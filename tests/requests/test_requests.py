"""Requests and completions: counts, texts and what they refuse."""

from __future__ import annotations

import dataclasses
import html
import json
import pickle
import re

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.errors import PromptError, SettingError
from jaxspec.models.tokenizer import TextStream, TextTokenizer
from jaxspec.requests.completions import (
    Completion,
    Completions,
    OutputText,
    find_stop,
    make_completion,
)
from jaxspec.requests.requests import make_requests, prompt_token_ids
from jaxspec.requests.sampling_params import SamplingParams, as_sampling_params
from jaxspec.telemetry.counters import Acceptance
from jaxspec.types import AcceptanceCounts, Finish, Origin

MODEL = tiny.model(text=tiny.tokenizer())
BARE = tiny.model()


def test_names_and_forms():
    assert SamplingParams().temperature == 0
    assert SamplingParams(stop="###") == SamplingParams(stop=["###"])
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    params = SamplingParams(stop_token_ids=[7, 1, 7], max_tokens=9)
    assert dataclasses.replace(params, temperature=0.5).max_tokens == 9
    assert params.stop_tokens(MODEL) == (1, 7)  # the model's EOS is 1
    assert dataclasses.replace(params, ignore_eos=True).stop_tokens(MODEL) == (7, 1)


def recommending(**generation_config):
    return dataclasses.replace(MODEL, generation_config=generation_config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 1}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"max_new_tokens": 40, "min_new_tokens": 4}, {"max_tokens": 40, "min_tokens": 4}),
        ({"stop_strings": "END"}, {"stop": ("END",)}),
        ({"num_beams": 1, "typical_p": None, "max_length": 4096, "min_length": 0}, {}),
    ],
)
def test_defaults_of_a_checkpoint(config, expected):
    found = SamplingParams.from_generation_config(recommending(**config))
    assert found == SamplingParams(**expected)


def test_changes_win_over_a_checkpoints_defaults():
    model = recommending(do_sample=True, temperature=0.6, top_k=20, max_new_tokens=40)
    changed = SamplingParams.from_generation_config(model, temperature=0.9, max_tokens=3)
    assert changed == SamplingParams(temperature=0.9, top_k=20, max_tokens=3)
    with pytest.raises(SettingError, match="temperature -1"):
        SamplingParams.from_generation_config(model, temperature=-1)


def test_defaults_that_cannot_be_followed():
    asked = {"num_beams": 4, "typical_p": 0.9, "suppress_tokens": [5], "min_length": 10}
    for name, value in asked.items():
        model = recommending(do_sample=True, **{name: value})
        with pytest.raises(SettingError, match=rf"asks for {name}.*not supported"):
            SamplingParams.from_generation_config(model)


def test_a_prompt_with_several_completions():
    params = SamplingParams(temperature=0.7, n=3, seed=40)
    found = make_requests([[5], [6]], [params, SamplingParams()], MODEL, longest=3)
    assert [request.request_id for request in found] == ["0-0", "0-1", "0-2", "1"]
    assert [request.index for request in found] == [0, 1, 2, 0]
    assert [request.params.seed for request in found] == [40, 41, 42, None]
    assert {request.params.n for request in found} == {1}
    last = SamplingParams(temperature=0.7, n=2, seed=2**63 - 2)
    seeds = [r.params.seed for r in make_requests([[5]], last, MODEL, longest=3)]
    assert seeds == [2**63 - 2, 2**63 - 1]


def test_a_seed_is_drawn_where_none_was_given():
    params = SamplingParams(temperature=0.7)
    seeds = [make_requests([[5]], params, MODEL, longest=3)[0].params.seed for _ in range(8)]
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    [a, b] = make_requests([[5], [5]], params, MODEL, longest=3)
    assert a.params.seed != b.params.seed


def test_stops_that_the_model_cannot_emit_or_read():
    for token in (-1, tiny.VOCAB):
        with pytest.raises(SettingError, match=f"Prompt 0 has the stop token {token}"):
            make_requests([[5]], SamplingParams(stop_token_ids=(token,)), MODEL, longest=3)
    with pytest.raises(SettingError, match="has no tokenizer to read its output"):
        make_requests([[5]], SamplingParams(stop=("x",)), BARE, longest=3)


@pytest.mark.parametrize("token", [tiny.VOCAB, 2**30])
@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("logit_bias", lambda token: {5: 1, token: 1}, "logit_bias of the token"),
        ("allowed_token_ids", lambda token: [5, token], "the allowed token"),
    ],
)
def test_biases_of_tokens_beyond_the_vocabulary(name, given, said, token):
    with pytest.raises(SettingError, match=f"Prompt 0 has {said} {token}, and the vocabulary"):
        make_requests([[5]], SamplingParams(**{name: given(token)}), MODEL, longest=3)


def test_min_tokens_with_nothing_but_stop_tokens_allowed():
    params = {"min_tokens": 2, "allowed_token_ids": [6, 7]}
    make_requests([[5]], params | {"stop_token_ids": [6]}, MODEL, longest=3)
    make_requests([[5]], params | {"stop_token_ids": [6, 7], "min_tokens": 0}, MODEL, longest=3)
    with pytest.raises(SettingError, match="every token of its allowed_token_ids ends the output"):
        make_requests([[5]], params | {"stop_token_ids": [6, 7]}, MODEL, longest=3)


# Stop strings: every token of this tokenizer is a byte.


def stop_in(text: str, *stop: str, min_tokens: int = 0):
    found = find_stop(MODEL.tokenizer, bytes_of(text), stop, min_tokens=min_tokens)
    return None if found is None else (found.num_tokens, found.text, found.stop)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two", ("xyz",), None),
        ("one two", ("e t",), (5, "on", "e t")),
        ("one two", ("one two",), (7, "", "one two")),
        ("aaa", ("a",), (1, "", "a")),
        ("abcd", ("abcd", "bc"), (3, "a", "bc")),  # complete first
        ("abcd", ("c", "bc"), (3, "a", "bc")),  # both at once: the text is cut before either
        ("abcabc", ("ca", "b"), (2, "a", "b")),
        ("é🙂 é", ("🙂",), (6, "é", "🙂")),  # two bytes and four
        ("é🙂 é", (" é",), (9, "é🙂", " é")),
        ("日本", ("本",), (6, "日", "本")),
    ],
)
def test_stop_strings(text, stop, expected):
    assert stop_in(text, *stop) == expected


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, (1, "", "a")), (1, (3, "ab", "a")), (2, (3, "ab", "a"))]
)
def test_stop_strings_within_min_tokens_do_not_count(min_tokens, expected):
    assert stop_in("abab", "a", min_tokens=min_tokens) == expected
    assert stop_in("abab", "a", min_tokens=3) is None


def test_a_character_split_by_min_tokens_is_complete_after_them():
    assert stop_in("🙂x", "🙂", min_tokens=3) == (4, "", "🙂")
    assert stop_in("🙂x", "🙂", min_tokens=4) is None
    assert stop_in("é🙂", "é🙂", min_tokens=5) == (6, "", "é🙂")


@settings(deadline=None, max_examples=150)
@given(
    text=st.text("ab🙂", max_size=12),
    stop=st.lists(st.text("ab🙂", min_size=1, max_size=3), min_size=1, max_size=3),
    min_tokens=st.integers(0, 9),
    looks=st.lists(st.integers(0, 40), max_size=4),
)
def test_stop_strings_against_a_search_token_by_token(text, stop, min_tokens, looks):
    """And at whatever moments the host looks."""
    ids = bytes_of(text)
    expected = None
    for num_tokens in range(min_tokens + 1, len(ids) + 1):
        now = MODEL.tokenizer.decode(ids[:num_tokens])
        ending = [string for string in stop if now.endswith(string)]
        if ending:
            longest = max(ending, key=len)
            expected = (num_tokens, now[: len(now) - len(longest)], longest)
            break
    for end in sorted(min(look, len(ids)) for look in [*looks, len(ids)]):
        found = find_stop(MODEL.tokenizer, ids[:end], stop, min_tokens=min_tokens)
        if found is not None:
            break
    got = None if found is None else (found.num_tokens, found.text, found.stop)
    assert got == expected


@settings(deadline=None, max_examples=150)
@given(
    text=st.text("ab🙂", max_size=12),
    prompt=st.text("a🙂", max_size=3),
    stop=st.lists(st.text("ab🙂", min_size=1, max_size=3), max_size=2),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_settled_text_is_what_no_token_can_change(text, prompt, stop, sizes):
    output = OutputText(MODEL.tokenizer, MODEL.tokenizer.encode(prompt), stop=stop)
    ids, first, turn = bytes_of(text), 0, 0
    taken = ""
    while first < len(ids) and output.stopped is None:
        size = sizes[turn % len(sizes)]
        output.push(ids[first : first + size])
        first, turn = first + size, turn + 1
        if output.stopped is not None:
            break
        taken += output.take_settled()
        now = MODEL.tokenizer.decode(ids[:first]).rstrip("\ufffd")
        begun = [n for s in stop for n in range(1, len(s)) if now.endswith(s[:n])]
        assert taken == now[: len(now) - max(begun, default=0)]
        assert output.num_taken == len(taken)
    if output.stopped is None:
        assert text.startswith(taken)
        assert not any(string in text for string in stop)
    else:
        assert output.stopped.text.startswith(taken)
        assert text.startswith(output.stopped.text + output.stopped.stop)


@pytest.mark.parametrize("stop", [(), ("no such text", "zz")])
def test_a_growing_output_is_decoded_once(stop, monkeypatch):
    """The tokens decoded in all grow with the output, however often it is read."""
    real, num_decoded = TextStream._decode, []

    def decode(self, token_ids):
        num_decoded.append(len(token_ids))
        return real(self, token_ids)

    monkeypatch.setattr(TextStream, "_decode", decode)
    output = OutputText(MODEL.tokenizer, bytes_of("a prompt"), stop=stop)
    ids, text = bytes_of("some é text z" * 200), ""
    for first in range(0, len(ids), 4):
        output.push(ids[first : first + 4])
        text += output.take_settled()
    assert ("some é text z" * 200).startswith(text)
    assert len(text) > 2500
    assert sum(num_decoded) < 10 * len(ids)


def test_stop_strings_that_are_special_tokens_end_by_id():
    params = SamplingParams(stop=("</s>", "x"), ignore_eos=True)
    assert params.stop_tokens(MODEL) == (tiny.EOS,)
    assert SamplingParams(stop=("</s>",), stop_token_ids=(7,)).stop_tokens(MODEL) == (1, 7)
    assert SamplingParams(stop=("</s",), ignore_eos=True).stop_tokens(MODEL) == ()
    assert SamplingParams(stop=("x",), ignore_eos=True).stop_tokens(BARE) == ()


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ("</s>\n", "'</s>' is a special token, which is not in an output's text"),
        ("x<s>", "give stop_token_ids=[0] instead"),
        ("<s></s>", "give stop_token_ids=[0] instead"),
        ("\ud800", "half a character"),
    ],
)
def test_stop_strings_that_never_match_are_refused(stop, words):
    with pytest.raises(SettingError) as raised:
        SamplingParams(stop=(stop,)).stop_tokens(MODEL)
    assert words in str(raised.value)
    assert str(raised.value).isascii()


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
        if field.name.endswith(("_per_pos", "_per_node")):
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
            accepted_node=np.array([[9, 9, 9], [3, 1, 1]]),
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


def complete(
    token_ids,
    origins=None,
    *,
    finish=Finish.MAX_TOKENS,
    model=MODEL,
    stop_token=-1,
    params=None,
    **options,
):
    [request] = make_requests([[5]], params or SamplingParams(), model, longest=9)
    return make_completion(
        request,
        model,
        token_ids=token_ids,
        origins=origins or [Origin.PLAIN] * len(token_ids),
        finish=finish,
        stop_token=stop_token,
        acceptance=Acceptance(num_rounds=2, num_emitted_tokens=len(token_ids)),
        **options,
    )


def bytes_of(text: str) -> list[int]:
    return MODEL.tokenizer.encode(text)[1:]


@pytest.mark.parametrize(
    ("finish", "reasons"),
    [
        (Finish.STOP_TOKEN, ("stop", 1)),
        (Finish.MAX_TOKENS, ("length", None)),
        (Finish.MAX_LENGTH, ("length", "max_length")),
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


def test_a_stop_string_cuts_text_tokens_origins_and_logprobs():
    ids = bytes_of("one two")
    stopped = find_stop(MODEL.tokenizer, ids, ("e t",), min_tokens=0)
    made = complete(
        ids,
        finish=Finish.STOP_STRING,
        stopped=stopped,
        logprobs=tuple({token: -1.0} for token in ids),
        logprobs_mode="raw_logprobs",
    )
    assert (made.text, made.finish_reason, made.stop_reason) == ("on", "stop", "e t")
    assert made.token_ids == tuple(ids[:5])
    assert len(made.origins) == len(made.logprobs) == len(made.pieces) == 5
    assert "".join(made.pieces) == "one t"
    # The string was complete when another reason ended the row.
    for finish in (Finish.MAX_TOKENS, Finish.MAX_LENGTH, Finish.NON_FINITE):
        again = complete(ids, finish=finish, stopped=stopped)
        assert (again.text, again.stop_reason) == ("on", "e t")


def test_seed_and_logprobs_are_told():
    params = SamplingParams(temperature=0.5, seed=2**60)
    made = complete(
        [5, 6],
        params=params,
        logprobs=({5: -0.5, 7: -1.5}, {6: -0.25}),
        logprobs_mode="processed_logprobs",
    )
    document = json.loads(json.dumps(made.to_json()))
    assert document["seed"] == 2**60
    assert document["index"] == 0
    assert document["logprobs_mode"] == "processed_logprobs"
    assert document["logprobs"] == [{"5": -0.5, "7": -1.5}, {"6": -0.25}]
    filtered = complete(
        [5], params=params, logprobs=({5: -0.5, 7: -np.inf},), logprobs_mode="processed_logprobs"
    )
    assert filtered.logprobs == ({5: -0.5, 7: -np.inf},)
    text = json.dumps(filtered.to_json(), allow_nan=False)
    assert json.loads(text)["logprobs"] == [{"5": -0.5, "7": -9999.0}]
    greedy = complete([5], params=SamplingParams(seed=3), logprobs_mode="raw_logprobs")
    assert greedy.seed is None
    assert greedy.logprobs_mode is None
    assert "logprobs" not in greedy.to_json()


def test_split_characters_appear_whole():
    made = complete(bytes_of("é🙂"))
    assert made.pieces == ("", "é", "", "", "", "🙂")


def test_pieces_are_decoded_when_they_are_read(monkeypatch):
    """Those of an output of thousands of tokens would hold up other requests."""
    real, calls = TextTokenizer.pieces, []
    monkeypatch.setattr(
        TextTokenizer, "pieces", lambda *arguments: calls.append(1) or real(*arguments)
    )
    made = complete(bytes_of("ab"))
    made.to_json()
    assert calls == []
    assert ("a", "b") == made.pieces == tuple(made.pieces)
    assert (made.pieces[-1], len(made.pieces), repr(made.pieces)) == ("b", 2, "('a', 'b')")
    assert len(calls) == 1
    again = pickle.loads(pickle.dumps(made))
    assert (again, hash(again), type(again.pieces)) == (made, hash(made), tuple)


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
        ("text", BARE, "has no tokenizer; give token ids"),
        ([{"role": "user", "content": "x"}], BARE, "has no tokenizer"),
        ([5, tiny.VOCAB], MODEL, f"holds the token id {tiny.VOCAB}"),
        ([-1], MODEL, "holds the token id -1"),
        ([2, 3, 4, 5], MODEL, "has 4 tokens, and the engine's max_length leaves room for 3"),
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
    with pytest.raises(PromptError, match="The prompts are None"):
        make_requests(None, SamplingParams(), MODEL, longest=3)


def test_chat_prompts():
    messages = [{"role": "user", "content": "Hi"}]
    ids = prompt_token_ids(messages, MODEL, name="it", chat_template_kwargs={"mood": "sad"})
    assert MODEL.tokenizer.hf.decode(ids) == "<s>[user] Hi\n[assistant] (sad)"
    with pytest.raises(PromptError, match=r"^it: The chat template refused"):
        prompt_token_ids(messages, MODEL, name="it", chat_template="{{ 1 / 0 }}")


def test_a_completion_prints_shortly():
    made = complete(bytes_of("ab" * 25))
    assert repr(made) == (
        f"<Completion 0: 50 tokens in 2 rounds, 25.00 per round, length, {made.text!r}>"
    )
    assert len(repr(complete(bytes_of("ab" * 500)))) < 160
    assert isinstance(made, Completion)


def test_several_completions_print_as_their_number():
    one = complete([5])
    assert repr(Completions([one])) == "<1 completion, 1 token in 2 rounds, 0.50 per round>"
    assert repr(Completions([one, one])).startswith("<2 completions, 2 tokens in 4 rounds")
    assert repr(Completions()).startswith("<0 completions, 0 tokens")
    shown = Completions([one, one])._repr_html_()
    assert shown.count("pre-wrap") == 2
    assert shown.count("accepted") == 1  # one legend


def test_sampling_parameters_as_dicts():
    one = SamplingParams(max_tokens=3)
    assert as_sampling_params({"max_tokens": 3}) == as_sampling_params(one) == one
    assert as_sampling_params(None) == SamplingParams()
    for params in ({"max_tokens": 3}, [one, {"max_tokens": 3}]):
        found = make_requests([[1], [2]], params, MODEL, longest=3)
        assert [request.params for request in found] == [one, one]
    with pytest.raises(SettingError, match="no sampling parameter 'tempo'; choose from max_tok"):
        as_sampling_params({"tempo": 3})
    with pytest.raises(SettingError, match="of type int were given"):
        as_sampling_params(3)
