"""Several files of outputs: each under the target, and compared with one of them."""

import dataclasses
import json

import pytest
import tiny

from jaxspec.audit.external import audit_outputs
from jaxspec.audit.files import audit_files, compare_outputs
from jaxspec.audit.judge import Finding
from jaxspec.audit.outputs import parse_outputs, read_outputs
from jaxspec.audit.scoring import Scorer
from jaxspec.engine.engine import Engine
from jaxspec.errors import PromptError, SettingError
from jaxspec.requests.sampling_params import SamplingParams

HEADER = {"engine": "other", "dtype": "float32", "max_tokens": 20, "ignore_eos": True}
PROMPTS = ["Once upon a time", "def f(x):", "The end", "Once more"]


@pytest.fixture(scope="module")
def target():
    return tiny.model(text=tiny.tokenizer())


@pytest.fixture(scope="module")
def scorer(target):
    return Scorer(target, max_length=128)


@pytest.fixture(scope="module")
def lines(target):
    engine = Engine(target, batch_size=4, max_length=128)
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
    return [
        {"prompt_token_ids": list(one.prompt_token_ids), "token_ids": list(one.token_ids)}
        for one in done
    ]


def text(header, lines):
    return "\n".join(map(json.dumps, (header, *lines)))


def parsed(target, lines, **header):
    (file,) = parse_outputs(text({**HEADER, **header}, lines), target, name="outputs.jsonl")
    return file


def changed(lines, number, index, token=None):
    """The lines with one token changed."""
    found = [{**line, "token_ids": list(line["token_ids"])} for line in lines]
    own = found[number]["token_ids"]
    own[index] = (own[index] + 3) % 200 + 2 if token is None else token
    return found


@pytest.fixture(scope="module")
def compared(target, lines, scorer):
    """A comparison of two lists of lines."""

    def of(ours, theirs, **header):
        audits = [
            audit_outputs(target, parsed(target, each, **header), scorer=scorer)
            for each in (ours, theirs)
        ]
        return compare_outputs(*audits)

    return of


def test_equal_files_are_equal_in_any_order(compared, lines):
    found = compared(lines, lines[::-1])
    assert (found.num_matched, found.num_equal, found.num_unmatched) == (4, 4, 0)


def test_a_first_difference_has_its_place_and_the_targets_verdict(compared, lines):
    found = compared(lines, changed(lines, 1, 7))
    (difference,) = found.differences
    assert (difference.line, difference.other_line, difference.index) == (3, 3, 7)
    assert difference.token == lines[1]["token_ids"][7]
    assert difference.finding == Finding.FAULT
    assert found.to_json()["num_faults"] == 1


def test_outputs_without_a_counterpart_are_counted(compared, lines):
    found = compared(lines[:3], [*lines[1:], lines[3]])
    assert (found.num_matched, found.num_unmatched) == (2, 3)
    with pytest.raises(PromptError, match="no prompt in common; give files of the same prompts"):
        compared(lines[:1], lines[1:])


def test_an_output_that_was_cut_earlier_is_no_fault(compared, lines):
    short = [{**line, "token_ids": line["token_ids"][:12], "max_tokens": 12} for line in lines]
    found = compared(lines, short)
    assert [d.finding for d in found.differences] == [None] * 4
    assert {d.index for d in found.differences} == {12}


def test_a_fault_that_the_other_file_has_too_is_not_speculations(target, lines):
    """Both have a wrong token in one place, and one of them goes on differently."""
    wrong = changed(lines, 2, 5)
    files = {
        "plain": parsed(target, wrong),
        "drafted": parsed(target, changed(wrong, 2, 15)),
        "good": parsed(target, lines),
    }
    audit = audit_files(target, files, against="plain")
    assert audit.holds is False
    assert audit.comparisons["drafted"].faults_in_both == (4,)
    assert audit.comparisons["good"].faults_in_both == ()
    assert "1 of the outputs with faults have the first one in plain too" in audit.sentence
    assert "1 of 3 files are the target's own" in audit.sentence
    document = json.loads(json.dumps(audit.to_json()))
    assert document["files"]["good"]["holds"] is True
    assert document["comparisons"]["drafted"]["num_equal"] == 3
    assert [len(table.rows) for table in audit.result_tables] == [3, 2, 1]
    assert audit.to_frame()["where"].tolist() == [where for where, _ in audit.located]
    for each, title in ((audit, "Files, each under"), (audit.audits["good"], "Greedy outputs")):
        assert title in str(each)
        assert str(each).replace("\n", " ").endswith(each.sentence[-30:])
        assert each._repr_html_().count("<table>") == len(each.all_tables)


def test_ids_outside_the_vocabulary_are_a_finding_of_their_line(target, lines, scorer):
    """OpenVINO's n-grams wrote runs of -1."""
    wrong = changed(changed(lines, 0, 6, token=-1), 0, 7, token=-1)
    audit = audit_outputs(target, parsed(target, wrong), scorer=scorer)
    assert not audit.holds
    assert [own.first is not None for own in audit.judged] == [True, False, False, False]
    first = audit.judged[0].first
    assert (first.index, first.token, first.finding) == (6, -1, Finding.FAULT)
    with pytest.raises(PromptError, match=r"Most outputs of outputs\.jsonl hold token ids such as"):
        parsed(target, [changed([line], 0, 2, token=999)[0] for line in lines])


def test_quantised_engines_are_compared_and_not_judged(target, lines, scorer):
    for said in ({"dtype": "other"}, {"kv_dtype": "u8"}):
        file = parsed(target, changed(lines, 1, 7), **said)
        assert not file.is_judged
        audit = audit_outputs(target, file, scorer=scorer)
        assert audit.holds is None
        assert "tokens of other" in audit.sentence
        assert "not the target's" in audit.sentence
        assert audit.to_json()["holds"] is None
        own = audit_outputs(target, parsed(target, lines), scorer=scorer)
        assert compare_outputs(audit, own).differences[0].finding is None
    assert parsed(target, lines, kv_dtype="fp32").is_judged
    assert parsed(target, lines, kv_dtype="auto").is_judged


def test_lines_may_say_how_they_were_computed(target, lines, tmp_path):
    """A file of several settings is as many files."""
    mixed = [{**line, "batch_size": 1 + 7 * (i % 2)} for i, line in enumerate(lines)]
    files = parse_outputs(text(HEADER, mixed), target, name="x")
    assert [file.label for file in files] == ["other float32 batch 1", "other float32 batch 8"]
    assert [len(file.outputs) for file in files] == [2, 2]
    (tmp_path / "x.jsonl").write_text(text(HEADER, mixed))
    with pytest.raises(SettingError, match="holds outputs of other float32 batch 1 and of"):
        read_outputs(tmp_path / "x.jsonl", target)


def test_the_reference_computes_in_fp32_and_its_weights_are_named(target, lines):
    coarse = Scorer(target, max_length=128, dtype="bfloat16", reference_weights="float32")
    audit = audit_outputs(target, parsed(target, lines), scorer=coarse)
    assert audit.to_json()["reference"].startswith("fp32 compute, weights rounded to float32 (dig")
    rounded = Scorer(target, max_length=128, dtype="bfloat16")
    assert rounded.reference_weights.name == "bfloat16"


def test_what_bf16_would_explain_is_said(target, lines):
    """Outputs of bf16 that are declared fp32."""
    from jaxspec.audit.scoring import with_dtype

    engine = Engine(with_dtype(target, "bfloat16"), batch_size=4, max_length=128)
    prompts = [line["prompt_token_ids"] for line in lines]
    prompts += [[*prompt, token] for prompt in prompts for token in range(5, 29)]
    done = engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    own = [
        {"prompt_token_ids": list(one.prompt_token_ids), "token_ids": list(one.token_ids)}
        for one in done
    ]
    audit = audit_outputs(target, parsed(target, own))
    assert not audit.holds
    assert audit.hint == "All of it would be explained if the engine computed in bfloat16."
    assert audit_outputs(target, parsed(target, own, dtype="bfloat16")).hint is None
    broken = audit_outputs(target, parsed(target, changed(own, 1, 7)))
    assert broken.hint is None


def test_the_report_says_how_many_tokens_show_second_best_ones(target, lines, scorer):
    audit = audit_outputs(target, parsed(target, lines), scorer=scorer)
    needed = list(audit.tokens_needed.values())
    assert list(audit.tokens_needed) == ["1%", "3%", "10%"]
    assert needed == sorted(needed, reverse=True)
    assert audit.to_json()["greedy"]["tokens_needed"] == audit.tokens_needed
    shown = dict(audit.result_tables[1].rows)
    assert f"{needed[0]} (if 1% are)" in shown["tokens that show second-best ones"]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"batch_size": 0}, "The header: batch_size 0 was given"),
        ({"engine": 3}, "has no header"),
        ({"kv_dtype": 8}, "The header has kv_dtype 8; write a name"),
        ({"dtype": "int4"}, "or other for quantised weights"),
    ],
)
def test_settings_that_cannot_be(target, lines, header, said):
    with pytest.raises((SettingError, PromptError), match=said):
        parsed(target, lines, **header)


def test_files_that_do_not_belong_together(target, lines):
    files = {
        "a": parsed(target, lines, model="one"),
        "b": parsed(target, lines, model="two"),
    }
    with pytest.raises(SettingError, match="say that their outputs are of one and of two; audit"):
        audit_files(target, files)
    with pytest.raises(SettingError, match="against='c' was given; name one of the files, a"):
        audit_files(target, {"a": files["a"]}, against="c")


def test_equal_outputs_are_judged_once(target, lines, scorer, monkeypatch):
    from jaxspec.audit import external

    judged = []
    real = external.judge_alone

    def counted(*args, **kwargs):
        judged.append(kwargs["output_ids"])
        return real(*args, **kwargs)

    monkeypatch.setattr(external, "judge_alone", counted)
    file = parsed(target, [*lines, *lines])
    audit = audit_outputs(target, dataclasses.replace(file), scorer=scorer)
    assert len(judged) == len(lines)
    assert len(audit.judged) == 2 * len(lines)
