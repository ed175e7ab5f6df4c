"""FlexDraft: what its mask rows see, both modes, the target's cache, what it refuses."""

import dataclasses
from typing import Any

import flex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from door import Untapped

import jaxspec
from jaxspec import SamplingParams
from jaxspec.decode.state import batch_view
from jaxspec.drafters.flexdraft import drafter as flexdraft
from jaxspec.drafters.flexdraft import formulas
from jaxspec.drafters.flexdraft.config import flex_config, param_shapes
from jaxspec.engine import adaptive
from jaxspec.engine.engine import Engine
from jaxspec.engine.executor import make_executor
from jaxspec.engine.round_times import PLAIN, LearnedTimes, RoundTimes
from jaxspec.errors import ModelError, SettingError
from jaxspec.kernels.base import attention_inputs, unpacked
from jaxspec.models import decoder, layers
from jaxspec.models.prefill import chain_window
from jaxspec.models.registry import PRESETS
from jaxspec.requests.requests import Request

MODES = ("parallel", "sequential")
FEWER = ("parallel", pytest.param("sequential", marks=pytest.mark.slow))
LENGTHS = (1, 2, 30, 130, 5, 7)
PARAMS = [
    SamplingParams(max_tokens=20 + index, temperature=0.8 * (index % 2), seed=index)
    for index in range(len(LENGTHS))
]
PROMPTS = toy.prompts(LENGTHS)
SMALL: dict[str, Any] = {"batch_size": 3, "max_length": 256}


@pytest.fixture(scope="module")
def target():
    return flex.target()


@pytest.fixture(scope="module")
def plain(target):
    return [c.token_ids for c in Engine(target, **SMALL).generate(PROMPTS, PARAMS)]


def admitted(target, drafter, *, prompts=PROMPTS[:3], num_tokens=60, **settings):
    """An executor whose rows have just read their prompts; every second one samples."""
    executor = make_executor(target, drafter, **{**SMALL, **settings})
    for row, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=num_tokens, temperature=0.8 * (row % 2), seed=row)
        request = Request(request_id=str(row), prompt_token_ids=tuple(prompt), params=params)
        executor.admit_and_prefill(row, request, draft_length=executor.shape.num_nodes)
    return executor


def compiled_blocks(drafter):
    """The hidden states of one group of mask rows at the newest token of each row."""

    @jax.jit
    def blocks(params, state):
        given = {"own": params["drafter"], "target": params["target"]}
        newest, everywhere = state.num_committed - 1, jnp.ones_like(state.num_committed, bool)
        return drafter._run_block(given, newest, everywhere, state.cache)[0]

    return blocks


# What mask rows see.


LONGEST = 48  # clean tokens of the reference, padded
# Of a target like Mistral: one sees part of its own block only, one ends amid the prompts.
WINDOWS = (20, 3, 9)


def reference_hidden(target, drafter):
    """A function of tokens `[LONGEST]` and their number, the last of which is the bonus token, that
    returns the hidden states `[K, E]` of one group of mask rows: by dense attention over the tokens
    before it and the group itself, with nothing cached."""
    weights, model, params = unpacked(target.params), target.config, drafter.params
    deep, place = drafter.config.first_deep_layer, jnp.arange(drafter.block_size, dtype=jnp.int32)

    def dense(queries, keys, values, visible, distance, window):
        visible &= distance < (LONGEST + len(place) if window is None else window)
        group = queries.shape[2] // keys.shape[2]
        keys, values = jnp.repeat(keys, group, axis=2), jnp.repeat(values, group, axis=2)
        scores = jnp.einsum("bthx,bshx->bhts", queries, keys) / np.sqrt(queries.shape[-1])
        weights = jax.nn.softmax(jnp.where(visible[None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhts,bshx->bthx", weights, values)

    @jax.jit
    def reference(tokens, number):
        index = jnp.arange(LONGEST, dtype=jnp.int32)
        of_clean = layers.rotary_angles(model.rope, index[None])
        at = number - 1 + place  # positions of the mask rows
        of_masks = layers.rotary_angles(model.rope, at[None])
        is_own = jnp.ones((len(place), len(place)), bool)
        is_context = jnp.broadcast_to(index[None] < number - 1, (len(place), LONGEST))
        hidden = decoder.embed(weights, tokens[None])
        masks = jnp.broadcast_to(params["mask"][None, None], (1, len(place), model.width))
        for number_of_layer, layer in enumerate(weights["layers"]):
            window = model.sliding_window(number_of_layer)
            kept = []

            def attend(qkv, layer=layer, kept=kept, window=window):
                settings = layers.attention_settings(model, layer)
                inputs = attention_inputs(qkv, of_clean, **settings)
                kept.extend(inputs[1:])
                distance = index[:, None] - index[None]
                return dense(*inputs, distance >= 0, distance, window)

            hidden = layers.decoder_layer(model, layer, hidden, attend)
            if number_of_layer < deep:
                continue
            mask_layer = {**layer, **params["layers"][number_of_layer - deep]}

            def attend_masks(qkv, mask_layer=mask_layer, kept=kept, window=window):
                settings = layers.attention_settings(model, mask_layer)
                queries, *own = attention_inputs(qkv, of_masks, **settings)
                pairs = zip(kept, own, strict=True)
                keys, values = (jnp.concatenate(pair, axis=1) for pair in pairs)
                visible = jnp.concatenate([is_context, is_own], axis=1)
                distance = at[:, None] - jnp.concatenate([index, at])[None]
                return dense(queries, keys, values, visible, distance, window)

            masks = layers.decoder_layer(model, mask_layer, masks, attend_masks)
        return masks[0]

    return reference


@pytest.mark.parametrize("mode", FEWER)
@pytest.mark.parametrize(
    ("kernels", "windows"),
    [
        pytest.param("default", (), marks=pytest.mark.slow),
        ("default", WINDOWS),
        pytest.param("xla", WINDOWS, marks=pytest.mark.slow),
    ],
)
def test_hidden_states_are_those_of_dense_attention(mode, kernels, windows):
    kernels = None if kernels == "default" else kernels
    target = flex.target(kernels=kernels, sliding_windows=windows)
    drafter = flex.random_flex(target, mode=mode)
    executor = admitted(target, drafter)
    bound = executor.parts.drafter
    blocks, reference = compiled_blocks(bound), reference_hidden(target, drafter)
    for num_rounds in (0, 1, 1, 3):
        executor.run(num_rounds)
        found = np.asarray(blocks(executor.params, executor.state))
        if mode == "parallel" and num_rounds:
            found = np.asarray(executor.state.drafter.hidden)
        state = executor.fetch()
        for row in range(3):
            expected = reference(state.tokens[row, :LONGEST], state.num_committed[row])
            np.testing.assert_allclose(found[row], expected[1:], rtol=2e-4, atol=2e-4)


def test_the_reference_sees_a_window_that_is_off_by_one():
    windows = {number: (20, number, 9) for number in (3, 4)}
    narrow, wide = (flex.target(sliding_windows=each) for each in windows.values())
    executor = admitted(wide, flex.random_flex(wide, mode="sequential"))
    found = np.asarray(compiled_blocks(executor.parts.drafter)(executor.params, executor.state))
    reference, state = reference_hidden(narrow, flex.random_flex(narrow)), executor.fetch()
    expected = reference(state.tokens[2, :LONGEST], state.num_committed[2])
    assert np.abs(found[2] - expected[1:]).max() > 1e-2


def test_windows_of_groups_are_as_drawn():
    """The picture in `formulas`, row by row."""
    window = formulas.group_window(
        chain_window(jnp.asarray([7, 20], jnp.int32), 3), num_groups=3, block_size=3
    )
    drawn = """
        x.. xxx ... ...
        xx. ... xxx ...
        xxx ... ... xxx
    """
    picture = ["".join(line.split()) for line in drawn.split("\n") if line.strip()]
    for row, start in enumerate((7, 20)):
        for mask in range(9):
            group, place = divmod(mask, 3)
            assert window.positions[row, mask] == start + group + 1 + place
            assert window.slots[row, mask] == start + 3 + mask
            num_seen = int(window.ends[row, mask]) - start
            seen = np.asarray(window.paths[row, mask, :num_seen]).tolist()
            assert seen == [slot for slot in range(12) if picture[group][slot] == "x"]
            assert window.tail_start[row, mask] == max(start + group + 4 - 6, 0)


@pytest.mark.parametrize("rule", ["product", "minimum"])
def test_a_draft_ends_where_the_drafter_is_not_sure(rule):
    confidence = jnp.asarray([[0.9, 0.6, 0.7], [0.1, 0.9, 0.9], [0.9, 0.9, 0.9], [0.9, 0.2, 0.9]])
    expected = {"product": [2, 1, 3, 1], "minimum": [3, 1, 3, 1]}[rule]
    assert formulas.sure_length(confidence, least=0.5, rule=rule).tolist() == expected


# Both modes draft the same.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kernels", "windows"),
    [
        ("float32", "default", ()),
        ("float32", "default", WINDOWS),
        ("bfloat16", "default", ()),
        ("float32", "xla", WINDOWS),
        ("bfloat16", "xla", ()),
    ],
)
def test_modes_have_the_same_hidden_states(dtype, kernels, windows):
    """Of every group that was kept, at every window; to the bit where the kernels' sums do not
    depend on its width. The rows run up to the end of their slots."""
    more = {} if kernels == "default" else {"kernels": "xla"}
    target = flex.target(dtype=jnp.dtype(dtype), sliding_windows=windows, **more)
    drafter = flex.copied_flex(target, mode="parallel", confidence=0.0)
    executor = admitted(target, drafter, exactness="ties", max_length=128, num_tokens=98)
    assert executor.verify_lengths == (1, 3, 4)
    blocks, num_compared, accepted = compiled_blocks(executor.parts.drafter), 0, set()
    for index in range(64):
        executor.run(1, draft_length=(3, 2, 3, 1)[index % 4])
        state, expected = executor.state.drafter, blocks(executor.params, executor.state)
        fresh = np.asarray(state.hidden_at == executor.state.num_committed)
        is_running = np.asarray(executor.state.is_running)
        if not is_running.any():
            break
        assert np.all(fresh[is_running])
        kept, expected = np.asarray(state.hidden)[is_running], np.asarray(expected)[is_running]
        if target.is_width_invariant:
            np.testing.assert_array_equal(kept, expected)
        else:
            allowed = 1e-4 if dtype == "float32" else 0.5
            np.testing.assert_allclose(
                kept.astype(np.float32), expected.astype(np.float32), rtol=0, atol=allowed
            )
        num_compared += len(kept)
        accepted |= set(np.asarray(executor.state.counts.accepted_at).sum(1).tolist())
    assert num_compared > 60
    assert len(accepted) > 3


@pytest.mark.parametrize(
    ("make", "windows"),
    [
        pytest.param(flex.random_flex, (), marks=pytest.mark.slow),
        pytest.param(flex.copied_flex, (), marks=pytest.mark.slow),
        (flex.copied_flex, WINDOWS),
    ],
)
def test_modes_accept_the_same(make, windows):
    """Also where all layers of the target have a sliding window, of which the drafter's own are
    narrower than a block and two blocks long."""
    target, counts = flex.target(sliding_windows=windows), []
    plain = Engine(target, **SMALL).generate(PROMPTS, PARAMS)
    for mode in MODES:
        engine = Engine(target, make(target, mode=mode), **SMALL)
        found = engine.generate(PROMPTS, PARAMS)
        assert [c.token_ids for c in found] == [c.token_ids for c in plain]
        counts.append([c.acceptance.num_accepted_tokens_per_pos for c in found])
        drafted = [c.acceptance.num_draft_tokens for c in found]
        rounds = [c.acceptance.num_rounds for c in found]
        assert sum(drafted) > 0.9 * sum(rounds)
    assert counts[0] == counts[1]
    if make is flex.copied_flex:
        assert sum(map(sum, counts[0])) > 20


def test_penalties_count_the_drafts_before(target):
    """A row that must not repeat a token is not drafted one twice."""
    drafter = flex.copied_flex(target, mode="sequential", confidence=0.0)
    executor = make_executor(target, drafter, **SMALL)
    params = SamplingParams(max_tokens=30, repetition_penalty=1e3)
    for row, prompt in enumerate(PROMPTS[:2]):
        own = params if row == 0 else SamplingParams(max_tokens=30)
        request = Request(request_id=str(row), prompt_token_ids=tuple(prompt), params=own)
        executor.admit_and_prefill(row, request, draft_length=3)
    shape, state = executor.parts.shape, executor.state

    @jax.jit
    def draft(params, state):
        given = {"own": params["drafter"], "target": params["target"]}
        return executor.parts.drafter.propose(
            shape, given, state.drafter, batch_view(state), target_cache=state.cache
        )[0]

    tokens = np.asarray(draft(executor.params, state).tokens)
    assert len(set(tokens[0].tolist())) == 3
    assert len(set(tokens[1].tolist())) == 1  # the other row has none


# Both modes in one engine.


def counted(executor):
    """How often each of the executor's programs of rounds is called from now on, by name."""
    calls = {}

    def wrap(name, program):
        def call(*args):
            calls[name] = calls.get(name, 0) + 1
            return program(*args)

        return call

    for name, program in executor.programs.items():
        if name.startswith("run"):
            executor.programs[name] = wrap(name, program)
    return calls


@pytest.mark.parametrize(("batch_size", "variant"), [(2, 0), (3, 1)])
def test_auto_follows_the_batch_where_rounds_are_not_measured(target, batch_size, variant):
    drafter = flex.random_flex(target)
    executor = make_executor(target, drafter, **{**SMALL, "batch_size": batch_size})
    assert executor.variants == (0,)
    assert executor.parts.drafter.mode == ("auto", "sequential")[variant]
    assert (executor.parts.drafter.score is None) == bool(variant)


def test_auto_changes_to_the_faster_mode_and_no_bit(target, plain, monkeypatch):
    """Parallel is made the faster one at short contexts, sequential at long ones."""

    def measured(rounds, *, windows, room):
        seconds = {kind: 2.0 if kind == PLAIN else 1.0 for kind in windows}
        return RoundTimes(
            short_context=1,
            long_context=60,
            short_s={kind: (1.0, 1.1)[kind.variant] * s for kind, s in seconds.items()},
            long_s={kind: (1.1, 1.0)[kind.variant] * s for kind, s in seconds.items()},
            chunk_s=0.0,
        )

    monkeypatch.setattr(adaptive, "measure_round_times", measured)
    # Rounds take what was measured.
    monkeypatch.setattr(LearnedTimes, "note", lambda self, *args: None)
    drafter = flex.copied_flex(target, confidence=0.0)
    engine = Engine(target, drafter, draft_length="auto", exactness="ties", **SMALL)
    assert engine.executor.variants == (0, 1)
    engine.adaptive.prepare()
    calls = counted(engine.executor)
    params = [dataclasses.replace(PARAMS[index], max_tokens=60) for index in (0, 1, 4)]
    prompts = [PROMPTS[index] for index in (0, 1, 4)]
    found = engine.generate(prompts, params)
    assert {name for name in calls if name.endswith("_variant_1")}
    assert {name for name in calls if "variant" not in name and name != "run_1"}
    if target.is_width_invariant:
        alone = Engine(target, **SMALL).generate(prompts, params)
        assert [c.token_ids for c in found] == [c.token_ids for c in alone]


# The target's cache.


@pytest.mark.parametrize("mode", FEWER)
def test_nothing_is_read_that_was_not_written(target, mode):
    """With NaN in all slots without committed KV before every round, mask rows' own included."""
    drafter = flex.copied_flex(target, mode=mode, confidence=0.0)
    found = {}
    for is_checked in (False, True):
        engine = Engine(target, drafter, check_invariants=is_checked, **SMALL)
        found[is_checked] = engine.generate(PROMPTS, PARAMS)
    for clean, poisoned in zip(found[False], found[True], strict=True):
        assert clean.token_ids == poisoned.token_ids
        assert clean.acceptance == poisoned.acceptance
    assert sum(c.acceptance.num_accepted_tokens for c in found[True]) > 20


@pytest.mark.slow
def test_rows_draft_to_the_end_of_their_slots(target):
    """The mask rows of the last rounds stand beyond `max_length`, and their KV has slots."""
    drafter = flex.copied_flex(target, mode="parallel", confidence=0.0)
    prompts = toy.prompts((100, 119), seed=4)
    params = [
        SamplingParams(max_tokens=126 - len(prompt), temperature=0.6 * row, seed=row)
        for row, prompt in enumerate(prompts)
    ]
    found = {}
    for max_length in (128, 256):
        engine = Engine(target, drafter, batch_size=2, max_length=max_length)
        assert engine.executor.state.cache.capacity == max_length + 128
        found[max_length] = engine.generate(prompts, params)
    for short, long in zip(*found.values(), strict=True):
        assert short.token_ids == long.token_ids
        assert short.acceptance == long.acceptance


def test_memory_counts_the_slots_of_mask_rows(target):
    alone = Engine(target, **SMALL)
    parallel = Engine(target, flex.random_flex(target, mode="parallel"), **SMALL)
    assert parallel.shape.max_length == alone.shape.max_length == 256
    assert parallel.memory.max_length == 256
    assert parallel.memory.kv_bytes == alone.memory.kv_bytes * (256 + 128) // 256


@pytest.mark.as_shipped
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "mode"),
    [
        pytest.param("default", "parallel", marks=pytest.mark.slow),
        pytest.param("default", "sequential", marks=pytest.mark.slow),
        pytest.param("xla", "parallel", marks=pytest.mark.slow),
        ("xla", "sequential"),
    ],
)
def test_no_cache_is_copied(kernels, mode):
    """Temporaries of a round do not grow with the slots of a row, of which one layer would show."""
    target = flex.target(**({} if kernels == "default" else {"kernels": "xla"}))
    temporaries, layer_bytes = [], []
    for max_length in (256, 2048):
        settings = {**SMALL, "max_length": max_length}
        executor = make_executor(target, flex.random_flex(target, mode=mode), **settings)
        memory = executor.lower_run().compile().memory_analysis()
        assert memory is not None
        temporaries.append(memory.temp_size_in_bytes)
        layer = executor.eval_state().cache.layers[0]
        layer_bytes.append(sum(2 * leaf.size for leaf in jax.tree.leaves(layer)))
    assert temporaries[1] - temporaries[0] < (layer_bytes[1] - layer_bytes[0]) / 4


@pytest.mark.slow
def test_plain_steps_between_rounds_make_hidden_states_stale(target, plain):
    drafter = flex.copied_flex(target, mode="parallel", confidence=0.0)
    executor = admitted(target, drafter, exactness="ties")
    for draft_length in (3, 0, 3, 0, 0, 3):
        executor.run(1, draft_length=draft_length)
        state = executor.state
        is_fresh = np.asarray(state.drafter.hidden_at == state.num_committed)[:3]
        assert np.all(is_fresh == (draft_length > 0))
    together = admitted(target, flex.copied_flex(target, mode="sequential"), exactness="ties")
    for draft_length in (3, 0, 3, 0, 0, 3):
        together.run(1, draft_length=draft_length)
    lengths = np.minimum(executor.state.num_committed, together.state.num_committed)
    for row, length in enumerate(lengths.tolist()):
        np.testing.assert_array_equal(
            executor.state.tokens[row, :length], together.state.tokens[row, :length]
        )


def test_a_row_that_is_cut_back_forgets_its_hidden_states(target):
    executor = admitted(target, flex.copied_flex(target, mode="parallel"))
    executor.run(2)
    drafter, shape, state = executor.parts.drafter, executor.parts.shape, executor.state.drafter
    after = drafter.rewind(shape, drafter.params, state, None, jnp.int32(1), jnp.int32(2))
    assert after.hidden_at.tolist()[1] == -1
    assert after.hidden_at.tolist()[::2] == state.hidden_at.tolist()[::2]


# Faults that the checks above must see.


def compare_modes(target):
    """The largest distance between hidden states that were kept and those made afresh."""
    drafter = flex.copied_flex(target, mode="parallel", confidence=0.0)
    executor = admitted(target, drafter)
    blocks, farthest = compiled_blocks(executor.parts.drafter), 0.0
    for _ in range(6):
        executor.run(1)
        expected = blocks(executor.params, executor.state)[:3]
        kept = executor.state.drafter.hidden[:3]
        farthest = max(farthest, float(jnp.max(jnp.abs(kept - expected))))
    return farthest


def with_group_off_by_one(
    self, shape, params, state, rows, info, *, real=flexdraft.FlexDraft.commit
):
    """Keeps the group of one accepted draft more."""
    verdict = info.verdict
    wrong = jnp.minimum(verdict.num_accepted + 1, state.groups.shape[1] - 1)
    after = real(
        self, shape, params, state, rows, info.replace(verdict=verdict.replace(num_accepted=wrong))
    )
    return after.replace(hidden_at=rows.num_committed)


def that_sees_the_next_token(window, *, real=formulas.group_window, **sizes):
    """Groups see one clean row more: the bonus token, as far as it was drafted."""
    masks = real(window, **sizes)
    size = sizes["block_size"]
    depth = jnp.arange(masks.paths.shape[2], dtype=jnp.int32)[None, None]
    group = jnp.arange(masks.paths.shape[1], dtype=jnp.int32)[None, :, None] // size
    return masks.replace(paths=jnp.where(depth == group + 1, depth, masks.paths))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["group off by one", "bonus leak"])
def test_a_wrong_group_is_seen(target, monkeypatch, fault):
    assert compare_modes(target) < 1e-4
    if fault == "group off by one":
        monkeypatch.setattr(flexdraft.FlexDraft, "commit", with_group_off_by_one)
    else:
        monkeypatch.setattr(formulas, "group_window", that_sees_the_next_token)
    assert compare_modes(target) > 1e-2


@pytest.mark.slow
def test_mask_rows_that_clean_rows_see_change_the_output(target, plain, monkeypatch):
    """A target whose clean rows look beyond their own position: the output is no longer its own."""

    def with_wide_ends(*args, real=decoder.run_dual_layers, **settings):
        window, masks = args[5], args[6]
        num_clean = window.positions.shape[1]
        # The whole first group is stored right after the window.
        ends = window.start[:, None] + num_clean + masks.paths.shape[2] // 2
        wide = window.replace(ends=jnp.broadcast_to(ends, window.positions.shape))
        return real(*args[:5], wide, *args[6:], **settings)

    drafter = flex.random_flex(target, mode="parallel", seed=2)
    engine = Engine(target, drafter, **SMALL)
    assert [c.token_ids for c in engine.generate(PROMPTS, PARAMS)] == plain
    monkeypatch.setattr(decoder, "run_dual_layers", with_wide_ends)
    engine = Engine(target, drafter, **SMALL)
    assert [c.token_ids for c in engine.generate(PROMPTS, PARAMS)] != plain


# What it refuses, and what it survives.


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_nan_in_a_projector_leaves_the_output_alone(target, plain, mode):
    drafter = flex.copied_flex(target, mode=mode)
    first = drafter.params["layers"][0]
    broken = {**first, "qkv": first["qkv"].at[0, 0, 0, 0].set(jnp.nan)}
    params = {**drafter.params, "layers": (broken, *drafter.params["layers"][1:])}
    for verifier in (jaxspec.Coupled(), jaxspec.Rejection()):
        engine = Engine(
            target,
            flexdraft.FlexDraft(drafter.config, params, mode=mode),
            verifier=verifier,
            **SMALL,
        )
        found = engine.generate(PROMPTS, PARAMS)
        greedy = [index for index, own in enumerate(PARAMS) if own.temperature == 0]
        wanted = greedy if isinstance(verifier, jaxspec.Rejection) else range(len(PARAMS))
        assert all(found[index].token_ids == plain[index] for index in wanted)
        assert all(c.finish_reason == "length" for c in found)


@pytest.mark.slow
def test_a_smaller_block_drafts_less(target, plain):
    config = flex.config_of(target, block_size=8)
    params = flex.copied_params(config, target)
    drafter = flexdraft.FlexDraft(config, params, block_size=3, mode="parallel", confidence=0.0)
    engine = Engine(target, drafter, **SMALL)
    assert engine.shape.num_nodes == 2
    found = engine.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in found] == plain
    assert max(c.acceptance.depth for c in found) == 2


@pytest.mark.slow
def test_a_window_wider_than_the_block_is_filled_up_to_it(target, plain):
    drafter = flex.copied_flex(target, mode="parallel", confidence=0.0)
    engine = Engine(target, drafter, verify_length=7, **SMALL)
    found = engine.generate(PROMPTS, PARAMS, draft_length=6)
    assert [c.token_ids for c in found] == plain
    assert max(c.acceptance.depth for c in found) == flex.BLOCK - 1


def test_what_does_not_fit_is_refused(target):
    drafter = flex.random_flex(target)
    in_bfloat16 = flex.random_params(drafter.config, dtype=jnp.bfloat16)
    other = dataclasses.replace(target, config=dataclasses.replace(target.config, num_kv_heads=4))

    def make(params=drafter.params, **settings):
        return flexdraft.FlexDraft(drafter.config, params, **settings)

    for error, call, message in (
        (SettingError, lambda: make(block_size=5), r"A block_size of 5 was given .* with 4"),
        (SettingError, lambda: make(block_size=1), "A block_size of 1 was given"),
        (SettingError, lambda: make(mode="both"), "The mode 'both' was given"),
        (SettingError, lambda: make(rule="sum"), "The rule 'sum' was given"),
        (SettingError, lambda: make(confidence=1.5), "confidence 1.5 was given; it must be a prob"),
        (ModelError, lambda: make({**drafter.params, "mask": jnp.zeros((33,))}),
         r"float32\[33\] at params\['mask'\]"),
        (ModelError, lambda: make(in_bfloat16).check(target),
         "dtype bfloat16, and echo0 has dtype float32"),
        (ModelError, lambda: drafter.check(other), "num_kv_heads 2, and echo0 has num_kv_heads 4"),
        (ModelError, lambda: dataclasses.replace(drafter.config, rank=2**40),
         "weights' rank is 1099511627776"),
        (ModelError, lambda: Engine(Untapped(target), drafter, **SMALL),
         "echo0 has no config, kernels, final_norm, head; use"),
        (SettingError, lambda: Engine(target, drafter, layout="aligned", **SMALL),
         "use the layout 'ragged'"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_the_papers_sizes():
    """Qwen3-8B: 16 mask rows, 10 of 36 layers, a calibrator of rank 512."""
    preset = PRESETS["qwen3-8b"]
    config = flex_config(preset)
    assert (config.block_size, config.num_deep_layers, config.rank) == (16, 10, 512)
    shapes = jax.tree.leaves(param_shapes(config), is_leaf=decoder.is_shape)
    assert round(sum(map(np.prod, shapes)) / 1e6, 1) == 501.6


@pytest.mark.slow
def test_updated_weights_are_used(target):
    first, second = (flex.random_flex(target, seed=seed, mode="parallel") for seed in (0, 1))
    engine = Engine(target, first, **SMALL)
    engine.generate(PROMPTS, PARAMS)
    engine.update_params(draft=second.params)
    found = engine.generate(PROMPTS, PARAMS)
    fresh = Engine(target, second, **SMALL).generate(PROMPTS, PARAMS)
    assert [c.acceptance for c in found] == [c.acceptance for c in fresh]
