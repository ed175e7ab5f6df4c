"""What README and docstrings show is run as it stands there."""

import doctest
import pathlib
import re

import jaxspec
import jaxspec.engine.engine
from jaxspec.drafters.names import make_drafter

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_library_examples_of_the_readme_run():
    first, *others = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    *statements, last = first.strip().split("\n")
    namespace = {}
    exec("\n".join(statements), namespace)
    for example in others:
        exec(example, namespace)
    text, token_ids, finish_reason, acceptance = eval(last, namespace)
    assert text
    assert token_ids
    assert finish_reason in ("length", "stop")
    assert acceptance.num_accepted_tokens > 0


def test_docstring_examples_run():
    results = doctest.testmod(jaxspec.engine.engine)
    assert results.attempted > 0
    assert results.failed == 0


def test_every_public_name_is_documented_and_listed():
    for name in jaxspec.__all__:
        assert getattr(jaxspec, name).__doc__, name
    public = {name for name in vars(jaxspec) if name[0].isupper()}
    assert public <= set(jaxspec.__all__)


def test_the_readme_names_existing_files_and_commands():
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    from jaxspec.cli import COMMANDS

    for command in re.findall(r"^jaxspec (\w+)", README, flags=re.MULTILINE):
        assert command in COMMANDS, command


def test_the_namesake_on_pypi_is_reported(monkeypatch, recwarn):
    jaxspec._warn_of_namesake()
    assert not recwarn.list
    monkeypatch.setattr(jaxspec._metadata, "version", lambda name: "0.4.1")
    jaxspec._warn_of_namesake()
    assert "X-ray spectral fitting" in str(recwarn.pop().message)


def test_the_drafter_names_of_the_readme_are_understood():
    target = jaxspec.random_model(
        jaxspec.ModelConfig(
            family="llama",
            vocab_size=16,
            width=8,
            feed_forward_width=8,
            num_layers=1,
            num_query_heads=1,
            num_kv_heads=1,
            head_size=8,
            max_length=64,
            norm_epsilon=1e-6,
            rope=jaxspec.RopeConfig(theta=1e4, rotary_size=8),
        )
    )
    assert make_drafter("ngram", target).name == "ngram:1-4"
    assert make_drafter(None, target) is None
