"""The CPU kernels against XLA's, and what they promise besides: a row's bits are its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from windows import tree_window

from jaxspec import Engine, load_model
from jaxspec.cache import pages as kv
from jaxspec.errors import SettingError
from jaxspec.kernels import base
from jaxspec.kernels import cpu as native
from jaxspec.kernels import registry as kernels
from jaxspec.kernels.registry import get_kernels
from jaxspec.models import layers
from jaxspec.models.config import RopeConfig
from jaxspec.models.prefill import chain_window
from jaxspec.runtime import environment

pytestmark = pytest.mark.skipif(native.problem() is not None, reason=f"{native.problem()}")

ROUNDING = {jnp.float32: 2e-5, jnp.bfloat16: 6e-2}
DTYPES = [jnp.float32, jnp.bfloat16]


def random(seed, *shape, dtype=jnp.float32):
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(drawn, jnp.float32).astype(dtype)


def difference(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    return np.abs(np.asarray(ours, np.float32) - np.asarray(theirs, np.float32)).max()


# Products

# Rows, inputs, outputs: whole tiles and strips, and what is left over of each.
SHAPES = [(1, 64, 256), (5, 40, 61), (8, 96, 48), (9, 33, 17), (48, 128, 200), (64, 20, 3)]
# Rows in one tile of a matrix unit, in two, three and more, whole and not.
TALL = [(8, 96, 48), (9, 33, 17), (19, 64, 100), (40, 96, 80), (70, 33, 130), (150, 64, 20)]
AROUND = {
    "nothing": (),
    "norm": ("norm",),
    "norm, residual": ("norm", "residual"),
    "gate, residual": ("gate", "residual"),
    "norm, fp32 result": ("norm", "wide"),
}


def product_inputs(shape, around, dtype):
    num_rows, num_inputs, num_outputs = shape
    x = random(1, num_rows, *([2] if "gate" in around else []), num_inputs, dtype=dtype)
    weight = random(2, num_inputs, num_outputs) / np.float32(num_inputs**0.5)
    settings = {"is_gated": "gate" in around, "epsilon": 1e-5}
    if "norm" in around:
        settings["norm"] = random(3, num_inputs, dtype=dtype)
    if "residual" in around:
        settings["residual"] = random(4, num_rows, num_outputs, dtype=dtype)
    if "wide" in around:
        settings["dtype"] = jnp.float32
    return x, weight.astype(dtype), settings


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_xlas(shape, around, dtype):
    x, weight, settings = product_inputs(shape, AROUND[around], dtype)
    ours = native.product(x, native.pack(weight), **settings)
    assert difference(ours, base.product(x, weight, **settings)) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("shape", TALL)
def test_a_rows_product_does_not_depend_on_how_many_rows_there_are(shape, around, dtype):
    x, weight, settings = product_inputs(shape, AROUND[around], dtype)
    weight = native.pack(weight)
    together = np.asarray(native.product(x, weight, **settings), np.float32)
    residual = settings.pop("residual", None)
    num_rows = shape[0]
    for rows in (slice(0, 1), slice(1, 4), slice(num_rows // 2, None), slice(num_rows - 2, None)):
        if residual is not None:
            settings["residual"] = residual[rows]
        alone = native.product(x[rows], weight, **settings)
        np.testing.assert_array_equal(np.asarray(alone, np.float32), together[rows])


def test_xlas_products_do_depend_on_it_so_the_check_above_can_fail():
    x, weight, settings = product_inputs((48, 1024, 512), ("norm",), jnp.float32)
    together = np.asarray(base.product(x, weight, **settings))
    assert np.any(np.asarray(base.product(x[:1], weight, **settings)) != together[:1])


# Live rows of each of three parts: none, some, all; with the last more than fit into one block.
COUNTS = [(0, 0, 0), (5, 0, 13), (13, 1, 0), (13, 13, 13)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("part", [13, 90])
def test_padding_is_not_computed_and_changes_no_bit(part, around, dtype):
    x, weight, settings = product_inputs((3 * part, 40, 61), AROUND[around], dtype)
    weight = native.pack(weight)
    full = np.asarray(native.product(x, weight, **settings), np.float32).reshape(3, part, 61)
    x = x.reshape(3, part, *x.shape[1:])
    if "residual" in settings:
        settings["residual"] = settings["residual"].reshape(3, part, 61)
    compute = jax.jit(lambda x, num_live: native.product(x, weight, num_live=num_live, **settings))
    for counts in np.array(COUNTS, np.int32) * part // 13:
        is_live = np.arange(part) < counts[:, None]
        spoilt = jnp.where(np.expand_dims(is_live, tuple(range(2, x.ndim))), x, jnp.nan)
        found = np.asarray(compute(spoilt, counts), np.float32)
        np.testing.assert_array_equal(found[is_live], full[is_live])
    assert compute._cache_size() == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_row(bad):
    for around in (("norm",), ("gate", "residual")):
        x, weight, settings = product_inputs((9, 64, 100), around, jnp.float32)
        weight = native.pack(weight)
        healthy = np.asarray(native.product(x, weight, **settings))
        x = x.at[(4, *[0] * (x.ndim - 1))].set(bad)
        ill = np.asarray(native.product(x, weight, **settings))
        np.testing.assert_array_equal(np.delete(ill, 4, axis=0), np.delete(healthy, 4, axis=0))
        if np.isnan(bad):
            assert np.isnan(ill[4]).all()


def test_gates_are_right_from_end_to_end_of_their_range():
    gate = jnp.asarray(np.concatenate([np.linspace(-120, 120, 4001), [0.0, -0.0, -3e38, 3e38]]))
    gate = gate.astype(jnp.float32)
    x = jnp.stack([gate, jnp.ones_like(gate)])[:, :, None].swapaxes(0, 1)  # [rows, 2, 1]
    one = native.pack(jnp.ones((1, 1), jnp.float32))
    got = [native.product(x[i : i + 50], one, is_gated=True) for i in range(0, len(x), 50)]
    got = np.concatenate(got)[:, 0]
    wide = np.asarray(gate, np.float64)
    right = wide / (1 + np.exp(-np.clip(wide, -700, 700)))
    np.testing.assert_allclose(got, right, rtol=1e-6, atol=1e-30)


# Attention


@dataclasses.dataclass(frozen=True)
class Case:
    """What a layer's attention may differ in."""

    starts: tuple[int, ...] = (0, 125, 300)
    window: int = 5
    heads: int = 2
    group: int = 3
    size: int = 64
    dtype: type = jnp.float32
    sliding: int | None = None
    rotary: int = 64
    changes: tuple[tuple[str, bool], ...] = ()
    kv_dtype: str | None = None

    @property
    def rounding(self):
        """Numbers that are rounded otherwise may get the next code, which is a step of 1 / 127."""
        return max(ROUNDING[self.dtype], 0.0 if self.kv_dtype is None else 4 / 127)

    def config(self):
        rope = RopeConfig(
            theta=1e4, rotary_size=self.rotary, is_interleaved="interleaved" in self.names
        )
        return toy.config(
            num_query_heads=self.heads * self.group,
            num_kv_heads=self.heads,
            head_size=self.size,
            rope=rope,
            has_qk_norm="norm" in self.names,
            has_qkv_bias="bias" in self.names,
        )

    @property
    def names(self):
        return dict(self.changes)


CASES = {
    "chain": Case(),
    "one token": Case(window=1, starts=(0, 127, 128, 380)),
    "one row": Case(starts=(200,), heads=1, group=8),
    "norm": Case(changes=(("norm", True),)),
    "bias, interleaved, half rotated": Case(
        rotary=32, changes=(("bias", True), ("interleaved", True))
    ),
    "wide head": Case(size=128, rotary=128, window=7),
    "narrow head": Case(size=32, rotary=32, group=1),
    "head of 8": Case(size=8, rotary=8),
    "head of 80, norm": Case(size=80, rotary=80, changes=(("norm", True),)),
    "head of 20, bf16, bias": Case(
        size=20, rotary=12, dtype=jnp.bfloat16, changes=(("bias", True),), sliding=130
    ),
    "sliding": Case(sliding=130),
    "sees itself only": Case(sliding=1),
    "bf16": Case(dtype=jnp.bfloat16),
    "bf16, head of 96, many queries": Case(
        size=96, rotary=96, window=8, group=5, starts=(0, 14, 200), dtype=jnp.bfloat16
    ),
    "bf16, head of 80, sliding over few blocks": Case(
        size=80, rotary=80, starts=(0, 14, 30, 141), dtype=jnp.bfloat16, sliding=17
    ),
    "sliding over few blocks": Case(starts=(0, 14, 30, 141), sliding=17),
    "bf16, norm, bias": Case(
        dtype=jnp.bfloat16, changes=(("norm", True), ("bias", True)), sliding=40
    ),
    "int8": Case(kv_dtype="int8", changes=(("norm", True),)),
    "int8, head of 20, sliding over few blocks": Case(
        size=20, rotary=12, starts=(0, 14, 30, 141), sliding=17, kv_dtype="int8"
    ),
    "int8, bf16, head of 96, many queries": Case(
        size=96,
        rotary=96,
        window=8,
        group=5,
        starts=(0, 14, 200),
        dtype=jnp.bfloat16,
        kv_dtype="int8",
    ),
    "int8, bf16, head of 80, sliding over few blocks": Case(
        size=80, rotary=80, starts=(0, 14, 30, 141), dtype=jnp.bfloat16, sliding=17, kv_dtype="int8"
    ),
}
MAX_LENGTH = 384


def attention_inputs(case, *, fill=0.0, rows=slice(None)):
    """Arguments of `Kernels.attend`: each row's numbers are the same whoever its neighbours are."""
    starts = case.starts[rows]
    config = case.config()
    cache = kv.init_cache(
        num_layers=1,
        num_rows=len(starts),
        capacity=MAX_LENGTH,
        num_kv_heads=case.heads,
        head_size=case.size,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
    )
    order = np.random.default_rng(9).permutation(cache.table.size)
    table = jnp.asarray(order.reshape(cache.table.shape), jnp.int32)
    k, v = (
        np.stack([random(which + start, MAX_LENGTH, case.heads, case.size) for start in starts])
        for which in (1000, 2000)
    )
    for row, start in enumerate(starts):
        k[row, start:] = v[row, start:] = fill
    slots = jnp.broadcast_to(jnp.arange(MAX_LENGTH, dtype=jnp.int32), k.shape[:2])
    k, v = (jnp.asarray(part).astype(case.dtype) for part in (k, v))
    layer = kv.write(cache.layers[0], table, k, v, slots)
    start = jnp.asarray(starts, jnp.int32)
    window = chain_window(start, case.window)
    parts = (case.heads, case.group + 2, case.size)
    qkv = jnp.stack([random(start, 12, *parts) for start in starts])[:, : case.window]
    params = {
        "qkv_bias": random(5, *parts, dtype=case.dtype),
        "q_norm": random(6, case.size, dtype=case.dtype),
        "k_norm": random(7, case.size, dtype=case.dtype),
    }
    is_there = {"qkv_bias": config.has_qkv_bias, "q_norm": config.has_qk_norm}
    is_there["k_norm"] = config.has_qk_norm
    params = {name: value for name, value in params.items() if is_there[name]}
    return config, params, qkv.astype(case.dtype), layer, table, window


@functools.partial(jax.jit, static_argnames=("config", "dtype", "sliding", "name"))
def attend(config, params, qkv, layer, table, window, *, dtype, sliding, name="native"):
    angles = layers.rotary_angles(config.rope, window.positions)
    return get_kernels(name).attend(
        qkv,
        layer,
        table,
        window,
        angles,
        dtype=dtype,
        sliding_window=sliding,
        **layers.attention_settings(config, params),
    )


def run(case, inputs, name="native"):
    return attend(*inputs, dtype=case.dtype, sliding=case.sliding, name=name)


def kv_of(layer, table, dtype):
    """k and v `[B, S, K, H]`, fp32."""
    every = jnp.broadcast_to(jnp.arange(MAX_LENGTH, dtype=jnp.int32), (table.shape[0], MAX_LENGTH))
    return [np.asarray(part, np.float32) for part in kv.read_slots(layer, table, every, dtype)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_equals_xlas_and_writes_the_same_kv(case):
    inputs = attention_inputs(case, fill=np.nan)
    assert native.is_attention_supported(*inputs[2:])
    ours, our_layer = run(case, inputs)
    theirs, their_layer = run(case, inputs, "xla")
    assert difference(ours, theirs) < case.rounding
    stored = [kv_of(layer, inputs[4], case.dtype) for layer in (our_layer, their_layer)]
    for mine, yours in zip(*stored, strict=True):
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(yours))
        np.testing.assert_allclose(mine, yours, rtol=0, atol=case.rounding)


def test_another_mask_or_another_slot_is_seen_by_the_check_above():
    case = CASES["chain"]
    config, params, qkv, layer, table, window = attention_inputs(case)
    right, right_layer = run(case, (config, params, qkv, layer, table, window), "xla")
    late = window.replace(slots=window.slots + 1)
    wrong, wrong_layer = run(case, (config, params, qkv, layer, table, late))
    assert difference(wrong, right) > 1e-2
    assert difference(wrong_layer.k, right_layer.k) > 1e-2
    narrow = dataclasses.replace(case, sliding=50)
    assert difference(run(narrow, attention_inputs(case))[0], right) > 1e-2


@pytest.mark.parametrize(
    "name",
    [
        "chain",
        "sliding",
        "sliding over few blocks",
        "bf16",
        "bf16, head of 96, many queries",
        "bf16, head of 80, sliding over few blocks",
        "wide head",
        "head of 8",
        "head of 20, bf16, bias",
        "int8, head of 20, sliding over few blocks",
        "int8, bf16, head of 96, many queries",
    ],
)
def test_a_rows_attention_depends_on_neither_neighbours_nor_the_windows_width(name):
    case = CASES[name]
    together = np.asarray(run(case, attention_inputs(case))[0], np.float32)
    for row in range(len(case.starts)):
        alone, _ = run(case, attention_inputs(case, rows=slice(row, row + 1)))
        np.testing.assert_array_equal(np.asarray(alone, np.float32)[0], together[row])
    for width in range(1, case.window):
        narrow = dataclasses.replace(case, window=width)
        heads, _ = run(narrow, attention_inputs(narrow))
        np.testing.assert_array_equal(np.asarray(heads, np.float32), together[:, :width])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_querys_attention_does_not_depend_on_how_many_read_the_same_kv(dtype):
    most = 20
    case = Case(starts=(0, 43, 125), window=1, heads=1, group=most, size=96, rotary=96, dtype=dtype)
    config, params, qkv, *rest = attention_inputs(case)
    together = np.asarray(run(case, (config, params, qkv, *rest))[0], np.float32)
    for count in range(1, most):
        for queries in (range(count), range(most - count, most)):
            some = qkv[:, :, :, jnp.asarray([*queries, most, most + 1])]
            heads, _ = run(case, (config, params, some, *rest))
            np.testing.assert_array_equal(np.asarray(heads, np.float32), together[:, :, queries])


@pytest.mark.parametrize("name", ["sliding", "bf16", "int8", "bf16, norm, bias"])
def test_chunks_of_a_row_in_one_call_get_the_bits_of_one_after_the_other(name):
    case = dataclasses.replace(CASES[name], starts=(7, 300), window=70)
    config, params, _, layer, table, _ = attention_inputs(case, fill=np.nan)
    rows, starts = jnp.array([0, 1, 0, 0]), jnp.array([147, 300, 77, 7], jnp.int32)
    num_live = jnp.array([11, 0, 70, 70], jnp.int32)
    qkv = random(3, 4, 70, case.heads, case.group + 2, case.size, dtype=case.dtype)
    window = chain_window(starts, 70, stop=starts + num_live, rows=rows)

    def attended(chunks, layer, *, has_counts=True):
        own = jax.tree.map(lambda leaf: leaf[chunks], window)
        own = own if has_counts else own.replace(num_live=None)
        is_live = np.arange(70) < np.asarray(num_live)[chunks, None]
        given = jnp.where(is_live[..., None, None, None], qkv[chunks], jnp.nan)
        heads, layer = run(case, (config, params, given, layer, table[rows[chunks]], own))
        return np.asarray(heads, np.float32)[is_live], layer

    one_by_one, after = [], layer
    for chunk in (3, 2, 1, 0):
        heads, after = attended(np.array([chunk]), after)
        one_by_one.insert(0, heads)
    together, packed = attended(np.arange(4), layer)
    np.testing.assert_array_equal(together, np.concatenate(one_by_one))
    stored = [kv_of(each, table, case.dtype) for each in (packed, after)]
    for mine, yours in zip(*stored, strict=True):
        np.testing.assert_array_equal(mine, yours)
    # Without counts a row of the window does not wait for the KV of the rows behind it.
    assert np.any(attended(np.arange(4), layer, has_counts=False)[0] != together)


@pytest.mark.parametrize("name", ["chain", "sliding over few blocks", "bf16", "int8"])
@pytest.mark.parametrize("has_tree", [False, True])
def test_entries_that_nobody_asks_for_are_not_stored_and_change_no_bit(name, has_tree):
    case = tree_case(name) if has_tree else CASES[name]
    *inputs, window = (tree_inputs if has_tree else attention_inputs)(case, fill=np.nan)
    config, params, qkv, layer, table = inputs
    heads, written = run(case, (*inputs, window))
    heads = np.asarray(heads, np.float32)
    before, full = (kv_of(each, table, case.dtype) for each in (layer, written))
    rows = np.arange(len(case.starts), dtype=np.int32)
    for shift in range(case.window + 1):
        counts = (shift + 3 * rows) % (case.window + 1)
        is_live = np.arange(case.window) < counts[:, None]
        given = jnp.where(is_live[..., None, None, None], qkv, jnp.nan)
        some = window.replace(num_live=counts)
        found, after = run(case, (config, params, given, layer, table, some))
        np.testing.assert_array_equal(np.asarray(found, np.float32)[is_live], heads[is_live])
        stop = np.asarray(case.starts)[:, None] + counts[:, None]
        is_stored = (np.arange(MAX_LENGTH) < stop)[..., None, None]
        for old, new, every in zip(before, kv_of(after, table, case.dtype), full, strict=True):
            np.testing.assert_array_equal(new, np.where(is_stored, every, old))


@pytest.mark.parametrize(("sliding", "kv_dtype"), [(None, None), (17, None), (None, "int8")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", [np.nan, np.inf, -3e38])
def test_what_dead_slots_hold_changes_no_bit(fill, dtype, sliding, kv_dtype):
    # Rows that end in the middle of a block of slots, at its end and behind it.
    starts = (0, 7, 11, 12, 125)
    case = Case(
        starts=starts,
        group=2,
        size=96,
        rotary=96,
        dtype=dtype,
        sliding=sliding,
        kv_dtype=kv_dtype,
    )
    clean, _ = run(case, attention_inputs(case))
    heads, _ = run(case, attention_inputs(case, fill=fill))
    assert np.isfinite(np.asarray(clean, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(heads, np.float32), np.asarray(clean, np.float32))


def test_entries_that_are_not_meant_are_not_stored_and_change_nobody():
    case = dataclasses.replace(CASES["chain"], starts=(0, 125, MAX_LENGTH - 3))

    def inputs(fill):
        config, params, qkv, layer, table, window = attention_inputs(case, fill=fill)
        # A short draft, a row that has ended, and one whose window passes the capacity.
        slots = window.slots.at[0, 2:].set(-1).at[1].set(-1)
        return config, params, qkv, layer, table, window.replace(slots=slots)

    heads, written = run(case, inputs(np.nan))
    is_stored = ~np.isnan(kv_of(written, inputs(np.nan)[4], case.dtype)[0]).all(axis=(2, 3))
    np.testing.assert_array_equal(is_stored.sum(axis=1), [2, 125, MAX_LENGTH])
    theirs, _ = run(case, inputs(0.0), "xla")
    for row, width in ((0, 2), (2, 3)):
        assert difference(heads[row, :width], theirs[row, :width]) < ROUNDING[case.dtype]


@pytest.mark.parametrize("name", ["chain", "int8"])
def test_a_value_that_is_no_number_is_seen_by_those_behind_it_only(name):
    case = CASES[name]
    config, params, qkv, *rest = attention_inputs(case)
    healthy, _ = run(case, (config, params, qkv, *rest))
    ill, _ = run(case, (config, params, qkv.at[1, 2, 0, -1, 7].set(np.inf), *rest))
    ill, healthy = np.asarray(ill), np.asarray(healthy)
    np.testing.assert_array_equal(ill[1, :2], healthy[1, :2])
    assert np.isnan(ill[1, 2:, : case.group]).all()
    np.testing.assert_array_equal(ill[1, :, case.group :], healthy[1, :, case.group :])
    np.testing.assert_array_equal(np.delete(ill, 1, axis=0), np.delete(healthy, 1, axis=0))


# Attention in trees

# The root in the first, in the middle and in the last place of a block of slots, however many lanes
# a vector has; and a tree that ends where the capacity does.
TREE_STARTS = (0, 3, 7, 15, 16, 17, 30, 127, 128, MAX_LENGTH - 12)


def tree_case(name):
    return dataclasses.replace(CASES[name], starts=TREE_STARTS, window=12)


def tree_inputs(case, *, fill=0.0):
    *inputs, _ = attention_inputs(case, fill=fill)
    return *inputs, tree_window(case.starts, case.window, max_depth=5)


@pytest.mark.parametrize(
    "name",
    [
        "chain",
        "one row",
        "wide head",
        "narrow head",
        "head of 8",
        "head of 80, norm",
        "head of 20, bf16, bias",
        "sliding over few blocks",
        "bf16",
        "bf16, head of 96, many queries",
        "bf16, head of 80, sliding over few blocks",
        "int8",
        "int8, bf16, head of 80, sliding over few blocks",
    ],
)
def test_a_trees_node_gets_the_bits_and_the_kv_of_its_path_as_a_chain(name):
    case = tree_case(name)
    config, params, qkv, layer, table, tree = tree_inputs(case, fill=np.nan)
    clean = attention_inputs(case)[3]
    heads, written = run(case, (config, params, qkv, layer, table, tree))
    heads, qkv, paths = np.asarray(heads, np.float32), np.asarray(qkv), np.asarray(tree.paths)
    rows = np.arange(len(case.starts))
    depth = np.asarray(tree.positions - tree.start[:, None])
    chain = chain_window(tree.start, paths.shape[2])
    for t in range(case.window):
        of_path = qkv[rows[:, None], paths[:, t]]
        alone, of_chain = run(case, (config, params, of_path, clean, table, chain))
        alone = np.asarray(alone, np.float32)[rows, depth[:, t]]
        np.testing.assert_array_equal(heads[:, t], alone)
        mine = kv.read_slots(written, table, tree.slots[:, t : t + 1], case.dtype)
        yours = kv.read_slots(of_chain, table, tree.positions[:, t : t + 1], case.dtype)
        np.testing.assert_array_equal(np.stack(mine), np.stack(yours))


@pytest.mark.parametrize(
    "name", ["chain", "sliding over few blocks", "bf16", "int8, bf16, head of 96, many queries"]
)
def test_a_trees_node_gets_the_bits_of_its_path_one_token_at_a_time(name):
    case = tree_case(name)
    inputs = tree_inputs(case)
    config, params, qkv, layer, table, tree = inputs
    heads = np.asarray(run(case, inputs)[0], np.float32)
    rows = np.arange(len(case.starts))
    depth = np.asarray(tree.positions - tree.start[:, None])
    deepest = np.argmax(depth, axis=1)
    for d, entries in enumerate(np.asarray(tree.paths)[rows, deepest].T):
        token = qkv[rows, entries][:, None]
        at = chain_window(tree.start + d, 1)
        alone, layer = run(case, (config, params, token, layer, table, at))
        is_on_path = depth[rows, entries] == d
        assert is_on_path.any()
        together = heads[rows, entries][is_on_path]
        np.testing.assert_array_equal(together, np.asarray(alone, np.float32)[is_on_path, 0])


def test_another_path_is_seen_by_the_checks_above():
    case = tree_case("chain")
    *inputs, tree = tree_inputs(case)
    heads, _ = run(case, (*inputs, tree))
    siblings, _ = run(case, (*inputs, tree.replace(paths=tree.paths.at[:, -1, 1].set(0))))
    assert np.all(np.any(np.asarray(heads != siblings)[:, -1], axis=(1, 2)))
    np.testing.assert_array_equal(siblings[:, :-1], heads[:, :-1])


@pytest.mark.parametrize("name", ["norm", "sliding over few blocks", "bf16, norm, bias", "int8"])
def test_attention_in_trees_equals_xlas(name):
    case = tree_case(name)
    inputs = tree_inputs(case)
    assert native.is_attention_supported(*inputs[2:])
    theirs, _ = run(case, inputs, "xla")
    assert difference(run(case, inputs)[0], theirs) < case.rounding


@pytest.mark.parametrize("sliding", [None, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_with_ends_see_what_follows_them_on_their_paths(dtype, sliding):
    """As the masks of a block that is drafted at once see one another."""
    case = Case(starts=TREE_STARTS, window=11, dtype=dtype, sliding=sliding)
    config, params, qkv, layer, table, _ = attention_inputs(case, fill=np.nan)
    start = np.asarray(case.starts, np.int32)
    groups = np.asarray([[0, 1, 2, 3, 4, 5], [0, 6, 7, 8, 9, 10]], np.int32)
    paths = groups[[0] * 6 + [1] * 5]
    depth = np.asarray([0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5], np.int32)
    ends = start[:, None] + np.where(depth == 0, 1, 6).astype(np.int32)
    chain = chain_window(start, 6).replace(ends=jnp.asarray(ends[:, :6]))
    tree = chain_window(start, 11).replace(
        positions=jnp.asarray(start[:, None] + depth),
        ends=jnp.asarray(ends),
        paths=jnp.asarray(np.broadcast_to(paths, (len(start), *paths.shape))),
    )
    together, _ = run(case, (config, params, qkv, layer, table, tree))
    for group in groups:
        of_group = (config, params, qkv[:, group], layer, table, chain)
        alone, _ = run(case, of_group)
        assert difference(alone, run(case, of_group, "xla")[0]) < ROUNDING[dtype]
        np.testing.assert_array_equal(
            np.asarray(together, np.float32)[:, group], np.asarray(alone, np.float32)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree_may_be_scored_level_by_level(dtype):
    """Paths lead to entries that earlier calls have stored."""
    case = dataclasses.replace(tree_case("chain"), dtype=dtype)
    config, params, qkv, layer, table, tree = tree_inputs(case, fill=np.nan)
    heads, _ = run(case, (config, params, qkv, layer, table, tree))
    parts = []
    for some in (slice(0, 1), slice(1, 5), slice(5, 12)):
        window = tree.replace(
            positions=tree.positions[:, some], slots=tree.slots[:, some], paths=tree.paths[:, some]
        )
        part, layer = run(case, (config, params, qkv[:, some], layer, table, window))
        parts.append(np.asarray(part, np.float32))
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), np.asarray(heads, np.float32))


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_no_number_is_seen_by_those_below_it_only(dtype, kv_dtype):
    case = dataclasses.replace(tree_case("chain"), dtype=dtype, kv_dtype=kv_dtype)
    config, params, qkv, *rest = tree_inputs(case)
    healthy, _ = run(case, (config, params, qkv, *rest))
    ill, _ = run(case, (config, params, qkv.at[:, 2, 0, -1, 7].set(np.inf), *rest))
    ill, healthy = np.asarray(ill, np.float32), np.asarray(healthy, np.float32)
    is_below = np.any(np.asarray(rest[-1].paths) == 2, axis=2)
    assert np.isnan(ill[is_below][:, : case.group]).all()
    assert 0 < is_below.sum() < is_below[:, 3:].size
    np.testing.assert_array_equal(ill[~is_below], healthy[~is_below])
    np.testing.assert_array_equal(ill[:, :, case.group :], healthy[:, :, case.group :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_have_ended_may_name_any_slot_of_a_tree(dtype):
    case = dataclasses.replace(tree_case("sliding"), dtype=dtype)
    *inputs, tree = tree_inputs(case)
    healthy, _ = run(case, (*inputs, tree))
    rng = np.random.default_rng(0)
    window = {name: np.array(getattr(tree, name)) for name in ("start", "positions", "paths")}
    window["ends"] = window["positions"] + 1
    for row, most in ((1, 2**31), (4, 2 * MAX_LENGTH), (6, 20), (8, 2**31)):
        for values in window.values():
            values[row] = rng.integers(-most, most, values[row].shape)
    window["start"][8] = 2**31 - 1
    ended = np.asarray([1, 4, 6, 8])
    slots = tree.slots.at[ended].set(-1)
    ill, _ = run(case, (*inputs, tree.replace(slots=slots, **jax.tree.map(jnp.asarray, window))))
    for heads in (ill, healthy):
        assert heads.shape[0] == len(TREE_STARTS)
    np.testing.assert_array_equal(
        np.delete(np.asarray(ill, np.float32), ended, axis=0),
        np.delete(np.asarray(healthy, np.float32), ended, axis=0),
    )


def test_what_the_kernels_cannot_do_is_left_to_xla():
    case = CASES["chain"]
    _, _, qkv, layer, table, window = attention_inputs(case)
    is_supported = native.is_attention_supported
    assert is_supported(qkv, layer, table, window)
    assert not is_supported(qkv.astype(jnp.float16), layer, table, window)
    assert not is_supported(qkv.astype(jnp.bfloat16), layer, table, window)  # beside fp32 KV
    assert not is_supported(jnp.zeros((3, 5, 2, 5, 520)), layer, table, window)
    aligned = kv.AlignedTable(pages=table, first_slot=window.start)
    assert not is_supported(qkv, layer, aligned, window)
    assert is_supported(jnp.zeros((3, 64, 2, 8 + 2, 64)), layer, table, window)
    many = jnp.zeros((3, native.MAX_QUERIES, *qkv.shape[2:]))
    assert not is_supported(many, layer, table, window)


# Packed weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "num_input_axes"), [((33, 5, 7), 1), ((3, 2, 8, 40), 3), ((1, 1), 1)]
)
def test_a_packed_weight_is_unpacked_to_what_it_was(shape, num_input_axes, dtype):
    weight = random(1, *shape, dtype=dtype)
    packed = native.pack(weight, num_input_axes)
    assert packed.num_inputs * np.prod(packed.output_shape) == weight.size
    np.testing.assert_array_equal(packed.unpacked(), weight)
    flat = weight.reshape(packed.num_inputs, -1)
    for row, column in ((0, 0), (packed.num_inputs - 1, flat.shape[1] - 1)):
        place = column // 16, row // 2, column % 16, row % 2
        assert packed.data[place] == flat[row, column]
    num_zeros = packed.data.size - weight.size
    assert np.sum(np.asarray(packed.data, np.float32) == 0) >= num_zeros


def test_only_what_the_kernels_multiply_is_packed():
    weight = random(1, 8, 8)
    packed = native.NATIVE.pack(weight)
    assert native.NATIVE.pack(packed) is packed
    np.testing.assert_array_equal(base.XLA.pack(packed), weight)
    assert base.XLA.pack(weight) is weight
    for other in (weight.astype(jnp.float16), jnp.zeros((0, 8)), jnp.zeros((8,))):
        assert native.NATIVE.pack(other) is other
    like = native.NATIVE.pack(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert jax.tree.leaves(like) == [jax.ShapeDtypeStruct(packed.data.shape, jnp.float32)]


def test_a_packed_weight_cast_to_what_the_kernels_do_not_take_is_unpacked():
    weight = random(1, 8, 24)
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), native.pack(weight))
    np.testing.assert_array_equal(native.NATIVE.pack(cast), weight.astype(jnp.float16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.astype(jnp.float16), "must both be fp32 or both bf16"),
        (lambda data: data[:1], "not of this product's shape"),
        (lambda data: data[:, :8], "not of this product's shape"),
        (lambda data: data[:, :, :8], "not of this product's shape"),
    ],
)
def test_a_packed_weight_that_is_none_is_refused(change, message):
    packed = native.pack(random(1, 40, 61))
    wrong = packed.replace(data=change(packed.data))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(native.product(random(2, 3, 40), wrong))


def test_weights_that_are_not_packed_are_multiplied_by_xla():
    x, weight, settings = product_inputs((5, 40, 61), ("norm",), jnp.float32)
    ours = native.NATIVE.product(x, weight, **settings)
    np.testing.assert_array_equal(ours, base.product(x, weight, **settings))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_weight_in_another_dtype_is_the_weight_in_it(dtype):
    """As the audit casts all of a model's parameters."""
    x, weight, settings = product_inputs((5, 40, 61), ("norm",), jnp.float32)
    rounded = weight.astype(jnp.bfloat16)
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), native.pack(rounded))
    settings["norm"] = settings["norm"].astype(dtype)
    ours = native.product(x.astype(dtype), cast, **settings)
    direct = native.product(x.astype(dtype), native.pack(rounded.astype(dtype)), **settings)
    np.testing.assert_array_equal(ours, direct)


@pytest.mark.parametrize("page", [-1, 9, 2**31 - 1])
def test_a_page_outside_the_cache_is_refused(page):
    case = CASES["chain"]
    config, params, qkv, layer, table, window = attention_inputs(case)
    inputs = (config, params, qkv, layer, table.at[1, 2].set(page), window)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"names page {page} of a cache of 9"):
        jax.block_until_ready(run(case, inputs))


# Moving KV


def filled_cache(dtype, *, num_layers=3, num_rows=2, kv_dtype=None):
    """A cache of random content, whose rows own their pages in no order; one page is nobody's."""
    cache = kv.init_cache(
        num_layers=num_layers,
        num_rows=num_rows,
        capacity=2 * kv.BLOCK,
        num_kv_heads=3,
        head_size=20,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    drawn = np.random.default_rng(0)

    def fill(leaf):
        numbers = drawn.integers(0, 100, leaf.shape)
        return jnp.asarray(numbers).astype(leaf.dtype)

    table = jnp.asarray([[3, 0], [2, 1]], jnp.int32)
    return cache.replace(layers=jax.tree.map(fill, cache.layers), table=table)


MOVES = {
    "none": ([[4, 5], [6, 7]], [[-1, -1], [-1, -1]]),
    "forward and backward": ([[4, 5, 6], [130, 9, 8]], [[5, 6, 4], [3, 130, -1]]),
    "over the end of a page": ([[129, 130, 2], [127, 0, 255]], [[126, 127, 128], [128, -1, 1]]),
    "outside of the row": ([[1, 300, -7], [1, 2, 3]], [[256, 9, 10], [10**9, -5, 4]]),
}


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MOVES)
def test_kv_is_moved_as_by_xla_in_every_layer(name, dtype, kv_dtype):
    source, target = (jnp.asarray(slots, jnp.int32) for slots in MOVES[name])

    def moved(move):
        cache = filled_cache(dtype, kv_dtype=kv_dtype)
        run = jax.jit(move, donate_argnums=0)
        return run(cache.layers, cache.table, source, target)

    after = moved(native.move_within)
    jax.tree.map(np.testing.assert_array_equal, after, moved(kv.move_within))
    is_same = jax.tree.map(np.array_equal, after, filled_cache(dtype, kv_dtype=kv_dtype).layers)
    assert all(jax.tree.leaves(is_same)) == (name == "none")


def test_moves_by_a_page_outside_the_cache_are_refused():
    cache = filled_cache(jnp.float32)
    slots = jnp.asarray([[1], [2]], jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="names page 4 of a cache of 4"):
        jax.block_until_ready(native.move_within(cache.layers, cache.table + 1, slots, slots + 1))


@pytest.mark.parametrize(("num_source", "num_target"), [((3, 1), (3, 1)), ((2, 2), (2, 1))])
def test_moves_of_other_rows_than_the_tables_are_refused(num_source, num_target):
    cache = filled_cache(jnp.float32)
    source, target = jnp.zeros(num_source, jnp.int32), jnp.ones(num_target, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="are not of the table's rows"):
        jax.block_until_ready(native.move_within(cache.layers, cache.table, source, target))


def test_where_they_cannot_be_used_that_is_announced_once(monkeypatch, caplog):
    assert environment.devices()["kernels_fallback"] is None
    monkeypatch.setattr(native, "problem", lambda: "the compiler is on holiday")
    for _ in range(2):
        target = load_model("demo-draft")
    announced = [record.getMessage() for record in caplog.records if "holiday" in record.message]
    assert len(announced) == 1
    assert announced[0].startswith("The C++ kernels cannot be used: the compiler is on holiday.")
    found = environment.devices()
    assert (found["kernels"], found["kernels_fallback"]) == ("xla", "the compiler is on holiday")
    described = Engine(target, max_length=128).describe()
    assert described["kernels"] == "xla"
    assert described["kernels_fallback"] == "the compiler is on holiday"
    monkeypatch.undo()
    load_model("demo-draft")
    assert environment.devices()["kernels_fallback"] is None


def test_models_are_loaded_with_them_where_they_can_be_used(monkeypatch):
    assert load_model("demo-draft").kernels == "native"
    assert load_model("demo-draft", kernels="xla").kernels == "xla"
    monkeypatch.setattr(native, "problem", lambda: "no C++ compiler was found (c++); install one")
    assert load_model("demo-draft").kernels == "xla"
    with pytest.raises(SettingError, match=r"no C\+\+ compiler was found .*; install one, or"):
        load_model("demo-draft", kernels="native")
    monkeypatch.undo()
    monkeypatch.setattr(kernels.jax, "default_backend", lambda: "gpu")
    with pytest.raises(SettingError, match="JAX runs on gpu"):
        load_model("demo-draft", kernels="native")
    assert kernels.default_kernels() == "pallas"
    monkeypatch.setattr(kernels.jax, "default_backend", lambda: "tpu")
    assert kernels.default_kernels() == "xla"


@pytest.mark.parametrize("given", ["0", "a", "-1"])
def test_a_number_of_threads_that_is_none_is_refused(given, monkeypatch):
    monkeypatch.setenv("JAXSPEC_NUM_THREADS", given)
    with pytest.raises(SettingError, match=f"JAXSPEC_NUM_THREADS is '{given}'; make it a whole"):
        native.num_threads()


def test_xla_is_what_is_left_where_there_are_none():
    assert type(get_kernels("xla")) is base.Kernels
    assert get_kernels("xla").product is base.product
