"""The head of a model in two steps, what it knows of a token, and packed weights."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxspec import DraftModel, Engine, load_model
from jaxspec.engine.executor import make_executor
from jaxspec.engine.memory import num_bytes
from jaxspec.errors import SettingError
from jaxspec.kernels.base import XLA, PackedWeight, TiedEmbedding, unpacked
from jaxspec.kernels.registry import default_kernels
from jaxspec.models import decoder
from jaxspec.models.base import HeadedModel, LanguageModel, packed_model
from jaxspec.models.prefill import chain_window


@pytest.mark.parametrize("kernels", ["xla", default_kernels()])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("is_tied", [True, False])
def test_two_steps_make_the_logits_and_rows_are_those_of_the_head(kernels, dtype, is_tied):
    model = toy.model(kernels=kernels, dtype=dtype, is_tied=is_tied, num_layers=1)
    assert isinstance(model, HeadedModel)
    params, model = model.params, packed_model(model)
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_a_tpu_weights_of_products_are_matrices(dtype):
    kernels = XLA.on("tpu")
    params = toy.model(dtype=dtype).params
    packed = decoder.pack_params(params, kernels)
    layer, plain = packed["layers"][0], params["layers"][0]
    for name in ("qkv", "gate_up"):
        assert layer[name].data.shape == (32, plain[name].size // 32)
        assert layer[name].shape == plain[name].shape
        assert kernels.pack(layer[name]) is layer[name]
        hidden = jax.random.normal(jax.random.key(0), (2, 3, 32), dtype)
        settings = {"norm": plain["attention_norm"], "epsilon": 1e-6}
        ours, theirs = (kernels.product(hidden, each[name], **settings) for each in (layer, plain))
        assert ours.shape == theirs.shape == (2, 3, *plain[name].shape[1:])
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
        swapped = layer[name].replace(data=jnp.flip(layer[name].data, axis=1))
        assert not np.array_equal(kernels.product(hidden, swapped, **settings), theirs)
    for mine, other in zip(*map(jax.tree.leaves, (unpacked(packed), params)), strict=True):
        assert mine.shape == other.shape
        np.testing.assert_array_equal(mine, other)
    on_cpu = decoder.pack_params(params, XLA.on("gpu"))["layers"][0]
    assert all(isinstance(leaf, jax.Array) for leaf in on_cpu.values())


def test_an_untied_head_that_is_packed_is_not_unpacked_for_a_few_rows():
    model = toy.model(kernels="xla", is_tied=False, num_layers=1)
    data = jnp.zeros((4, 16, 16, 2), jnp.float32)
    params = {**model.params, "head": PackedWeight(data=data, shape=(32, 61), num_input_axes=1)}
    program = jax.make_jaxpr(model.head_rows)(params, jnp.zeros((2,), jnp.int32))
    assert max(out.aval.size for eqn in program.eqns for out in eqn.outvars) <= 2 * 32


@pytest.mark.parametrize("kernels", sorted({"xla", default_kernels()}))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_tied_model_keeps_its_embedding_once_and_computes_the_same_bits(kernels, dtype):
    tied = toy.model(kernels=kernels, dtype=dtype, is_tied=True, num_layers=1)
    params, tied = tied.params, packed_model(tied)
    embedding = tied.params["embedding"]
    assert isinstance(embedding, TiedEmbedding)
    assert "head" not in tied.params
    assert (embedding.shape, embedding.dtype) == ((61, 32), dtype)
    assert num_bytes(embedding) <= 64 * 32 * dtype.dtype.itemsize  # panels of 16 columns
    # What it was made of: a table and a head.
    config = dataclasses.replace(tied.config, is_tied=False)
    own = {**params, "head": params["embedding"].T}
    both = packed_model(LanguageModel(name="both", config=config, params=own, kernels=kernels))
    assert num_bytes(both.params) > num_bytes(tied.params)
    tokens = jnp.asarray([[0, 15, 16, -1, 60, 61, 10**6]], jnp.int32)
    found = {}
    for model in (both, tied):
        window = chain_window(jnp.zeros((1,), jnp.int32), tokens.shape[1])
        cache = model.init_cache(1, 128)
        hidden, cache = jax.jit(model.forward)(model.params, tokens, window, cache)
        found[model.name] = [
            jax.jit(decoder.embed)(model.params, tokens),
            hidden,
            jax.jit(model.logits)(model.params, hidden),
            jax.jit(model.head_rows)(model.params, tokens),
        ]
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("kernels", sorted({"xla", default_kernels()}))
def test_a_tied_model_may_be_made_again_from_any_form_of_its_parameters(kernels):
    model = toy.model(kernels=kernels, is_tied=True, num_layers=1)
    params, packed = model.params, packed_model(model).params
    for given in (packed, params, {**params, "head": params["embedding"].T}):
        again = dataclasses.replace(model, params=given, kernels="xla")
        jax.tree.map(np.testing.assert_array_equal, unpacked(again.params), params)
        jax.tree.map(np.testing.assert_array_equal, model.pack(again.params), packed)
    again.check_params()
    shapes = jax.eval_shape(model.pack, params)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, packed)


def test_a_head_that_is_not_the_embeddings_is_refused_where_the_config_says_tied():
    model = toy.model(is_tied=True, num_layers=1)
    params = model.params
    others = {
        "other": params["embedding"].T.at[3, 5].add(1),
        "not transposed": params["embedding"],
        "packed": packed_model(
            toy.model(kernels=default_kernels(), is_tied=False, num_layers=1, seed=1)
        ).params["head"],
    }
    for head in others.values():
        with pytest.raises(SettingError, match="toy0 says that its head is tied"):
            dataclasses.replace(model, params={**params, "head": head})


@pytest.mark.parametrize("kernels", sorted({"xla", default_kernels()}))
@pytest.mark.parametrize("is_tied", [True, False])
def test_no_loop_converts_the_whole_embedding_to_float32(kernels, is_tied):
    """As XLA:CPU does ahead of a loop that reads bfloat16."""
    model = toy.model(
        kernels=kernels, dtype=jnp.bfloat16, is_tied=is_tied, num_layers=1, vocab_size=1009
    )
    model = packed_model(model)

    def sums(params, tokens, read):
        def body(i, total):
            return total + read(params, tokens + i).astype(jnp.float32)

        return jax.lax.fori_loop(0, 5, body, jnp.zeros((2, 32)))

    for read in (decoder.embed, decoder.head_rows):
        program = jax.jit(sums, static_argnums=2)
        tokens = jnp.zeros((2,), jnp.int32)
        compiled = program.lower(model.params, tokens, read).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 1009 * 32 * 2


# Plain arrays in a model, packed ones in an engine


@pytest.mark.parametrize("is_tied", [True, False])
def test_params_are_plain_arrays_that_can_be_differentiated(is_tied):
    model = toy.model(kernels=default_kernels(), is_tied=is_tied, num_layers=1)
    assert jax.tree.map(jnp.shape, model.params) == decoder.param_shapes(model.config)
    tokens, one_text = jnp.arange(1, 9)[None], jnp.zeros((1, 8), jnp.int32)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        logits = decoder.training_logits(model.config, params, tokens, one_text)
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1))

    before, gradients = loss(model.params)
    assert all(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(gradients))
    step = jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, model.params, gradients)
    assert loss(step)[0] < before


def test_engines_of_a_model_share_its_packed_weights_while_there_are_engines():
    model = toy.model(kernels=default_kernels(), num_layers=1)
    settings = {"batch_size": 1, "max_length": 128}
    first = make_executor(model, DraftModel(model), draft_length=2, **settings)
    second = make_executor(model, **settings)
    leaves = [jax.tree.leaves(each.target_params) for each in (first, second)]
    leaves.append(jax.tree.leaves(first.params["drafter"]))
    for ours, *others in zip(*leaves, strict=True):
        places = {each.unsafe_buffer_pointer() for each in (ours, *others)}
        assert places == {ours.unsafe_buffer_pointer()}
    copy = weakref.ref(packed_model(model))
    assert copy() is not model
    del first, second, leaves, ours, others
    gc.collect()
    assert copy() is None


def test_an_engine_that_loads_its_models_itself_keeps_one_copy_of_their_weights():
    """What it counts is all that there is; a model that somebody else has stays as it is."""

    def live_bytes():
        gc.collect()
        return sum(leaf.nbytes for leaf in jax.live_arrays())

    before = live_bytes()
    engine = Engine("demo-target", "demo-draft", batch_size=1, max_length=128)
    made = live_bytes() - before
    assert engine.memory.weights_bytes <= made < 1.02 * engine.memory.weights_bytes
    del engine
    models = load_model("demo-target"), load_model("demo-draft")
    engine = Engine(models[0], DraftModel(models[1]), batch_size=1, max_length=128)
    made = live_bytes() - before
    assert made > 1.9 * engine.memory.weights_bytes
    assert all(isinstance(leaf, jax.Array) for leaf in models[0].params["layers"][0].values())
