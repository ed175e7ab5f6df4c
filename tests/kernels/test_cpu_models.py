"""Models on the CPU kernels: a row's bits depend on the row alone, whatever drafts, and their
programs copy no cache. They are compiled as users compile them."""

import dataclasses
import functools
import os
import subprocess
import sys
import threading

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ties
import toy

import jaxspec
from jaxspec import Engine, NGram, SamplingParams, load_model
from jaxspec.cache import pages as kv
from jaxspec.kernels import cpu
from jaxspec.models.config import RopeConfig

pytestmark = [
    pytest.mark.as_shipped,
    pytest.mark.skipif(cpu.problem() is not None, reason=f"{cpu.problem()}"),
]

DTYPES = [jnp.float32, jnp.bfloat16]


@pytest.fixture(scope="module")
def pair():
    shape = {"head_size": 64, "rope": RopeConfig(theta=1e4, rotary_size=64)}
    target = toy.model(kernels="native", **shape)
    draft = toy.model(seed=1, kernels="native", num_layers=1, **shape)
    return target, draft


@pytest.mark.slow
def test_a_model_decodes_as_with_xlas_kernels_or_parts_at_ties(pair):
    target, draft = pair
    prompts, params = toy.prompts((3, 140, 20, 60)), SamplingParams(max_tokens=40)
    ours = Engine(target, jaxspec.DraftModel(draft), draft_length=3, batch_size=2, max_length=256)
    completions = ours.generate(prompts, params)
    xla = dataclasses.replace(target, kernels="xla")
    theirs = Engine(xla, batch_size=2, max_length=256).generate(prompts, params)
    assert len(ties.divergences(xla, completions, theirs, params)) < len(prompts)


@dataclasses.dataclass(eq=False)
class Demo:
    """The models of the package, and engines of three rows, each made once."""

    dtype: jax.typing.DTypeLike
    prompts = ("Once upon a time", "def main():", "The sum of")

    def __post_init__(self):
        names = ("demo-target", "demo-draft")
        self.target, self.draft = (load_model(name, dtype=self.dtype) for name in names)

    def make(self, drafter=None, **settings):
        shape = {"batch_size": 3, "max_length": 256, "max_logprobs": 0}
        return Engine(self.target, drafter, scheduler=jaxspec.Static(), **shape | settings)

    @functools.cached_property
    def plain(self):
        return self.make()

    @functools.cached_property
    def drafting(self):
        """By draft length."""

        @functools.cache
        def of(draft_length):
            return self.make(jaxspec.DraftModel(self.draft), draft_length=draft_length)

        return of


@pytest.fixture(
    scope="module", params=[pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16]
)
def demo(request):
    return Demo(request.param)


def committed(engine, prompts, params, **options):
    """Tokens of each request, and the bits of its KV in every layer."""
    done = engine.generate(prompts, params, **options)
    state = engine.state
    slots = jnp.arange(state.cache.capacity, dtype=jnp.int32)
    every = jnp.broadcast_to(slots, state.cache.table.shape[:1] + slots.shape)
    bits = []
    for layer in state.cache.layers:
        parts = kv.read_slots(layer, state.cache.table, every, state.cache.dtype)
        bits.append(np.stack([np.asarray(part, np.float32) for part in parts]))
    longest = [len(x.prompt_token_ids) + len(x.token_ids) - 1 for x in done]
    of_rows = [np.stack(bits)[:, :, row, :length] for row, length in enumerate(longest)]
    return [x.token_ids for x in done], of_rows


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_of_a_real_size_gives_the_same_tokens_at_every_batch_size_and_window(dtype):
    target = jaxspec.random_model("llama-635m", dtype=dtype)
    draft = jaxspec.DraftModel(jaxspec.random_model("llama-65m", dtype=dtype))
    lengths = (3, 32, 17, 40, 9, 25, 12, 30)
    prompts = [tuple(range(100 + 50 * i, 100 + 50 * i + n)) for i, n in enumerate(lengths)]
    params = SamplingParams(max_tokens=16, ignore_eos=True)

    def token_ids(batch_size, drafter, draft_length):
        engine = Engine(
            target, drafter, draft_length=draft_length, batch_size=batch_size, max_length=128
        )
        return [done.token_ids for done in engine.generate(prompts, params)]

    one_at_a_time = token_ids(1, None, 0)
    sequences = [prompt + ids for prompt, ids in zip(prompts, one_at_a_time, strict=True)]
    oracle = jaxspec.Oracle(sequences, acceptance=0.7, cost_of=draft)
    for batch_size, drafter, draft_length in (
        (4, None, 0), (8, None, 0), (1, oracle, 4), (8, oracle, 2), (8, oracle, 4), (3, oracle, 7),
    ):  # fmt: skip
        assert token_ids(batch_size, drafter, draft_length) == one_at_a_time


def test_windows_of_every_width_and_one_token_at_a_time_give_the_same_bits(demo):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    tokens, bits = committed(demo.plain, demo.prompts, params)
    for draft_length in (4, 6):
        drafted, drafted_bits = committed(demo.drafting(draft_length), demo.prompts, params)
        assert drafted == tokens
        for ours, theirs in zip(drafted_bits, bits, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    # Nor does it matter who else is decoded.
    engine = demo.make(jaxspec.DraftModel(demo.draft), draft_length=4, batch_size=1)
    assert [done.token_ids for done in engine.generate(demo.prompts, params)] == tokens


FAMILIES = {
    "llama": {"has_qk_norm": False},
    "mistral": {"has_qk_norm": False, "sliding_windows": (16, 16)},
    "qwen2": {"has_qk_norm": False, "has_qkv_bias": True},
    "qwen3": {},
    "glm4": {
        "has_qk_norm": False,
        "has_qkv_bias": True,
        "has_sandwich_norms": True,
        "rope": RopeConfig(theta=1e4, rotary_size=32, is_interleaved=True),
    },
}


# What the others have too: `llama` has nothing more, and `glm4` has the biases.
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_give_the_same_bits_in_every_family(family):
    shape = {"head_size": 64, "rope": RopeConfig(theta=1e4, rotary_size=64)} | FAMILIES[family]
    target = toy.model(kernels="native", dtype=jnp.bfloat16, **shape)
    prompts = toy.prompts((3, 40, 20))
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    shape = {"batch_size": 3, "max_length": 128, "scheduler": jaxspec.Static()}
    # An oracle that does not know the outputs yet, and is told them as other weights.
    unknown = jaxspec.Oracle([prompt + [0] * 30 for prompt in prompts], acceptance=0.7)
    engine = Engine(target, unknown, **shape)
    assert engine.verify_lengths == (1, 5)
    tokens, bits = committed(engine, prompts, params, speculate=False)
    known = [prompt + list(output) for prompt, output in zip(prompts, tokens, strict=True)]
    engine.update_params(draft=jaxspec.Oracle(known).params)
    drafted, drafted_bits = committed(engine, prompts, params)
    assert drafted == tokens
    assert engine.metrics()["num_accepted_tokens"] > 20
    for ours, theirs in zip(drafted_bits, bits, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_xlas_bits_do_change_with_the_width_so_the_check_above_can_fail():
    target, draft = (load_model(name, kernels="xla") for name in ("demo-target", "demo-draft"))
    prompts, params = ["Once upon a time"], SamplingParams(max_tokens=40, ignore_eos=True)
    shape = {"batch_size": 1, "max_length": 256, "scheduler": jaxspec.Static()}
    _, (plain,) = committed(Engine(target, **shape), prompts, params)
    drafted = Engine(target, jaxspec.DraftModel(draft), draft_length=6, **shape)
    _, (other,) = committed(drafted, prompts, params)
    assert np.any(plain != other)


@pytest.mark.slow
def test_no_instruction_copies_a_whole_cache(pair):
    target, draft = pair
    engine = Engine(target, jaxspec.DraftModel(draft), batch_size=4, max_length=2048)
    state = engine.executor.eval_state()
    program = hlo.compiled(engine)
    text = program.as_text()
    assert "jaxspec_attention" in text
    assert not hlo.whole_cache_moves(text, {state.cache.layers[0].k.size})
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
    assert program.memory_analysis().alias_size_in_bytes >= num_bytes


ON_A_MESH = """
import jax, numpy as np
import jaxspec
target = jaxspec.load_model("demo-target")
prompts, params = ["Once upon a time", "def main():"], jaxspec.SamplingParams(max_tokens=12)
for shape in ((1, 1), (2, 1), (1, 2)):
    mesh = jax.make_mesh(shape, ("data", "model")) if shape != (1, 1) else None
    engine = jaxspec.Engine(target, jaxspec.NGram(), batch_size=2, max_length=128, mesh=mesh)
    tokens = [done.token_ids for done in engine.generate(prompts, params)]
    text = engine.executor.lower_run().as_text()
    print(shape, "jaxspec_attention" in text, "jaxspec_product" in text, tokens)
"""


@pytest.mark.slow
def test_a_mesh_that_splits_the_model_leaves_it_to_xla():
    done = subprocess.run(
        [sys.executable, "-c", ON_A_MESH],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    alone, data, model = done.stdout.splitlines()
    assert alone.startswith("(1, 1) True True")
    assert data.startswith("(2, 1) True True")
    assert model.startswith("(1, 2) False False")
    assert data.split("True True")[1] == alone.split("True True")[1]


@pytest.mark.slow
def test_threads_that_decode_at_once_get_what_they_get_alone(pair):
    target, _ = pair
    params = SamplingParams(max_tokens=30)
    engines = [Engine(target, NGram(), batch_size=2, max_length=256) for _ in range(2)]
    prompts = [toy.prompts((5, 30, 12), seed=seed) for seed in range(2)]
    alone = [engine.generate(asked, params) for engine, asked in zip(engines, prompts, strict=True)]
    together = [None] * 2

    def decode(index):
        together[index] = engines[index].generate(prompts[index], params)

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(together, alone, strict=True):
        assert [x.token_ids for x in ours] == [x.token_ids for x in theirs]


@pytest.mark.slow
def test_a_model_that_the_kernels_cannot_run_is_handed_on_to_xla():
    half = toy.model(dtype=jnp.float16, kernels="native")
    done = Engine(half, NGram(), batch_size=1, max_length=256).generate(
        toy.prompts((80,)), SamplingParams(max_tokens=5)
    )
    assert len(done[0].token_ids) == 5


@pytest.mark.slow
@pytest.mark.parametrize("demo", [jnp.float32, jnp.bfloat16], indirect=True)
def test_bitwise_engines_score_in_narrow_windows_and_no_bit_tells(demo):
    """Tokens, log-probabilities and KV, greedy and sampled, are those of one token at a time."""
    assert demo.target.kernels == "native"
    prompts = demo.prompts
    params = [
        SamplingParams(
            max_tokens=40, ignore_eos=True, logprobs=0, temperature=temperature, top_p=0.9, seed=3
        )
        for temperature in (0.0, 0.8, 1.0)
    ]
    plain, bitwise = outcome(demo.plain, prompts, params), demo.drafting(4)
    ties = demo.make(jaxspec.DraftModel(demo.draft), draft_length=4, exactness="ties")
    assert (bitwise.verify_lengths, ties.verify_lengths) == ((1, 5), (1, 3, 5))
    assert bitwise.exactness == ties.exactness == "bitwise"
    for engine, options in (
        (bitwise, {}),
        (bitwise, {"speculate": False}),
        (ties, {"draft_length": 2}),
    ):
        for ours, theirs in zip(outcome(engine, prompts, params, **options), plain, strict=True):
            assert ours == theirs
    used = bitwise.executor.compile_counts()
    assert (used["run_1"], used["run"]) == (1, 1)
    assert ties.executor.compile_counts()["run_3"] == 1


def outcome(engine, prompts, params, **options):
    """Tokens, log-probabilities and the bytes of the KV of each request."""
    done = engine.generate(prompts, params, **options)
    kvs = [
        b"".join(values.tobytes() for values in engine.executor.committed_kv(row))
        for row in range(len(prompts))
    ]
    return [(x.token_ids, x.logprobs, kv) for x, kv in zip(done, kvs, strict=True)]


def test_trees_give_the_bits_of_one_token_at_a_time(demo):
    prompts = demo.prompts
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0, temperature=temperature, seed=3)
        for temperature in (0.0, 0.8, 1.0)
    ]
    truth = tuple(map(tuple, toy.sequences(demo.plain.generate(prompts, params))))
    plain = outcome(demo.plain, prompts, params)
    # The rows' roots are at many places of a block of slots; in some rounds a node is wrong.
    tree = demo.make(toy.TreeOracle(truth, right_until=30), draft_length=6)
    assert (tree.verify_lengths, tree.exactness) == ((1, 7), "bitwise")
    for options in ({}, {"speculate": False}):
        for ours, theirs in zip(outcome(tree, prompts, params, **options), plain, strict=True):
            assert ours == theirs
    drafted = tree.generate(prompts, params)
    assert sum(done.acceptance.num_accepted_tokens for done in drafted) > 30


def test_engines_that_the_kernels_do_not_serve_keep_to_one_width(pair):
    target, draft = pair
    shape = {"draft_length": 4, "max_length": 256}
    drafter = jaxspec.DraftModel(draft)
    half = Engine(toy.model(kernels="native", dtype=jnp.float16), NGram(), batch_size=2, **shape)
    xla = Engine(dataclasses.replace(target, kernels="xla"), drafter, batch_size=2, **shape)
    aligned = Engine(target, drafter, batch_size=2, layout="aligned", **shape)
    rejecting = Engine(target, drafter, batch_size=2, verifier="rejection", **shape)
    for engine in (half, xla, aligned, rejecting):
        assert engine.verify_lengths == (5,)
    assert half.exactness == xla.exactness == "bitwise"
    assert aligned.exactness == "ties"
