"""FlexDraft's mask rows in training: what they see, labels, the loss, where it starts."""

from __future__ import annotations

import functools

import flex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.flexdraft.config import param_shapes
from jaxspec.kernels.base import unpacked
from jaxspec.models import decoder
from jaxspec.models.prefill import chain_window
from jaxspec.training import dual_path
from jaxspec.training.dual_path import (
    BlockBatch,
    clean_keys_values,
    draw_blocks,
    run_mask_rows,
    score_blocks,
    slot_weights,
)
from jaxspec.training.flexdraft import (
    FlexBatch,
    FlexLoss,
    init_flexdraft,
    make_flex_optimizer,
)
from jaxspec.training.text_rows import pack_texts
from jaxspec.training.texts import Text
from jaxspec.training.trainer import TrainState, train_step

BLOCK = flex.BLOCK
scored = jax.jit(score_blocks, static_argnums=0)


@functools.cache
def target(windows=()):
    with jax.ensure_compile_time_eval():
        return flex.target(kernels="xla", sliding_windows=windows)


def random_text(num_prompt, num_output, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, target().vocab_size, num_prompt + num_output).tolist()
    return Text("tales", "book", tokens[:num_prompt], tokens[num_prompt:])


def packed(*texts, anchors, row_length=24):
    """A row of `texts`, and blocks at `anchors`."""
    batch = pack_texts([texts], row_length)
    anchors = jnp.asarray([anchors], jnp.int32)
    return BlockBatch(texts=batch, anchors=anchors, is_block=jnp.ones(anchors.shape, bool))


@functools.partial(jax.jit, static_argnums=0)
def loss_of(config, params, target_params, batch, uncalibrated=1.0):
    return FlexLoss(config)(params, target_params, FlexBatch(batch, jnp.float32(uncalibrated)))


@functools.partial(jax.jit, static_argnums=0)
def hidden_in_training(config, params, target_params, batch):
    clean = clean_keys_values(config, target_params, batch.texts)
    return run_mask_rows(config, params, target_params, clean, batch)


def hidden_in_drafting(model, drafter, tokens):
    """A function of a place in `tokens`: the hidden states `[K - 1, E]` of the mask rows whose
    first stands there, beside a cache that holds all of the tokens."""
    bound = drafter.for_target(model)
    window = chain_window(jnp.zeros((1,), jnp.int32), len(tokens))
    read = jnp.asarray([tokens], jnp.int32)
    forward = jax.jit(decoder.forward, static_argnums=0)
    _, cache = forward(model.config, model.params, read, window, model.init_cache(1, 32))
    params = {"own": bound.params, "target": model.params}

    @jax.jit
    def run(newest):
        return bound._run_block(params, newest[None], jnp.ones((1,), bool), cache)[0][0]

    return run


@pytest.mark.parametrize("windows", [(), (9, 3, 5)], ids=["no windows", "sliding windows"])
def test_mask_rows_compute_in_training_what_they_compute_in_drafting(windows):
    """Of the second text of a row, beside the same text alone."""
    model = target(windows)
    drafter = flex.random_flex(model)
    first, second = random_text(3, 4, seed=1), random_text(3, 12, seed=2)
    tokens = [*second.prompt, *second.output]
    at = (1, 4, 9)
    batch = packed(first, second, anchors=[7 + each for each in at])
    params = unpacked(model.params)
    made = hidden_in_training(drafter.config, drafter.params, params, batch)
    drafted = hidden_in_drafting(model, drafter, tokens)
    for block, anchor in enumerate(at):
        np.testing.assert_allclose(made[0, block, 1:], drafted(anchor + 1), atol=2e-4)
        # Sabotage: the block of the anchor before.
        assert np.abs(made[0, block, 1:] - drafted(anchor)).max() > 0.01


def dependence(batch, changed):
    """Which of the blocks' hidden states change with the token at each place of the row, `[N]`."""
    model = target()
    drafter = flex.random_flex(model)
    params = unpacked(model.params)
    before = hidden_in_training(drafter.config, drafter.params, params, batch)
    tokens = batch.texts.tokens.at[0, changed].add(1) % model.vocab_size
    other = batch.replace(texts=batch.texts.replace(tokens=tokens))
    after = hidden_in_training(drafter.config, drafter.params, params, other)
    return (before != after).any(axis=(2, 3))[0]


def leaks(batch):
    """Whether a block depends on its bonus token, or on one after it."""
    anchors = np.asarray(batch.anchors)[0]
    return any((dependence(batch, place) & (anchors < place)).any() for place in range(4, 14))


def test_a_block_sees_its_text_up_to_its_anchor(monkeypatch):
    texts = random_text(2, 5, seed=1), random_text(3, 12, seed=2)
    batch = packed(*texts, anchors=[3, 8, 9, 12])
    for place in range(14):
        own = np.asarray([place < 7, *(place >= 7,) * 3])
        expected = own & (np.asarray([3, 8, 9, 12]) >= place)
        np.testing.assert_array_equal(dependence(batch, place), expected)
    assert not leaks(batch)
    # Sabotage: a mask that is off by one shows the bonus token.
    jax.clear_caches()
    honest = dual_path._attend

    def late(*inputs):
        *others, batch, block, sliding_window = inputs
        moved = batch.replace(anchors=batch.anchors + 1)
        return honest(*others, moved, block, sliding_window)

    monkeypatch.setattr(dual_path, "_attend", late)
    assert leaks(batch)
    jax.clear_caches()


def test_blocks_do_not_see_each_other():
    model = target()
    drafter = flex.random_flex(model)
    text, params = random_text(2, 20), unpacked(model.params)
    run = functools.partial(hidden_in_training, drafter.config, drafter.params, params)
    together = run(packed(text, anchors=[2, 3, 11]))
    for block, anchor in enumerate((2, 3, 11)):
        alone = run(packed(text, anchors=[anchor]))
        np.testing.assert_allclose(together[:, block], alone[:, 0], atol=1e-5)


def test_clean_rows_have_no_gradients():
    """Those of the target's parameters in its shallow layers, which mask rows never run through,
    are zero; those of FlexDraft's are not."""
    model = target()
    drafter = flex.random_flex(model)
    batch = packed(random_text(2, 20), anchors=[2, 3, 11])

    def loss(params, target_params):
        return loss_of(drafter.config, params, target_params, batch)[0]

    ours, theirs = jax.jit(jax.grad(loss, argnums=(0, 1)))(drafter.params, unpacked(model.params))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(ours))
    shallow = theirs["layers"][: drafter.config.first_deep_layer]
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(shallow))
    assert all((np.asarray(layer["qkv"]) == 0).all() for layer in theirs["layers"])


# Labels and the loss


def test_labels_are_tokens_that_the_target_wrote_in_the_anchors_text():
    texts = random_text(3, 5, seed=1), random_text(2, 9, seed=2)
    batch = packed(*texts, anchors=[0, 1, 5, 9, 15], row_length=20)
    tokens, is_label = dual_path._labels(batch, BLOCK)
    assert is_label[0].astype(int).tolist() == [
        [0, 0, 1, 1],  # places 1 to 4, of which the first two are of the prompt
        [0, 1, 1, 1],
        [1, 1, 0, 0],  # places 6 to 9: the text ends with 7
        [1, 1, 1, 1],
        [1, 1, 1, 0],  # places 16 to 19: the text ends with 18
    ]
    row = [token for text in texts for token in (*text.prompt, *text.output)]
    assert tokens[0, 1].tolist() == row[2:6]


def test_anchors_have_a_draft_to_learn():
    texts = random_text(3, 5, seed=1), random_text(2, 9, seed=2)
    batch = draw_blocks(pack_texts([texts], 20), 30, [np.random.default_rng(0)])
    drawn = np.asarray(batch.anchors)[np.asarray(batch.is_block)].tolist()
    assert drawn == [1, 2, 3, 4, 5, *range(8, 17)]
    some = [
        draw_blocks(pack_texts([texts], 20), 5, [np.random.default_rng(seed)]) for seed in (0, 0, 1)
    ]
    assert all(np.asarray(each.is_block).all() for each in some)
    first, again, other = (np.asarray(each.anchors).tolist() for each in some)
    assert first == again != other
    assert set(first[0]) <= set(drawn)
    assert len(set(first[0])) == 5


def test_weights_of_slots():
    assert slot_weights(16)[[0, 1, 2]] == pytest.approx([1, 1, np.exp(-1 / 7)])
    assert slot_weights(10)[3] == pytest.approx(np.exp(-2 / 5))
    assert slot_weights(8)[7] == pytest.approx(np.exp(-6 / 4))


def test_the_loss_is_the_sum_label_by_label():
    model = target()
    drafter = flex.random_flex(model)
    texts = random_text(3, 5, seed=1), random_text(2, 9, seed=2)
    batch = packed(*texts, anchors=[0, 5, 9, 15], row_length=20)
    batch = batch.replace(is_block=jnp.asarray([[True, True, False, True]]))
    params, own = unpacked(model.params), drafter.params["calibrator"]
    hidden = hidden_in_training(drafter.config, drafter.params, params, batch)[0]
    row = [token for text in texts for token in (*text.prompt, *text.output)] + [0] * 4
    _, is_label = dual_path._labels(batch, BLOCK)
    sums = np.zeros((2, 2))  # calibrated and not: losses and weights
    for block, anchor in enumerate((0, 5, 9, 15)):
        for slot in range(BLOCK):
            if not is_label[0, block, slot]:
                continue
            normed = model.final_norm(params, hidden[block, slot][None])[0]
            logits = model.head(params, normed[None])[0]
            bonus = params["embedding"][row[anchor + 1]]
            read = bonus @ own["embedding"] + normed @ own["hidden"] + own["hidden_bias"]
            added = jax.nn.silu(read) @ own["logits"] + own["logits_bias"]
            label, weight = row[anchor + 1 + slot], np.exp(-max(slot - 1, 0) / 2)
            for kind, each in enumerate((logits + added, logits)):
                if kind == 1 or slot >= 1:
                    loss = np.log(np.exp(np.asarray(each)).sum()) - each[label]
                    sums[kind] += weight * loss, weight
    calibrated, uncalibrated = sums[:, 0] / sums[:, 1]
    loss, metrics = loss_of(drafter.config, drafter.params, params, batch, 0.25)
    assert loss == pytest.approx(calibrated + 0.25 * uncalibrated, rel=1e-4)
    assert metrics["calibrated_loss"] == pytest.approx(calibrated, rel=1e-4)


@pytest.mark.slow
def test_logits_in_parts_are_the_same(monkeypatch):
    model = target()
    drafter = flex.random_flex(model)
    batch = packed(random_text(2, 20), anchors=[2, 3, 11, 12, 14, 15])
    params = unpacked(model.params)

    def made():
        @jax.jit
        def made_of(own):
            gradient = jax.grad(lambda own: loss_of(drafter.config, own, params, batch)[0])
            return scored(drafter.config, own, params, batch), gradient(own)

        jax.clear_caches()
        return made_of(drafter.params)

    whole = made()
    num_logits = 2 * BLOCK * model.vocab_size  # of two blocks
    monkeypatch.setattr(dual_path, "_MAX_LOGITS", num_logits)
    in_parts = jax.make_jaxpr(functools.partial(score_blocks, drafter.config))
    assert "length=3" in str(in_parts(drafter.params, params, batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), whole, made())


# Where training starts, and that it goes somewhere


def test_training_starts_from_the_targets_projectors_and_no_calibration():
    model = target()
    config, params = flex.config_of(model), unpacked(model.params)
    made = init_flexdraft(config, params, jax.random.key(0))
    shapes = jax.tree.map(lambda leaf: leaf.shape, made)
    assert shapes == param_shapes(config)
    for own, theirs in zip(made["layers"], params["layers"][1:], strict=True):
        for name, leaf in own.items():
            np.testing.assert_array_equal(leaf, theirs[name])
    assert 0.01 < np.std(made["mask"]) < 0.04
    scores = scored(config, made, params, packed(random_text(2, 20), anchors=[2, 11]))
    np.testing.assert_array_equal(scores.loss[..., 1:], scores.calibrated_loss[..., 1:])


def test_steps_lower_the_loss_at_both_rates():
    model = target()
    config, target_params = flex.config_of(model), unpacked(model.params)
    before = init_flexdraft(config, target_params, jax.random.key(0))
    params = jax.tree.map(jnp.copy, before)
    optimizer = make_flex_optimizer(10.0)
    state = TrainState(params=params, optimizer=optimizer.init(params))
    text = Text("tales", "book", [3, 4], [5, 6, 7, 8] * 5)
    batch = FlexBatch(packed(text, anchors=[2, 4, 7, 9, 12]), jnp.float32(1.0))
    how = {"loss": FlexLoss(config), "optimizer": optimizer}
    losses, moved = [], {}
    for step in range(30):
        state, metrics = train_step(state, target_params, batch, np.float32(1e-3), **how)
        losses.append(float(metrics["loss"]))
        if step == 0:  # Adam's first step is as large as the rate
            apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), state.params, before)
            moved = {name: max(jax.tree.leaves(each)) for name, each in apart.items()}
    assert losses[-1] < losses[0] - 1
    assert moved["layers"] == pytest.approx(1e-3, rel=0.2)
    assert moved["mask"] == pytest.approx(1e-2, rel=0.2)
    assert moved["calibrator"] == pytest.approx(1e-2, rel=0.2)
