"""Heads in training: labels, packing, the same formulas as in drafting, losses, accuracy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxspec.cache import pages as kv
from jaxspec.drafters.heads.config import heads_config, param_shapes
from jaxspec.drafters.heads.formulas import anchor, apply_head, head_logits
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel, forward_features
from jaxspec.models.prefill import chain_window
from jaxspec.training import teacher_forcing
from jaxspec.training.head_accuracy import (
    RankedText,
    accuracy_of,
    best_trees,
    rank_of,
    rank_texts,
)
from jaxspec.training.heads import HeadsLoss, init_heads
from jaxspec.training.teacher_forcing import labels_of, run_heads, target_features, target_parts
from jaxspec.training.text_rows import fill_rows, pack_texts
from jaxspec.training.texts import Text
from jaxspec.training.trainer import TrainState, make_optimizer, train_step

KINDS = ("medusa", "hydra", "clover", "clover2")
ABLATIONS = (
    ("medusa", {"num_layers": 2}),
    ("hydra", {"shares_head": False}),
    ("clover", {"connection": "mlp"}),
    ("clover", {"connection": "none"}),
    ("clover", {"block": None, "gate": "cosine"}),
    ("clover", {"block_part": "attention", "shares_connection": False}),
)
TARGET = toy.config()


@functools.cache
def target_params():
    with jax.ensure_compile_time_eval():
        return decoder.init_params(TARGET, jax.random.key(0), jnp.float32, stddev=0.4)


def text(prompt, output, domain="tales"):
    return Text(domain, "book", list(prompt), list(output))


def random_text(num_prompt, num_output, seed=0):
    tokens = np.random.default_rng(seed).integers(0, toy.VOCAB, num_prompt + num_output).tolist()
    return text(tokens[:num_prompt], tokens[num_prompt:])


def random_heads(kind, **fields):
    """Heads that begin as in training, with noise on every parameter."""
    config = heads_config(kind, TARGET, **({"num_heads": 3} | fields))
    params = init_heads(config, TARGET, target_params(), jax.random.key(1))
    leaves, treedef = jax.tree.flatten(params)
    noisy = [
        leaf + 0.1 * jax.random.normal(jax.random.fold_in(jax.random.key(2), i), leaf.shape)
        for i, leaf in enumerate(leaves)
    ]
    return config, jax.tree.unflatten(treedef, noisy)


@functools.partial(jax.jit, static_argnums=0)
def logits_in_training(config, params, batch):
    """`[D, B, T, V]` of the heads on a packed batch."""
    target = target_parts(TARGET, target_params())
    features = target_features(TARGET, target_params(), batch)
    made = run_heads(config, params, target, features, batch)
    return [head_logits(config, params, target, i, each.hidden) for i, each in enumerate(made)]


def logits_in_drafting(config, params, tokens, at):
    """`[D, V]` of the heads that draft after `tokens[: at + 2]`, from features as an engine has
    them: the target and the block read the tokens before, with a cache."""
    return _logits_in_drafting(config, at, params, jnp.asarray([tokens], jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits_in_drafting(config, at, params, tokens):
    model = LanguageModel(name="toy", config=TARGET, params=target_params())
    window = chain_window(jnp.zeros((1,), jnp.int32), at + 1)
    _, features, _ = forward_features(
        model,
        target_params(),
        tokens[:, : at + 1],
        window,
        model.init_cache(1, 128),
        (TARGET.num_layers,),
    )

    def block(hidden):
        cache = kv.init_cache(
            num_layers=config.block.num_layers,
            num_rows=1,
            capacity=128,
            num_kv_heads=config.block.num_kv_heads,
            head_size=config.block.head_size,
            dtype=jnp.float32,
        )
        has_feed_forward = config.block_part == "whole"
        return decoder.run_layers(
            config.block, params, hidden, window, cache, has_feed_forward=has_feed_forward
        )[0]

    target = target_parts(TARGET, target_params())
    hidden = anchor(config, params, target, features[:, :, 0], tokens[:, 1 : at + 2], block)[:, -1]
    made = []
    for index in range(config.num_heads):
        path = tokens[:, at + 1 : at + 2 + index]
        hidden, output = apply_head(config, params, target, index, hidden, path)
        made.append(head_logits(config, params, target, index, output)[0])
    return made


# Labels and packing


def expected_labels():
    """Of two heads on the row of `test_labels...`: label at each anchor, None without one."""
    # tokens: 5 6 | 7 8 9   1 | 2 3   - -
    return [
        [7, 8, 9, None, None, 3, None, None, None, None],
        [8, 9, None, None, None, None, None, None, None, None],
    ]


def found_labels(batch):
    found = []
    for index in range(2):
        labels, weights = labels_of(batch, index)
        found.append([int(a) if w else None for a, w in zip(labels[0], weights[0], strict=True)])
    return found


def test_labels_are_tokens_of_the_output_two_and_more_positions_on(monkeypatch):
    batch = pack_texts([[text([5, 6], [7, 8, 9]), text([1], [2, 3])]], 10)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3, 0, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, -1, -1]]
    assert found_labels(batch) == expected_labels()
    # Sabotage: labels one position off.
    honest = teacher_forcing.shifted
    monkeypatch.setattr(teacher_forcing, "shifted", lambda x, n: honest(x, n + 1))
    assert found_labels(batch) != expected_labels()


def test_labels_in_the_prompt_do_not_count():
    batch = pack_texts([[text([5, 6, 4, 2], [7, 8])]], 6)
    labels, weights = labels_of(batch, 0)
    assert weights.tolist() == [[0, 0, 1, 1, 0, 0]]
    assert labels[0, 2:4].tolist() == [7, 8]


def test_a_text_longer_than_a_row_is_cut():
    batch = pack_texts([[random_text(4, 20)]], 8)
    assert batch.tokens.shape == (1, 8)
    assert batch.is_output.sum() == 4


def test_rows_hold_every_text_once_and_are_well_filled():
    lengths = np.random.default_rng(0).integers(20, 220, 500).tolist()
    rows = fill_rows(lengths, 512, np.random.default_rng(1))
    assert sorted(index for row in rows for index in row) == list(range(500))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert max(filled) <= 512
    assert sum(filled) > 0.9 * 512 * len(rows)
    assert rows == fill_rows(lengths, 512, np.random.default_rng(1))
    assert rows != fill_rows(lengths, 512, np.random.default_rng(2))


# Formulas


def test_training_features_are_the_streams_between_the_layers():
    model = LanguageModel(name="toy", config=TARGET, params=target_params())
    tokens = jnp.asarray([random_text(4, 6).prompt + random_text(4, 6).output], jnp.int32)
    window = chain_window(jnp.zeros((1,), jnp.int32), 10)
    taps = (2, 0, 1)
    cache = model.init_cache(1, 128)
    _, expected, _ = forward_features(model, target_params(), tokens, window, cache, taps)
    segments = jnp.zeros(tokens.shape, jnp.int32)
    made = decoder.training_features(TARGET, target_params(), tokens, segments, taps)
    assert made.shape == (1, 10, 3, TARGET.width)
    np.testing.assert_allclose(made, expected, atol=1e-4)
    logits = decoder.training_logits(TARGET, target_params(), tokens, segments)
    np.testing.assert_array_equal(decoder.head(TARGET, target_params(), made[:, :, 0]), logits)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in KINDS),
        *(pytest.param(*form, marks=pytest.mark.system) for form in ABLATIONS),
    ],
)
def test_heads_compute_in_training_what_they_compute_in_drafting(kind, fields):
    """Of the second text of a row, beside the same text alone."""
    config, params = random_heads(kind, **fields)
    first, second = random_text(3, 4, seed=1), random_text(3, 6, seed=2)
    batch = pack_texts([[first, second]], 20)
    tokens, at = [*second.prompt, *second.output], 4
    in_training = [each[0, 7 + at] for each in logits_in_training(config, params, batch)]
    in_drafting = logits_in_drafting(config, params, tokens, at)
    np.testing.assert_allclose(in_training, in_drafting, atol=2e-3)
    if config.is_regressive:  # Sabotage: tokens one position late.
        late = [*tokens[1:], 0]
        wrong = logits_in_drafting(config, params, late, at)
        assert np.abs(np.stack(in_training) - np.stack(wrong)).max() > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_heads_begin_by_adding_nothing(kind):
    config = heads_config(kind, TARGET)
    params = init_heads(config, TARGET, target_params(), jax.random.key(0))
    shapes = jax.tree.map(lambda leaf: leaf.shape, params)
    assert shapes == param_shapes(config)
    if kind in ("medusa", "hydra"):  # the target's own prediction of the next token
        batch = pack_texts([[random_text(3, 6)]], 9)
        ours = logits_in_training(config, params, batch)
        theirs = decoder.training_logits(TARGET, target_params(), batch.tokens, batch.segments)
        for each in ours:
            np.testing.assert_allclose(each, theirs, atol=1e-4)
    else:
        last = target_params()["layers"][-1]
        for layer in params["layers"]:
            jax.tree.map(np.testing.assert_array_equal, layer, last)


def test_own_heads_begin_as_the_targets():
    config = heads_config("medusa", TARGET, shares_head=False)
    params = init_heads(config, TARGET, target_params(), jax.random.key(0))
    for each in params["heads"]:
        np.testing.assert_array_equal(each["head"], target_params()["head"])


# Losses


@functools.partial(jax.jit, static_argnums=0)
def read_by_the_loss(config, params, batch):
    """The target's normed states and distribution, and what every head makes."""
    target = target_parts(TARGET, target_params())
    features = target_features(TARGET, target_params(), batch)
    normed = target.final_norm(features)
    made = [each.hidden for each in run_heads(config, params, target, features, batch)]
    return normed, jax.nn.softmax(target.head(normed)), made


def reference_loss(config, params, batch):
    """The loss label by label, in NumPy."""
    logits = np.asarray(logits_in_training(config, params, batch), np.float64)
    tokens, segments = np.asarray(batch.tokens), np.asarray(batch.segments)
    read = read_by_the_loss(config, params, batch)
    normed, p, made = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), read)
    total = 0.0
    for k in range(config.num_heads):
        losses = []
        for row in range(tokens.shape[0]):
            for t in range(tokens.shape[1] - 2 - k):
                label = t + 2 + k
                if segments[row, label] != segments[row, t] or not batch.is_output[row, label]:
                    continue
                log_q = logits[k, row, t] - np.log(np.exp(logits[k, row, t]).sum())
                if config.kind != "clover2":
                    losses.append(-log_q[tokens[row, label]])
                    continue
                apart = np.abs(made[k][row, t] - normed[row, label - 1])
                smooth = np.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
                losses.append(-(p[row, label - 1] * log_q).sum() + 10 * smooth)
        total += (0.7 if config.kind == "clover2" else 0.8) ** k * np.mean(losses)
    return total


@pytest.mark.parametrize("kind", ["medusa", "clover2"])
def test_the_loss_is_that_of_the_paper(kind):
    config, params = random_heads(kind)
    batch = pack_texts([[random_text(3, 6, seed=1), random_text(2, 5, seed=2)]], 18)
    loss, metrics = jax.jit(HeadsLoss(config, TARGET))(params, target_params(), batch)
    np.testing.assert_allclose(loss, reference_loss(config, params, batch), rtol=1e-4)
    assert set(metrics) == {"loss", "top1/0", "top1/1", "top1/2"}


def test_a_step_learns_and_leaves_the_target_as_it_was():
    config, params = random_heads("clover")
    batch = pack_texts([[random_text(3, 30)]], 33)
    before = jax.tree.map(np.array, target_params())
    optimizer = make_optimizer()
    state = TrainState(params=params, optimizer=optimizer.init(params))
    how = {"loss": HeadsLoss(config, TARGET), "optimizer": optimizer}
    losses = []
    for _ in range(8):
        state, metrics = train_step(state, target_params(), batch, np.float32(1e-2), **how)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, before, target_params())
    # The shared head is no parameter of the heads, so nothing of the target can be trained.
    assert toy.VOCAB not in {size for leaf in jax.tree.leaves(state.params) for size in leaf.shape}


def test_a_token_of_which_the_head_knows_nothing_leaves_gradients_finite():
    """Vocabularies are padded with rows of zeros, whose cosine with anything is 0 / 0."""
    config, params = random_heads("clover", block=None, gate="cosine")
    target = {**target_params(), "head": jnp.zeros_like(target_params()["head"])}
    batch = pack_texts([[random_text(3, 6)]], 9)
    gradients, _ = jax.jit(jax.grad(HeadsLoss(config, TARGET), has_aux=True))(params, target, batch)
    for leaf in jax.tree.leaves(gradients):
        assert jnp.all(jnp.isfinite(leaf))


# Accuracy


def test_ranks_are_those_of_top_k():
    logits = jnp.asarray([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    for row in range(2):
        _, order = jax.lax.top_k(logits[row], 4)
        labels = jnp.asarray(order, jnp.int32)
        ranks = rank_of(jnp.broadcast_to(logits[row], (4, 4)), labels)
        assert ranks.tolist() == [0, 1, 2, 3]


def test_accuracy_is_counted_label_by_label():
    config, params = random_heads("hydra", num_heads=2)
    texts = [random_text(3, 6, seed=1), random_text(2, 5, seed=2)._replace(domain="sums")]
    ranked = rank_texts(config, params, (TARGET, target_params()), texts, row_length=12)
    found = accuracy_of(ranked)
    assert set(found) == {"all", "tales", "sums"}
    by_hand = {0: [], 1: []}
    for each in texts:
        tokens = [*each.prompt, *each.output]
        alone = logits_in_training(config, params, pack_texts([[each]], 9))
        for at in range(len(tokens) - 2):
            logits = [of_head[0, at] for of_head in alone]
            ranks = {}
            for k in range(2):
                label = at + 2 + k
                if label < len(tokens):
                    order = np.argsort(-np.asarray(logits[k]), kind="stable").tolist()
                    ranks[k] = order.index(tokens[label])
                    if label >= len(each.prompt):
                        by_hand[k].append(ranks[k])
    everything = found["all"]
    for k in range(2):
        assert everything.num_tokens[k] == len(by_hand[k])
        assert everything.top1[k] == pytest.approx(np.mean([r == 0 for r in by_hand[k]]))
        assert everything.top5[k] == pytest.approx(np.mean([r < 5 for r in by_hand[k]]))


def test_acceptance_is_counted_where_rounds_begin():
    # Anchors 1, 2, ... of a prompt of three tokens. Only the last of head 0 is wrong, so the rounds
    # of a chain of two begin at 1, at 4 (three tokens on) and at 6 (two on: head 1 is wrong at 4).
    ranks = np.array(
        [[9, 9], [0, 0], [5, 5], [5, 5], [0, 1], [5, 5], [2, 0], [5, 5], [5, 5], [5, 5]]
    )
    found = accuracy_of([RankedText("tales", 3, ranks)])["all"]
    assert found.num_tokens == [7, 7]
    assert found.acceptance[0][:3] == pytest.approx([2 / 4, 0, 1 / 4])
    assert found.acceptance[1][:3] == pytest.approx([2 / 3, 1 / 3, 0])


def test_the_best_tree_is_found_and_its_rounds_are_counted():
    """Texts whose tokens are always of rank 1 and then 0: the path (1, 0) is accepted each time."""
    ranks = np.tile(np.array([[1, 0]]), (32, 1))
    trees = best_trees([RankedText("tales", 2, ranks)], (1, 2, 1000), 24)
    assert set(trees) == {1, 2}
    tree, tokens_per_round = trees[2]
    assert tree.choices == ((1,), (1, 0))
    assert tokens_per_round == 3.0  # 30 tokens in 10 rounds
    assert trees[1][0].choices == ((1,),)
    assert trees[1][1] == 2.0


def test_logits_that_are_no_numbers_are_not_counted_as_right():
    config, params = random_heads("medusa", num_heads=1)
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), params)
    pair = TARGET, target_params()
    ranked = rank_texts(config, broken, pair, [random_text(3, 30)], row_length=33)
    assert accuracy_of(ranked)["all"].top1[0] < 0.5
