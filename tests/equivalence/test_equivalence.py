"""The promise: speculative output is plain decoding's, bit for bit, whatever drafts it.

E1, the same program with every draft marked invalid; E2, a request alone; E3, the same seeds; E4,
the independent window-1 loop. Greedy and sampled rows decode side by side. One table of drafters
goes through all of it, and a test holds the table against what the package exports. Sabotaged
rounds show that the checks can fail.
"""

import dataclasses
import functools

import door
import flex
import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ties
import toy
from live import live_pages, poison

import jaxspec
from jaxspec import sampling
from jaxspec.decode import round as decoding
from jaxspec.drafters.base import Drafter
from jaxspec.engine.engine import Engine
from jaxspec.kernels import cpu as native
from jaxspec.kernels.registry import default_kernels
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import RopeConfig
from jaxspec.requests.completions import Completions
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.types import chain_parents
from jaxspec.verifiers import coupled

LENGTHS = (1, 2, 30, 126, 5, 140, 77, 12)  # one row goes from its first page to its second
NUM_ROWS = 6
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.8, seed=1),
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.8, seed=2, top_p=0.9),
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.8, seed=4, presence_penalty=0.5),
    SamplingParams(
        max_tokens=24,
        temperature=0.8,
        seed=5,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        min_tokens=20,
        stop_token_ids=tuple(range(8)),
    ),
    SamplingParams(max_tokens=9, temperature=1.3, seed=3, top_k=20, min_p=0.01),
    SamplingParams(max_tokens=24),
]
WINDOW = 6
FLEX = {"block_size": WINDOW + 1, "num_deep_layers": 1, "confidence": 0.0}


FIXED = jaxspec.trees.StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))


def stranger(target):
    """A draft model of other weights and sizes."""
    return toy.model(seed=9, dtype=target.dtype, width=24, num_layers=1)


# Every drafter, by name: a function of the target, and of prompts with their true continuations.
DRAFTERS = {
    "DraftModel": lambda target, _: jaxspec.DraftModel(stranger(target)),
    "DraftModel of the target": lambda target, _: jaxspec.DraftModel(target),
    "DraftModel that ends drafts early": lambda target, _: jaxspec.DraftModel(
        stranger(target), 0.25
    ),
    "DraftModel of the target, a beam tree": lambda target, _: jaxspec.DraftModel(
        target, tree=jaxspec.trees.BeamTree(3, 3, WINDOW)
    ),
    "DraftModel, a fixed shape": lambda target, _: jaxspec.DraftModel(stranger(target), tree=FIXED),
    "NGram": lambda *_: jaxspec.NGram(1, 3),
    "NGram of three branches": lambda *_: jaxspec.NGram(1, 3, branches=3),
    "Oracle": lambda _, truth: jaxspec.Oracle(truth, acceptance=0.7),
    "Oracle with cost": lambda target, truth: jaxspec.Oracle(
        truth, acceptance=0.5, cost_of=jaxspec.DraftModel(stranger(target))
    ),
    "always wrong": lambda *_: toy.WrongDrafter(),
    "a tree": lambda _, truth: toy.TreeOracle(tuple(map(tuple, truth)), right_until=60),
    "a linear head": lambda target, _: door.linear_head(target),
    "drafts that ride along": lambda target, _: door.Riding(target),
    "Heads of Medusa, a fixed shape": lambda target, _: heads.random_heads(
        "medusa", target, tree=FIXED
    ),
    "Heads of Hydra, a chain": lambda target, _: heads.random_heads("hydra", target, tree="chain"),
    "Heads of Clover, a budget": lambda target, _: heads.random_heads("clover", target),
    "Heads of Clover-2, a beam tree": lambda target, _: heads.random_heads(
        "clover2", target, tree=jaxspec.trees.BeamTree(2, 3, WINDOW)
    ),
    "FlexDraft, parallel": lambda target, _: flex.random_flex(target, mode="parallel", **FLEX),
    "FlexDraft, sequential": lambda target, _: flex.random_flex(target, mode="sequential", **FLEX),
    "FlexDraft of copied projectors, parallel": lambda target, _: flex.copied_flex(
        target, mode="parallel", **FLEX
    ),
    "FlexDraft of copied projectors, sequential": lambda target, _: flex.copied_flex(
        target, mode="sequential", **FLEX
    ),
}
# The tier of those without which the table is quicker.
LONGER = {
    "DraftModel, a fixed shape": pytest.mark.slow,
    "NGram of three branches": pytest.mark.system,
    "Heads of Medusa, a fixed shape": pytest.mark.slow,
    "Heads of Hydra, a chain": pytest.mark.system,
    "Heads of Clover-2, a beam tree": pytest.mark.system,
    "FlexDraft of copied projectors, parallel": pytest.mark.slow,
    "FlexDraft of copied projectors, sequential": pytest.mark.system,
}
# Settings: dtype, kernels, and the dtype of KV where it is not that of the model.
NATIVE, XLA = "float32, default", "bfloat16, xla"
INT8_XLA, INT8_NATIVE = "float32, xla, int8", "bfloat16, native, int8"
needs_native = pytest.mark.skipif(native.problem() is not None, reason=f"{native.problem()}")
IN_BFLOAT16 = {  # where each tier has those that differ in how they score and store
    "DraftModel of the target": (),
    "a tree": (),
    "Heads of Clover, a budget": (),
    "FlexDraft, parallel": (),
    "DraftModel of the target, a beam tree": pytest.mark.slow,
    "Oracle with cost": pytest.mark.slow,
    "drafts that ride along": pytest.mark.system,
    "FlexDraft of copied projectors, sequential": pytest.mark.system,
}
TABLE = [
    *(pytest.param(NATIVE, x, marks=LONGER.get(x, ())) for x in DRAFTERS),
    *(pytest.param(XLA, x, marks=IN_BFLOAT16.get(x, pytest.mark.slow)) for x in DRAFTERS),
    pytest.param(INT8_XLA, "a tree"),
    pytest.param(INT8_NATIVE, "a tree", marks=needs_native),
    pytest.param("float32, native, int8", "a tree", marks=[needs_native, pytest.mark.slow]),
    pytest.param("float32, pallas, int8", "a tree", marks=pytest.mark.slow),
    *(
        pytest.param(kind, x, marks=marks)
        for kind, marks in (
            (INT8_XLA, [pytest.mark.slow]),
            (INT8_NATIVE, [needs_native, pytest.mark.system]),
        )
        for x in (
            "FlexDraft of copied projectors, parallel",
            "FlexDraft of copied projectors, sequential",
            "Heads of Clover, a budget",
        )
    ),
]
FEW = [
    pytest.param(kind, name, marks=marks)
    for kind, name, marks in (
        (NATIVE, "DraftModel", ()),
        (NATIVE, "NGram", ()),
        (NATIVE, "Oracle", ()),
        (NATIVE, "a tree", ()),
        (NATIVE, "FlexDraft, parallel", ()),
        (NATIVE, "NGram of three branches", pytest.mark.slow),
        (NATIVE, "Heads of Clover, a budget", pytest.mark.system),
        (NATIVE, "FlexDraft of copied projectors, sequential", pytest.mark.slow),
        (XLA, "FlexDraft, parallel", pytest.mark.slow),
        (XLA, "Heads of Clover, a budget", pytest.mark.slow),
        (XLA, "Oracle with cost", pytest.mark.slow),
        (XLA, "DraftModel of the target, a beam tree", pytest.mark.slow),
        (INT8_XLA, "NGram", pytest.mark.slow),
        (INT8_NATIVE, "NGram", [needs_native, pytest.mark.system]),
        ("float32, pallas, int8", "NGram", pytest.mark.slow),
    )
]
few_drafters = pytest.mark.parametrize(("setting", "name"), FEW, indirect=["setting"])


def test_the_table_holds_every_drafter_the_package_exports():
    exported = {name for name in jaxspec.__all__ if hasattr(getattr(jaxspec, name), "propose")}
    exported -= {"Drafter"}
    assert exported == {"DraftModel", "FlexDraft", "Heads", "NGram", "Oracle"}
    assert exported <= {name.split()[0].rstrip(",") for name in DRAFTERS}
    target = toy.model()
    for make in DRAFTERS.values():
        assert isinstance(make(target, [[1]]), Drafter)


@dataclasses.dataclass(eq=False)
class Setting:
    """A target, prompts, and their plain continuations from the window-1 loop."""

    target: LanguageModel
    prompts: list[list[int]]
    reference: Completions

    # Tokens by depth of trees and whether drafts ride in the target's pass, which with XLA's
    # products shows in their rounding: every drafter has to emit the same.
    expected: dict = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, kind):
        dtype, kernels, kv_dtype = [*kind.split(", "), None][:3]
        # A head that fills the vectors of every processor the native kernels are written for.
        target = toy.model(
            kernels=default_kernels() if kernels == "default" else kernels,
            dtype=jnp.dtype(dtype),
            kv_dtype=kv_dtype,
            head_size=16,
            rope=RopeConfig(theta=1e4, rotary_size=16),
        )
        prompts = toy.prompts(LENGTHS)
        reference = Engine(target, batch_size=NUM_ROWS, max_length=256).generate(prompts, PARAMS)
        return cls(target, prompts, reference)

    @functools.cached_property
    def engine(self):
        """The engine with the drafter of a name, made once."""

        def make(name, *, tree_depth=None, scheduler="static"):
            drafter = DRAFTERS[name](self.target, toy.sequences(self.reference))
            return engine_for(self.target, drafter, tree_depth=tree_depth, scheduler=scheduler)

        return functools.cache(make)


@pytest.fixture(scope="module", params=[NATIVE, pytest.param(XLA, marks=pytest.mark.system)])
def setting(request):
    return Setting.of(request.param)


def engine_for(target, drafter, **options):
    settings = {
        "scheduler": "static",  # prompt i is row i
        "draft_length": 4,
        "verify_length": WINDOW + 1,
        "batch_size": NUM_ROWS,
        "max_length": 256,
    }
    return Engine(target, drafter, **settings | options)


def token_ids(completions):
    return [completion.token_ids for completion in completions]


def check_tokens_and_kv(setting, name):
    target, engine = setting.target, setting.engine(name)
    batch, params = setting.prompts[:NUM_ROWS], PARAMS[:NUM_ROWS]
    plain = engine.generate(batch, params, speculate=False)
    plain_kv = live_pages(engine)
    poison(engine)  # or the plain run's KV would stand in for what the drafted run fails to write
    drafted = engine.generate(batch, params)
    assert token_ids(drafted) == token_ids(plain)
    for ours, theirs in zip(live_pages(engine), plain_kv, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if target.kv_dtype == "int8":
        assert [pages.dtype for pages in plain_kv[:4]] == [np.int8, np.int8, np.float32, np.float32]
        assert np.abs(plain_kv[0]).max() == 127
    program = engine.shape.tree_depth, engine.executor.parts.drafter.score is not None
    assert token_ids(plain) == setting.expected.setdefault(program, token_ids(plain))
    if target.kernels == "native" or (target.dtype == jnp.float32 and target.kv_dtype is None):
        assert token_ids(plain) == token_ids(setting.reference[:NUM_ROWS])
    total = drafted.acceptance
    assert total.num_draft_tokens > 0
    if "Oracle" in name or "target" in name or name == "a tree":
        assert total.num_accepted_tokens > 0
    for completion in drafted:
        counts = completion.acceptance
        rounds_and_accepted = counts.num_accepted_tokens + counts.num_rounds
        # An output may end with an accepted token.
        assert counts.num_emitted_tokens in (rounds_and_accepted, rounds_and_accepted - 1)


@pytest.mark.parametrize(("setting", "name"), TABLE, indirect=["setting"])
def test_speculative_equals_plain_bit_for_bit(setting, name):
    check_tokens_and_kv(setting, name)


ALLOWED = tuple(range(3, toy.VOCAB, 5))
BIASED = [
    SamplingParams(max_tokens=12, allowed_token_ids=ALLOWED),
    SamplingParams(max_tokens=12, temperature=0.8, seed=1, allowed_token_ids=ALLOWED),
    SamplingParams(max_tokens=12, allowed_token_ids=[9]),
    SamplingParams(max_tokens=12, logit_bias={4: 100}),
    SamplingParams(max_tokens=12),
    SamplingParams(
        max_tokens=12, temperature=1.2, seed=5, allowed_token_ids=ALLOWED,
        logit_bias=dict.fromkeys(ALLOWED[::2], -100), frequency_penalty=0.1,
    ),
]  # fmt: skip


@few_drafters
def test_biased_tokens_are_plain_decodings_and_allowed(setting, name):
    engine, batch = setting.engine(name), setting.prompts[:NUM_ROWS]
    found = engine.generate(batch, BIASED)
    tokens = token_ids(found)
    assert tokens == token_ids(engine.generate(batch, BIASED, speculate=False))
    allowed = (ALLOWED, ALLOWED, [9], [4], range(toy.VOCAB), ALLOWED[1::2])
    for own, ids in zip(tokens, allowed, strict=True):
        assert set(own) <= set(ids)
    [alone] = engine.generate([batch[4]], SamplingParams(max_tokens=12))
    assert tokens[4] == alone.token_ids
    assert len(set(tokens[0])) > 1
    if name.split()[0] in ("DraftModel", "Heads", "FlexDraft"):
        # Where one token can be emitted, every drafter with logits of its own drafts that token.
        assert all(found[index].acceptance.num_accepted_tokens > 6 for index in (2, 3))


@few_drafters
def test_draft_length_neighbours_seat_and_order_do_not_matter(setting, name):
    engine, batch, params = setting.engine(name), setting.prompts, PARAMS
    if name == "a tree":  # its table is in the order of the rows of the batch
        batch, params = batch[:NUM_ROWS], params[:NUM_ROWS]
    together = token_ids(engine.generate(batch, params))
    for draft_length in (1, WINDOW):
        assert token_ids(engine.generate(batch, params, draft_length=draft_length)) == together
    if name == "a tree":
        return
    order = np.random.default_rng(3).permutation(len(batch)).tolist()
    shuffled = token_ids(engine.generate([batch[i] for i in order], [params[i] for i in order]))
    assert [shuffled[order.index(i)] for i in range(len(order))] == together
    for index in (0, 2, 3, 5) if name != "Oracle" else range(len(batch)):
        assert engine.generate([batch[index]], params[index])[0].token_ids == together[index]


@pytest.mark.slow
def test_drafters_and_draft_lengths_agree_on_one_window_and_tree_depth(setting):
    expected = None
    for name in ("DraftModel of the target", "NGram", "Oracle", "a tree"):
        engine = setting.engine(name, tree_depth=WINDOW)
        for draft_length in (1, 4, WINDOW):
            batch = setting.prompts[:NUM_ROWS]
            got = token_ids(engine.generate(batch, PARAMS[:NUM_ROWS], draft_length=draft_length))
            expected = expected or got
            assert got == expected, (name, draft_length)


def test_seeds_differ_and_are_reported(setting):
    engine, prompt = setting.engine("NGram"), setting.prompts[0]
    params = SamplingParams(max_tokens=12, temperature=0.8)
    drawn = engine.generate([prompt] * 6, params)
    assert len({completion.seed for completion in drawn}) == 6
    assert len(set(token_ids(drawn))) == 6
    [again] = engine.generate([prompt], dataclasses.replace(params, seed=drawn[3].seed))
    assert again.token_ids == drawn[3].token_ids
    many = engine.generate([prompt], dataclasses.replace(params, seed=7, n=3))
    assert [completion.seed for completion in many] == [7, 8, 9]


@pytest.mark.system
@pytest.mark.parametrize(
    "setting", [NATIVE, pytest.param(XLA, marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize("scheduler", ["pool", pytest.param("continuous", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "DraftModel of the target, a beam tree",
        pytest.param("DraftModel, a fixed shape", marks=pytest.mark.slow),
        "a tree",
    ],
)
def test_schedulers_agree_on_trees(setting, name, scheduler):
    """Greedy and sampled rows side by side, more requests than rows."""
    prompts = [*setting.prompts, *setting.prompts[:NUM_ROWS]]
    params = [
        SamplingParams(max_tokens=8 + 2 * i, temperature=0.8 * (i % 2), seed=i)
        for i in range(len(prompts))
    ]
    static, regrouped = (
        setting.engine(name, tree_depth=WINDOW, scheduler=each).generate(prompts, params)
        for each in ("static", scheduler)
    )
    assert token_ids(regrouped) == token_ids(static)
    assert sum(done.acceptance.num_accepted_tokens for done in static) > 0


def test_scores_of_the_newest_token_do_not_depend_on_what_is_drafted(setting):
    target, engine = setting.target, setting.engine("always wrong")
    engine.generate(setting.prompts[:NUM_ROWS], PARAMS[1])
    state = engine.executor.state.replace(finish=jnp.zeros((NUM_ROWS,), jnp.int32))

    def score(tokens):
        draft = decoding.Draft(
            tokens=tokens,
            parents=chain_parents(NUM_ROWS, WINDOW),
            num_valid=jnp.full((NUM_ROWS,), WINDOW, jnp.int32),
        )
        window = decoding.make_window(state, draft, tree_depth=0)
        hidden, _ = target.forward(
            target.params, decoding.window_tokens(state, draft), window, state.cache
        )
        return target.logits(target.params, hidden)

    run = jax.jit(score)
    drawn = np.random.default_rng(0).integers(0, toy.VOCAB, (NUM_ROWS, WINDOW))
    a, b = run(jnp.zeros_like(drawn, jnp.int32)), run(jnp.asarray(drawn, jnp.int32))
    np.testing.assert_array_equal(a[:, 0], b[:, 0])
    assert np.abs(np.asarray(a[:, 1:] - b[:, 1:])).max() > 0


def test_differences_from_the_window_1_loop_are_ties(setting):
    found = setting.engine("Oracle").generate(setting.prompts, PARAMS)
    ties.divergences(setting.target, found, setting.reference, PARAMS)


# Sabotage: each of these is a bug that published batch implementations had. The check must see it.


def sabotaged_commit_one_short(state, info, cache, *, real=decoding.commit):
    """Keeps the KV of one rejected draft: rolls back one token too few."""
    after = real(state, info, cache)
    rejected = info.verdict.num_accepted < info.draft.num_valid
    return after.replace(
        num_committed=after.num_committed + (rejected & after.is_running).astype(jnp.int32)
    )


def sabotaged_follow(chosen, draft, *, real=coupled.follow):
    """Accepts the first drafted token whatever the target says."""
    verdict = real(chosen, draft)
    has_draft = draft.num_valid > 0
    return verdict.replace(
        num_accepted=jnp.where(has_draft, jnp.maximum(verdict.num_accepted, 1), 0),
        path=verdict.path.at[:, 0].set(jnp.where(has_draft, 0, -1)),
    )


def sabotaged_window(state, draft, *, tree_depth, real=decoding.make_window):
    """Writes every row at the offset of row 0: the ragged tensor problem."""
    window = real(state, draft, tree_depth=tree_depth)
    return window.replace(
        slots=jnp.broadcast_to(window.slots[:1], window.slots.shape), start=window.start
    )


def sabotaged_choose(logits, rows, prefix):
    """Draws with noise by place within the window, not by position."""
    place = prefix.position - prefix.position[:, :1]
    return sampling.choose(logits, rows, prefix.replace(position=place))


def often_right(completions):
    """An oracle whose table always has the same shape."""
    table = [(sequence + [0] * 256)[:256] for sequence in toy.sequences(completions)]
    return jaxspec.Oracle(table, acceptance=0.5)


@pytest.fixture(scope="module")
def sound():
    """An engine whose drafts are right half of the time, and which gives what plain decoding
    gives."""
    target, prompts = toy.model(num_layers=1), toy.prompts(LENGTHS[:NUM_ROWS])
    params = PARAMS[:NUM_ROWS]
    reference = Engine(target, batch_size=NUM_ROWS, max_length=256).generate(prompts, params)
    engine = engine_for(target, often_right(reference))
    assert token_ids(engine.generate(prompts, params)) == token_ids(reference)
    return engine, prompts, params


@pytest.mark.parametrize(
    ("module", "name", "sabotage"),
    [
        (decoding, "commit", sabotaged_commit_one_short),
        (coupled, "follow", sabotaged_follow),
        (decoding, "make_window", sabotaged_window),
        (coupled, "choose", sabotaged_choose),
    ],
)
def test_sabotage_is_caught(monkeypatch, sound, module, name, sabotage):
    engine, prompts, params = sound
    monkeypatch.setattr(module, name, sabotage)
    broken = engine_for(engine.target, engine.drafter)
    plain = broken.generate(prompts, params, speculate=False)
    broken.update_params(draft=often_right(plain).params)
    drafted = broken.generate(prompts, params)
    is_same = [a == b for a, b in zip(token_ids(drafted), token_ids(plain), strict=True)]
    if name == "choose":  # greedy rows use no noise; of the others none comes through
        assert is_same == [each.temperature == 0 for each in params]
    else:
        assert not all(is_same[i] for i, each in enumerate(params) if each.temperature == 0)
        assert not all(is_same[i] for i, each in enumerate(params) if each.temperature > 0)
