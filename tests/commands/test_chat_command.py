"""`jaxspec chat`: turns from standard input, what they reuse, and what is refused."""

from __future__ import annotations

import io

import pytest
import tiny

from jaxspec import Engine, NGram, SamplingParams, load_model

IGNORE_EOS = ("--sampling-args", '{"ignore_eos": true}')
OPTIONS = ("--drafter", "ngram", "--max-tokens", 9, "--max-length", 256, *IGNORE_EOS)


@pytest.fixture
def say(monkeypatch):
    """Makes these the lines of standard input."""

    def set_lines(*lines):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return set_lines


def test_turns_reuse_the_kv_and_say_so(cli, models, say):
    say("hello", "", "and then?", "/new", "again", "/quit", "never")
    result = cli("chat", "--target", models.target, *OPTIONS, "--system", "be kind", "--json")
    assert result.status == 0, result.err
    turns = result.document["turns"]
    assert len(turns) == 3
    asked = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    text = tiny.tokenizer()
    assert turns[0]["prompt_token_ids"] == text.encode_chat(asked)
    asked += [
        {"role": "assistant", "content": turns[0]["text"]},
        {"role": "user", "content": "and then?"},
    ]
    assert turns[1]["prompt_token_ids"] == text.encode_chat(asked)
    # A new chat shares the system message.
    reused = [turn["num_reused_tokens"] for turn in turns]
    assert reused[0] == 0 < reused[2] < reused[1]
    num_read = len(turns[1]["prompt_token_ids"]) - reused[1]
    assert f"{reused[1]} prompt tokens reused, {num_read} prefilled; KV of" in result.out
    assert turns[0]["text"] in result.out
    assert turns[0]["kv_bytes"] > 0
    engine = Engine(load_model(str(models.target)), NGram(), batch_size=1, max_length=256)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    for turn in turns:
        [alone] = engine.generate([turn["prompt_token_ids"]], params)
        assert list(alone.token_ids) == turn["token_ids"]


def test_without_a_template_turns_are_lines_of_text(cli, models, say):
    say("hello", "more")
    result = cli("chat", "--target", models.no_template, *OPTIONS, "--json")
    first, second = result.document["turns"]
    text = tiny.tokenizer()
    assert first["prompt_token_ids"] == text.encode("hello\n")
    assert second["prompt_token_ids"] == text.encode(f"hello\n{first['text']}\nmore\n")


def test_a_line_that_does_not_fit_is_refused_and_the_chat_goes_on(cli, models, say):
    say("hello", "x" * 400, "short")
    result = cli("chat", "--target", models.target, *OPTIONS, "--json")
    assert result.status == 0
    assert "/new starts a new chat" in result.err
    assert "leaves room for" in result.err
    first, second = result.document["turns"]
    assert second["num_reused_tokens"] >= len(first["prompt_token_ids"])


def test_commands_that_do_not_exist_are_not_sent(cli, models, say):
    say("/exti", "/", "/new chat", "hello", " /etc/hosts", "/exit", "never")
    result = cli("chat", "--target", models.target, *OPTIONS, "--json")
    assert result.status == 0, result.err
    for line in ("'/exti'", "'/'", "'/new chat'"):
        assert f"{line} is no command, and nothing was sent: /new starts" in result.err
    assert "/quit, /exit or the end of the input exits" in result.err
    text = tiny.tokenizer()
    asked = [{"role": "user", "content": "hello"}]
    first, second = result.document["turns"]
    assert first["prompt_token_ids"] == text.encode_chat(asked)
    asked += [{"role": "assistant", "content": first["text"]}]
    asked += [{"role": "user", "content": " /etc/hosts"}]
    assert second["prompt_token_ids"] == text.encode_chat(asked)


def test_variables_of_the_template(cli, models, say, refused):
    say("hello")
    options = (*OPTIONS, "--chat-template-kwargs", '{"mood": "glad"}')
    [turn] = cli("chat", "--target", models.target, *options, "--json").document["turns"]
    asked = [{"role": "user", "content": "hello"}]
    expected = tiny.tokenizer().encode_chat(asked, template_kwargs={"mood": "glad"})
    assert turn["prompt_token_ids"] == expected
    assert "has no chat template" in refused("chat", "--target", models.no_template, *options)
    options = (*OPTIONS, "--chat-template-kwargs", "glad")
    assert "must be a JSON object" in refused("chat", "--target", models.target, *options)
    assert "has no tokenizer" in refused("chat", "--target", models.no_tokenizer)
