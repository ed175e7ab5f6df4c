"""What `test_meshes` runs in a process of its own: `Engine(mesh=...)` on eight virtual devices.

Each program on a mesh takes seconds to compile, so what needs none of its own is asked of `four`.
"""

import functools
import gc

import door
import flex
import heads
import jax
import numpy as np
import pandas
import pytest
import ties
import tiny
import toy

import jaxspec
from jaxspec.audit.self_audit import audit_engine
from jaxspec.engine.adaptive import DraftLengthController
from jaxspec.engine.engine import Engine
from jaxspec.engine.round_times import RoundKind, RoundTimes
from jaxspec.engine.row_store import ROW_PROGRAMS
from jaxspec.errors import SettingError
from jaxspec.kernels.registry import default_kernels
from jaxspec.models.base import packed_model
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.schedulers import Continuous, Pool, Static
from jaxspec.serving import ServingEngine

LENGTHS = (1, 30, 70, 2, 129, 5, 66, 12, 9, 64, 65, 3)
PARAMS = [
    SamplingParams(
        max_tokens=4 + 3 * (i % 5),
        temperature=0.8 * (i % 2),
        top_k=20,
        seed=i,
        logit_bias={7: 2.0, 9: -100} if i % 4 > 1 else {},
    )
    for i in range(len(LENGTHS))
]


def small(*, seed=0, **changes):
    """A model whose heads four devices can share."""
    changes = {"num_layers": 1} | changes
    return toy.model(seed=seed, vocab_size=64, num_kv_heads=4, **changes)


def engine(mesh, scheduler=None, *, batch_size=8, layout="ragged"):
    return Engine(
        small(),
        jaxspec.DraftModel(small(seed=1)),
        scheduler=scheduler,
        layout=layout,
        batch_size=batch_size,
        max_length=256,
        rounds_per_sync=4,
        mesh=mesh,
    )


def token_ids(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def prompts():
    return toy.prompts(LENGTHS)


@pytest.fixture(scope="module")
def one():
    """One device, with the rows of the batch of a shard."""
    return engine(None, batch_size=2)


@pytest.fixture(scope="module")
def expected(one, prompts):
    return token_ids(one.generate(prompts, PARAMS))


@pytest.fixture(scope="module")
def four():
    """Four shards of one device; axes `Explicit`, as `make_mesh` makes them."""
    return engine(jax.make_mesh((4,), ("data",)))


@pytest.mark.parametrize("scheduler", [Continuous(), Static(), Pool(window_size=3)])
def test_outputs_are_those_of_one_device_with_the_seats_of_a_shard(
    four, prompts, expected, scheduler
):
    on_mesh = four
    if not isinstance(scheduler, Continuous):
        on_mesh = engine(four.mesh, scheduler)
    seen = []
    assert token_ids(on_mesh.generate(prompts, PARAMS, on_progress=seen.append)) == expected
    assert all(rounds > 0 for rounds in np.asarray(on_mesh.state.num_rounds))  # all shards worked
    assert seen[-1].num_finished == len(prompts)
    assert seen[-1].num_rounds == int(np.sum(on_mesh.state.num_rounds))


def test_the_aligned_layout_aligns_the_rows_of_a_shard(four, one, prompts):
    on_mesh = engine(four.mesh, Static(), layout="aligned")
    assert_equal_or_ties(
        on_mesh.target, on_mesh.generate(prompts, PARAMS), one.generate(prompts, PARAMS)
    )
    assert on_mesh.state.schedule.num_slots_moved.shape == (4,)
    assert np.sum(on_mesh.state.schedule.num_slots_moved) > 0


def test_an_engine_on_a_mesh_is_audited(four, prompts):
    audit = audit_engine(four, prompts, PARAMS)
    assert audit.holds, audit.sentence
    assert audit.levels["E1"].num_other_bits == audit.levels["E2"].num_other_bits == 0
    assert audit.levels["E2"].exact == 1


def test_rounds_run_ahead_on_a_mesh(four, prompts):
    """Counts, too, are those without: no request of these ends by a stop string."""
    found = []
    for runs_ahead in (False, True):
        four.reset()
        four.executor.runs_ahead = runs_ahead
        names = [four.submit(p, s) for p, s in zip(prompts, PARAMS, strict=True)]
        done, num_ahead = [], 0
        while four.has_unfinished:
            done += four.step()
            num_ahead += len(four._core._rounds)
        four.executor.runs_ahead = False
        assert (num_ahead > 0) == runs_ahead
        of_name = {one.request_id: (one.token_ids, one.acceptance) for one in done}
        found.append([of_name[name] for name in names])
    assert found[0] == found[1]


def test_sessions_on_a_mesh(four, prompts):
    few = SamplingParams(max_tokens=9, ignore_eos=True)
    sessions = [four.session() for _ in range(four.num_residents + 3)]  # some are parked
    assert sessions[0].exactness == "ties"
    turns = [prompts[index % len(prompts)] for index in range(len(sessions))]
    found = [session.generate(turn, few) for session, turn in zip(sessions, turns, strict=True)]
    assert {session.place for session in sessions} == {"device", "host"}
    later = []
    for session, first in zip(sessions, found, strict=True):
        history = [*first.prompt_token_ids, *first.token_ids]
        later.append(session.generate([*history, 5, 6, 7], few))
        assert later[-1].num_reused_tokens == len(history) - 1
    for session in sessions:
        session.close()
    anew = four.generate([done.prompt_token_ids for done in later], few)
    assert_equal_or_ties(four.target, later, anew, [few] * len(later))
    with four.session(reread=True) as session:
        assert session.exactness == "bitwise"
        first = session.generate(prompts[2], few)
        done = session.generate([*prompts[2], *first.token_ids, 3], few)
        assert done.num_reused_tokens == 64
    counts = four.executor.compile_counts()
    assert {counts[name] for name in ROW_PROGRAMS} == {1}


def assert_equal_or_ties(target, completions, witness, params=PARAMS):
    for ours, theirs, its_own in zip(completions, witness, params, strict=True):
        ties.divergences(target, [ours], [theirs], its_own)


def serving(mesh, batch_size=4):
    return ServingEngine(
        small(), jaxspec.DraftModel(small(seed=1)), batch_size=batch_size, max_length=256,
        mesh=mesh,
    )  # fmt: skip


def served(engine, prompts, reader=None):
    """Tokens of each prompt, in whatever row is free; `reader` prefills."""
    state, waiting = engine.init_decode_state(), list(enumerate(prompts))
    in_rows, found = {}, {}
    while waiting or in_rows:
        while waiting and (free := set(range(engine.shape.batch_size)) - set(in_rows)):
            index, prompt = waiting.pop()
            prefilled = (reader or engine).prefill(prompt, PARAMS[index])
            in_rows[row := max(free)] = index
            found[index] = []
            state = engine.insert(prefilled, state, row)
        state, result = engine.generate(state)
        new = jax.device_get(result)
        for row, index in list(in_rows.items()):
            found[index] += new.tokens[row, : new.num_new[row]].tolist()
            if new.done[row]:
                state = engine.free(state, row)
                del in_rows[row]
    return [tuple(found[index]) for index in range(len(prompts))]


def addresses(arrays):
    """Where the arrays' parts are in memory."""
    parts = (part for leaf in jax.tree.leaves(arrays) for part in leaf.addressable_shards)
    return {part.data.unsafe_buffer_pointer() for part in parts}


def test_a_serving_engine_on_a_mesh(prompts, expected):
    on_mesh = serving(jax.make_mesh((4,), ("data",)))
    warmed = len(on_mesh.warm_up())
    prefilled = on_mesh.prefill(prompts[1])
    assert len({d for leaf in jax.tree.leaves(prefilled.cache) for d in leaf.devices()}) == 1
    assert served(on_mesh, prompts) == list(map(tuple, expected))
    other = small(seed=3)
    on_mesh.update_params(target=other.params)
    with pytest.raises(SettingError, match="weights number 0"):
        on_mesh.insert(prefilled, on_mesh.init_decode_state(), 0)
    new = Engine(other, jaxspec.DraftModel(small(seed=1)), batch_size=1, max_length=256)
    assert served(on_mesh, prompts[:3]) == token_ids(new.generate(prompts[:3], PARAMS[:3]))
    counts = [program.num_compilations() for program in on_mesh.programs.values()]
    assert counts == [1] * warmed
    assert addresses(on_mesh._row.params) <= addresses(on_mesh.params)  # no copy of the weights


def test_a_serving_engine_whose_heads_are_split(prompts):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    on_mesh = serving(mesh)
    found = served(on_mesh, prompts)
    assert found == token_ids(engine(mesh, batch_size=4).generate(prompts, PARAMS))
    with pytest.raises(SettingError, match="multiple of 2"):
        serving(mesh, batch_size=3)


def test_speculative_equals_plain_and_order_does_not_matter(four, prompts, expected):
    assert token_ids(four.generate(prompts, PARAMS, speculate=False)) == expected
    backwards = four.generate(prompts[::-1], PARAMS[::-1])
    assert token_ids(backwards)[::-1] == expected


def test_nothing_is_compiled_again(four, prompts):
    four.generate(prompts, PARAMS)
    counts = four.executor.compile_counts()
    assert [counts[name] for name in ("admit", "prefill", "run", "init")] == [1, 1, 1, 1]


def test_a_warm_up_leaves_nothing_to_compile():
    names = []

    def note(event, duration, **more):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(more.get("fun_name"))

    model = small()
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    warm = Engine(model, jaxspec.NGram(), batch_size=4, max_length=128, mesh=mesh)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        gc.collect()  # what other tests left
        bytes_before = sum(array.nbytes for array in jax.live_arrays())
        assert len(warm.warm_up()) == len(names) > 0
        assert sum(array.nbytes for array in jax.live_arrays()) == bytes_before  # no state
        names.clear()
        warm.generate(toy.prompts((3, 70, 1)), SamplingParams(max_tokens=9, temperature=0.5))
        warm.submit([1, 2], SamplingParams(max_tokens=100), request_id="x")
        warm.step()
        warm.cancel("x")
        warm.step()
        assert names == []
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_requests_one_by_one(four, prompts, expected):
    ids = [four.submit(prompt, params) for prompt, params in zip(prompts, PARAMS, strict=True)]
    victim = four.submit(prompts[1], SamplingParams(max_tokens=100))
    done = {completion.request_id: completion for completion in four.step()}
    four.cancel(victim)
    while four.has_unfinished:
        done |= {completion.request_id: completion for completion in four.step()}
    assert [done[name].token_ids for name in ids] == expected
    assert done[victim].stop_reason == "cancelled"
    pieces = list(four.stream(prompts[4], PARAMS[4]))
    assert [token for piece in pieces for token in piece.token_ids] == list(expected[4])


def test_rows_are_shared_out_evenly(four):
    for _ in range(4):
        four.submit([1, 2, 3], SamplingParams(max_tokens=50))
    four.step()
    tickets = four.queue.tickets_by_row
    held = np.array([row in tickets for row in range(four.num_residents)]).reshape(4, -1)
    assert held.sum(axis=1).tolist() == [1, 1, 1, 1]
    while four.has_unfinished:
        four.step()


def test_new_weights_go_where_the_old_ones_are(four, prompts, expected):
    four.update_params(target=small(seed=5).params)
    assert token_ids(four.generate(prompts, PARAMS)) != expected
    four.update_params(target=small().params)
    assert token_ids(four.generate(prompts, PARAMS)) == expected
    assert four.executor.compile_counts()["run"] == 1


def test_a_tied_model_keeps_its_embedding_once_and_takes_new_weights(prompts):
    made = [small(seed=seed, is_tied=True, kernels=default_kernels()) for seed in (0, 5)]
    drafter = jaxspec.DraftModel(made[0])
    shape = {"batch_size": 2, "max_length": 256}
    of_one, alone = Engine(made[0], drafter, **shape), []
    for each in made:
        of_one.update_params(target=each.params)
        alone.append(of_one.generate(prompts, PARAMS))
    mesh = jax.make_mesh((1, 4), ("data", "model"))
    on_mesh = Engine(made[0], drafter, mesh=mesh, **shape)
    head = on_mesh.executor.params["target"]["embedding"].head
    assert head.sharding.shard_shape(head.shape) == (head.shape[0], head.shape[1] // 4)
    assert "head" not in on_mesh.executor.params["target"]
    for number, given in ((0, None), (1, made[1].params), (0, packed_model(made[0]).params)):
        if given is not None:
            on_mesh.update_params(target=given)
        found = on_mesh.generate(prompts, PARAMS)
        assert_equal_or_ties(made[number], found, alone[number])


def test_two_by_four(one, prompts):
    on_mesh = engine(jax.make_mesh((2, 4), ("data", "model")), batch_size=4)
    completions = on_mesh.generate(prompts, PARAMS)
    together = token_ids(completions)
    assert token_ids(on_mesh.generate(prompts, PARAMS, speculate=False)) == together
    assert [on_mesh.generate([prompts[i]], PARAMS[i])[0].token_ids for i in (4, 7)] == [
        together[i] for i in (4, 7)
    ]
    witness = one.generate(prompts, PARAMS)
    assert_equal_or_ties(on_mesh.target, completions, witness)
    assert sum(a.token_ids == b.token_ids for a, b in zip(completions, witness, strict=True)) > 8
    assert on_mesh.describe()["mesh"] == {"data": 2, "model": 4}
    memory, state = on_mesh.memory, on_mesh.state
    part = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    weights = [
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(on_mesh.executor.params)
    ]
    assert memory.num_devices == 8
    assert (memory.state_bytes, memory.weights_bytes) == (part, sum(weights))
    assert "on each of 8 devices" in memory.sentence


def test_meshes_that_do_not_fit_are_refused():
    with pytest.raises(SettingError, match=r"batch_size 6 was given .* 4 shards"):
        engine(jax.make_mesh((4,), ("data",)), batch_size=6)
    with pytest.raises(SettingError, match=r"axes \(batch\)"):
        engine(jax.make_mesh((4,), ("batch",)))
    with pytest.raises(SettingError, match=r"model axis has 8 devices .* 4 KV heads"):
        engine(jax.make_mesh((1, 8), ("data", "model")))


def test_traces_are_those_of_one_device(prompts):
    frames = []
    for mesh, batch_size in ((None, 2), (jax.make_mesh((2,), ("data",)), 4)):
        traced = Engine(
            small(),
            jaxspec.NGram(),
            batch_size=batch_size,
            max_length=256,
            mesh=mesh,
            trace="tokens",
        )
        completions = traced.generate(prompts, SamplingParams(max_tokens=20))
        frames.append((completions.rounds(), completions.tokens()))
    assert len(frames[0][1]) > 0
    for both in zip(*frames, strict=True):
        # The engine's rounds are counted by each shard for itself.
        ours, theirs = (frame.drop(columns="engine_round", errors="ignore") for frame in both)
        pandas.testing.assert_frame_equal(ours, theirs)


def test_a_mesh_of_some_devices_says_so(caplog):
    engine(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]))
    assert "using 4 of 8 CPUs" in caplog.text
    caplog.clear()
    engine(jax.make_mesh((8,), ("data",)))
    assert "using" not in caplog.text


def test_memory_that_a_device_lacks_is_refused_for_the_whole_mesh(monkeypatch):
    need = engine(jax.make_mesh((8,), ("data",)), Static(), batch_size=32).memory.needed_bytes
    monkeypatch.setattr(
        "jaxspec.engine.memory.free_memory", lambda: (8 * (need - 1), "on this host")
    )
    with pytest.raises(SettingError, match=r"batch_size 32 .* fits is a batch_size of 24"):
        engine(jax.make_mesh((8,), ("data",)), Static(), batch_size=32)


def test_draft_lengths_choose_themselves_on_a_mesh():
    """Wrong weights are declined, right ones are found again; nothing is compiled twice."""
    model, draft = tiny.model(eos_token_ids=()), tiny.model(seed=5, eos_token_ids=())
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = toy.prompts(LENGTHS[:7])
    expected = Engine(model, batch_size=2, max_length=256).generate(prompts, params)
    adaptive = Engine(
        model,
        jaxspec.DraftModel(draft),
        draft_length="auto",
        exactness="ties",
        verify_length=3,
        batch_size=4,
        max_length=256,
        rounds_per_sync=4,
        mesh=jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]),
    )
    seconds = {RoundKind(0): 1, RoundKind(1): 1.3, RoundKind(2): 1.6}
    times = RoundTimes(
        short_context=0, long_context=1, short_s=seconds, long_s=seconds, chunk_s=1e-6
    )
    adaptive.adaptive.controller = DraftLengthController(times)
    adaptive.adaptive.controller.times.note = lambda *arguments: None  # rounds take these times
    assert_equal_or_ties(model, adaptive.generate(prompts, params), expected, [params] * 7)
    declined = adaptive.rounds_by_draft_length
    assert declined[0] > declined[2] > 0
    adaptive.update_params(draft=model.params)
    done = adaptive.generate(prompts * 8, params)
    assert_equal_or_ties(model, done, list(expected) * 8, [params] * 56)
    chosen = adaptive.rounds_by_draft_length
    assert chosen[2] - declined[2] > chosen[0] - declined[0]
    counts = adaptive.executor.compile_counts()
    assert {counts[name] for name in ("run", "run_1", "catch_up", "prefill_target")} == {1}


def beam_tree(model):
    return jaxspec.DraftModel(model, tree=jaxspec.trees.BeamTree(2, 3, 6))


def clover_budget(model):
    return heads.random_heads("clover", model)


def clover2_chain(model):
    return heads.random_heads("clover2", model, tree="chain")


def flex_parallel(model):
    return flex.copied_flex(model, mode="parallel", num_deep_layers=1)


def flex_sequential(model):
    return flex.random_flex(model, mode="sequential", num_deep_layers=1)


SHAPE = {"batch_size": 8, "max_length": 256}


@functools.cache
def plain_on(shape):
    """A target of two layers, for drafters that live between them, its plain engine on a mesh, and
    what that emits."""
    model, mesh = small(num_layers=2), jax.make_mesh(shape, ("data", "model"))
    plain = Engine(model, mesh=mesh, **SHAPE)
    return model, plain, plain.generate(toy.prompts(LENGTHS), PARAMS)


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((4, 1), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        *(door.Riding, beam_tree, clover2_chain, flex_parallel),
        *(
            pytest.param(make, marks=pytest.mark.slow)
            for make in (door.linear_head, clover_budget, flex_sequential)
        ),
    ],
)
def test_drafters_that_live_in_the_target_or_draft_trees_run_on_a_mesh(prompts, shape, make):
    """The target's shards serve the drafter too: its weights are counted, and held, once."""
    model, plain, truth = plain_on(shape)
    drafting = Engine(model, make(model), mesh=plain.mesh, **SHAPE)
    found = drafting.generate(prompts, PARAMS)
    ties.divergences(model, found, truth, PARAMS)
    assert sum(c.acceptance.num_draft_tokens for c in found) > 0
    if make is beam_tree:
        assert sum(c.acceptance.num_accepted_tokens for c in found) > 0
    if make is door.Riding:
        assert drafting.memory.weights_bytes == plain.memory.weights_bytes
