"""A foreign model and a foreign drafter plug in without touching the package."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import toy
from flax import nnx

import jaxspec
from jaxspec.cache import pages as kv
from jaxspec.engine.engine import Engine
from jaxspec.kernels.xla import block_attention
from jaxspec.models.base import Model
from jaxspec.models.registry import PRESETS
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.types import Draft, chain_parents

HEADS, SIZE, WIDTH, VOCAB = 2, 8, 16, 43


class Layer(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.normal(0.5)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * HEADS * SIZE, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(HEADS * SIZE, WIDTH, kernel_init=init, rngs=rngs)

    def __call__(self, x, window, layer, table):
        q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        layer = kv.write(layer, table, k, v, window.slots)
        mixed = block_attention(q, layer, table, window, dtype=jnp.float32)
        return x + self.out(mixed.reshape(*x.shape[:2], -1)), layer


class Decoder(nnx.Module):
    """A small decoder with learned positions, as somebody else would write it."""

    def __init__(self, rngs):
        init = nnx.initializers.normal(1.0)
        self.tokens = nnx.Embed(VOCAB, WIDTH, embedding_init=init, rngs=rngs)
        self.positions = nnx.Embed(512, WIDTH, embedding_init=init, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, kernel_init=init, rngs=rngs)

    def __call__(self, tokens, window, cache):
        x = self.tokens(tokens) + self.positions(window.positions)
        table = cache.table if window.rows is None else cache.table[window.rows]
        written = []
        for layer, stored in zip(self.layers, cache.layers, strict=True):
            x, stored = layer(x, window, stored, table)
            written.append(stored)
        return x, cache.replace(layers=tuple(written))


class ForeignModel:
    """The Model protocol around an NNX module: split once, merged inside the trace."""

    name = "foreign"
    vocab_size = VOCAB
    eos_token_ids = ()
    tokenizer = None

    def __init__(self, seed):
        self.graph, self.params = nnx.split(Decoder(nnx.Rngs(seed)))

    def init_cache(self, num_rows, capacity):
        return kv.init_cache(
            num_layers=2,
            num_rows=num_rows,
            capacity=capacity,
            num_kv_heads=HEADS,
            head_size=SIZE,
            dtype=jnp.float32,
        )

    def forward(self, params, tokens, window, cache):
        return nnx.merge(self.graph, params)(tokens, window, cache)

    def logits(self, params, hidden):
        return nnx.merge(self.graph, params).head(hidden)


@dataclasses.dataclass(frozen=True)
class RepeatLast(jaxspec.Drafter):
    """A foreign drafter: proposes the newest token again, twice at most."""

    name: str = "repeat-last"

    def propose(self, shape, params, state, rows):
        newest = jnp.take_along_axis(rows.tokens, rows.num_committed[:, None] - 1, axis=1)
        draft = Draft(
            tokens=jnp.broadcast_to(newest, (shape.batch_size, shape.num_nodes)),
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=jnp.minimum(rows.draft_limit, 2),
        )
        return draft, state


PROMPTS, PARAMS = [[1, 2, 3], [4] * 130, [7]], SamplingParams(max_tokens=30)


@pytest.fixture(scope="module")
def plain():
    target = ForeignModel(0)
    assert isinstance(target, Model)
    return Engine(target, batch_size=3, max_length=256).generate(PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "make", [jaxspec.DraftModel, lambda _: RepeatLast(), lambda _: jaxspec.NGram(1, 2)]
)
def test_a_foreign_model_decodes_speculatively_as_it_decodes_plainly(plain, make):
    drafter = make(ForeignModel(0))
    engine = Engine(ForeignModel(0), drafter, draft_length=4, batch_size=3, max_length=256)
    drafted = engine.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    total = drafted.acceptance
    assert total.num_draft_tokens > 0
    if isinstance(drafter, jaxspec.DraftModel):
        assert total.num_accepted_tokens == total.num_draft_tokens
    if isinstance(drafter, RepeatLast):
        assert total.depth == 2
    assert plain[0].text is None


@pytest.mark.slow
def test_a_preset_builds_and_decodes_at_reduced_size():
    for name, config in PRESETS.items():
        small = dataclasses.replace(
            config,
            num_layers=2,
            width=64,
            feed_forward_width=96,
            vocab_size=toy.VOCAB,
            sliding_windows=(),
        )
        target = jaxspec.random_model(small, dtype=jnp.float32)
        [completion] = Engine(target, batch_size=1, max_length=128).generate([[1, 2, 3]])
        assert len(completion.token_ids) == 16, name
    with pytest.raises(jaxspec.errors.JaxspecError, match="no preset 'gpt-2'"):
        jaxspec.random_model("gpt-2")
    shapes = jax.eval_shape(lambda: jaxspec.random_model("qwen3-0.6b").params)
    assert sum(x.size for x in jax.tree.leaves(shapes)) > 0.59e9
