"""The promise: speculative output is plain decoding's, bit for bit, whatever drafts it.

E1, the same program with every draft marked invalid; E2, a request alone; E4, the independent
window-1 loop. One table of drafters goes through all of it, and a test holds the table against what
the package exports. Sabotaged rounds show that the checks can fail.
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
from live import live_kv, poison

import jaxspec
from jaxspec.decode import round as decoding
from jaxspec.drafters.base import Drafter
from jaxspec.engine.engine import Engine
from jaxspec.kernels.registry import default_kernels
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import RopeConfig
from jaxspec.requests.completions import Completions
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.verifiers import coupled

LENGTHS = (1, 2, 30, 129, 5, 140, 77, 12)
PARAMS = SamplingParams(max_tokens=24)
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
LONGER = (  # the table is quicker without
    "DraftModel, a fixed shape",
    "NGram of three branches",
    "Heads of Medusa, a fixed shape",
    "Heads of Hydra, a chain",
    "Heads of Clover-2, a beam tree",
    "FlexDraft of copied projectors, parallel",
    "FlexDraft of copied projectors, sequential",
)
NATIVE, XLA = "float32, default kernels", "bfloat16, XLA's kernels"
IN_BFLOAT16 = {  # where each tier has those that differ in how they score and store
    "DraftModel of the target": (),
    "a tree": (),
    "Heads of Clover, a budget": (),
    "FlexDraft, parallel": (),
    "DraftModel of the target, a beam tree": pytest.mark.system,
    "Oracle with cost": pytest.mark.system,
    "drafts that ride along": pytest.mark.system,
    "FlexDraft of copied projectors, sequential": pytest.mark.system,
}
TABLE = [
    *(pytest.param(NATIVE, x, marks=[pytest.mark.system] * (x in LONGER)) for x in DRAFTERS),
    *(pytest.param(XLA, x, marks=IN_BFLOAT16.get(x, pytest.mark.slow)) for x in DRAFTERS),
]


def test_the_table_holds_every_drafter_the_package_exports():
    exported = {name for name in jaxspec.__all__ if hasattr(getattr(jaxspec, name), "propose")}
    exported -= {"Drafter"}
    assert exported == {"DraftModel", "FlexDraft", "Heads", "NGram"}
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

    @classmethod
    def of(cls, kind):
        if kind.startswith("float32"):
            # A head that fills the vectors of every processor the kernels are written for.
            rope = RopeConfig(theta=1e4, rotary_size=16)
            target = toy.model(kernels=default_kernels(), head_size=16, rope=rope)
        else:
            target = toy.model(dtype=jnp.bfloat16)
        prompts = toy.prompts(LENGTHS)
        reference = Engine(target, batch_size=4, max_length=256).generate(prompts, PARAMS)
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


def engine_for(target, drafter, *, tree_depth=None, scheduler="static"):
    return Engine(
        target,
        drafter,
        scheduler=scheduler,  # static: prompt i is row i
        draft_length=4,
        verify_length=WINDOW + 1,
        tree_depth=tree_depth,
        batch_size=4,
        max_length=256,
    )


def token_ids(completions):
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(("setting", "name"), TABLE, indirect=["setting"])
def test_speculative_equals_plain_bit_for_bit(setting, name):
    engine, batch = setting.engine(name), setting.prompts[:4]
    plain = engine.generate(batch, PARAMS, speculate=False)
    plain_kv = live_kv(engine)
    poison(engine)  # or the plain run's KV would stand in for what the drafted run fails to write
    drafted = engine.generate(batch, PARAMS)
    assert token_ids(drafted) == token_ids(plain)
    for ours, theirs in zip(live_kv(engine), plain_kv, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    total = drafted.acceptance
    assert total.num_draft_tokens > 0
    if "Oracle" in name or "target" in name or name == "a tree":
        assert total.num_accepted_tokens > 0
    for completion in drafted:
        counts = completion.acceptance
        assert counts.num_emitted_tokens == counts.num_accepted_tokens + counts.num_rounds


def test_drafters_and_draft_lengths_agree_on_one_window_and_tree_depth(setting):
    expected = None
    for name in ("DraftModel of the target", "NGram", "Oracle", "a tree"):
        engine = setting.engine(name, tree_depth=WINDOW)
        for draft_length in (1, 4, WINDOW):
            done = engine.generate(setting.prompts[:4], PARAMS, draft_length=draft_length)
            got = token_ids(done)
            expected = expected or got
            assert got == expected, (name, draft_length)


def test_a_request_does_not_depend_on_neighbours_seat_or_order(setting):
    engine, prompts = setting.engine("Oracle"), setting.prompts
    together = token_ids(engine.generate(prompts, PARAMS))
    order = np.random.default_rng(3).permutation(len(prompts))
    shuffled = token_ids(engine.generate([prompts[i] for i in order], PARAMS))
    assert [shuffled[list(order).index(i)] for i in range(len(prompts))] == together
    alone = [engine.generate([prompt], PARAMS)[0].token_ids for prompt in prompts]
    assert alone == together


@pytest.mark.system
@pytest.mark.parametrize(
    "setting", [NATIVE, pytest.param(XLA, marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize("scheduler", ["pool", "continuous"])
@pytest.mark.parametrize(
    "name", ["DraftModel of the target, a beam tree", "DraftModel, a fixed shape", "a tree"]
)
def test_schedulers_agree_on_trees(setting, name, scheduler):
    """Greedy and sampled rows side by side, more requests than rows."""
    params = [
        SamplingParams(max_tokens=8 + 4 * i, temperature=0.8 * (i % 2), seed=i)
        for i in range(len(setting.prompts))
    ]
    static, regrouped = (
        setting.engine(name, tree_depth=WINDOW, scheduler=each).generate(setting.prompts, params)
        for each in ("static", scheduler)
    )
    assert token_ids(regrouped) == token_ids(static)
    assert sum(done.acceptance.num_accepted_tokens for done in static) > 0


def test_scores_of_the_newest_token_do_not_depend_on_what_is_drafted(setting):
    target, engine = setting.target, setting.engine("always wrong")
    engine.generate(setting.prompts[:4], PARAMS)
    state = engine.executor.state.replace(finish=jnp.zeros((4,), jnp.int32))

    def score(tokens):
        draft = decoding.Draft(
            tokens=tokens,
            parents=decoding_chain(4),
            num_valid=jnp.full((4,), WINDOW, jnp.int32),
        )
        window = decoding.make_window(state, draft, tree_depth=0)
        hidden, _ = target.forward(
            target.params, decoding.window_tokens(state, draft), window, state.cache
        )
        return target.logits(target.params, hidden)

    def decoding_chain(rows):
        return jaxspec.types.chain_parents(rows, WINDOW)

    run = jax.jit(score)
    a = run(jnp.zeros((4, WINDOW), jnp.int32))
    b = run(jnp.asarray(np.random.default_rng(0).integers(0, toy.VOCAB, (4, WINDOW)), jnp.int32))
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


@pytest.fixture(scope="module")
def sound():
    """A target, prompts with their plain continuations, and an engine that gives these."""
    target, prompts = toy.model(), toy.prompts(LENGTHS[:4])
    reference = Engine(target, batch_size=4, max_length=256).generate(prompts, PARAMS)
    engine = engine_for(target, jaxspec.Oracle(toy.sequences(reference), acceptance=0.5))
    assert token_ids(engine.generate(prompts, PARAMS)) == token_ids(reference)
    return engine, prompts, reference


@pytest.mark.parametrize(
    ("module", "name", "sabotage"),
    [
        (decoding, "commit", sabotaged_commit_one_short),
        (coupled, "follow", sabotaged_follow),
        (decoding, "make_window", sabotaged_window),
    ],
)
def test_sabotage_is_caught(monkeypatch, sound, module, name, sabotage):
    engine, prompts, reference = sound
    monkeypatch.setattr(module, name, sabotage)
    broken = engine_for(engine.target, engine.drafter).generate(prompts, PARAMS)
    assert token_ids(broken) != token_ids(reference)
