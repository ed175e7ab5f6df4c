"""The head of a model in two steps, and what it knows of a token: whole, packed and tied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxspec.kernels.base import PackedWeight, unpacked
from jaxspec.kernels.registry import default_kernels
from jaxspec.models.base import HeadedModel


@pytest.mark.parametrize("kernels", ["xla", default_kernels()])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("is_tied", [True, False])
def test_two_steps_make_the_logits_and_rows_are_those_of_the_head(kernels, dtype, is_tied):
    model = toy.model(kernels=kernels, dtype=dtype, is_tied=is_tied, num_layers=1)
    assert isinstance(model, HeadedModel)
    params = unpacked(model.params)
    assert is_tied or isinstance(model.params["head"], PackedWeight) == (kernels == "native")
    head = params["embedding"].T if is_tied else params["head"]
    hidden = jax.random.normal(jax.random.key(0), (2, 3, 32), jnp.float32).astype(dtype)
    normed = model.final_norm(model.params, hidden)
    assert normed.dtype == dtype
    np.testing.assert_allclose(
        model.head(model.params, normed), model.logits(model.params, hidden), rtol=1e-5, atol=1e-5
    )
    tokens = jnp.asarray([[0, 15, 16], [17, 60, 3]], jnp.int32)
    found = jax.jit(model.head_rows)(model.params, tokens)
    np.testing.assert_array_equal(
        np.asarray(found, np.float32), np.asarray(head.T[tokens], np.float32)
    )


def test_an_untied_head_that_is_packed_is_not_unpacked_for_a_few_rows():
    model = toy.model(kernels="xla", is_tied=False, num_layers=1)
    data = jnp.zeros((4, 16, 16, 2), jnp.float32)
    params = {**model.params, "head": PackedWeight(data=data, shape=(32, 61), num_input_axes=1)}
    program = jax.make_jaxpr(model.head_rows)(params, jnp.zeros((2,), jnp.int32))
    assert max(out.aval.size for eqn in program.eqns for out in eqn.outvars) <= 2 * 32
