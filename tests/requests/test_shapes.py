"""Shapes of prompts: one of a kind counts as a list of one, the rest is refused in a sentence."""

from __future__ import annotations

import array
import collections
import types

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tokenizers
import transformers

from jaxspec.errors import PromptError, SettingError
from jaxspec.requests.requests import make_request, make_requests, params_of_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.requests.shapes import as_prompt, as_prompts

MODEL = tiny.model(text=tiny.tokenizer())
HELLO = {"role": "user", "content": "Hello"}
BYE = {"role": "assistant", "content": "Bye"}
TORCH = pytest.importorskip("torch")


def tokenized(*texts, **options):
    """What a tokenizer of transformers returns."""
    hf = tiny.tokenizer().hf
    hf.pad_token = "</s>"
    return hf(list(texts) if len(texts) > 1 else texts[0], **options)


# What was given, and the prompts that it is.
ONE = {
    "text": ("ab", "ab"),
    "ids": ([5, 6], [5, 6]),
    "a range": (range(5, 7), [5, 6]),
    "a deque": (collections.deque([5, 6]), [5, 6]),
    "array.array": (array.array("i", [5, 6]), [5, 6]),
    "NumPy ids": (np.array([5, 6], np.uint16), [5, 6]),
    "JAX ids": (jnp.array([5, 6]), [5, 6]),
    "PyTorch ids": (TORCH.tensor([5, 6]), [5, 6]),
    "JAX scalars": (list(jnp.array([5, 6])), [5, 6]),
    "PyTorch scalars": (list(TORCH.tensor([5, 6])), [5, 6]),
    "a batch of one": (np.array([[5, 6]]), [5, 6]),
    "a chat": ([HELLO, BYE], [HELLO, BYE]),
    "messages that are no dicts": ([types.MappingProxyType(HELLO)], [HELLO]),
    "a dict of text": ({"prompt": "ab"}, "ab"),
    "a dict of ids": ({"prompt_token_ids": np.array([5, 6])}, [5, 6]),
    "a dict of messages": ({"messages": [HELLO]}, [HELLO]),
    "parts of text": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}],
        [{"role": "user", "content": "a\nb"}],
    ),
    "a tokenizer's output": (tokenized("ab"), as_prompt(tokenized("ab")["input_ids"], "it")),
    "the same in NumPy": (tokenized("ab", return_tensors="np"), tokenized("ab")["input_ids"]),
    "the same in PyTorch": (tokenized("ab", return_tensors="pt"), tokenized("ab")["input_ids"]),
    "a padded one": (
        {"input_ids": [1, 1, 5, 6], "attention_mask": [0, 0, 1, 1]},
        [5, 6],
    ),
}


def plain(prompts):
    return [p if isinstance(p, str) else [x if isinstance(x, int) else dict(x) for x in p]
            for p in prompts]  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_one_prompt(name):
    given, expected = ONE[name]
    assert plain([as_prompt(given, "it")]) == [expected]
    assert plain(as_prompts(given)) == [expected]
    if name != "a batch of one":
        assert plain(as_prompts([given, "x"])) == [expected, "x"]
    ids = as_prompt(given, "it")
    assert isinstance(ids, str) or all(type(x) is int or isinstance(x, dict) or x for x in ids)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        (["ab"], ["ab"]),
        (np.array(["ab", "c"]), ["ab", "c"]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["ab", [5], [HELLO]], ["ab", [5], [HELLO]]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        (TORCH.tensor([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        (np.array([[5], [6, 7]], object), [[5], [6, 7]]),
        ([np.array([5, 6]), jnp.array([7])], [[5, 6], [7]]),
        ([{"prompt": "a"}, {"prompt_token_ids": [5]}], ["a", [5]]),
        ({"input_ids": [[5, 6], [7]]}, [[5, 6], [7]]),
        ({"input_ids": np.array([[5, 6], [7, 1]]), "attention_mask": [[1, 1], [1, 0]]},
         [[5, 6], [7]]),
        ([{"input_ids": [5]}, {"input_ids": [[6]]}], [[5], [6]]),
    ],
)  # fmt: skip
def test_lists_of_prompts(given, expected):
    assert plain(as_prompts(given)) == expected


def test_a_tokenizers_padding_is_left_out():
    both = [tokenized(text)["input_ids"] for text in ("ab", "c")]
    for kind in (None, "np", "pt"):
        assert as_prompts(tokenized("ab", "c", padding=True, return_tensors=kind)) == both


class Unreadable:
    ndim = 1

    def tolist(self):
        raise RuntimeError("deleted")


# What was given as one prompt, and words of the sentence.
REFUSED = {
    "None": (None, "is None; give text"),
    "a number": (5, "of type int"),
    "bytes": (b"ab", "bytes, which are decoded with .decode()"),
    "a memoryview": (memoryview(b"ab"), "bytes"),
    "a generator": ((x for x in "ab"), "a generator, which list(...) makes a list"),
    "a set": ({5, 6}, "of type set"),
    "no text": ("", "is empty; give at least one token"),
    "no ids": ([], "is empty"),
    "a scalar array": (np.array(5), "of type int"),
    "floats": ([5.0, 6.0], "not of token ids"),
    "bools": ([True, False], "not of token ids"),
    "bools in arrays": (list(TORCH.tensor([True])), "not of token ids"),
    "nested ids": ([[5, 6]], "not of token ids"),
    "several rows": (np.array([[5], [6]]), "has 2 rows of token ids, and one is expected"),
    "ids and words": ([5, "a"], "not of token ids"),
    "Nones": ([None], "not of token ids"),
    "an unreadable array": (Unreadable(), "cannot be read (RuntimeError)"),
    "an Encoding": (tiny.tokenizer().hf.backend_tokenizer.encode("a"), "of type Encoding"),
    "one message": (HELLO, "put one message in brackets, [message]"),
    "an empty dict": ({}, "is a dict with nothing; give one of 'prompt'"),
    "another dict": ({"text": "a"}, "is a dict with 'text'"),
    "two prompts": ({"prompt": "a", "prompt_token_ids": [5]}, "is a dict with 'prompt', 'prompt_"),
    "an image": ({"prompt": "a", "multi_modal_data": {}}, "'multi_modal_data', which is not read"),
    "a dict without text": ({"prompt": [5]}, "has a 'prompt' of type list; give text there"),
    "ids that are text": ({"prompt_token_ids": "5"}, "give a list of token ids there"),
    "a mask of another length": (
        {"input_ids": [5, 6], "attention_mask": [1]},
        "do not fit their 'attention_mask'",
    ),
    "no role": ([{"content": "a"}], "Message 0 of it has no 'role'"),
    "a role of None": ([HELLO, {"role": None, "content": "a"}], "Message 1 of it has no 'role'"),
    "content of None": ([{"role": "user", "content": None}], "no 'content' that is text"),
    "a picture": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}],
        "no 'content' that is text",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_prompts(name):
    given, words = REFUSED[name]

    def refused(call):
        with pytest.raises(PromptError) as raised:
            call()
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)
        assert str(raised.value).endswith(".")

    refused(lambda: as_prompt(given, "it"))
    if not hasattr(given, "__next__"):
        refused(lambda: make_request(given, None, MODEL, longest=9, request_id="x", name="it"))


@pytest.mark.parametrize(
    "given", [None, 5, b"ab", (x for x in "ab"), {5}, {}, HELLO, {"input_ids": None}, object()]
)
def test_refused_lists(given):
    with pytest.raises(PromptError, match=r"^(The prompts|Prompt 0) ") as raised:
        make_requests(given, None, MODEL, longest=9)
    assert "\n" not in str(raised.value)


def test_nested_lists_are_refused_by_number():
    with pytest.raises(PromptError, match=r"^Prompt 1 is a list, but not of token ids"):
        as_prompts(["a", [[5]]])
    with pytest.raises(PromptError, match=r"^Message 0 of prompt 1 has no 'role'"):
        as_prompts(["a", [{"content": "b"}]])


def test_a_message_that_calls_a_tool_needs_no_content():
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert as_prompt([HELLO, called], "it") == [HELLO, called]


def test_ids_beyond_all_bounds():
    for token in (10**20, -(10**5000)):
        with pytest.raises(PromptError, match="holds the token id"):
            make_requests([[token]], None, MODEL, longest=9)


def test_refused_params():
    for params in ("greedy", 5, iter([]), {1}, np.array([1]), [None, "x"]):
        with pytest.raises(SettingError, match="Sampling parameters of type"):
            params_of_prompts(params, 2)


def test_one_text_may_have_a_list_of_one():
    params = SamplingParams(max_tokens=3)
    for given in ("ab", [5], [HELLO]):
        [one] = make_requests(given, [params], MODEL, longest=99)
        assert one.params == params


def test_what_a_chat_template_returns():
    chat = tiny.tokenizer().hf.apply_chat_template([HELLO], add_generation_prompt=True)
    assert isinstance(chat, transformers.BatchEncoding)
    [request] = make_requests(chat, None, MODEL, longest=99)
    [same] = make_requests([HELLO], None, MODEL, longest=99)
    assert request.prompt_token_ids == same.prompt_token_ids
    assert isinstance(tiny.tokenizer().hf.backend_tokenizer, tokenizers.Tokenizer)
