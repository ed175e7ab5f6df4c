"""A round computes what was drafted, of rows that have not ended, and nothing else is ever used."""

from __future__ import annotations

import dataclasses

import flex
import heads
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec import DraftModel, Engine, FlexDraft, NGram, SamplingParams
from jaxspec.decode import round
from jaxspec.engine import adaptive, executor, round_times
from jaxspec.kernels import cpu, registry
from jaxspec.models.base import LanguageModel

pytestmark = pytest.mark.skipif(cpu.problem() is not None, reason=f"{cpu.problem()}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpoilingKernels(cpu.NativeKernels):
    """The C++ kernels, with NaN in all results that nobody asked for.

    Attributes:
      spared: entries of each row, besides those asked for, that are left as they are.
    """

    spared: int = 0

    def _spoil(self, made, num_live):
        if num_live is None:
            return made
        entry = jnp.arange(made.size // made.shape[-1] // len(num_live), dtype=jnp.int32)[None]
        is_live = (entry < num_live[:, None] + self.spared).reshape(-1, 1)
        flat = made.reshape(-1, made.shape[-1])
        return jnp.where(is_live, flat, jnp.asarray(jnp.nan, made.dtype)).reshape(made.shape)

    def product_for(self, num_live):
        right = super().product_for(num_live)

        def product(x, weight, **settings):
            made = right(x, weight, **settings)
            if num_live is None:
                return made
            flat = made.reshape(*made.shape[: x.ndim - 1 - settings.get("is_gated", False)], -1)
            return self._spoil(flat, num_live).reshape(made.shape)

        return product

    def attend(self, qkv, layer, table, window, angles, **settings):
        made, layer = super().attend(qkv, layer, table, window, angles, **settings)
        flat = made.reshape(*made.shape[:2], -1)
        return self._spoil(flat, window.num_live).reshape(made.shape), layer


_FIELDS = {"product": cpu.NATIVE.product, "highest": cpu.NATIVE.highest}
_FIELDS |= {"is_width_invariant": True, "skips_padding": True}
SPOILING = SpoilingKernels(**_FIELDS)
TOO_FEW = SpoilingKernels(**_FIELDS, spared=-1)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setitem(registry.KERNELS, "spoiling", (__name__, "SPOILING"))
    monkeypatch.setitem(registry.KERNELS, "too few", (__name__, "TOO_FEW"))


def stranger(target: LanguageModel, **settings) -> DraftModel:
    model = toy.model(seed=1, kernels=target.kernels, dtype=target.dtype, num_layers=1)
    return DraftModel(model, **settings)


def flexdraft(mode):
    def make(target):
        config = flex.config_of(target)
        return FlexDraft(config, flex.copied_params(config, target), mode=mode)

    return make


TREE = jaxspec.trees.BeamTree(width=2, depth=2, nodes=4)
DRAFTERS = {
    "none": lambda target: None,
    "ngram": lambda target: NGram(1, 3),
    "ngram tree": lambda target: NGram(1, 3, branches=2),
    "draft model": stranger,
    "unsure draft model": lambda target: stranger(target, min_confidence=0.3),
    "draft tree": lambda target: stranger(target, tree=TREE),
    "clover": lambda target: heads.random_heads("clover", target),
    "medusa chain": lambda target: heads.random_heads("medusa", target, tree="chain"),
    "flexdraft": flexdraft("parallel"),
    "sequential flexdraft": flexdraft("sequential"),
}
TARGETS = {"clover": heads.target, "medusa chain": heads.target}
TARGETS |= {name: flex.target for name in DRAFTERS if "flexdraft" in name}
PROMPTS = [ids * 3 for ids in toy.prompts((5, 11, 2, 20, 7))]
LIMITS = (14, 3, 9, 1, 6)
SAMPLING = (
    {},
    {"temperature": 0.8},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "top_p": 0.7},
)
PARAMS = [
    SamplingParams(max_tokens=limit, ignore_eos=True, logprobs=2, seed=i, **SAMPLING[i % 4])
    for i, limit in enumerate(LIMITS)
]


def outputs(name, kernels, *, verifier="coupled", **settings):
    """What requests get that end at different times, and the engine that they came from."""
    target = TARGETS.get(name, toy.model)(kernels=kernels)
    settings = {"batch_size": 3, "max_length": 128} | settings
    drafter = DRAFTERS[name](target)
    if drafter is not None:
        settings |= {"verifier": verifier}
        settings |= {"draft_length": 3} if drafter.is_chain else {}
    engine = Engine(target, drafter, max_logprobs=2, trace="distributions", **settings)
    return engine.generate(PROMPTS, PARAMS), engine


def seen_by_users(completions):
    """Tokens, log-probabilities and the history of each, without what its rounds did not draft."""
    for one in completions:
        yield one.token_ids, one.finish_reason, repr(one.logprobs)
        rounds, tokens = one.trace.rounds, one.trace.tokens
        yield rounds.drafted.tolist(), rounds.accepted.tolist(), rounds.emitted.tolist()
        num_columns = tokens.token_id.shape[1]
        is_drafted = np.arange(num_columns) <= rounds.drafted[:, None]
        parts = {**vars(tokens), **vars(one.trace.distributions)}
        yield {part: values[is_drafted].tobytes() for part, values in parts.items()}


CASES = [(name, "coupled") for name in DRAFTERS]
CASES += [(name, "rejection") for name in ("ngram tree", "draft model", "flexdraft")]
CASES += [("draft model", "block"), ("ngram tree", "typical")]
CASES = [
    case if case[0] == "ngram" else pytest.param(*case, marks=pytest.mark.slow) for case in CASES
]


@pytest.mark.parametrize(("name", "verifier"), CASES)
def test_what_nobody_drafted_is_never_used(name, verifier, monkeypatch):
    spoilt, engine = outputs(name, "spoiling", verifier=verifier, check_invariants=True)
    assert engine.executor.parts.skips_padding
    monkeypatch.setattr(executor, "may_skip_padding", lambda parts: False)
    everything, engine = outputs(name, "native", verifier=verifier)
    assert not engine.executor.parts.skips_padding
    assert [*seen_by_users(spoilt)] == [*seen_by_users(everything)]


def test_rounds_of_a_draft_length_that_chooses_itself_compute_what_was_drafted():
    spoilt, engine = outputs("ngram", "spoiling", draft_length="auto", check_invariants=True)
    assert engine.executor.parts.skips_padding
    assert engine.executor.state.least_live.tolist() == [0] * engine.executor.num_rows
    plain, _ = outputs("none", "native")
    for one, other in zip(spoilt, plain, strict=True):
        assert (one.token_ids, repr(one.logprobs)) == (other.token_ids, repr(other.logprobs))


def test_rounds_are_timed_as_if_everything_had_been_drafted():
    _, engine = outputs("ngram", "native", draft_length="auto", scheduler="static")
    rows = engine.executor
    requests = adaptive.MadeUpRequests(rows, draft_length=3)
    requests.fill(1)
    requests.run(round_times.RoundKind(2), 1)
    info, _, _ = round.draft_and_verify(rows.parts, rows.params, rows.state)
    is_running = np.asarray(rows.state.is_running)
    assert info.draft.num_valid.tolist() == [0] * rows.num_rows
    assert info.window.num_live.tolist() == np.where(is_running, 3, 0).tolist()


@pytest.mark.parametrize("name", ["none", "ngram", "draft tree"])
def test_one_entry_less_is_seen_by_the_check_above(name):
    found, _ = outputs(name, "too few")
    assert all(one.finish_reason == "abort" for one in found)
