"""Prompt files and chat templates."""

from __future__ import annotations

import json
import os
import threading

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.errors import PromptError, SettingError
from jaxspec.requests.prompts import (
    VICUNA_TEMPLATE,
    PromptLine,
    chat_template,
    encode_prompts,
    encode_within,
    read_prompts,
    sample_prompts,
)

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def target():
    return tiny.model(text=tiny.tokenizer())


def write(tmp_path, *lines, name="prompts.jsonl"):
    path = tmp_path / name
    path.write_bytes("\n".join(lines).encode())
    return path


def test_every_kind_of_line(tmp_path):
    path = write(
        tmp_path,
        '{"question_id": 81, "category": "writing", "turns": ["One", "Two"]}\r',
        "",
        '{"prompt": "text\\n", "domain": "code"}',
        '{"prompt_token_ids": [3, 0, 4]}',
        json.dumps({"messages": MESSAGES}),
        "   ",
    )
    assert read_prompts(path) == [
        PromptLine(prompt="One", fields={"question_id": 81, "category": "writing"}, number=1),
        PromptLine(prompt="text\n", fields={"domain": "code"}, number=3),
        PromptLine(prompt=[3, 0, 4], number=4),
        PromptLine(prompt=MESSAGES, number=5),
    ]
    assert [line.is_chat for line in read_prompts(path)] == [False, False, False, True]


def test_plain_lines_and_json_may_stand_together(tmp_path):
    lines = ("  indented ", "[1, 2]", '{"prompt": "x"}', '"quoted"', "a\u2028b\r")
    path = write(tmp_path, "\ufeff" + lines[0], *lines[1:], name="prompts.txt")
    expected = ["  indented ", "[1, 2]", "x", '"quoted"', "a\u2028b"]
    assert [line.prompt for line in read_prompts(path)] == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "is not JSON"),
        ("plain", "is not JSON"),
        ('"text"', "not an object"),
        ('{"text": "x"}', "no prompt field"),
        ('{"prompt": "x", "turns": ["y"]}', "turns and prompt"),
        ('{"prompt": ""}', "'prompt' that is not text, or is empty"),
        ('{"prompt": ["x"]}', "'prompt' that is not text"),
        ('{"prompt_token_ids": []}', "not a list of token ids, or is empty"),
        ('{"prompt_token_ids": [true]}', "not a list of token ids"),
        ('{"prompt_token_ids": [' + "9" * 5000 + "]}", "is not JSON (Exceeds the limit"),
        ('{"messages": ["hello"]}', "not a list of objects"),
        ('{"messages": [{"role": "user"}]}', "'role' and 'content'"),
        ('{"turns": []}', "not a list of texts"),
        ("[" * 100_000, "is not JSON (nested too deeply)"),
    ],
)
def test_malformed_line_is_named(tmp_path, line, message):
    path = write(tmp_path, '{"prompt": "good"}', "", line, '{"prompt": "good"}')
    with pytest.raises(PromptError, match=r"^Line 3 of the prompt file") as raised:
        read_prompts(path)
    assert message in str(raised.value)


def test_malformed_json_in_a_plain_file_is_named(tmp_path):
    with pytest.raises(
        PromptError, match=r"Line 2 of the prompt file is not JSON.*begins with a brace"
    ):
        read_prompts(write(tmp_path, "plain", "{not json", name="prompts.txt"))


def test_unreadable_and_empty_files(tmp_path):
    with pytest.raises(PromptError, match="holds no prompt"):
        read_prompts(write(tmp_path, "", "  ", ""))
    with pytest.raises(PromptError, match="No such file"):
        read_prompts(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="not UTF-8 text"):
        read_prompts(tmp_path / "binary")


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.one_of(
            st.text(min_size=1),
            st.lists(st.integers(0, 2**31), min_size=1),
            st.lists(
                st.fixed_dictionaries({"role": st.just("user"), "content": st.text()}), min_size=1
            ),
        ),
        min_size=1,
    ),
    blank=st.sets(st.integers(0, 9)),
)
def test_what_is_written_is_read_back(tmp_path_factory, prompts, blank):
    path = tmp_path_factory.mktemp("read") / "prompts.jsonl"
    lines, numbers = [], []
    for index, prompt in enumerate(prompts):
        kind = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        kind = "messages" if isinstance(prompt[0], dict) else kind
        lines += [""] * (index in blank)
        lines.append(json.dumps({kind: prompt, "index": index}, ensure_ascii=index % 2 == 0))
        numbers.append(len(lines))
    try:
        path.write_text("\n".join(lines), encoding="utf-8")
    except UnicodeEncodeError:  # a lone surrogate
        return
    found = read_prompts(path)
    assert [line.prompt for line in found] == prompts
    assert [line.fields["index"] for line in found] == list(range(len(prompts)))
    assert [line.number for line in found] == numbers


def test_sample_prompts():
    lines = sample_prompts()
    assert len(lines) == 48
    assert {line.fields["domain"] for line in lines} == {"fairy_tales", "tech_docs", "code", "math"}


def encode(target, *prompts, **options):
    lines = [PromptLine(prompt=p, number=3 + i) for i, p in enumerate(prompts)]
    return encode_prompts(lines, target, **options)


def text_of(target, ids):
    return target.tokenizer.hf.decode(ids)


def test_bos_is_never_doubled(target):
    bos = tiny.BOS
    plain, written, chat = encode(
        target, "hello", "<s>hello", [{"role": "user", "content": "hello"}]
    )
    assert plain == written
    assert plain[0] == bos
    for ids in (plain, written, chat):
        assert ids.count(bos) == 1
    assert encode(target, [5, 6]) == [(5, 6)]  # ids are taken as they are


def test_long_prompts_are_cut_and_those_of_a_chat_left_out(target):
    lines = [PromptLine(prompt=text, number=n) for n, text in enumerate(("hi", "hello " * 20), 1)]
    whole = [encode(target, line.prompt)[0] for line in lines]
    most = len(whole[1]) - 1
    found = encode_within(most, lines, target, is_chat=False)
    assert found == [(lines[0], whole[0]), (lines[1], whole[1][:-1])]
    [short, long] = encode(target, *(line.prompt for line in lines), is_chat=True)
    assert encode_within(len(long), lines, target, is_chat=True) == [
        (lines[0], short), (lines[1], long)
    ]  # fmt: skip
    assert encode_within(len(long) - 1, lines, target, is_chat=True) == [(lines[0], short)]
    with pytest.raises(PromptError, match="Every one of the 2 prompts has more than 1 tokens"):
        encode_within(1, lines, target, is_chat=True)


def test_own_template_is_for_messages_and_for_chat(target):
    own = "<s>[user] Why?\n[assistant]"
    [as_messages] = encode(target, MESSAGES[1:])
    [as_chat] = encode(target, "Why?", is_chat=True)
    assert text_of(target, as_messages) == text_of(target, as_chat) == own
    [as_text] = encode(target, "Why?")
    assert text_of(target, as_text) == "<s>Why?"
    assert encode(target, [7, 8], is_chat=True) == [(7, 8)]


def test_other_templates_and_their_variables(target, tmp_path):
    path = write(tmp_path, "{{ messages[0]['content'] | upper }}{{ end }}", name="t.jinja")
    template = chat_template(str(path))
    [ids] = encode(target, "why", is_chat=True, template=template, template_kwargs={"end": "!"})
    assert text_of(target, ids) == "WHY!"  # templates write special tokens themselves
    [ids] = encode(target, "why", is_chat=True, template_kwargs={"mood": "glad"})
    assert text_of(target, ids) == "<s>[user] why\n[assistant] (glad)"


def test_vicuna_template(target):
    assert chat_template(None) is None
    assert chat_template("vicuna") == VICUNA_TEMPLATE
    [ids, turns] = encode(
        target,
        "Hi",
        [*MESSAGES, {"role": "assistant", "content": "So."}, {"role": "user", "content": "Oh."}],
        is_chat=True,
        template=VICUNA_TEMPLATE,
    )
    # As FastChat's conv_template "vicuna_v1.1" renders it.
    assert text_of(target, ids) == (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. USER: Hi ASSISTANT:"
    )
    assert (
        text_of(target, turns) == "<s>Be kind. USER: Why? ASSISTANT: So.</s> USER: Oh. ASSISTANT:"
    )


def test_template_errors_name_the_line(target, tmp_path):
    bare = tiny.model(text=tiny.tokenizer(chat=None))
    with pytest.raises(PromptError, match=r"^Line 4 .*no chat template; name one") as raised:
        encode(bare, "text", MESSAGES)
    assert "\n" not in str(raised.value)
    [ids] = encode(bare, "Hi", is_chat=True, template="{{ messages[0]['content'] }}")
    assert text_of(bare, ids) == "Hi"
    for template in ("{% if %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}"):
        with pytest.raises(PromptError, match=r"^Line 3 .*refused the messages"):
            encode(target, "x", is_chat=True, template=template)
    with pytest.raises(PromptError, match="neither 'vicuna' nor a readable file"):
        chat_template(str(tmp_path / "absent"))


def test_truncation(target):
    cut, short = encode(target, "a long prompt", "ab", max_prompt_tokens=4)
    assert text_of(target, cut) == "<s>a l"
    assert text_of(target, short) == "<s>ab"


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb"])
def test_half_a_character(text, target):
    for prompt in (text, [{"role": "user", "content": text}]):
        with pytest.raises(PromptError, match=r"^Line 3 .*half a character") as raised:
            encode(target, prompt)
        assert str(raised.value).isascii()


def test_what_is_no_file_of_prompts(tmp_path):
    for path in ("/dev/zero", tmp_path, "x" * 5000, "a\0b"):
        with pytest.raises(PromptError, match="cannot be read"):
            read_prompts(path)
        with pytest.raises(PromptError, match="neither 'vicuna' nor a readable file"):
            chat_template(str(path))


def test_prompts_may_come_through_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("hello\n",))
    writer.start()
    assert [line.prompt for line in read_prompts(tmp_path / "pipe")] == ["hello"]
    writer.join()


def test_all_turns_of_a_question(tmp_path):
    question = json.dumps({"turns": ["a", "b", "c"], "question_id": 3})
    path = write(tmp_path, question, '{"prompt": "x"}')
    assert [line.num_turns for line in read_prompts(path)] == [1, 1]
    several, single = read_prompts(path, turns="all")
    assert (several.prompt, several.later_turns, single.num_turns) == ("a", ("b", "c"), 1)
    second = several.turn(["A"], is_chat=False)
    assert (second.prompt, second.fields) == ("a\nA\nb", {"question_id": 3, "turn": 1})
    assert several.turn([], is_chat=True).prompt == [{"role": "user", "content": "a"}]
    assert several.turn(["A", "B"], is_chat=True).prompt == [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 2 + ("user",), "aAbBc", strict=True)
    ]
    assert single.turn([], is_chat=True) is single
    with pytest.raises(SettingError, match="turns 'second' was given"):
        read_prompts(path, turns="second")
