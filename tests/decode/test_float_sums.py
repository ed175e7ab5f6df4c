"""No round adds fp32 numbers along the vocabulary: XLA would choose the order by the shape of the
batch and of the window, and bits would depend on both."""

from __future__ import annotations

import flex
import heads
import jax
import jax.numpy as jnp
import pytest
import toy

import jaxspec
from jaxspec.kernels import sums

SIZE = 67  # of the vocabulary, and of nothing else


def equations(jaxpr):
    """All equations, in branches and loops too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def summed_axes(equation) -> tuple[int, ...]:
    """The axes along which an equation adds numbers."""
    match equation.primitive.name:
        case "reduce_sum":
            return equation.params["axes"]
        case "reduce":
            return equation.params["dimensions"]
        case "dot_general":
            return equation.params["dimension_numbers"][0][0]
        case "cumsum" | "cumlogsumexp":
            return (equation.params["axis"],)
    return ()


def float_sums(function, *arguments) -> list[str]:
    """The equations of a function that add fp32 numbers along the vocabulary."""
    found = []
    for equation in equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        axes = summed_axes(equation)
        if axes:
            summed = equation.invars[0].aval
            is_long = any(summed.shape[axis] == SIZE for axis in axes)
            if is_long and jnp.issubdtype(summed.dtype, jnp.floating):
                found.append(f"{equation} at {equation.source_info.name_stack}")
    return found


def test_they_are_found():
    numbers = jnp.ones((3, SIZE))
    for function in (
        jax.nn.softmax,
        jax.jit(lambda x: jax.nn.logsumexp(x, axis=1)),
        lambda x: x @ x.T,
        lambda x: jnp.cumsum(x, axis=1),
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda: jnp.sum(x), lambda: 1.0),
    ):
        assert float_sums(function, numbers)
    assert not float_sums(lambda x: (sums.softmax(x), x.T @ x, jnp.sum(x, axis=0)), numbers)


def engine(name: str) -> jaxspec.Engine:
    """Engines that together run everything that follows from logits."""
    target = toy.model(vocab_size=SIZE)
    own = toy.model(seed=1, vocab_size=SIZE, num_layers=1)
    chain = jaxspec.DraftModel(own, min_confidence=0.3)
    beam = jaxspec.DraftModel(own, tree=jaxspec.trees.BeamTree(width=2, depth=3, nodes=6))
    static = jaxspec.DraftModel(own, tree=jaxspec.trees.StaticTree(((0,), (1,), (0, 0), (0, 1))))
    recorded = {"max_logprobs": 2, "trace": "distributions"}
    processed = recorded | {"logprobs_mode": "processed_logprobs"}
    match name:
        case "plain":
            settings = {"drafter": None, **recorded}
        case "coupled":
            settings = {"drafter": chain, **processed}
        case "beam":
            settings = {"drafter": beam, **recorded}
        case "budget":
            tree = jaxspec.trees.BudgetTree(nodes=6, depth=3)
            settings = {"drafter": jaxspec.DraftModel(own, tree=tree), **processed}
        case "rejection" | "block":
            settings = {"drafter": chain, "verifier": name, **recorded}
        case "rejection, deterministic":
            settings = {"drafter": jaxspec.NGram(), "verifier": "rejection", **recorded}
        case "rejection, tree":
            settings = {"drafter": static, "verifier": "rejection", **recorded}
        case "typical":
            settings = {"drafter": beam, "verifier": jaxspec.Typical(), **recorded}
        case "heads":
            target = heads.target(vocab_size=SIZE)
            settings = {"drafter": heads.random_heads("medusa", target), **recorded}
        case "flexdraft":
            target = flex.target(vocab_size=SIZE, kernels="xla")
            settings = {"drafter": flex.random_flex(target, confidence=0.5), **recorded}
        case _:
            raise KeyError(name)
    return jaxspec.Engine(target, **settings, batch_size=2, max_length=128)


NAMES = [
    *("plain", "coupled", "beam", "budget", "rejection", "block", "rejection, deterministic"),
    *("rejection, tree", "typical", "heads", "flexdraft"),
]


@pytest.mark.parametrize("name", NAMES)
def test_no_round_has_any(name):
    loop = engine(name).executor.loop
    state = jax.eval_shape(loop.init)
    assert float_sums(loop.run, loop.params, state, jnp.int32(1), jnp.int32(1)) == []
