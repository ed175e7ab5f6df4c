"""Other systems' outputs: the file, the verdicts under the target, the test of the distribution."""

import dataclasses
import json
import types

import numpy as np
import pytest
import tiny

from jaxspec.audit import chi_square as distributions
from jaxspec.audit.chi_square import combined_p_value, pooled, test_distribution
from jaxspec.audit.external import audit_outputs
from jaxspec.audit.judge import Finding
from jaxspec.audit.outputs import canonical_dtype, read_outputs
from jaxspec.audit.scoring import Scorer
from jaxspec.engine.engine import Engine
from jaxspec.errors import PromptError, SettingError
from jaxspec.requests.sampling_params import SamplingParams

test_distribution.__test__ = False  # a function of the package, not a test

HEADER = {"engine": "other", "version": "1.2", "dtype": "float32", "max_tokens": 20}
PROMPTS = ["Once upon a time", "def f(x):", "The end"]


@pytest.fixture(scope="module")
def target():
    return tiny.model(text=tiny.tokenizer())


@pytest.fixture(scope="module")
def engine(target):
    return Engine(target, batch_size=8, max_length=128)


@pytest.fixture(scope="module")
def greedy(engine):
    return engine.generate(PROMPTS, SamplingParams(max_tokens=20))


@pytest.fixture(scope="module")
def scorer(target):
    """One for all audits in fp32: its programs are compiled once."""
    return Scorer(target, max_length=128)


@pytest.fixture
def audit_of(target, write, scorer):
    """The audit of a file of these lines, the header first."""

    def audit(*lines):
        return audit_outputs(target, read_outputs(write(*lines), target), scorer=scorer)

    return audit


@pytest.fixture
def write(tmp_path):
    def to_file(*lines):
        path = tmp_path / "outputs.jsonl"
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
        return path

    return to_file


def line(completion, **fields):
    return {
        "prompt_token_ids": list(completion.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        **fields,
    }


def test_the_targets_own_output_passes_as_ids_with_text_and_as_text(audit_of, greedy):
    audit = audit_of(HEADER, *map(line, greedy))
    assert audit.holds
    assert (audit.exact, audit.exact_up_to_ties, audit.prefix_match) == (1, 1, 1)
    assert audit.file.label == "other 1.2 float32"
    assert "3 of 3 greedy outputs" in audit.sentence
    with_text = [line(one, text=one.text) for one in greedy]
    assert audit_of(HEADER, *with_text).holds
    assert json.loads(json.dumps(audit.to_json()))["holds"] is True


def test_biases_of_a_file_are_judged_under(audit_of, engine, write, target):
    allowed = list(range(40, 90))
    own = {"allowed_token_ids": allowed, "logit_bias": {"41": -2.5, "50": 3}}
    made = engine.generate(PROMPTS, SamplingParams(max_tokens=20, **own))
    lines = [line(one) for one in made]
    # As in JSON by hand, and as jaxspec and vLLM write what is off.
    assert audit_of(HEADER | own, *lines).holds
    pairs = own | {"logit_bias": [[41, -2.5], [50, 3.0]]}
    assert audit_of(HEADER, *(one | {"sampling_params": pairs} for one in lines)).holds
    off = {"allowed_token_ids": None, "logit_bias": None}
    assert not audit_of(HEADER | off, *lines).holds
    lines[0]["token_ids"][3] = 7
    audit = audit_of(HEADER | own, *lines)
    assert audit.to_json()["divergences"][0]["finding"] == Finding.FAULT.value
    with pytest.raises(SettingError, match="Line 2 of the outputs file has the allowed token 999"):
        read_outputs(write(HEADER, lines[1] | {"allowed_token_ids": [999]}), target)


def test_text_is_read_by_the_targets_tokenizer(write, target):
    path = write(HEADER, {"prompt": "Once", "text": " upon"})
    file = read_outputs(path, target)
    assert file.is_text
    tokenizer = target.tokenizer
    assert list(file.outputs[0].prompt_token_ids) == tokenizer.encode("Once")
    assert list(file.outputs[0].token_ids) == tokenizer.encode(" upon")[1:]
    assert audit_outputs(target, file).to_json()["ids_from_text"] is True


def test_a_changed_token_is_named_with_its_line(audit_of, greedy):
    lines = [line(one) for one in greedy]
    lines[1]["token_ids"][6] = (lines[1]["token_ids"][6] + 3) % tiny.VOCAB
    audit = audit_of(HEADER, *lines)
    assert not audit.holds
    assert (audit.exact, audit.exact_up_to_ties) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert audit.prefix_match == pytest.approx((1 + 6 / 20 + 1) / 3)
    first = audit.to_json()["divergences"][0]
    assert (first["line"], first["index"], first["finding"]) == (3, 6, Finding.FAULT.value)
    assert first["margin"] > first["bound"]


def test_every_token_is_checked_not_only_the_first(audit_of, greedy):
    lines = [line(greedy[0])]
    for index in (4, 15):
        lines[0]["token_ids"][index] = (lines[0]["token_ids"][index] + 3) % tiny.VOCAB
    audit = audit_of(HEADER, *lines)
    assert {4, 15} <= {d.index for d in audit.judged[0].divergences}


def test_tokens_behind_the_stop_token_are_cut_and_counted(write, target, greedy):
    one = line(greedy[0])
    one["token_ids"] = [*one["token_ids"][:5], tiny.EOS, 7, 7]
    file = read_outputs(write(HEADER, one), target)
    assert len(file.outputs[0].token_ids) == 6
    assert file.outputs[0].after_stop == (7, 7)
    one["sampling_params"] = {"ignore_eos": True}
    assert len(read_outputs(write(HEADER, one), target).outputs[0].token_ids) == 8


def test_their_dtype_widens_the_bound_and_nothing_else(write, target, greedy):
    file = read_outputs(write(HEADER, *map(line, greedy)), target)
    changed = dataclasses.replace(file.outputs[0], token_ids=(5, *file.outputs[0].token_ids[1:]))
    file = dataclasses.replace(file, outputs=(changed,))
    in_fp32 = audit_outputs(target, file).judged[0].divergences[0]
    coarse = Scorer(target, max_length=128, dtype="bfloat16", reference_weights="float32")
    in_bf16 = audit_outputs(target, file, scorer=coarse).judged[0].divergences[0]
    assert in_bf16.margin == in_fp32.margin
    assert in_bf16.bound > 10 * in_fp32.bound


def test_jaxspecs_own_seeds_are_checked_draw_by_draw(audit_of, engine):
    params = SamplingParams(max_tokens=12, temperature=1.0)
    done = engine.generate(PROMPTS, [dataclasses.replace(params, seed=i) for i in (4, 5, 6)])
    drawn = {"temperature": 1.0, "max_tokens": 12}
    for name, other, holds in (("jaxspec", 0, True), ("jaxspec", 1, False), ("other", 1, True)):
        lines = [line(one, seed=one.seed + other, sampling_params=drawn) for one in done]
        audit = audit_of({**HEADER, "engine": name}, *lines)
        assert (audit.samples.num_excluded == 0) is holds
        found = {d.finding for own in audit.judged for d in own.divergences}
        assert found == (set() if holds else {Finding.SAMPLING})


# Where the parameters stand.


@pytest.mark.parametrize("place", ["line", "sampling_params", "header", "header's sampling_params"])
def test_parameters_are_read_wherever_they_stand(write, target, engine, scorer, place):
    """A sampled output is not judged as a greedy one because of where it says so."""
    drawn = {"temperature": 1.0, "top_k": 12, "max_tokens": 12}
    done = engine.generate(PROMPTS, SamplingParams(**drawn, seed=4))
    within = {"sampling_params": drawn} if place.endswith("sampling_params") else drawn
    header = {name: x for name, x in HEADER.items() if name != "max_tokens"}
    of_header, of_line = (within, {}) if place.startswith("header") else ({}, within)
    lines = [line(one, seed=4, **of_line) for one in done]
    file = read_outputs(write({**header, **of_header}, *lines), target)
    assert [o.params for o in file.outputs] == [SamplingParams(**drawn, seed=4)] * len(done)
    audit = audit_outputs(target, file, scorer=scorer)
    assert audit.holds
    assert (len(audit.greedy), len(audit.sampled)) == (0, len(done))


def test_lines_that_jaxspec_writes_are_read(audit_of, greedy):
    header = {"engine": "jaxspec", "max_tokens": 20}
    lines = [one.to_json() for one in greedy]
    assert audit_of(header, *lines).holds


# Where outputs end.


def ended(audit_of, one, *, header=HEADER, **fields):
    """The audit of one output."""
    return audit_of(header, {**line(one), **fields})


@pytest.mark.parametrize("length", [0, 1, 10, 19])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_output_that_is_cut_is_found(audit_of, engine, length, temperature):
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=3, ignore_eos=True)
    one = engine.generate(PROMPTS[:1], params)[0]
    said = {"temperature": temperature, "ignore_eos": True}
    assert ended(audit_of, one, **said).holds
    audit = ended(audit_of, one, token_ids=list(one.token_ids[:length]), **said)
    assert not audit.holds
    assert "1 without a stop token before max_tokens" in audit.sentence
    found = audit.to_json()["divergences"][-1]
    assert (found["index"], found["token"]) == (length, -1)
    if temperature == 0:
        assert found["expected"] == one.token_ids[length]
        assert audit.exact == 0


def test_an_output_longer_than_its_limit_is_found(audit_of, greedy):
    audit = ended(audit_of, greedy[0], header={**HEADER, "max_tokens": 15})
    assert not audit.holds
    found = audit.to_json()["divergences"][-1]
    assert (found["index"], found["token"], found["expected"]) == (15, greedy[0].token_ids[15], -1)


def test_an_output_may_end_with_a_stop_token_or_a_stop_string(audit_of, target, greedy):
    one = greedy[0]
    stop = one.token_ids[9]
    ids = list(one.token_ids[: one.token_ids.index(stop) + 1])
    assert not ended(audit_of, one, token_ids=ids).holds
    assert ended(audit_of, one, token_ids=ids, stop_token_ids=[stop]).holds
    text = target.tokenizer.decode(ids)
    assert ended(audit_of, one, token_ids=ids, stop=[text[-1]]).holds
    assert not ended(audit_of, one, token_ids=ids, stop=["never said"]).holds


def test_a_file_without_its_stop_tokens_is_told_so(audit_of, greedy):
    one, stop = greedy[0], greedy[0].token_ids[9]
    ids = list(one.token_ids[: one.token_ids.index(stop)])
    audit = ended(audit_of, one, token_ids=ids, stop_token_ids=[stop])
    assert not audit.holds
    assert "if the engine emitted it, write it into the file" in audit.sentence


def test_padding_after_a_stop_token_passes_and_other_tokens_do_not(audit_of, greedy):
    one = greedy[0]
    stop = one.token_ids[9]
    ids = list(one.token_ids[: one.token_ids.index(stop) + 1])
    said = {"stop_token_ids": [stop]}
    for after, holds in (([tiny.EOS] * 3, True), ([7, 8], False), ([7, 7], False)):
        audit = ended(audit_of, one, token_ids=ids + after, **said)
        assert audit.holds is holds
        assert audit.to_json()["num_too_long"] == (0 if holds else 1)


def test_the_ends_of_texts_are_not_judged_and_the_report_says_so(audit_of):
    audit = audit_of(HEADER, {"prompt": "a", "text": "b"})
    assert audit.ends == {}
    assert "max_tokens" not in audit.promise
    assert audit.to_json()["are_ends_judged"] is False


# The distribution of samples.

NUM_SAMPLES = 200


def samples(engine, *, temperature):
    params = SamplingParams(max_tokens=4, temperature=temperature, top_k=12, n=NUM_SAMPLES, seed=3)
    return engine.generate(PROMPTS[:1], params)


@pytest.mark.parametrize(("drawn_at", "holds"), [(1.0, True), (3.0, False)])
def test_samples_are_tested_against_the_distribution(audit_of, engine, drawn_at, holds):
    said = {"temperature": 1.0, "top_k": 12, "max_tokens": 4}
    done = samples(engine, temperature=drawn_at)
    audit = audit_of({**HEADER, **said}, *map(line, done))
    assert list(audit.distribution_tests) == [2]
    test = audit.distribution_tests[2]
    assert test.num_samples == NUM_SAMPLES
    assert test.num_groups > 1
    assert (audit.distribution_p_value >= distributions.ALPHA) is holds
    assert audit.holds is holds
    assert "chi-square" in audit.sentence


def test_a_token_that_the_filters_exclude_breaks_it_and_few_samples_are_not_tested(scorer, engine):
    done = samples(engine, temperature=1.0)

    def found(num_samples, **said):
        return test_distribution(
            scorer,
            prompt_ids=done[0].prompt_token_ids,
            samples=[one.token_ids for one in done[:num_samples]],
            params=SamplingParams(temperature=1.0, **said),
        )

    assert found(NUM_SAMPLES, top_k=2).p_value == 0
    assert found(distributions.MIN_SAMPLES - 1) is None


def test_greedy_outputs_that_are_said_to_be_sampled_are_found(audit_of, greedy):
    """They are no sample of any temperature, however likely each of their tokens is."""
    audit = audit_of({**HEADER, "temperature": 1.0}, *map(line, greedy))
    assert not audit.holds
    assert audit.samples.is_unlikely_together or audit.samples.num_unlikely


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        ({"temperature": 0.5}, {"temperature": 1.0}),
        ({"temperature": 2.0}, {"temperature": 1.0}),
        ({"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0}),
        ({"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}),
    ],
    ids=["colder", "hotter", "top-p not said", "top-p not used"],
)
def test_outputs_of_other_parameters_are_found_together(audit_of, engine, drawn, said):
    params = [SamplingParams(max_tokens=20, seed=i, **drawn) for i in range(24)]
    done = engine.generate(PROMPTS * 8, params)

    def audit(said):
        lines = [line(one, seed=one.seed) for one in done]
        return audit_of({**HEADER, **said}, *lines)

    assert audit(drawn).holds
    assert not audit(said).holds


def test_the_report_says_what_so_many_tokens_can_show(audit_of, engine):
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1)
    done = engine.generate(PROMPTS[:1], params)
    document = audit_of({**HEADER, "temperature": 1.0}, *map(line, done)).to_json()
    powers = {power["alternative"]: power for power in document["sampled"]["power"]}
    assert {power["num_tokens"] for power in powers.values()} == {20}
    needed = {name: power["tokens_needed"] for name, power in powers.items()}
    assert needed["greedy"] < needed["temperature x 0.5"] < needed["temperature x 0.8"]
    assert powers["temperature x 0.8"]["chance"] < powers["greedy"]["chance"]


def test_outputs_that_share_a_seed_do_not_add_up(audit_of, engine):
    """The same output twenty times is one draw."""
    params = SamplingParams(max_tokens=3, temperature=1.0, seed=1)
    one = engine.generate(PROMPTS[:1], params)[0]

    def audit(seeds):
        said = {**HEADER, "temperature": 1.0, "max_tokens": 3}
        lines = [line(one, seed=seed) for seed in seeds]
        return audit_of(said, *lines)

    assert audit([5] * 40).holds
    assert audit([5] * 40).distribution_tests == {}
    assert not audit(range(40)).holds


def test_rare_tokens_are_pooled():
    distribution = np.array([0.5, 0.4, 0.06, 0.03, 0.01])
    observed, expected = pooled(np.array([50, 40, 6, 0, 4]), distribution * 100)
    assert expected.tolist() == pytest.approx([50, 40, 10])  # 6 alone, joined by the rare 4
    assert observed.tolist() == [50, 40, 10]
    observed, expected = pooled(np.array([20, 0, 0, 0, 5]), distribution * 25)
    assert expected.tolist() == pytest.approx([12.5, 12.5])  # the rare ones are too few for a cell
    assert observed.tolist() == [20, 5]


def test_p_values_of_several_prompts():
    def of(*p_values):
        return combined_p_value([types.SimpleNamespace(p_value=p) for p in p_values])

    assert of(0.1, 0.01) == pytest.approx(1 - 0.99**2)
    assert (of(0.0, 1.0), of(1.0)) == (0, 1)
    assert np.isnan(of())


# What is refused, each in one sentence.

GOOD = {"prompt_token_ids": [0, 5, 6], "token_ids": [7, 8]}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "is empty; its first line is a header"),
        ([HEADER], "holds a header and no output"),
        ([GOOD, GOOD], "has no header"),
        ([{"version": "1"}, GOOD], "has no header"),
        ([HEADER, GOOD, "{"], "Line 3 of the outputs file is not JSON"),
        ([HEADER, "[1, 2]"], "Line 2 of the outputs file is JSON, but not an object"),
        ([HEADER, {"prompt_token_ids": [5]}], "Line 2 .* has neither token_ids nor text"),
        ([HEADER, {"token_ids": [5]}], "Line 2 .* has neither prompt_token_ids nor prompt"),
        ([HEADER, GOOD, {"prompt": "a", "text": "b"}], "is ragged: line 3 has prompt, text"),
        ([HEADER, {**GOOD, "token_ids": [[7], [8]]}], "not one list of integers"),
        ([HEADER, {**GOOD, "token_ids": [7, 1.5]}], "not one list of integers"),
        ([HEADER, {"prompt": "a", "text": ""}], "Line 2 .* has an empty text"),
        ([HEADER, {**GOOD, "prompt_token_ids": []}], "Line 2 .* has an empty prompt"),
        ([HEADER, {**GOOD, "token_ids": [5, 258]}], "hold token ids such as 258.* ends at 257"),
        ([HEADER, {**GOOD, "prompt_token_ids": [-1]}], "Line 2 .* id -1 in prompt_token_ids"),
        ([HEADER, {**GOOD, "text": "something else"}], "of another tokenizer"),
        ([HEADER, {"prompt": "a", "text": 5}], "has a text that is not text"),
        ([{**HEADER, "sampling_params": 3}, GOOD], "The header has sampling_params"),
        ([{"engine": "other"}, GOOD], "Line 2 .* without a stop token and gives no max_tokens"),
    ],
)
def test_malformed_files(write, target, lines, said):
    with pytest.raises(PromptError, match=said) as raised:
        read_outputs(write(*lines), target)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sampling_params": {"beams": 3}}, "Line 2 .* sampling parameter 'beams'"),
        ({"temprature": 1.0}, "Line 2 .* has the field 'temprature', which is not known"),
        ({"temperature": 1, "sampling_params": {"temperature": 2}}, "gives temperature twice, 1 "),
        ({"seed": 4}, "Line 2 .* has seed 4 and no temperature"),
        ({"top_p": 0.9}, "Line 2 .* has top_p 0.9 and no temperature"),
        ({"sampling_params": {"temperature": 1, "top_p": 2}}, "Line 2 .*top_p 2 was given"),
        ({"sampling_params": {"temperature": "hot"}}, "Line 2 .*temperature 'hot' was given"),
        ({"seed": -4, "sampling_params": {"temperature": 1}}, "Line 2 .*seed -4 was given"),
    ],
)
def test_sampling_parameters_that_cannot_be(write, target, fields, said):
    with pytest.raises(SettingError, match=said):
        read_outputs(write(HEADER, {**GOOD, **fields}), target)


def test_unknown_fields_of_the_header_are_refused(write, target):
    with pytest.raises(SettingError, match="The header has the field 'beams'"):
        read_outputs(write({**HEADER, "beams": 2}, GOOD), target)


def test_an_outputs_file_of_another_tokenizer(write, greedy):
    other = tiny.model(text=tiny.tokenizer(is_reversed=True))
    lines = [line(one, text=one.text) for one in greedy]
    with pytest.raises(PromptError, match="is of another tokenizer, so name the model"):
        read_outputs(write(HEADER, *lines), other)


def test_a_file_that_is_not_there_or_not_text(tmp_path, target):
    with pytest.raises(PromptError, match="cannot be read"):
        read_outputs(tmp_path / "none.jsonl", target)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="not UTF-8"):
        read_outputs(tmp_path / "binary", target)


def test_text_needs_a_tokenizer(write):
    with pytest.raises(PromptError, match="has no tokenizer; give prompt_token_ids and"):
        read_outputs(write(HEADER, {"prompt": "a", "text": "b"}), tiny.model())


def test_dtypes_by_any_usual_name():
    assert canonical_dtype("bf16", where="x") == canonical_dtype("torch.bfloat16", where="x")
    for wrong in ("int4", 16):
        with pytest.raises(SettingError, match="The header names the dtype"):
            canonical_dtype(wrong, where="The header")
