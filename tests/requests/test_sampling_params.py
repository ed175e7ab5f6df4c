"""Sampling parameters from arrays, sets, generators and scalars: the values in them, of Python's
own types, or one of our errors."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.errors import SettingError
from jaxspec.requests.sampling_params import as_sampling_params

NUMBERS = {
    "max_tokens": 7,
    "min_tokens": 3,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": 9,
    "n": 2,
    "logprobs": 1,
    "repetition_penalty": 2,
    "presence_penalty": 1,
    "frequency_penalty": -1,
}


@pytest.mark.parametrize(
    "given",
    [
        [0, 5],
        (0, 5),
        {0, 5},
        np.array([0, 5]),
        np.array([0, 5], np.uint8),
        jnp.array([0, 5]),
        [np.int64(0), jnp.array(5)],
        range(0, 6, 5),
        {0: "a", 5: "b"}.keys(),
        iter([0, 5]),
    ],
    ids=lambda given: type(given).__name__,
)
def test_stop_tokens_of_any_list(given):
    params = SamplingParams(stop_token_ids=given)
    assert sorted(params.stop_token_ids) == [0, 5]
    assert all(type(token) is int for token in params.stop_token_ids)
    json.dumps(params.stop_token_ids)


@pytest.mark.parametrize("token", [0, 3])
@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_an_array_of_one_stop_token_is_kept(array, token):
    assert SamplingParams(stop_token_ids=array([token])).stop_token_ids == (token,)


@pytest.mark.parametrize("empty", [None, [], (), set(), np.array([]), jnp.array([]), iter(())])
def test_nothing_is_no_stop(empty):
    assert SamplingParams(stop_token_ids=empty).stop_token_ids == ()


@pytest.mark.parametrize(
    "given",
    [
        ["a", "b"],
        ("a", "b"),
        {"a", "b"},
        np.array(["a", "b"]),
        np.array(["a", "b"], object),
        [np.str_("a"), np.array("b")],
        (text for text in "ab"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_stop_strings_of_any_list(given):
    assert sorted(SamplingParams(stop=given).stop) == ["a", "b"]


@pytest.mark.parametrize("text", ["ab", np.str_("ab"), np.array("ab")])
def test_one_stop_string(text):
    assert SamplingParams(stop=text).stop == ("ab",)


@pytest.mark.parametrize("name", NUMBERS)
def test_scalars_count_as_numbers(name):
    right = {"temperature": 1.0, "max_tokens": 7}
    expected = SamplingParams(**(right | {name: NUMBERS[name]}))
    of_floats = (np.float32, np.array, jnp.float32, jnp.bfloat16, ml_dtypes.bfloat16)
    of_whole = (np.int64, np.uint8, np.array, jnp.array)
    is_whole = SamplingParams.__dataclass_fields__[name].type.startswith("int")
    for make in of_whole if is_whole else of_floats:
        params = SamplingParams(**(right | {name: make(NUMBERS[name])}))
        assert params == expected
        assert hash(params) == hash(expected)
        assert type(getattr(params, name)) is (int if is_whole else float)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "given",
    [
        True,
        False,
        np.bool_(True),
        np.array([1]),
        np.array([1, 2]),
        jnp.array([1]),
        jnp.array(True),
        10**400,
        -(10**5000),
        1j,
        b"1",
        "1",
        [1],
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_number_is_refused_in_one_line(name, given):
    with pytest.raises(SettingError, match=f"^{name} .* was given; it must be ") as raised:
        SamplingParams(**{name: given})
    assert len(str(raised.value)) < 300
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("stop_token_ids", np.array([0.5])),
        ("stop_token_ids", np.array([[1, 2]])),
        ("stop_token_ids", np.array(3)),
        ("stop_token_ids", jnp.array(3)),
        ("stop_token_ids", [True]),
        ("stop_token_ids", np.array([True])),
        ("stop_token_ids", b"ab"),
        ("stop_token_ids", "ab"),
        ("stop_token_ids", {1: 2}),
        ("stop_token_ids", iter(int, 1)),
        ("stop", np.array([1, 2])),
        ("stop", np.array(["a", ""])),
        ("stop", jnp.array([1])),
        ("stop", b"ab"),
        ("stop", {"a": 1}),
        ("stop", iter(str, 1)),
        ("ignore_eos", 1),
        ("ignore_eos", "false"),
        ("ignore_eos", None),
        ("ignore_eos", np.array([True])),
    ],
)
def test_lists_and_flags_of_other_things_are_refused(name, given):
    with pytest.raises(SettingError, match=f"^{name} .* given"):
        SamplingParams(**{name: given})


@pytest.mark.parametrize(
    "given",
    [
        {5: 1, 3: -2.5},
        {"5": 1, "3": -2.5},
        {np.int64(5): np.float32(1), 3: jnp.array(-2.5)},
        [(3, -2.5), [5, 1.0]],
        json.loads('{"5": 1, "3": -2.5}'),
    ],
)
def test_biases_of_any_mapping(given):
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == ((3, -2.5), (5, 1.0))
    assert params == SamplingParams(logit_bias=params.logit_bias)
    assert hash(params) == hash(SamplingParams(**json.loads(json.dumps(vars(params)))))


@pytest.mark.parametrize("given", [{9, 4}, [4, 9, 9], np.array([9, 4]), iter([9, 4])])
def test_allowed_tokens_of_any_list(given):
    assert SamplingParams(allowed_token_ids=given).allowed_token_ids == (4, 9)


def test_no_bias_is_none():
    for nothing in (None, {}, ()):
        assert SamplingParams(logit_bias=nothing, allowed_token_ids=None) == SamplingParams()


def test_at_most_300_biases_and_allowed_tokens():
    full = SamplingParams(logit_bias=dict.fromkeys(range(300), 1), allowed_token_ids=range(300))
    assert full.of_row(prompt_length=1).bias.tokens.tolist() == list(range(300))
    with pytest.raises(SettingError, match="must be a dict of at most 300 token ids"):
        SamplingParams(logit_bias=dict.fromkeys(range(301), 1))
    with pytest.raises(SettingError, match="must be from 1 to 300 token ids"):
        SamplingParams(allowed_token_ids=range(301))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {5: float("-inf")}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {5: True}),
        ("logit_bias", {5: None}),
        ("logit_bias", {True: 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {2**40: 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {1.5: 1}),
        ("logit_bias", {(1, 2): 1}),
        ("logit_bias", {5: 1, "5": 2}),
        ("logit_bias", [5, 6]),
        ("logit_bias", [(5, 1, 2)]),
        ("logit_bias", np.array([[5, 1.0]])),
        ("logit_bias", "5"),
        ("logit_bias", 5),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [2**40]),
        ("allowed_token_ids", [1.5]),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", "12"),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", {5: 1}),
    ],
)
def test_other_biases_and_allowed_tokens_are_refused(name, given):
    with pytest.raises(SettingError, match=rf"{name} .* was given; it must be ") as raised:
        SamplingParams(**{name: given})
    assert "\n" not in str(raised.value)


def test_a_flag_may_be_a_scalar():
    for flag in (True, np.bool_(True), np.array(True), jnp.array(True)):
        assert SamplingParams(ignore_eos=flag).ignore_eos is True


def test_a_dict_of_fields_may_hold_them_too():
    params = as_sampling_params({"max_tokens": np.int64(3), "stop_token_ids": np.array([0])})
    assert params == SamplingParams(max_tokens=3, stop_token_ids=(0,))
