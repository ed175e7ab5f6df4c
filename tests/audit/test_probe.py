"""The start-up probe passes here, and sees a machine on which bits depend on places."""

import dataclasses

import jax.numpy as jnp
import pytest
import toy

import jaxspec
from jaxspec.audit.probe import probe
from jaxspec.engine.engine import Engine
from jaxspec.models.base import LanguageModel


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Leaky(LanguageModel):
    """A model whose last layer leaks something about the batch: a machine's doing, say."""

    leak: str

    def forward(self, params, tokens, window, cache):
        hidden, cache = super().forward(params, tokens, window, cache)
        rows, length = tokens.shape
        if self.leak == "rows":
            place = 10 * jnp.arange(rows, dtype=jnp.float32)[:, None]
        elif self.leak == "window":
            place = 10 * jnp.arange(length, dtype=jnp.float32)[None, :]
        else:
            place = jnp.sum(hidden, axis=(0, 1, 2), keepdims=True)[..., 0]
        return hidden.at[..., 0].add(place), cache


def leaky(leak):
    healthy = toy.model(num_layers=1)
    fields = {f.name: getattr(healthy, f.name) for f in dataclasses.fields(healthy)}
    return Leaky(**fields, leak=leak)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_it_holds_here(dtype):
    target = toy.model(dtype=jnp.dtype(dtype), num_layers=1)
    engine = Engine(
        target, jaxspec.DraftModel(target), draft_length=3, batch_size=3, max_length=128
    )
    report = probe(engine)
    assert (report.rows, report.neighbours, report.window_positions) == (True, True, True)
    assert report.holds
    assert "bit-exact" in report.sentence
    assert report.to_json()["holds"] is True
    # The engine decodes on as before.
    assert len(engine.generate([[1, 2, 3]])[0].token_ids) == 16


def test_one_seat_and_no_window_leave_nothing_to_compare():
    report = probe(Engine(toy.model(num_layers=1), batch_size=1, max_length=128))
    assert (report.rows, report.neighbours, report.window_positions) == (None, None, None)
    assert "nothing to compare" in report.sentence


@pytest.mark.parametrize(
    "leak", ["window", *(pytest.param(n, marks=pytest.mark.slow) for n in ("rows", "neighbours"))]
)
def test_a_leak_is_seen_and_named(leak):
    drafter = jaxspec.NGram() if leak == "window" else None
    report = probe(Engine(leaky(leak), drafter, batch_size=3, max_length=128))
    assert not report.holds
    assert "equal up to ties" in report.sentence
    if leak == "window":
        assert report.window_positions is False
        assert "window positions" in report.sentence
    elif leak == "rows":
        assert report.rows is False
    else:
        assert report.neighbours is False
        assert "neighbours" in report.sentence
