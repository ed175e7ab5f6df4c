"""The promise: speculative output is plain decoding's, bit for bit, whatever drafts it.

E1, the same program with every draft marked invalid; E2, a request alone; E4, the independent
window-1 loop. One table of drafters goes through all of it, and a test holds the table against what
the package exports. Sabotaged rounds show that the checks can fail.
"""

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
from jaxspec.models.config import RopeConfig
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.verifiers import coupled

LENGTHS = (1, 2, 30, 129, 5, 140, 77, 12)
PARAMS = SamplingParams(max_tokens=24)
WINDOW = 6
FLEX = {"block_size": WINDOW + 1, "num_deep_layers": 1, "confidence": 0.0}


def drafters(target, truth):
    """Every drafter, by name; `truth` are prompts with their true continuations."""
    own = jaxspec.DraftModel(target)
    stranger = jaxspec.DraftModel(toy.model(seed=9, dtype=target.dtype, width=24, num_layers=1))
    return {
        "DraftModel": stranger,
        "DraftModel of the target": own,
        "DraftModel that ends drafts early": jaxspec.DraftModel(stranger.model, 0.25),
        "DraftModel of the target, a beam tree": jaxspec.DraftModel(
            target, tree=jaxspec.BeamTree(3, 3, WINDOW)
        ),
        "DraftModel, a fixed shape": jaxspec.DraftModel(
            stranger.model, tree=jaxspec.StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))
        ),
        "NGram": jaxspec.NGram(1, 3),
        "NGram of three branches": jaxspec.NGram(1, 3, branches=3),
        "Oracle": jaxspec.Oracle(truth, acceptance=0.7),
        "Oracle with cost": jaxspec.Oracle(truth, acceptance=0.5, cost_of=stranger),
        "always wrong": toy.WrongDrafter(),
        "a tree": toy.TreeOracle(tuple(map(tuple, truth)), right_until=60),
        "a linear head": door.linear_head(target),
        "drafts that ride along": door.Riding(target),
        "Heads of Medusa, a fixed shape": heads.random_heads(
            "medusa", target, tree=jaxspec.StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))
        ),
        "Heads of Hydra, a chain": heads.random_heads("hydra", target, tree="chain"),
        "Heads of Clover, a budget": heads.random_heads("clover", target),
        "Heads of Clover-2, a beam tree": heads.random_heads(
            "clover2", target, tree=jaxspec.BeamTree(2, 3, WINDOW)
        ),
        "FlexDraft, parallel": flex.random_flex(target, mode="parallel", **FLEX),
        "FlexDraft, sequential": flex.random_flex(target, mode="sequential", **FLEX),
        "FlexDraft of copied projectors, parallel": flex.copied_flex(
            target, mode="parallel", **FLEX
        ),
        "FlexDraft of copied projectors, sequential": flex.copied_flex(
            target, mode="sequential", **FLEX
        ),
    }


NAMES = list(drafters(toy.model(), [[1]]))
LONGER = (  # the table is quicker without
    "DraftModel, a fixed shape",
    "NGram of three branches",
    "Heads of Medusa, a fixed shape",
    "Heads of Hydra, a chain",
    "Heads of Clover-2, a beam tree",
    "FlexDraft of copied projectors, parallel",
    "FlexDraft of copied projectors, sequential",
)


def test_the_table_holds_every_drafter_the_package_exports():
    exported = {
        name
        for name in vars(jaxspec)
        if isinstance(vars(jaxspec)[name], type)
        and issubclass(vars(jaxspec)[name], object)
        and hasattr(vars(jaxspec)[name], "propose")
        and name not in ("Drafter", "Drafter")
    }
    assert exported == {"DraftModel", "FlexDraft", "Heads", "NGram", "Oracle"}
    assert exported <= {name.split()[0].rstrip(",") for name in NAMES}
    for drafter in drafters(toy.model(), [[1]]).values():
        assert isinstance(drafter, Drafter)


def setting_of(kind):
    """A target, prompts, and their plain continuations from the window-1 loop."""
    if kind.startswith("float32"):
        # A head that fills the vectors of every processor the kernels are written for.
        rope = RopeConfig(theta=1e4, rotary_size=16)
        target = toy.model(kernels=default_kernels(), head_size=16, rope=rope)
    else:
        target = toy.model(dtype=jnp.bfloat16)
    prompts = toy.prompts(LENGTHS)
    reference = Engine(target, batch_size=4, max_length=256).generate(prompts, PARAMS)
    return target, prompts, reference


XLA = "bfloat16, XLA's kernels"


@pytest.fixture(
    scope="module",
    params=["float32, default kernels", pytest.param(XLA, marks=pytest.mark.system)],
)
def setting(request):
    return setting_of(request.param)


@pytest.fixture(scope="module")
def xla_setting():
    return setting_of(XLA)


def engine_for(
    target, drafter, *, draft_length=4, batch_size=4, tree_depth=None, scheduler="static"
):
    return Engine(
        target,
        drafter,
        scheduler=scheduler,  # static: prompt i is row i
        draft_length=draft_length,
        verify_length=WINDOW + 1,
        tree_depth=tree_depth,
        batch_size=batch_size,
        max_length=256,
    )


def token_ids(completions):
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.system] * (name in LONGER)) for name in NAMES]
)
def test_speculative_equals_plain_bit_for_bit(setting, name):
    check_equal_to_plain(setting, name)


@pytest.mark.parametrize(
    "name",
    ["DraftModel of the target", "a tree", "Heads of Clover, a budget", "FlexDraft, parallel"],
)
def test_with_xlas_kernels_too(xla_setting, name):
    """The whole table runs with these as well, in the tier of whole programs."""
    check_equal_to_plain(xla_setting, name)


def check_equal_to_plain(setting, name):
    target, prompts, reference = setting
    engine = engine_for(target, drafters(target, toy.sequences(reference))[name])
    batch = prompts[:4]
    plain = engine.generate(batch, PARAMS, speculate=False)
    plain_kv = live_kv(engine)
    poison(engine)  # or the plain run's KV would stand in for what the drafted run fails to write
    drafted = engine.generate(batch, PARAMS)
    assert token_ids(drafted) == token_ids(plain)
    for ours, theirs in zip(live_kv(engine), plain_kv, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    total = jaxspec.Acceptance.total([completion.acceptance for completion in drafted])
    assert total.num_draft_tokens > 0
    if "Oracle" in name or "target" in name or name == "a tree":
        assert total.num_accepted_tokens > 0
    for completion in drafted:
        counts = completion.acceptance
        assert counts.num_emitted_tokens == counts.num_accepted_tokens + counts.num_rounds


def test_drafters_and_draft_lengths_agree_on_one_window_and_tree_depth(setting):
    target, prompts, reference = setting
    table = drafters(target, toy.sequences(reference))
    expected = None
    for name in ("DraftModel of the target", "NGram", "Oracle", "a tree"):
        engine = engine_for(target, table[name], tree_depth=WINDOW)
        for draft_length in (1, 4, WINDOW):
            got = token_ids(engine.generate(prompts[:4], PARAMS, draft_length=draft_length))
            expected = expected or got
            assert got == expected, (name, draft_length)


def test_a_request_does_not_depend_on_neighbours_seat_or_order(setting):
    target, prompts, reference = setting
    engine = engine_for(target, drafters(target, toy.sequences(reference))["Oracle"])
    together = token_ids(engine.generate(prompts, PARAMS))
    order = np.random.default_rng(3).permutation(len(prompts))
    shuffled = token_ids(engine.generate([prompts[i] for i in order], PARAMS))
    assert [shuffled[list(order).index(i)] for i in range(len(prompts))] == together
    alone = [engine.generate([prompt], PARAMS)[0].token_ids for prompt in prompts]
    assert alone == together


@pytest.mark.system
@pytest.mark.parametrize("scheduler", ["pool", "continuous"])
@pytest.mark.parametrize(
    "name", ["DraftModel of the target, a beam tree", "DraftModel, a fixed shape", "a tree"]
)
def test_schedulers_agree_on_trees(setting, name, scheduler):
    """Greedy and sampled rows side by side, more requests than rows."""
    target, prompts, reference = setting
    params = [
        SamplingParams(max_tokens=8 + 4 * i, temperature=0.8 * (i % 2), seed=i)
        for i in range(len(prompts))
    ]
    drafter = drafters(target, toy.sequences(reference))[name]
    static = engine_for(target, drafter, tree_depth=WINDOW).generate(prompts, params)
    regrouped = engine_for(target, drafter, tree_depth=WINDOW, scheduler=scheduler)
    assert token_ids(regrouped.generate(prompts, params)) == token_ids(static)
    assert sum(done.acceptance.num_accepted_tokens for done in static) > 0


def test_scores_of_the_newest_token_do_not_depend_on_what_is_drafted(setting):
    target, prompts, _ = setting
    engine = engine_for(target, toy.WrongDrafter())
    engine.generate(prompts[:4], PARAMS)
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
    target, prompts, reference = setting
    engine = engine_for(target, drafters(target, toy.sequences(reference))["Oracle"])
    ties.divergences(target, engine.generate(prompts, PARAMS), reference, PARAMS)


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


@pytest.mark.parametrize(
    ("module", "name", "sabotage"),
    [
        (decoding, "commit", sabotaged_commit_one_short),
        (coupled, "follow", sabotaged_follow),
        (decoding, "make_window", sabotaged_window),
    ],
)
def test_sabotage_is_caught(monkeypatch, module, name, sabotage):
    target = toy.model()
    prompts = toy.prompts(LENGTHS[:4])
    reference = Engine(target, batch_size=4, max_length=256).generate(prompts, PARAMS)
    oracle = jaxspec.Oracle(toy.sequences(reference), acceptance=0.5)
    sound = engine_for(target, oracle).generate(prompts, PARAMS)
    assert token_ids(sound) == token_ids(reference)
    monkeypatch.setattr(module, name, sabotage)
    broken = engine_for(target, oracle).generate(prompts, PARAMS)
    assert token_ids(broken) != token_ids(reference)
