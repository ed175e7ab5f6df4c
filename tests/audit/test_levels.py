"""The audit of jaxspec's own runs: healthy ones hold, sabotaged ones do not."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
import tiny
import toy

import jaxspec
from jaxspec.audit.controls.faults import FAULTS
from jaxspec.audit.judge import Finding
from jaxspec.audit.levels import StudyMetrics
from jaxspec.audit.self_audit import audit_engine, promise_of
from jaxspec.decode import round as decoding
from jaxspec.engine.conversation import Conversation
from jaxspec.engine.engine import Engine
from jaxspec.requests.prompts import sample_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.schedulers import Continuous, Pool, Static
from jaxspec.verifiers import rejection

PROMPTS = toy.prompts((4, 19, 33, 8, 1, 12))
GREEDY = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.95, seed=5)


def close_draft(target, noise=0.02):
    """The target with noise on its weights: it agrees with it often, not always."""
    keys = iter(jax.random.split(jax.random.key(1), 100))

    def disturb(leaf):
        return leaf + leaf.dtype.type(noise) * jax.random.normal(next(keys), leaf.shape, leaf.dtype)

    params = jax.tree.map(disturb, target.params)
    return jaxspec.DraftModel(dataclasses.replace(target, name="close", params=params))


def engine_of(*, dtype="float32", **options):
    target = toy.model(dtype=jnp.dtype(dtype), num_layers=1)
    return Engine(
        target,
        close_draft(target),
        draft_length=3,
        batch_size=4,
        max_length=128,
        max_logprobs=0,
        **options,
    )


def test_a_healthy_coupled_run_holds_every_level():
    stages = []
    audit = audit_engine(
        engine_of(dtype="bfloat16"),
        PROMPTS,
        [GREEDY, SAMPLED] * 3,
        on_stage=stages.append,
    )
    assert audit.holds
    assert 0 < audit.acceptance.num_accepted_tokens < audit.acceptance.num_draft_tokens
    assert {name: level.holds for name, level in audit.levels.items()} == dict.fromkeys(
        ("E1", "E2", "E3", "E4", "E5"), True
    )
    for name in ("E1", "E2", "E3"):
        assert audit.levels[name].exact == 1
        assert audit.levels[name].num_other_bits == 0
    assert [len(audit.levels[name].outputs) for name in ("E1", "E2", "E3")] == [6, 10, 3]
    assert all(c.are_bits_equal for c in audit.levels["E1"].outputs)
    assert len(audit.levels["E5"].outputs) == 8  # two later turns of four chats
    assert (audit.num_requests, audit.num_sampled) == (6, 3)
    assert len(audit.distribution.samples.log_evidence) == 3
    assert audit.tables.holds is None
    assert audit.promise.startswith("bit-exact")
    assert audit.probe.holds
    assert "holds" in audit.sentence
    assert audit.study is None  # the toy has no tokenizer
    assert len(stages) > 4
    document = json.loads(json.dumps(audit.to_json()))
    assert document["levels"]["E1"]["exact"] == 1


@pytest.fixture
def one_short(monkeypatch):
    """Rounds that count a rejected draft as committed."""
    real = decoding.commit

    def commit(state, info, cache):
        after = real(state, info, cache)
        rejected = info.verdict.num_accepted < info.draft.num_valid
        return after.replace(
            num_committed=after.num_committed + (rejected & after.is_running).astype(jnp.int32)
        )

    monkeypatch.setattr(decoding, "commit", commit)


@pytest.mark.slow
def test_a_sabotaged_round_breaks_e1(one_short):
    audit = audit_engine(engine_of(), PROMPTS, GREEDY)
    assert not audit.holds
    assert audit.levels["E1"].holds is False
    assert audit.levels["E1"].count(Finding.FAULT) > 0
    assert audit.levels["E4"].count(Finding.FAULT) > 0
    assert "broken" in audit.sentence
    for shown in ("Levels, on token ids", "What each level claims", "Divergences", "is broken"):
        assert shown in str(audit)
    divergence = audit.to_json()["levels"]["E1"]["divergences"][0]
    assert divergence["finding"] == "fault"


def test_a_seam_kept_one_position_too_far_breaks_e5(monkeypatch):
    real = Conversation.num_common

    def one_too_far(self, prompt, *, is_reread):
        found = real(self, prompt, is_reread=is_reread)
        return min(found + 1, len(prompt) - 1) if found else 0

    monkeypatch.setattr(Conversation, "num_common", one_too_far)
    audit = audit_engine(engine_of(), PROMPTS, GREEDY)
    assert [name for name, level in audit.levels.items() if not level.holds and level.outputs] == [
        "E5"
    ]
    assert audit.levels["E5"].count(Finding.FAULT) > 0


@pytest.fixture(scope="module")
def rejecting():
    return engine_of(verifier=rejection.Rejection())


@pytest.mark.slow
def test_rejection_promises_the_distribution_only(rejecting):
    audit = audit_engine(rejecting, PROMPTS, SAMPLED)
    assert audit.holds
    assert audit.tables.holds is True
    assert set(audit.tables.p_values) == {"memoryless", "filtered"}
    assert audit.promise.startswith("distribution only")
    assert audit.levels["E1"].holds is None
    assert "draws other tokens" in audit.levels["E1"].reason
    assert audit.levels["E2"].holds is True
    assert audit.distribution.holds is True


@pytest.mark.slow
def test_sampled_outputs_that_are_cut_break_the_distribution(rejecting, monkeypatch):
    """Nothing else compares their lengths: they are no reference's."""
    real = Engine.run

    def cut(self, requests, **options):
        for completion in real(self, requests, **options):
            yield dataclasses.replace(completion, token_ids=completion.token_ids[:5])

    monkeypatch.setattr(Engine, "run", cut)
    audit = audit_engine(rejecting, PROMPTS, SAMPLED)
    assert audit.distribution.num_wrong_ends == len(PROMPTS)
    assert audit.distribution.holds is False


@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        pytest.param("one_stream", jaxspec.Rejection(), marks=pytest.mark.slow),
        pytest.param("position_only_keys", jaxspec.Block(), marks=pytest.mark.slow),
        pytest.param(
            "draft_filtered_in_another_order", jaxspec.Rejection(), marks=pytest.mark.slow
        ),
    ],
)
def test_an_audit_finds_faults_of_the_distribution(name, verifier):
    """On the tables; a few outputs of a real pair do not show them."""
    assert FAULTS[name].kind == "distribution"
    with FAULTS[name].apply():
        audit = audit_engine(engine_of(verifier=verifier), PROMPTS, SAMPLED)
    assert audit.tables.holds is False
    assert "tables" in audit.sentence


@pytest.mark.slow
def test_a_verifier_that_accepts_everything_breaks_the_distribution(monkeypatch):
    def accept_all(self, distributions, draws):
        del self, draws
        num_accepted = jnp.sum(distributions.is_node, axis=1, dtype=jnp.int32)
        return num_accepted, rejection.at_node(distributions.p, num_accepted)

    monkeypatch.setattr(rejection.Rejection, "accept", accept_all)
    target = toy.model(num_layers=1)
    stranger = jaxspec.DraftModel(toy.model(seed=9, num_layers=1))
    engine = Engine(
        target,
        stranger,
        verifier=rejection.Rejection(),
        draft_length=3,
        batch_size=4,
        max_length=128,
    )
    audit = audit_engine(engine, PROMPTS, dataclasses.replace(SAMPLED, top_p=1.0))
    assert audit.distribution.holds is False
    assert not audit.holds
    assert "distribution" in audit.sentence


def test_promises_in_words():
    said = [
        promise_of(verifier) for verifier in (jaxspec.Coupled(), jaxspec.Block(), jaxspec.Typical())
    ]
    assert [words.split(":")[0] for words in said] == ["bit-exact", "distribution only", "lossy"]


def test_the_studys_metrics_judge_text():
    model = tiny.model(text=tiny.tokenizer())
    equal, other = [5, 6, 7, 8], [5, 6, 9, 8]
    found = StudyMetrics.of(model, [equal, other], [equal, equal])
    assert (found.exact, found.partial) == (0.5, 0.75)
    # Text after the reference's end is not seen by the partial match.
    found = StudyMetrics.of(model, [[*equal, 9]], [equal])
    assert (found.exact, found.partial) == (0.0, 1.0)
    assert StudyMetrics.of(tiny.model(), [equal], [equal]) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_embedded_pair(dtype, temperature):
    target = jaxspec.load_model("demo-target", dtype=dtype)
    draft = jaxspec.DraftModel(jaxspec.load_model("demo-draft", dtype=dtype))
    engine = Engine(target, draft, batch_size=8, max_length=384, max_logprobs=0)
    prompts = [line.prompt for line in sample_prompts()]
    params = SamplingParams(max_tokens=64, temperature=temperature, seed=1)
    audit = audit_engine(engine, prompts, params)
    assert audit.holds, audit.sentence
    assert audit.study is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"layout": "aligned", "scheduler": Static()},
        pytest.param(
            {"layout": "aligned", "scheduler": Pool(window_size=6, sort_by_length=True)},
            marks=pytest.mark.slow,
        ),
        {"exactness": "ties"},
    ],
    ids=["static", "pool", "ties"],
)
def test_engines_that_do_not_keep_bits_are_audited_up_to_ties(settings):
    audit = audit_engine(engine_of(**settings), PROMPTS, [GREEDY, SAMPLED] * 3)
    assert audit.holds, audit.sentence
    assert audit.promise.startswith("equal up to proven ties")
    assert all(audit.levels[name].allows_ties for name in ("E1", "E2", "E3", "E4"))


@pytest.mark.slow
def test_a_sabotaged_aligned_engine_does_not(one_short):
    audit = audit_engine(engine_of(layout="aligned"), PROMPTS, GREEDY)
    assert not audit.holds
    assert audit.levels["E4"].count(Finding.FAULT) > 0


def test_bits_are_compared_row_by_row_whatever_the_order_of_admission():
    engine = engine_of(scheduler=Continuous(longest_first=True))
    params = [dataclasses.replace(GREEDY, max_tokens=6 + 2 * i) for i in range(len(PROMPTS))]
    audit = audit_engine(engine, PROMPTS, params)
    assert audit.holds, audit.sentence
    assert audit.levels["E2"].num_other_bits == 0
