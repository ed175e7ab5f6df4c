"""What a teacher would say after every token of its texts, and distillation from that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxspec.errors import CheckpointError
from jaxspec.kernels.base import unpacked
from jaxspec.load.models import load_packed
from jaxspec.models import decoder
from jaxspec.training import lm, teacher_tops, text_passes
from jaxspec.training.lm import TopRows
from jaxspec.training.teacher_tops import NUM_TOPS


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = tiny.save(tmp_path_factory.mktemp("models"), "teacher", text=tiny.tokenizer())
    return load_packed(path)


@pytest.fixture(scope="module")
def texts(teacher):
    """Texts of one chunk, of several, and of a whole number of them."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, teacher.vocab_size, n).tolist() for n in (3, 1, 200, 128, 256, 17)]


def test_they_are_the_likeliest_tokens_in_their_own_text(tmp_path, teacher, texts, monkeypatch):
    monkeypatch.setattr(text_passes, "_NUM_CHUNKS", 3)  # some texts do not fit into one call
    found = teacher_tops.teacher_tops(tmp_path / "tops", teacher, texts)
    assert len(found) == sum(map(len, texts))
    start = 0
    for text in texts:
        ids = jnp.array(text)[None]
        logits = decoder.training_logits(
            teacher.config, unpacked(teacher.params), ids, jnp.zeros_like(ids)
        )
        expected = np.asarray(jax.nn.log_softmax(logits))[0]
        ours = found[start : start + len(text)]
        at_ours = np.take_along_axis(expected, ours["tokens"], axis=1)
        np.testing.assert_allclose(ours["log_probs"], at_ours, atol=2e-2)  # float16
        highest = -np.sort(-expected, axis=1)[:, :NUM_TOPS]
        np.testing.assert_allclose(at_ours, highest, atol=1e-4)
        start += len(text)


def test_an_interrupted_file_is_continued(tmp_path, teacher, texts, monkeypatch):
    path = tmp_path / "tops"
    whole = teacher_tops.teacher_tops(path, teacher, texts).tobytes()
    size = teacher_tops.RECORD.itemsize
    for num_bytes in (0, 5 * size, 204 * size + 7, len(whole)):  # within a text, within a record
        path.write_bytes(whole[:num_bytes])
        assert teacher_tops.teacher_tops(path, teacher, texts).tobytes() == whole

    def computed(*_):
        raise AssertionError

    monkeypatch.setattr(teacher_tops, "_likeliest", computed)
    teacher_tops.teacher_tops(path, teacher, texts)  # everything is known


def test_those_of_others_are_refused(tmp_path, teacher, texts):
    path = tmp_path / "tops"
    teacher_tops.teacher_tops(path, teacher, texts[:2])
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="of other texts; remove it"):
        teacher_tops.teacher_tops(path, teacher, texts)
    assert path.read_bytes() == before
    path.unlink()  # as the error says
    assert len(teacher_tops.teacher_tops(path, teacher, texts)) == sum(map(len, texts))


@pytest.mark.parametrize("ids", [(), (1, 2, 5)])
def test_with_all_tokens_the_loss_is_that_of_the_whole_distribution(ids):
    p = jax.random.normal(jax.random.key(0), (2, 3, 7))
    q = jax.random.normal(jax.random.key(1), (2, 3, len(ids) + 1 if ids else 7))
    rows = jnp.broadcast_to(jnp.arange(7), p.shape)
    log_probs = jax.nn.log_softmax(p)
    if ids:
        rows = jnp.full(7, len(ids)).at[jnp.array(ids)].set(jnp.arange(len(ids)))
        rows = jnp.broadcast_to(rows, p.shape)
        log_probs = jnp.where(rows < len(ids), log_probs, -jnp.inf)
    weights = jnp.array([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    expected, gradient = jax.value_and_grad(
        lambda q: lm.distillation_loss(q, p, weights, ids), has_aux=True
    )(q)
    found, same_gradient = jax.value_and_grad(
        lambda q: lm.top_distillation_loss(q, TopRows(rows, log_probs), weights), has_aux=True
    )(q)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(same_gradient, gradient, atol=1e-5)


def test_tokens_beyond_the_likeliest_count_together():
    p = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (1, 4, 9)))
    q = jax.random.normal(jax.random.key(1), (1, 4, 9))
    log_probs, rows = jax.lax.top_k(p, 3)
    loss, acceptance = lm.top_distillation_loss(q, TopRows(rows, log_probs), jnp.ones((1, 4)))
    ours = np.take_along_axis(np.asarray(jax.nn.softmax(q)), np.asarray(rows), axis=-1)
    theirs = np.exp(log_probs)
    overlap = np.minimum(ours, theirs).sum(axis=-1).mean()
    theirs, ours = (
        np.concatenate([x, 1 - x.sum(axis=-1, keepdims=True)], axis=-1) for x in (theirs, ours)
    )
    divergence = (theirs * np.log(theirs / ours)).sum(axis=-1).mean()
    np.testing.assert_allclose(acceptance, overlap, atol=1e-6)
    np.testing.assert_allclose(loss, (divergence + 1 - overlap) / 2, atol=1e-6)
