"""Bad command lines, as data. None of them may load more than the embedded pair, or decode.

A word `{name}` stands for a file of `FILES`, `{dir}` for an empty directory, `{model}` for a
converted one, `{absent}` for a path where nothing is.
"""

from __future__ import annotations

import itertools

# Files by name: prompts, outputs and templates that are not what they should be.
FILES: dict[str, bytes] = {
    "empty.txt": b"",
    "blank.txt": b"\n  \n\r\n",
    "latin.txt": b"caf\xe9\n",
    "nul.bin": bytes(100),
    "utf16.txt": "hello\n".encode("utf-16"),
    "list.jsonl": b"[1, 2]\n",
    "text.jsonl": b'"hello"\n',
    "plain.jsonl": b"hello\n",
    "cut.jsonl": b'{"prompt": "hel',
    "no_prompt.jsonl": b'{"text": "hello"}\n',
    "two_prompts.jsonl": b'{"prompt": "a", "turns": ["b"]}\n',
    "empty_prompt.jsonl": b'{"prompt": ""}\n',
    "null_prompt.jsonl": b'{"prompt": null}\n',
    "number_prompt.jsonl": b'{"prompt": 5}\n',
    "list_prompt.jsonl": b'{"prompt": ["a"]}\n',
    "no_turns.jsonl": b'{"turns": []}\n',
    "number_turns.jsonl": b'{"turns": [1]}\n',
    "no_ids.jsonl": b'{"prompt_token_ids": []}\n',
    "text_ids.jsonl": b'{"prompt_token_ids": ["1"]}\n',
    "float_ids.jsonl": b'{"prompt_token_ids": [1.5]}\n',
    "true_ids.jsonl": b'{"prompt_token_ids": [true]}\n',
    "negative_ids.jsonl": b'{"prompt_token_ids": [-1]}\n',
    "outside_ids.jsonl": b'{"prompt_token_ids": [4096]}\n',
    "large_ids.jsonl": b'{"prompt_token_ids": [99999999999999999999]}\n',
    "long_ids.jsonl": b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}\n",
    "nan_ids.jsonl": b'{"prompt_token_ids": [NaN]}\n',
    "no_messages.jsonl": b'{"messages": []}\n',
    "text_messages.jsonl": b'{"messages": ["hello"]}\n',
    "no_role.jsonl": b'{"messages": [{"content": "a"}]}\n',
    "number_role.jsonl": b'{"messages": [{"role": 5, "content": "a"}]}\n',
    "no_content.jsonl": b'{"messages": [{"role": "user"}]}\n',
    "nested.jsonl": b'{"prompt": ' + b"[" * 100_000 + b"\n",
    "nested_objects.jsonl": b'{"a":' * 100_000 + b"\n",
    "surrogate.jsonl": b'{"prompt": "a\\ud800"}\n',
    "surrogate_message.jsonl": b'{"messages": [{"role": "user", "content": "\\udc00"}]}\n',
    "good_then_bad.jsonl": b'{"prompt": "a"}\n{"prompt": "b"\n',
    "good.jsonl": b'{"prompt": "a", "question_id": 1}\n',
    "long.jsonl": b'{"prompt": "' + b"a b " * 5000 + b'"}\n',
    "endless.jinja": b"{% for a in range(99999) %}{% for b in range(99999) %}"
    b"{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "doubling.jinja": b"{% set n = namespace(x='x' * 1000) %}{% for i in range(60) %}"
    b"{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
    "wide.jinja": b"{{ 'x'.center(100000000) }}",
    "huge.jinja": b"{{ 'x' * 10000000000 }}",
    "cut.jinja": b"{% for message in messages",
    "class.jinja": b"{{ ''.__class__.__mro__ }}",
    "open.jinja": b"{{ self.__init__.__globals__ }}",
    "raises.jinja": b"{{ raise_exception('no\nsystem\nmessages') }}",
    "divides.jinja": b"{{ 1 / 0 }}",
    "recursion.jinja": b"{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}",
    "include.jinja": b"{% include '/etc/passwd' %}",
    "silent.jinja": b"{% set x = 1 %}",
    "template_latin.jinja": b"{{ 'caf\xe9' }}",
}

HUGE = "9" * 5000
GENERATE = ("generate", "--target", "demo-target")
PROMPT = (*GENERATE, "--prompt", "hello")
COMMANDS = ("demo", "generate", "audit", "compare", "bench", "convert", "train", "cache", "doctor")


def command_lines() -> list[tuple[str, ...]]:
    """All of them, each once."""
    groups = (_words(), _numbers(), _choices(), _names(), _prompts(), _others())
    return list(dict.fromkeys(itertools.chain.from_iterable(groups)))


def _words():
    """Commands and options that are none."""
    for word in ("generat", "Generate", "x", "", " ", "-", "--", "--x", "-v", "generate ", "a\0b",
                 "\udcff", "0", "help me", "../generate", "--target"):  # fmt: skip
        yield (word,)
    for command in COMMANDS:
        for words in (("--nonsense",), ("--nonsense", "1"), ("-x",), ("a", "b", "c"),
                      ("--target",), ("--help=1",), ("\udcff",), ("--json", "--json", "--x"),
                      ("--prompt", "caf\udce9", "--target", "x")):  # fmt: skip
            yield (command, *words)


def _numbers():
    """Numbers out of range, and what is no number."""
    wrong = ("-1", "1.5", "1e20", "x", "", "NaN", "inf", HUGE, "0x10", "1,5", "\u00bd", "--", "-")
    whole = {  # options, and numbers that are whole and still wrong
        "--max-tokens": ("0", "-99999999999999999999", "99999999999999999999", "1073741825"),
        "--n": ("0", "2", "99999999999999999999"),
        "--seed": ("9223372036854775808", "99999999999999999999"),
        "--batch-size": ("0", "-99999999999999999999"),
        "--max-length": ("0", "99999999999999999999", "1000000000"),
        "--limit": ("0",),
        "--max-prompt-tokens": ("0",),
        "--verify-length": ("0", "2", "99999999999999999999"),
    }
    for option, numbers in whole.items():
        for number in (*wrong, *numbers):
            yield (*PROMPT, option, number)
    for number in (*wrong, "0", "1000000000"):
        if number != "--":
            yield (*PROMPT, "--drafter", "ngram", "--draft-length", number)
    fractions = {
        "--temperature": ("-1", "1e-9", "1e9", "nan", "inf", "-inf", "1e400"),
        "--top-p": ("0", "-0.1", "1.1", "nan", "inf"),
    }
    fields = {
        "min_tokens": ("65", "99999999999999999999", '"x"', "1.5", HUGE),
        "top_k": ("-3", "1.5", '"x"', "[1]", HUGE),
        "min_p": ("-0.1", "1.1", "NaN", "-Infinity", '"x"'),
        "repetition_penalty": ("0", "-1", "1e9", "NaN", "Infinity", "[]"),
        "presence_penalty": ("1e9", "NaN", "-Infinity", "{}"),
        "frequency_penalty": ("1e9", "NaN", "Infinity", '"x"'),
        "logit_bias": ('"x"', "[1]", "5", '{"a": 1}', '{"5": 101}', '{"5": NaN}', '{"-5": 1}'),
        "allowed_token_ids": ('"x"', "[]", "[-5]", "[1.5]", "[99999999]", "5"),
        "stop_token_ids": ('"x"', "[-5]", "[99999999]"),
        "logprobs": ("-1", '"x"', "99999999"),
        "x": ("1",), "n": ("2",), "temperature": ("1",), "run": ("1",),
    }  # fmt: skip
    for field, values in fields.items():
        for value in values:
            yield (*PROMPT, "--sampling-args", f'{{"{field}": {value}}}')
    settings = {
        "scheduler": ('"x"', '""', "5", "[]", "{}"), "layout": ('"x"', "5", "[]"),
        "check_invariants": ("5", '"x"'), "prefill_chunk": ("0", "64", '"x"'),
        "rounds_per_sync": ("0", "true"), "budget_bytes": ("0", "1e400"), "mesh": ("1",),
        "batch_size": ("1",), "x": ("1",), "step_timeout_s": ("-1", "NaN", '"x"'),
        "logprobs_mode": ('"x"', "5"), "tree_depth": ("-1",), "trace": ('"rounds"',),
    }  # fmt: skip
    for setting, values in settings.items():
        for value in values:
            yield (*PROMPT, "--engine-args", f'{{"{setting}": {value}}}')
    for text in ("", "x", "[]", "5", "null", "{", "[" * 100_000, HUGE):
        yield (*PROMPT, "--sampling-args", text)
        yield (*PROMPT, "--engine-args", text)
    for option, numbers in fractions.items():
        for number in ("x", "", "1,5", "--", *numbers):
            yield (*PROMPT, option, number)
    others = {
        "demo": ("--max-tokens", "--batch-sizes", "--repeats"),
        "compare": ("--repeats", "--draft-length", "--batch-size", "--max-length", "--max-tokens"),
        "audit": ("--limit", "--draft-length", "--batch-size", "--max-length", "--max-tokens"),
    }
    for command, options in others.items():
        target = () if command == "demo" else ("--target", "demo-target")
        for option in options:
            for number in ("0", "-1", "1.5", "x", "", HUGE, "1e20"):
                yield (command, *target, option, number)


def _choices():
    """Values outside a list of choices."""
    options = ("--dtype", "--exactness", "--verifier", "--format")
    for option in options:
        for value in ("x", "", "float64", "Bitwise", "coupled ", "0", "None"):
            yield (*PROMPT, option, value)


def _names():
    """Models and drafters."""
    models = ("", " ", ".", "..", "/", "/dev/null", "/dev/zero", "/etc/passwd", "~nouser/x",
              "~nouser", "{dir}", "{absent}", "{empty.txt}", "{nul.bin}", "random:", "random:x",
              "random:5",
              "random: vicuna-7b", "demo-Target", "demo_target", "a\nb", "a b", "a//b", "a/b/c/d",
              "\u65e5\u672c", "\udcff", "x" * 5000, "http://example.com/x", "-x", "*", "$HOME",
              "org/../x", "{dir}/../{absent}", "C:\\x", "%s", "{0}")  # fmt: skip
    for model in models:
        yield ("generate", "--target", model, "--prompt", "hello")
        yield (*PROMPT, "--draft", model)
        yield ("convert", model, "{absent}")
    drafters = ("", " ", "x", "None", "ngram:", "ngram:1", "ngram[4]", "ngram@4", "Ngram",
                "draft_model", "draft_model:", "draft_model:x", "draft_model@0.5:demo-draft",
                "{", "{}", "{1}", "[]", '{"kind": "x"}', '{"kind": 1}', '{"kind": "ngram", "x": 1}',
                '{"model": 1}', '{"model": null}', '{"model": ""}', "{" * 5000, '{"kind": ' * 5000,
                "a.b:c", "os:getcwd", "os:nothing", "json:loads", "builtins:dict",
                "os.path:join", ":x", "x:", ":", "::", "a:b:c", "1:2", "a b:c", "..:x",
                "~nouser/x", "draft_model:~nouser/x", "\udcff:x")  # fmt: skip
    for drafter in drafters:
        yield (*PROMPT, "--drafter", drafter)
    for settings in ("", "x", "1", "[]", "null", "{", '{"x": 1}', '{"kind": 1}', '{"model": 1}',
                     '{"prompt_lookup_max": 0}', '{"prompt_lookup_max": 65}',
                     '{"prompt_lookup_max": "4"}', '{"prompt_lookup_max": 1.5}',
                     f'{{"prompt_lookup_max": {HUGE}}}', '{"prompt_lookup_max": null}',
                     '{"prompt_lookup_min": 5}', '{"branches": 0}', '{"branches": -1}'
                     ):  # fmt: skip
        yield (*PROMPT, "--drafter", "ngram", "--drafter-args", settings)
    for settings in ("2", "-1", "NaN", "Infinity", '"x"', "null", "[]"):
        args = f'{{"min_confidence": {settings}}}'
        yield (*PROMPT, "--draft", "demo-draft", "--drafter-args", args)
    for settings in ('"4x4"', '"4x4:99"', '"0x0:0"', '""', '"x"', "1.5", "[]", "{}", "true"):
        yield (*PROMPT, "--draft", "demo-draft", "--drafter-args", f'{{"tree": {settings}}}')
    yield (*PROMPT, "--drafter-args", '{"branches": 4}')
    yield (*PROMPT, "--drafter", "ngram", "--draft", "demo-draft")
    yield (*PROMPT, "--drafter", "draft_model:demo-draft", "--draft", "demo-draft")


def _prompts():
    """Files of prompts, templates and their variables."""
    fine = {"good.jsonl", "nul.bin"}
    for name in FILES:
        if name in fine or name.endswith(".jinja"):
            continue
        yield (*GENERATE, "--prompts", f"{{{name}}}", "--max-length", "256")
    for path in ("{dir}", "{absent}", "", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem",
                 "a\0b", "x" * 5000, "\udcff"):  # fmt: skip
        yield (*GENERATE, "--prompts", path)
        yield (*PROMPT, "--chat", "--chat-template", path)
    for name in FILES:
        if name.endswith(".jinja"):
            yield (*PROMPT, "--chat", "--chat-template", f"{{{name}}}")
    for text in ("", "x", "[]", "5", '"a"', "{", "null", "NaN", "{'a': 1}", "[" * 100_000, HUGE,
                 '{"tokenize": true}', '{"chat_template": "x"}', '{"messages": []}',
                 '{"conversation": 1}', '{"tools": 5}', '{"continue_final_message": true}',
                 '{"documents": [1]}'):  # fmt: skip
        yield (*PROMPT, "--chat", "--chat-template-kwargs", text)
    yield (*PROMPT, "--chat-template", "vicuna")
    yield (*PROMPT, "--prompts", "{good.jsonl}")
    yield GENERATE
    yield (*GENERATE, "--prompt", "")


def _others():
    """Options that do not go together, and the other commands."""
    alone = (
        ("--resume",), ("--format", "spec-bench"),
        ("--trace", "x.txt"), ("--trace", "x.parquet", "--resume"), ("--verifier", "rejection"),
        ("--verify-length", "4"), ("--output", "{dir}"), ("--output", "/dev/null/x"),
        ("--output", "{good.jsonl}"), ("--n", "2", "--temperature", "1", "--format", "spec-bench"),
        ("--stop", ""), ("--n", "3"),
        ("--sampling-args", '{"min_tokens": 5}', "--max-tokens", "4"),
        ("--n", "100000", "--temperature", "1"), ("--trace", "/dev/null/x.parquet"),
    )  # fmt: skip
    for words in alone:
        yield (*PROMPT, *words)
    for words in (
        ("cache",), ("cache", "x"), ("cache", "remove"), ("cache", "list", "x"),
        ("cache", "remove", ""), ("cache", "remove", "x"), ("cache", "remove", ".."),
        ("cache", "remove", "/"), ("cache", "remove", "a\0b"), ("cache", "remove", "*"),
        ("cache", "remove", "../x"), ("cache", "remove", "\udcff"),
        ("convert",), ("convert", "{dir}"), ("convert", "{dir}", "{absent}"),
        ("convert", "{dir}", "{dir}"), ("convert", "{model}", "{absent}"),
        ("convert", "{dir}", "{absent}", "--revision", "main"),
        ("convert", "{dir}", "{absent}", "--dtype", "int8"), ("convert", "a", "b", "c"),
        ("convert", "{dir}", "a\0b"), ("convert", "{empty.txt}", "{absent}"),
        ("train",), ("train", "x"), ("train", "lm"), ("train", "lm", "--out", "{absent}"),
        ("train", "lm", "--out", "{absent}", "--corpora", "{absent}"),
        ("train", "lm", "--out", "{absent}", "--corpora", "{dir}"),
        ("train", "lm", "--out", "{absent}", "--corpora", "{empty.txt}"),
        ("train", "lm", "--out", "{absent}", "--corpora", "~nouser/x"),
        ("audit", "--target", "demo-target", "--verifier", "x"),
        ("audit", "--target", "demo-target", "--outputs", "{absent}"),
        ("audit", "--target", "demo-target", "--outputs", "{dir}"),
        ("audit", "--target", "demo-target", "--outputs", "{empty.txt}"),
        ("audit", "--target", "demo-target", "--outputs", "{latin.txt}"),
        ("audit", "--target", "demo-target", "--outputs", "{cut.jsonl}"),
        ("audit", "--target", "demo-target", "--outputs", "{list.jsonl}"),
        ("audit", "--target", "demo-target", "--outputs", "{nested.jsonl}"),
        ("audit", "--target", "demo-target", "--outputs", "{long_ids.jsonl}"),
        ("audit", "--target", "demo-target", "--sampling-args", '{"n": 2}'),
        ("audit", "--snippet", "x"), ("audit", "--target", "~nouser/x"),
        ("compare",), ("compare", "--target", "x y"), ("compare", "--target", "~nouser/x"),
        ("compare", "--target", "demo-target", "--drafter", "x"),
        ("compare", "--target", "demo-target", "--drafter", "ngram:1-999999999999"),
        ("compare", "--target", "demo-target", "--prompts", "{absent}"),
        ("bench",), ("bench", "x"), ("bench", "decode", "--target", "~nouser"),
        ("bench", "predict", "--target", "qwen3-8b", "--draft", "x"),
        ("bench", "predict", "--target", "x", "--draft", "qwen3-0.6b"),
    ):  # fmt: skip
        yield words
    predict = ("bench", "predict", "--target", "qwen3-8b", "--draft", "qwen3-0.6b")
    for option, values in {
        "--batch": ("0", "x", "", "4..1", "1..", "1..x", "1..999999999999", "-1", HUGE, "1e9"),
        "--acceptance": ("x", "-1", "2", "nan", ""),
        "--device": ("x", "", "H200 "),
        "--context": ("0", "-1", "x", "1e9"),
    }.items():
        for value in values:
            yield (*predict, option, value)
    # These are right.
    yield ()
    yield ("--help",)
    yield ("--version",)
    yield ("cache", "list", "--json")
    for command in COMMANDS:
        yield (command, "--help")
