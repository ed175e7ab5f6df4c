"""What `test_meshes` runs in a process of its own, on eight virtual devices.

Data-parallel: every shard is alone, no collective. Tensor-parallel: the same promises within the
mesh, and rounding between meshes. Sabotage shows that the checks can fail.
"""

import re

import driver
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from driver import Driver
from jax.sharding import PartitionSpec as P
from windows import as_trees, setup

import jaxspec
from jaxspec.audit.judge import Finding, judge
from jaxspec.audit.scoring import Scorer
from jaxspec.decode import loop as decode_loop
from jaxspec.decode import sharded as sharding
from jaxspec.engine.config import EngineConfig, make_parts
from jaxspec.kernels.pallas import PallasKernels
from jaxspec.kernels.registry import get_kernels
from jaxspec.models import decoder
from jaxspec.models.config import RopeConfig
from jaxspec.models.layers import rotary_angles
from jaxspec.models.registry import PRESETS
from jaxspec.models.shapes import shape_model, shortened
from jaxspec.requests.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=12)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=7)
LENGTHS = (1, 30, 70, 2, 129, 5, 66, 12, 9, 64, 65, 3, 40, 1, 100, 8)
COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter)"
    r"(?:-start)?\(.*"
)


def collectives(compiled):
    """Lines of a program on which devices talk to each other."""
    return [match[0] for match in COLLECTIVE.finditer(compiled.as_text())]


def requests(params=GREEDY, lengths=LENGTHS):
    """Prompts of tokens below 61, by row."""
    return {row: (prompt, params) for row, prompt in enumerate(toy.prompts(lengths))}


def moved(by_row, shift):
    """The same requests in other rows, among other neighbours."""
    rows = list(np.random.default_rng(shift).permutation(16))
    return {int(rows[row]): request for row, request in by_row.items()}, rows


@pytest.fixture(scope="module")
def eight():
    """Eight shards of one device."""
    return Driver(driver.mesh(data=8), driver.draft_model())


@pytest.fixture(scope="module")
def one():
    """One device."""
    return Driver(driver.mesh(data=1), driver.draft_model())


@pytest.fixture(scope="module")
def two_by_four():
    """Two shards of four devices."""
    return Driver(driver.mesh(data=2, model=4), driver.draft_model())


@pytest.fixture(scope="module")
def two():
    """Two shards of one device, without a drafter."""
    return Driver(driver.mesh(data=2))


def alone(one, by_row, **options):
    """Outputs of requests decoded one at a time on one device."""
    return {row: one.generate({0: request}, **options)[0] for row, request in by_row.items()}


def test_shards_do_not_talk(eight, two_by_four):
    for name in ("admit", "prefill", "run"):
        assert not collectives(eight.compiled(name))
    assert collectives(two_by_four.compiled("run"))  # the search finds what is there


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_request_is_the_same_on_every_shard_and_on_one_device(eight, one, params):
    by_row = requests(params)
    together = eight.generate(by_row)
    kept = {row: eight.committed_kv(row) for row in (0, 4, 14)}
    shuffled, rows = moved(by_row, 3)
    again = eight.generate(shuffled)
    assert {row: again[rows[row]] for row in by_row} == together
    for row, before in kept.items():
        for ours, theirs in zip(eight.committed_kv(rows[row]), before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    few = dict(list(by_row.items())[2:6])
    assert alone(one, few) == {row: together[row] for row in few}
    assert len(set(map(tuple, together.values()))) > 8


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("which", ["eight", "two_by_four"])
def test_speculative_equals_plain_bit_for_bit(which, params, request):
    on_mesh = request.getfixturevalue(which)
    num_rows = 2 * on_mesh.loop.num_shards
    by_row = requests(params, LENGTHS[:num_rows])
    plain = on_mesh.generate(by_row, draft_length=0)
    plain_kv = [on_mesh.committed_kv(row) for row in by_row]
    poison(on_mesh)
    drafted = on_mesh.generate(by_row)
    assert drafted == plain
    for row in by_row:
        for ours, theirs in zip(on_mesh.committed_kv(row), plain_kv[row], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert np.sum(on_mesh.state.counts.num_draft_tokens) > 0


def poison(on_mesh):
    """All KV becomes NaN: what an earlier run left cannot stand in for what this one forgets."""
    nan = jax.jit(
        lambda cache: jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, cache
        ),
        out_shardings=on_mesh.loop.state_shardings.cache,
    )
    on_mesh.state = on_mesh.state.replace(cache=nan(on_mesh.state.cache))


def test_every_shard_counts_its_own_rounds(eight):
    before = np.asarray(eight.state.num_rounds)
    by_row = {
        2: ([1, 2, 3], SamplingParams(max_tokens=2)),
        9: ([1, 2, 3], SamplingParams(max_tokens=20)),
    }
    eight.generate(by_row, draft_length=0)
    num_rounds = np.asarray(eight.state.num_rounds) - before
    assert num_rounds.tolist() == [0, 2, 0, 0, 20, 0, 0, 0]
    assert eight.state.drafter.num_positions.shape == (8,)


def test_a_shard_with_nothing_to_read_keeps_its_state(eight):
    eight.put({row: (prompt, GREEDY) for row, prompt in enumerate(toy.prompts([90] * 16))})
    before = jax.device_get(eight.state)
    poison(eight)
    eight.prefill([(5 * driver.BATCH_SIZE + 1, 0)])
    after = jax.device_get(eight.state)
    for layer in after.cache.layers:
        is_written = ~np.isnan(layer.k.reshape(8, 2, 2, -1)).all(axis=-1)
        assert np.argwhere(is_written).tolist() == [[5, 1, 0]]
    for ours, theirs in zip(
        jax.tree.leaves(after.replace(cache=(), drafter=())),
        jax.tree.leaves(before.replace(cache=(), drafter=())),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)
    eight.generate({row: ([1], SamplingParams(max_tokens=1)) for row in range(16)})


def test_the_state_is_donated_and_nothing_is_compiled_again(eight, two_by_four):
    for on_mesh in (eight, two_by_four):
        num_rows = 2 * on_mesh.loop.num_shards
        on_mesh.generate(requests(lengths=LENGTHS[:num_rows]))
        before = on_mesh.compile_counts()
        assert [before[name] for name in ("admit", "prefill", "run")] == [1, 1, 1]
        old = on_mesh.state
        on_mesh.generate(requests(SAMPLED, lengths=LENGTHS[::-1][:num_rows]), draft_length=2)
        assert on_mesh.compile_counts() == before
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        state = jax.eval_shape(on_mesh.loop.init)
        num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache.layers))
        for name in ("admit", "prefill", "run"):
            compiled = on_mesh.compiled(name)
            assert compiled.memory_analysis().alias_size_in_bytes >= num_bytes / 8
            assert not re.search(
                r"= f32\[4,\d+,128,\d+\]\S* (copy|convert|transpose|gather)\(", compiled.as_text()
            )


def assert_equal_or_tie(on_mesh, by_row, ours, theirs):
    scorer = None
    for row, (prompt, params) in by_row.items():
        if ours[row] == theirs[row]:
            continue
        scorer = scorer or Scorer(on_mesh.parts.target, max_length=on_mesh.shape.max_length)
        found = judge(
            scorer,
            prompt_ids=prompt,
            output_ids=ours[row],
            reference_ids=theirs[row],
            params=params,
        )
        assert found is not None
        assert found.finding == Finding.TIE, (row, found)


# Tensor-parallel.


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_across_meshes_outputs_are_equal_or_ties_and_kv_is_close(two_by_four, one, params):
    by_row = requests(params, LENGTHS[1:5])
    ours, theirs = two_by_four.generate(by_row), alone(one, by_row)
    assert_equal_or_tie(two_by_four, by_row, ours, theirs)
    assert sum(ours[row] == theirs[row] for row in by_row) >= 3
    for row, request in by_row.items():
        one.generate({0: request})
        if ours[row] == theirs[row]:
            for mine, other in zip(two_by_four.committed_kv(row), one.committed_kv(0), strict=True):
                mine, other = mine.view(np.float32), other.view(np.float32)
                np.testing.assert_allclose(mine, other, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_request_is_alone_within_the_mesh(two_by_four, params):
    by_row = requests(params, LENGTHS[1:5])
    together = two_by_four.generate(by_row)
    turned = two_by_four.generate({(row + 3) % 4: request for row, request in by_row.items()})
    assert {row: turned[(row + 3) % 4] for row in by_row} == together
    for row, request in by_row.items():
        assert two_by_four.generate({3 - row: request})[3 - row] == together[row]


def test_logits_are_close_across_meshes(two_by_four):
    model = two_by_four.parts.target
    tokens = jnp.asarray(toy.prompts([40, 40]), jnp.int32)
    segments = jnp.zeros_like(tokens)
    logits = jax.jit(decoder.training_logits, static_argnums=0)
    split = logits(model.config, two_by_four.params["target"], tokens, segments)
    whole = logits(model.config, model.params, tokens, segments)
    np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(split, whole)  # two programs, two roundings: it is not vacuous


def test_only_partial_sums_travel_and_only_within_a_shard(two_by_four):
    for name in ("prefill", "run"):
        found = collectives(two_by_four.compiled(name))
        assert found
        for line in found:
            assert line.startswith("all-reduce"), line  # no weight and no KV is gathered
            groups = re.search(r"replica_groups=(\[2,4\]<=\[8\]|\{\{0,1,2,3\},\{4,5,6,7\}\})", line)
            assert groups, line


def test_each_device_holds_its_part_of_the_weights_and_of_the_kv(two_by_four):
    parameters = two_by_four.params["target"]
    layer = parameters["layers"][0]
    for array, axis in (
        (parameters["embedding"], 0),
        (parameters["head"], 1),
        (layer["qkv"], 1),
        (layer["output"], 0),
        (layer["gate_up"], 2),
        (layer["down"], 0),
    ):
        part = array.sharding.shard_shape(array.shape)
        assert part[axis] * 4 == array.shape[axis]
        assert np.prod(part) * 4 == array.size
    for cache in (two_by_four.state.cache, two_by_four.state.drafter.cache):
        pages = cache.layers[0].k
        assert pages.sharding.shard_shape(pages.shape) == (
            pages.shape[0] // 2,
            pages.shape[1] // 4,
            *pages.shape[2:],
        )


def test_a_draft_model_may_keep_a_window_of_its_kv():
    """Every shard's pages take turns by themselves, and rows are alone."""
    by_row = requests(lengths=(150, 40, 560, 420))
    drafter = jaxspec.DraftModel(driver.draft_model().model, kv_window=128)
    on_mesh = Driver(driver.mesh(data=2, model=2), drafter, max_length=640)
    drafted = on_mesh.generate(by_row)
    num_rounds = np.asarray(on_mesh.state.counts.num_rounds)
    turned = on_mesh.generate({3 - row: request for row, request in by_row.items()})
    assert {row: turned[3 - row] for row in by_row} == drafted
    np.testing.assert_array_equal(on_mesh.state.counts.num_rounds[::-1], num_rounds)
    assert on_mesh.generate(by_row, draft_length=0) == drafted
    pages, table = on_mesh.state.drafter.cache.layers[0].k, on_mesh.state.drafter.cache.table
    assert pages.shape[0] == 4 * 3
    assert table[2].tolist() == [0, 1, 2, 1, 2]
    one = Driver(driver.mesh(data=1), drafter, max_length=640)
    assert_equal_or_tie(on_mesh, by_row, drafted, alone(one, by_row))


class Replicated:
    """A user's model: no word on how it may be split."""

    def __init__(self, model):
        self.name, self.params, self.tokenizer = model.name, model.params, None
        self.vocab_size, self.eos_token_ids = model.vocab_size, ()
        self.init_cache, self.forward, self.logits = model.init_cache, model.forward, model.logits


def test_models_that_cannot_be_split_are_replicated(one):
    by_row = requests(lengths=LENGTHS[1:3])
    theirs = alone(one, by_row)
    narrow = driver.draft_model(num_kv_heads=1, num_query_heads=2)
    on_mesh = Driver(driver.mesh(data=1, model=2), narrow)
    pages = on_mesh.state.cache.layers[0].k
    assert pages.sharding.shard_shape(pages.shape)[1] * 2 == pages.shape[1] == 4
    pages = on_mesh.state.drafter.cache.layers[0].k
    assert pages.sharding.shard_shape(pages.shape) == pages.shape
    assert_equal_or_tie(on_mesh, by_row, on_mesh.generate(by_row), theirs)

    model = Replicated(driver.target())
    own = Driver(driver.mesh(data=1, model=2), jaxspec.NGram(), model=model)
    assert not collectives(own.compiled("run"))
    assert own.generate(by_row) == own.generate(by_row, draft_length=0)


def test_explicit_axes_and_their_order_do_not_matter():
    explicit = jax.make_mesh((4, 2), ("model", "data"))
    ours = sharding.check_mesh(explicit)
    assert ours.axis_names == ("data", "model")
    assert ours.devices.tolist() == explicit.devices.T.tolist()
    assert dict(ours.shape) == {"data": 2, "model": 4}


# Kernels that the compiler cannot split: each device runs them on its own heads.

PALLAS = {
    "kernels": "pallas",
    "num_query_heads": 8,
    "head_size": 16,
    "rope": RopeConfig(theta=1e4, rotary_size=16),
}


def attention_inputs(kind):
    """Projections of a window of four KV heads with two query heads each, and its cache."""
    window_length = 40 if kind == "parts" else 5
    kv_dtype = "int8" if kind == "int8" else None
    _, layer, table, window = setup(
        [3, 250, 380, 40], 5, heads=4, group=2, fill=np.nan, kv_dtype=kv_dtype
    )
    if kind == "tree":
        window = as_trees(window, [[0, 0, 1, 1]] * 4, depth=3)
    if kind == "parts":
        positions = window.start[:, None] + jnp.arange(window_length, dtype=jnp.int32)
        window = window.replace(positions=positions, slots=positions)
    key = jax.random.key(0)
    qkv = jax.random.normal(key, (4, window_length, 4, 4, 16))
    biases = {"bias": jax.random.normal(key, (4, 4, 16)), "query_norm": jnp.full((16,), 1.5)}
    return qkv, layer, table, window, {**biases, "key_norm": jnp.full((16,), 0.5)}


def attend(qkv, layer, table, window, parameters):
    angles = rotary_angles(RopeConfig(theta=1e4, rotary_size=16), window.positions)
    span = {"dtype": jnp.float32, "sliding_window": None}
    settings = {"is_interleaved": False, "epsilon": 1e-6, **parameters, **span}
    heads, layer = get_kernels("pallas").attend(qkv, layer, table, window, angles, **settings)
    return heads, layer.replace(heads_axis=None)


def attend_on_mesh(heads_axis):
    """The same, compiled for four devices, which have a KV head each if there is an axis."""

    def on_shard(qkv, layer, *rest):
        return attend(qkv, layer.replace(heads_axis=heads_axis), *rest)

    mesh = driver.mesh(data=1, model=4)
    split = jax.sharding.NamedSharding(mesh, P(None, heads_axis))
    whole = jax.sharding.NamedSharding(mesh, P())
    heads = jax.sharding.NamedSharding(mesh, P(None, None, heads_axis))
    on_shards = jax.shard_map(
        on_shard, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    return jax.jit(
        on_shards,
        in_shardings=(heads, split, whole, whole, whole),
        out_shardings=(heads, split),
    )


def same_bits(ours, theirs):
    pairs = zip(*map(jax.tree.leaves, jax.device_get((ours, theirs))), strict=True)
    return all(mine.tobytes() == other.tobytes() for mine, other in pairs)


@pytest.mark.parametrize("heads_axis", ["model", None])
@pytest.mark.parametrize(
    "kind", ["chain", pytest.param("tree", marks=pytest.mark.slow), "int8",
             pytest.param("parts", marks=pytest.mark.slow)]
)  # fmt: skip
def test_attention_has_the_bits_of_one_device(kind, heads_axis):
    inputs = attention_inputs(kind)
    compiled = attend_on_mesh(heads_axis).lower(*inputs).compile()
    assert not collectives(compiled)
    heads, layer = compiled(*inputs)
    assert same_bits((heads, layer), jax.jit(attend)(*inputs))
    assert np.isfinite(heads).all()
    shape = layer.k.sharding.shard_shape(layer.k.shape)
    assert shape[1] == (4 if heads_axis is None else 1)


@pytest.fixture(scope="module")
def four_with_kernels():
    """Four devices of one shard, with a draft model of one KV head, which each of them has."""
    drafter = driver.draft_model(num_kv_heads=1, **{**PALLAS, "num_query_heads": 2})
    return Driver(driver.mesh(data=1, model=4), drafter, model=driver.target(**PALLAS))


@pytest.mark.slow
def test_rounds_with_kernels_are_those_of_one_device(four_with_kernels):
    by_row = requests(lengths=LENGTHS[1:3])
    on_mesh = four_with_kernels
    assert on_mesh.loop.is_drafter_split is False
    drafted = on_mesh.generate(by_row)
    assert np.sum(on_mesh.state.counts.num_draft_tokens) > 0
    assert drafted == on_mesh.generate(by_row, draft_length=0)
    pages = on_mesh.state.cache.layers[0].k
    assert pages.sharding.shard_shape(pages.shape)[1] == 1
    found = collectives(on_mesh.compiled("run"))
    assert found
    assert all(line.startswith("all-reduce") for line in found)
    one = Driver(driver.mesh(data=1), model=driver.target(**PALLAS))
    assert_equal_or_tie(on_mesh, by_row, drafted, alone(one, by_row, draft_length=0))


@pytest.mark.slow
def test_of_a_70b_model_every_device_runs_the_kernels_on_its_own_heads(monkeypatch):
    """Lowered for GPUs from shapes, with one layer of each model; nothing is allocated."""
    monkeypatch.setattr("jaxspec.runtime.environment.is_hopper", lambda: True)
    target, draft = (
        shape_model(
            shortened(PRESETS[name], 1),
            name=name,
            dtype="bfloat16",
            kernels="mosaic",
            is_packed=False,
            platform="gpu",
        )
        for name in ("llama-2-70b", "vicuna-68m")
    )
    config = EngineConfig(scheduler="static", draft_length=4, batch_size=8, max_length=1024)
    parts = make_parts(target, jaxspec.DraftModel(draft), config)
    loop = sharding.ShardedLoop(parts=parts, mesh=driver.mesh(data=1, model=8))
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (jax.eval_shape(lambda: loop.params), jax.eval_shape(loop.init)),
        (loop.param_shardings, loop.state_shardings),
    )
    count = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    traced = jax.jit(loop.run, donate_argnums=1).trace(*like, *count)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    results = re.findall(r"custom_call @mosaic_gpu\w*\(.*-> \(?tensor<([\dx]+)xbf16>", text)
    # Queries of the KV heads `[B, K, T, G, H]`, and heads `[B, T, K, G, H]`. The 12 KV heads of the
    # draft model cannot be split, so every device has them all.
    ours = ["8x1x5x8x128", "8x5x1x8x128"]
    first, later = ["8x12x2x1x64", "8x2x12x1x64"], ["8x12x1x1x64", "8x1x12x1x64"]
    assert sorted(results) == sorted(ours + first + later)


# Sabotage: each of these is a bug that the checks above must see.


def test_the_kv_of_another_devices_head_is_seen(monkeypatch):
    real = PallasKernels.write

    def wrong(self, qkv, layer, *rest, **settings):
        queries, layer = real(self, qkv, layer, *rest, **settings)
        if jax.sharding.get_abstract_mesh().manual_axes:
            moved = jax.lax.ppermute(layer.k, "model", [(i, (i + 1) % 4) for i in range(4)])
            layer = layer.replace(k=moved)
        return queries, layer

    inputs = attention_inputs("chain")
    right = jax.jit(attend)(*inputs)
    monkeypatch.setattr(PallasKernels, "write", wrong)
    jax.clear_caches()
    compiled = attend_on_mesh("model").lower(*inputs).compile()
    assert not same_bits(compiled(*inputs), right)
    assert collectives(compiled)
    jax.clear_caches()


def test_a_chunk_of_another_shards_row_is_seen(two, monkeypatch):
    """Every shard reads the chunk that shard 0 wants."""
    real = sharding.ShardedLoop.prefill

    def wrong(self, params, state, rows, starts):
        return real(self, params, state, rows, jnp.broadcast_to(starts[:1], starts.shape))

    by_row = requests(lengths=LENGTHS[:4])
    right = two.generate(by_row)
    monkeypatch.setattr(sharding.ShardedLoop, "prefill", wrong)
    assert Driver(driver.mesh(data=2)).generate(by_row) != right


def test_a_program_that_talks_is_seen(two, monkeypatch):
    """All shards run until the last of them has ended."""
    real = decode_loop.run

    def wrong(parts, params, state, num_rounds, min_running):
        return real(parts, params, state, jax.lax.pmax(num_rounds, "data"), min_running)

    assert not collectives(two.compiled("run"))
    monkeypatch.setattr(decode_loop, "run", wrong)
    assert collectives(Driver(driver.mesh(data=2)).compiled("run"))
