"""Text of a growing output: whole characters only, and in the end all of it."""

from __future__ import annotations

import doctest

import pipelines
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

import jaxspec.models.tokenizer
from jaxspec.models.tokenizer import TextStream

BYTES = tiny.tokenizer()
PIPELINES = {kind: pipelines.sentencepiece(kind, words=("▁the", "cat")) for kind in pipelines.KINDS}
# `▁` for a space, the first of which is dropped, and bytes for what is not in the vocabulary, a run
# of which is decoded as one.
LLAMA = PIPELINES["strip"]
THE = LLAMA.hf.convert_tokens_to_ids("▁the")
FIRST_BYTE = len(pipelines.SPECIAL)


def streamed(stream, token_ids, sizes=(1,)):
    """What comes out of pushes of these sizes, in turn."""
    pieces, first, turn = [], 0, 0
    while first < len(token_ids):
        size = sizes[turn % len(sizes)]
        pieces.append(stream.push(token_ids[first : first + size]))
        first, turn = first + size, turn + 1
    return [*pieces, stream.end()]


def fallback_ids(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


sizes = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)
any_bytes = st.lists(st.integers(0, 257), max_size=40)


@given(any_bytes, sizes)
def test_any_bytes_join_to_their_text(ids, sizes):
    assert "".join(streamed(BYTES.stream(), ids, sizes)) == BYTES.decode(ids)


@given(st.text(max_size=12), sizes)
def test_no_unfinished_character_is_shown(text, sizes):
    ids = BYTES.hf.encode(text, add_special_tokens=False)
    *pieces, rest = streamed(BYTES.stream(), ids, sizes)
    assert "".join(pieces) == text.rstrip("\ufffd")
    assert "".join(pieces) + rest == text


# Words, special tokens, and characters as runs of byte tokens.
fallback_tokens = st.lists(
    st.one_of(
        st.sampled_from(["▁", "a", "b", "▁the", "cat"]).map(
            lambda word: [LLAMA.hf.convert_tokens_to_ids(word)]
        ),
        st.just([2]),
        st.sampled_from("é你😀x").map(fallback_ids),
    ),
    max_size=30,
).map(lambda parts: [token for part in parts for token in part])


@given(fallback_tokens, sizes)
def test_runs_of_bytes_and_dropped_spaces_join_to_their_text(ids, sizes):
    assert "".join(streamed(LLAMA.stream(), ids, sizes)) == LLAMA.decode(ids)
    shown = LLAMA.hf.decode(ids, clean_up_tokenization_spaces=False)
    assert "".join(streamed(LLAMA.stream(skip_special_tokens=False), ids, sizes)) == shown


def test_characters_come_with_the_token_that_completes_them():
    pieces = streamed(LLAMA.stream(), [THE, *fallback_ids("你你"), 2, THE])
    assert pieces == ["the", "", "", "你", "", "", "你", "", " the", ""]


def test_what_was_returned_is_not_taken_back():
    """The run's text turns into four U+FFFD; `DecodeStream` raises here."""
    ids = [*fallback_ids("你"), FIRST_BYTE + 0xFF, THE]
    assert LLAMA.decode(ids) == "\ufffd" * 4 + " the"
    assert streamed(LLAMA.stream(), ids) == ["", "", "你", "", "\ufffd" * 3 + " the", ""]


def test_a_stream_that_does_not_wait_is_noticed():
    class Hasty(TextStream):
        def push(self, token_ids):
            return self._decode(list(token_ids))

    ids = BYTES.encode("né")[1:]
    assert "".join(streamed(Hasty(BYTES.hf, left_out=BYTES.special_tokens), ids)) != BYTES.decode(
        ids
    )


def test_a_long_output_is_not_decoded_again_and_again():
    longest = 0

    class Counting(TextStream):
        def _decode(self, token_ids):
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super()._decode(token_ids)

    ids = BYTES.encode("abé " * 200)
    stream = Counting(BYTES.hf, left_out=BYTES.special_tokens)
    assert "".join(streamed(stream, ids)) == BYTES.decode(ids)
    assert longest <= 16
    # Nor where a model goes on after its end.
    assert stream.push([tiny.EOS] * 5000) == ""
    assert longest <= 16


# Outputs are decoded after their prompts: the whole text is the oracle.


def ids_of(text: str) -> list[int]:
    return LLAMA.hf.encode(text, add_special_tokens=False)


def decoded(tokenizer, prompt, output, **options):
    """The output's text at once, as a stream, and as pieces, which must agree."""
    text = tokenizer.decode_output(prompt, output, **options)
    assert "".join(streamed(tokenizer.stream(prompt, **options), output)) == text
    pieces = tokenizer.pieces(output, prompt, **{"skip_special_tokens": True, **options})
    assert len(pieces) == len(output)
    assert "".join(pieces) == (text if output else "")
    return text


parts = st.lists(
    st.one_of(
        st.sampled_from(["the", " the", "cat", " ", "  ", "é", "你", "😀", ".", " b"]).map(ids_of),
        st.sampled_from([[1], [2], [3], [LLAMA.hf.convert_tokens_to_ids("▁")]]),
    ),
    max_size=20,
).map(lambda parts: [token for part in parts for token in part])


@given(st.sampled_from(pipelines.KINDS), parts, parts)
def test_an_output_is_what_it_adds_to_its_prompt(kind, prompt, output):
    tokenizer = PIPELINES[kind]
    expected = tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]
    assert decoded(tokenizer, prompt, output) == expected


@pytest.mark.parametrize("kind", pipelines.KINDS)
def test_the_space_of_a_first_word_is_kept(kind):
    tokenizer = PIPELINES[kind]
    the = [tokenizer.hf.convert_tokens_to_ids("▁the")]
    assert decoded(tokenizer, tokenizer.encode("a cat sat on"), the) == " the"
    # After special tokens only, it is the first of the text.
    assert decoded(tokenizer, [1], the) == decoded(tokenizer, [], the) == "the"
    # However many of them are last, the prompt has a text before.
    assert decoded(tokenizer, [*tokenizer.encode("on"), *[3] * 40], the) == " the"


@given(
    st.text("aé你😀 ", min_size=1, max_size=9), st.integers(0, 3), st.text("aé你😀 ", max_size=9)
)
def test_a_character_that_the_prompt_leaves_incomplete_is_the_outputs(text, num_left, more):
    for tokenizer in (BYTES, LLAMA):
        ids = tokenizer.encode(text)[1:]
        after = tokenizer.encode(text + more)[1:][len(ids) :]
        num_moved = min(num_left, len(ids))
        prompt, output = ids[: len(ids) - num_moved], ids[len(ids) - num_moved :] + after
        whole = tokenizer.decode(prompt + output)
        settled = tokenizer.decode(prompt)
        while settled.endswith("\ufffd"):  # the part of a character, or in LLAMA the run of bytes
            prompt, output = prompt[:-1], [prompt[-1], *output]
            settled = tokenizer.decode(prompt)
        cut = [*ids, *after][: len(ids) - num_moved]
        rest = [*ids, *after][len(cut) :]
        assert decoded(tokenizer, cut, rest) == (whole[len(settled) :] if rest else "")
        assert decoded(tokenizer, cut, [*tokenizer.special_tokens]) == ""


@pytest.mark.parametrize("tokenizer", [BYTES, LLAMA])
def test_a_replacement_character_of_the_prompt_stays_there(tokenizer):
    for prompt in ("a\ufffd", "\ufffd", "a" + "\ufffd" * 9, "\ufffdabcdefg"):
        assert decoded(tokenizer, tokenizer.encode(prompt), tokenizer.encode("b")[-1:]) == "b"
    began = [*tokenizer.encode("a\ufffd"), *tokenizer.encode("你")[-3:-1]]
    assert decoded(tokenizer, began, tokenizer.encode("你")[-1:]) == "你"


def test_special_tokens_of_an_output():
    prompt, output = LLAMA.encode("on"), [*ids_of("the"), 2, *ids_of("cat")]
    assert decoded(LLAMA, prompt, output) == " the cat"
    assert decoded(LLAMA, prompt, output, skip_special_tokens=False) == " the</s> cat"


def test_what_is_encoded_after_a_prompt_is_what_was_emitted():
    the = LLAMA.hf.convert_tokens_to_ids("▁the")
    cat = LLAMA.hf.convert_tokens_to_ids("cat")
    prompt = LLAMA.encode("sat on")
    for output in ((the,), (cat,), (cat, the, 2)):
        text = LLAMA.decode_output(prompt, output, skip_special_tokens=False)
        assert LLAMA.encode_output(prompt, text) == output
    assert LLAMA.encode_output([1], "the") == (the,)


def test_docstring_example():
    results = doctest.testmod(jaxspec.models.tokenizer)
    assert results.attempted > 0
    assert results.failed == 0
