"""Sampling parameters of numbers, arrays, sets and generators: the values in them, of Python's own
types, or one of our errors."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec import SamplingParams, seeds
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
NO_NUMBERS = [True, np.bool_(True), np.array([1]), jnp.array([1]), jnp.array(True), 1j, "1", [1]]
NO_NUMBERS += [10**400, -(10**5000), b"1"]
NAN, INF = float("nan"), float("inf")

# What is given for a list, by what it holds.
LISTS = {
    "stop_token_ids": {
        (0, 5): [[0, 5], {0, 5}, np.array([0, 5], np.uint8), jnp.array([0, 5]), range(0, 6, 5),
          [np.int64(0), jnp.array(5)], {0: "a", 5: "b"}.keys(), iter([0, 5])],
        (3,): [np.array([3]), jnp.array([3])],
        (0,): [np.array([0]), jnp.array([0])],  # an array that is false
        (): [None, [], np.array([]), jnp.array([]), iter(())],
    },
    "stop": {
        ("a", "b"): [["a", "b"], {"a", "b"}, np.array(["a", "b"]), np.array(["a", "b"], object),
          [np.str_("a"), np.array("b")], (text for text in "ab")],
        ("ab",): ["ab", np.str_("ab"), np.array("ab")],
    },
    "allowed_token_ids": {(4, 9): [{9, 4}, [4, 9, 9], np.array([9, 4]), iter([9, 4])]},
}  # fmt: skip
REFUSED = {
    "max_tokens": [0, 2**31, 2.5],
    "min_tokens": [-1, 17],
    "temperature": [-0.5, 1e-4, NAN, INF, 1e39, "hot", None],
    "top_k": [-2, 2**40, 0.5],
    "top_p": [0, 1.01, NAN],
    "min_p": [-0.1, 1.1],
    "seed": [-1, 2**63, 1.0],
    "n": [0, 10**9],
    "logprobs": [-1],
    "repetition_penalty": [0, 1e-50],
    "presence_penalty": [NAN, 1e300],
    "frequency_penalty": [-INF],
    "stop": [("a", ""), [3], 3, np.array([1, 2]), np.array(["a", ""]), b"ab", {"a": 1}],
    "stop_token_ids": [3, ("a",), np.array([0.5]), np.array([[1, 2]]), np.array(3), [True], "ab",
      np.array([True]), b"ab", {1: 2}],
    "ignore_eos": [1, "false", None, np.array([True])],
    "logit_bias": [{5: 100.5}, {5: NAN}, {5: "1"}, {5: True}, {5: None}, {True: 1}, {-1: 1},
      {2**40: 1}, {"a": 1}, {"-1": 1}, {"²": 1}, {1.5: 1}, {(1, 2): 1}, {5: 1, "5": 2}, [5, 6],
      [(5, 1, 2)], np.array([[5, 1.0]]), "5", 5, dict.fromkeys(range(301), 1)],
    "allowed_token_ids": [[], [-1], [2**40], [1.5], [True], "12", 5, {5: 1}, range(301)],
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_any_kind(name):
    for expected, forms in LISTS[name].items():
        for given in forms:
            found = getattr(SamplingParams(**{name: given}), name)
            assert tuple(sorted(found)) == expected
            assert {type(entry) for entry in found} <= {int, str}
            json.dumps(found)


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


@pytest.mark.parametrize("name", REFUSED)
def test_other_values_are_refused_in_one_line(name):
    for given in REFUSED[name] + (NO_NUMBERS if name in NUMBERS else []):
        with pytest.raises(SettingError, match=rf"{name} .* was given; it must be ") as raised:
            SamplingParams(**{name: given})
        assert len(str(raised.value)) < 300
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": 17}, "min_tokens 17 was given; it must be from 0 to max_tokens"),
        ({"temperature": -0.5}, "temperature -0.5 was given; it must be 0 (greedy)"),
        ({"temperature": "hot"}, "temperature 'hot' was given; it must be a number"),
        ({"seed": 2**63 - 1, "n": 2, "temperature": 1.0}, "each completion has its own"),
        ({"n": 2}, "n 2 was given at temperature 0"),
        ({"stop": iter(str, 1)}, "stop was given with more than"),
        ({"stop_token_ids": iter(int, 1)}, "stop_token_ids was given with more than"),
    ],
)
def test_what_a_refusal_says(options, message):
    with pytest.raises(SettingError) as raised:
        SamplingParams(**options)
    assert message in str(raised.value)


def test_values_at_the_edges_are_taken():
    for options in (
        {"temperature": 1e-3},
        {"top_k": -1},
        {"top_p": 1},
        {"min_p": 1.0},
        {"seed": 2**63 - 1},
        {"seed": 2**63 - 2, "n": 2, "temperature": 1.0},
        {"min_tokens": 16},
        {"logprobs": 0},
    ):
        SamplingParams(**options)
    full = SamplingParams(logit_bias=dict.fromkeys(range(300), 1), allowed_token_ids=range(300))
    assert full.of_row(prompt_length=1).bias.tokens.tolist() == list(range(300))


@pytest.mark.parametrize(
    "given",
    [
        {5: 1, 3: -2.5},
        {"5": 1, "3": -2.5},
        {np.int64(5): np.float32(1), 3: jnp.array(-2.5)},
        [(3, -2.5), [5, 1.0]],
    ],
)
def test_biases_of_any_mapping(given):
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == ((3, -2.5), (5, 1.0))
    assert params == SamplingParams(logit_bias=params.logit_bias)
    assert hash(params) == hash(SamplingParams(**json.loads(json.dumps(vars(params)))))


def test_no_bias_is_none():
    for nothing in (None, {}, ()):
        assert SamplingParams(logit_bias=nothing, allowed_token_ids=None) == SamplingParams()


def test_a_flag_may_be_a_scalar():
    for flag in (True, np.bool_(True), np.array(True), jnp.array(True)):
        assert SamplingParams(ignore_eos=flag).ignore_eos is True


def test_a_dict_of_fields_may_hold_them_too():
    params = as_sampling_params({"max_tokens": np.int64(3), "stop_token_ids": np.array([0])})
    assert params == SamplingParams(max_tokens=3, stop_token_ids=(0,))


def test_consecutive_seeds():
    """One for each completion, as the command line makes them."""
    params = SamplingParams(temperature=0.5, seed=3, n=2, max_tokens=7)
    made = seeds(params, 3)
    assert [each.seed for each in made] == [3, 5, 7]
    assert {(each.n, each.temperature, each.max_tokens) for each in made} == {(2, 0.5, 7)}
    assert [each.seed for each in seeds({"temperature": 1.0}, 2)] == [0, 1]
    assert seeds(None, 0) == []
    last = 2**63 - 1
    assert [each.seed for each in seeds({"seed": last - 1}, 2)] == [last - 1, last]
    with pytest.raises(
        SettingError, match=rf"{last - 1} was given for 3 .*; give at most {last - 2}"
    ):
        seeds({"seed": last - 1}, 3)
    with pytest.raises(SettingError, match="num_prompts"):
        seeds(params, -1)
