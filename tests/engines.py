"""Engines that tests share: each is compiled once in a process, by the first test that asks for it.

    @pytest.fixture(scope="module")
    def engine():
        return engines.engine("toy", "draft model")

What differs between tests comes in as arrays: prompts, sampling parameters, limits, draft lengths
(`draft_length=`, `speculate=False`), and weights (`engine.update_params`). Make an engine of your
own only for another shape, model or setting than those of the table.

An engine is handed out empty and with its first weights, so a test may leave any state behind. Its
counters run on, and what a test replaces in it (`engine.executor.programs`, a controller) it has to
put back, as `monkeypatch` does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable

import jax.numpy as jnp
import tiny
import toy

import jaxspec
from jaxspec import DraftModel, Engine, NGram

SHAPE = {"batch_size": 2, "max_length": 256}

TARGETS = {
    "toy": lambda dtype: toy.model(dtype=dtype, num_layers=1),
    "deep": lambda dtype: toy.model(dtype=dtype),
    "text": lambda dtype: tiny.model(eos_token_ids=(), text=tiny.tokenizer(), dtype=dtype),
}
DRAFTERS = {
    None: lambda target: None,
    "ngram": lambda target: NGram(1, 3),
    "draft model": lambda target: DraftModel(stranger(target)),
    "the target": lambda target: DraftModel(target),
    "draft tree": lambda target: DraftModel(
        stranger(target), tree=jaxspec.trees.BeamTree(width=2, depth=2, nodes=4)
    ),
}
# Compiled programs are found again only under the settings of JAX and XLA that they were compiled
# with; `conftest.py` says here which of these the running test has.
compiled_for: Hashable = None


def stranger(target):
    """A draft model of one layer that seldom agrees with the target."""
    if target.vocab_size == tiny.VOCAB:
        return tiny.model(seed=5, eos_token_ids=(), text=target.tokenizer, dtype=target.dtype)
    return toy.model(seed=1, dtype=target.dtype, num_layers=1)


@functools.cache
def target(name: str = "toy", dtype: str = "float32"):
    """A target of the table, made once."""
    return TARGETS[name](jnp.dtype(dtype))


def engine(name: str = "toy", drafter: str | None = None, *, dtype="float32", **settings) -> Engine:
    """An engine of the table, empty and with its first weights.

    Args:
      name: of the target, see `TARGETS`.
      drafter: see `DRAFTERS`; chains of three tokens, trees of four.
      dtype: of the weights.
      settings: of the engine, besides `SHAPE`; all hashable.
    """
    key = (compiled_for, name, drafter, dtype, tuple(sorted(settings.items())))
    made = _engine(*key)
    if made.has_unfinished:  # a test that failed left it so
        forget()
        made = _engine(*key)
    drafts = made.drafter.params if isinstance(made.drafter, DraftModel) else None
    made.update_params(target=target(name, dtype).params, draft=drafts)
    made.reset()
    return made


@functools.cache
def _engine(compiled_for, name, drafter, dtype, settings) -> Engine:
    its_target = target(name, dtype)
    settings = SHAPE | dict(settings)
    if drafter not in (None, "draft tree"):
        settings = {"draft_length": 3} | settings
    return Engine(its_target, DRAFTERS[drafter](its_target), **settings)


def forget() -> None:
    """Frees all engines, before their programs are."""
    _engine.cache_clear()


def hold_rounds(engine, monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Makes rounds wait; the events are set when they have begun, and to let them end."""
    real, begun, may_end = engine.executor.programs["run"], threading.Event(), threading.Event()

    def run(*arguments):
        begun.set()
        may_end.wait()
        return real(*arguments)

    monkeypatch.setitem(engine.executor.programs, "run", run)
    return begun, may_end
