"""Chat templates: what transformers makes of them, within limits on time and memory."""

from __future__ import annotations

import os
import signal
import threading

import pipelines
import pytest
import tiny

from jaxspec.errors import PromptError
from jaxspec.models.chat import TemplateProcess
from jaxspec.requests.prompts import VICUNA_TEMPLATE

pytestmark = pytest.mark.system  # each process imports transformers

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None}]
FINE = "{% for m in messages %}[{{ m.role }}]{{ m.content | default('-') }}{% endfor %}"
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
DOUBLING = (
    "{% set n = namespace(x='x' * 10000000) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x | length }}"
)


@pytest.fixture(scope="module")
def process():
    process = TemplateProcess(time_limit_s=2, memory_limit_bytes=2**29)
    yield process
    process.close()


def refused(process: TemplateProcess, template: str, messages=MESSAGES, **variables) -> str:
    with pytest.raises(PromptError) as raised:
        process.render(template, messages, variables)
    message = str(raised.value)
    assert "\n" not in message
    assert message.endswith(".")
    # What was refused has no part in what comes after it.
    assert process.render(FINE, MESSAGES, {}) == "[user]hello[assistant]-"
    return message


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (tiny.CHAT_TEMPLATE, {}),
        (tiny.CHAT_TEMPLATE, {"mood": "glad"}),
        (FINE, {}),
        ("{{ messages | tojson }}\n {{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}", {}),
        ("{% generation %}{{ tools | tojson }}{% endgeneration %}", {"tools": [{"name": "é"}]}),
        ("{%- for m in messages -%}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}", {}),
    ],
)
def test_as_transformers_renders_it(template, variables):
    text = tiny.tokenizer()
    ours = text.encode_chat(MESSAGES, template=template, template_kwargs=variables)
    theirs = text.hf.apply_chat_template(
        MESSAGES, chat_template=template, add_generation_prompt=True, **variables
    )
    assert ours == theirs["input_ids"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content | default('-') }}</s>{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m.content | default('-') }}{% endfor %}",
        "<s>{{ messages[0].content }}",
        VICUNA_TEMPLATE,
    ],
)
def test_special_tokens_are_those_of_the_template(template):
    """As with transformers, for a tokenizer that puts BOS in front of text."""
    for text in (tiny.tokenizer(), *(pipelines.sentencepiece(kind) for kind in pipelines.KINDS)):
        chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " Well. "}]
        theirs = text.hf.apply_chat_template(
            chat, chat_template=template, add_generation_prompt=True
        )["input_ids"]
        ours = text.encode_chat(chat, template=template)
        assert ours == theirs
        bos = text.hf.bos_token_id
        assert ours.count(bos) == ("bos_token" in template or "<s>" in template)
        assert text.encode("hello")[0] == bos


def test_variables_may_replace_the_generation_prompt_and_no_argument():
    text, chat = tiny.tokenizer(), MESSAGES[:1]
    ours = text.encode_chat(chat, template_kwargs={"add_generation_prompt": False})
    assert text.hf.decode(ours) == "<s>[user] hello\n"
    for name in ("tokenize", "chat_template", "conversation", "return_dict"):
        with pytest.raises(PromptError, match=f"variable '{name}' was given"):
            text.encode_chat(chat, template_kwargs={name: True})


def test_a_template_that_never_ends(process):
    assert "ran for more than 2 s" in refused(process, ENDLESS)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (DOUBLING, "too much memory"),
        ("{{ 'x' * 10000000000 }}", "too much memory"),
        ("{{ '%9999999999d' % 1 }}", "too much memory"),
        ("{{ 'x' * 20000000 }}", "20,000,000 characters"),
        ("{{ raise_exception('no\nsystem') }}", "(no system)"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for", "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "refused the messages"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}", "recursion"),
    ],
)
def test_what_a_template_may_not(process, template, reason):
    assert reason in refused(process, template)


def test_what_is_no_json(process):
    message = refused(process, FINE, [{"role": "user", "content": object()}])
    assert "must be JSON values" in message
    assert "must be JSON values" in refused(process, FINE, tool=print)


def test_a_process_that_is_gone(process):
    process.render(FINE, MESSAGES, {})
    [worker] = _children()
    os.kill(worker, signal.SIGKILL)
    assert "ended with status -9" in refused(process, FINE)


def test_threads_get_their_own_texts(process):
    found = {}

    def render(index: int) -> None:
        for _ in range(20):
            text = process.render("{{ x }}", MESSAGES, {"x": index})
            found.setdefault(index, set()).add(text)

    threads = [threading.Thread(target=render, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: {str(index)} for index in range(4)}


def _children() -> list[int]:
    """The template processes of this one that the fixture started, by id."""
    import psutil

    return [
        child.pid
        for child in psutil.Process().children()
        if any("template_worker" in word for word in child.cmdline()) and "2" in child.cmdline()
    ]
