"""Meshes: the decode loop on many devices.

Over the mesh's `data` axis every shard holds its own rows, with their pages and page table, and
runs the whole loop by itself, with its own number of rounds and no collectives. Over the `model`
axis heads, feed-forward layers and vocabulary are split, and XLA inserts the sums (GSPMD,
2105.04663); the devices of one shard run every round together. Two shards of two rows, each split
in two:

              model 0      model 1
    data 0    heads 0, 1   heads 2, 3     rows 0, 1
    data 1    heads 0, 1   heads 2, 3     rows 2, 3

Rows are numbered across all shards: row r lives on shard `r // rows per shard`. Arrays with a row
axis keep it, one shard's rows after another's; arrays without one (a round counter) get a first
axis over the shards. Page numbers are local to a shard, so a table is read on its own shard only.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.cache.pages import LayerCache
from jaxspec.decode.loop import DecodeLoop
from jaxspec.decode.parts import RoundParts, params_of
from jaxspec.decode.state import Admission, has_rows, is_cache
from jaxspec.errors import SettingError
from jaxspec.kernels.base import splittable
from jaxspec.models.base import param_specs
from jaxspec.runtime.values import check_kind
from jaxspec.types import DecodeState, EngineShape, PyTree

DATA, MODEL = "data", "model"


def check_mesh(mesh: Mesh) -> Mesh:
    """The same devices with axes `data` and `model`, in this order, the second of size 1 if it was
    missing; both are `Auto`: the loop itself maps over `data`.

    Raises:
      SettingError: not a mesh, no `data` axis, an axis that is neither `data` nor `model`, or
        devices of other processes.
    """
    check_kind("mesh", mesh, Mesh, "a jax.sharding.Mesh, as jax.make_mesh makes it")
    names = ", ".join(mesh.axis_names)
    if DATA not in mesh.axis_names or not set(mesh.axis_names) <= {DATA, MODEL}:
        raise SettingError(
            f"A mesh with the axes ({names}) was given; it must have an axis {DATA}, and may have "
            f"an axis {MODEL} besides: make it with "
            f'jax.make_mesh((num_shards, devices_per_shard), ("{DATA}", "{MODEL}")).'
        )
    if mesh.is_multi_process:
        raise SettingError(
            f"A mesh over {mesh.devices.size} devices was given, some of them of other processes; "
            "give each process an engine with a mesh of jax.local_devices()."
        )
    order = [mesh.axis_names.index(name) for name in (DATA, MODEL) if name in mesh.axis_names]
    devices = mesh.devices.transpose(order).reshape(mesh.shape[DATA], -1)
    return Mesh(devices, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def batch_size_per_shard(batch_size: int, mesh: Mesh) -> int:
    """Rows of each data shard.

    Raises:
      SettingError: the shards do not divide the rows of the batch.
    """
    num_shards = mesh.shape[DATA]
    if batch_size % num_shards:
        raise SettingError(
            f"batch_size {batch_size} was given for a mesh whose {DATA} axis has {num_shards} "
            f"shards; rows are shared out evenly, so give a multiple of {num_shards}."
        )
    return batch_size // num_shards


def first_shard(mesh: Mesh) -> Mesh:
    """The devices of the first data shard, as a mesh of one; `mesh` as for `check_mesh`."""
    mesh = check_mesh(mesh)
    return Mesh(mesh.devices[:1], mesh.axis_names, axis_types=mesh.axis_types)


def on_first_shard(arrays: PyTree, shardings: PyTree) -> PyTree:
    """Arrays that every data shard has, on the first shard alone, without a copy; `shardings` are
    those of `first_shard`."""

    def of(array: jax.Array, sharding: NamedSharding) -> jax.Array:
        parts = {part.device: part.data for part in array.addressable_shards}
        own = [parts[device] for device in sharding.addressable_devices_indices_map(array.shape)]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, own)

    return jax.tree.map(of, arrays, shardings)


def param_shardings(owner: Any, mesh: Mesh) -> PyTree:
    """A `NamedSharding` for each of the parameters of a model or a drafter; see
    `models.base.param_specs`."""
    specs = param_specs(owner, mesh.shape[MODEL])
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def _is_spec(node: PyTree) -> bool:
    return isinstance(node, P)


def _is_split(specs: PyTree) -> bool:
    return any(MODEL in spec for spec in jax.tree.leaves(specs, is_leaf=_is_spec))


def _part(array: PyTree, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Shape of the part of an array that one device holds."""
    return jax.ShapeDtypeStruct(sharding.shard_shape(array.shape), array.dtype)


def _is_layer(node: PyTree) -> bool:
    return isinstance(node, LayerCache)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedLoop:
    """The functions of `decode.loop` for all shards of a mesh.

    They are for `jax.jit` with the state donated and `out_shardings=state_shardings`, and with
    parameters that `place` has put on the devices. Where they take a number of rows, an array `[D]`
    has one for each data shard.

    Attributes:
      parts: those of one shard; their `shape.batch_size` is per shard.
      mesh: as `check_mesh` returns it.
    """

    parts: RoundParts
    mesh: Mesh

    @property
    def params(self) -> PyTree:
        """The parameters, on whatever devices they are; see `place`. Weights that are split
        over devices are not packed."""
        params = params_of(self.parts)
        return splittable(params) if self.mesh.shape[MODEL] > 1 else params

    @property
    def _of_shard(self) -> DecodeLoop:
        """The functions of one shard."""
        return DecodeLoop(self.parts)

    @property
    def num_shards(self) -> int:
        """D, data shards."""
        return self.mesh.shape[DATA]

    @property
    def rows_per_shard(self) -> int:
        """The number of rows that each shard holds, in the batch or waiting."""
        return self.parts.resident_shape.batch_size

    @property
    def resident_shape(self) -> EngineShape:
        """The shape of the state: the rows of all shards."""
        return dataclasses.replace(
            self.parts.resident_shape, batch_size=self.num_shards * self.rows_per_shard
        )

    @functools.cached_property
    def param_shardings(self) -> PyTree:
        """Where each parameter belongs.

        Raises:
          SettingError: the `model` axis does not divide the target's heads, feed-forward or
            vocabulary.
        """
        return {
            "target": param_shardings(self.parts.target, self.mesh),
            "drafter": param_shardings(self.parts.drafter, self.mesh),
        }

    @property
    def is_drafter_split(self) -> bool | None:
        """Whether the `model` axis splits the drafter's parameters, or every device has all of
        them; None if there is nothing to split."""
        specs = param_specs(self.parts.drafter, self.mesh.shape[MODEL])
        has_any = bool(jax.tree.leaves(specs, is_leaf=_is_spec)) and self.mesh.shape[MODEL] > 1
        return _is_split(specs) if has_any else None

    def place(self, params: PyTree) -> PyTree:
        """Parameters on the devices they belong to; those already there are not moved."""
        return jax.device_put(params, self.param_shardings)

    @functools.cached_property
    def state_shardings(self) -> DecodeState:
        """The sharding of each array of the state."""
        by_data = NamedSharding(self.mesh, P(DATA))
        by_heads = NamedSharding(self.mesh, P(DATA, MODEL))
        num_shards = self.mesh.shape[MODEL]

        def of(state: PyTree, owner: Any) -> PyTree:
            """Shardings of `state`; a cache is split in the same way as the parameters that write
            it."""
            specs = () if owner is None else param_specs(owner, num_shards)

            def of_node(node):
                if not _is_layer(node):
                    return by_data
                is_split = _is_split(specs) and node.num_heads % num_shards == 0
                return jax.tree.map(lambda _: by_heads if is_split else by_data, node)

            return jax.tree.map(of_node, state, is_leaf=_is_layer)

        state = jax.eval_shape(self._of_shard.init)
        return of(state, None).replace(
            cache=of(state.cache, self.parts.target), drafter=of(state.drafter, self.parts.drafter)
        )

    def place_of_row(self, cache: PyTree, drafter: PyTree) -> tuple[PyTree, PyTree]:
        """Shardings with which every shard holds a copy of the cache and the drafter state of a
        `first_shard`, given their shardings there."""

        def of(sharding: NamedSharding) -> NamedSharding:
            return NamedSharding(self.mesh, P(None, *sharding.spec[1:]))

        return jax.tree.map(of, cache), jax.tree.map(of, drafter)

    def params_of_device(self) -> PyTree:
        """Shapes of the parameters, or of their parts, that one device holds."""
        params = jax.eval_shape(lambda: self.params)  # unpacks nothing
        return jax.tree.map(_part, params, self.param_shardings)

    def state_of_device(self, state: DecodeState) -> DecodeState:
        """Shapes of what one device holds of a shard's `state`, which may have any number of
        rows and any max_length."""

        def of(leaf, sharding: NamedSharding):
            split = P(None, *sharding.spec[1:]) if len(sharding.spec) > 1 else P()
            return _part(leaf, NamedSharding(self.mesh, split))

        return jax.tree.map(of, state, self.state_shardings)

    @functools.cached_property
    def _is_per_row(self) -> PyTree:
        return has_rows(jax.eval_shape(self._of_shard.init))

    def _inside(self, state: DecodeState) -> DecodeState:
        """One shard's part of the state, in the form that the loop uses."""
        return self._for_shared(state, lambda leaf: leaf[0])

    def _outside(self, state: DecodeState) -> DecodeState:
        """The loop's state, in the form of one shard's part."""
        return self._for_shared(state, lambda leaf: leaf[None])

    def _with_heads_axes(self, function, state: DecodeState) -> DecodeState:
        """`function(state)`, which runs models, with KV that says which axis splits its heads."""

        def of(node: PyTree, sharding: PyTree) -> PyTree:
            is_split = _is_layer(node) and MODEL in sharding.k.spec
            return node.replace(heads_axis=MODEL) if is_split else node

        def plain(node: PyTree) -> PyTree:
            return node.replace(heads_axis=None) if _is_layer(node) else node

        after = function(jax.tree.map(of, state, self.state_shardings, is_leaf=_is_layer))
        return jax.tree.map(plain, after, is_leaf=_is_layer)

    def _for_shared(self, state: DecodeState, change) -> DecodeState:
        """The state with `change` applied to all arrays without a row axis. Caches belong to their
        shards: their pages and tables are concatenated."""

        def of(is_per_row: bool, node: PyTree) -> PyTree:
            return node if is_per_row or is_cache(node) else change(node)

        return jax.tree.map(of, self._is_per_row, state)

    def _on_shards(self, function, in_specs: PyTree):
        """`function` on every shard by itself; the axis `model` is left to the compiler."""
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=P(DATA),
            axis_names={DATA},
            check_vma=False,
        )

    def init(self) -> DecodeState:
        """State with every row empty."""
        return self._on_shards(lambda: self._outside(self._of_shard.init()), ())()

    def admit(
        self, params: PyTree, state: DecodeState, row: jax.Array, admission: Admission
    ) -> DecodeState:
        """State with a request in row `row` (int32 scalar, numbered across all shards); its prompt
        is still to be prefilled."""
        return self.on_row(self._of_shard.admit, params, state, row, admission)

    def prefill(
        self, params: PyTree, state: DecodeState, rows: jax.Array, starts: jax.Array
    ) -> DecodeState:
        """State after some chunks of prompts on each shard.

        Args:
          rows: `[D, R]` int32, row numbers local to each shard, as `decode.loop.prefill` has them.
          starts: `[D, R]` int32, each chunk's first token.
        """
        return self._on_rows(self._of_shard.prefill, params, state, rows, starts)

    def prefill_target(
        self, params: PyTree, state: DecodeState, rows: jax.Array, starts: jax.Array
    ) -> DecodeState:
        """`prefill` for the target only."""
        return self._on_rows(self._of_shard.prefill_target, params, state, rows, starts)

    def score(
        self, params: PyTree, state: DecodeState, rows: jax.Array, starts: jax.Array
    ) -> DecodeState:
        """`prefill_target` with log-probabilities of the prompts' tokens."""
        return self._on_rows(self._of_shard.score, params, state, rows, starts)

    def catch_up(self, params: PyTree, state: DecodeState, rows: jax.Array) -> DecodeState:
        """State after the drafter has read a chunk for each of `rows` `[D, R]`, as in `prefill`."""

        def catch_up(params, state, rows, _):
            return self._of_shard.catch_up(params, state, rows)

        return self._on_rows(catch_up, params, state, rows, rows)

    def lag(self, state: DecodeState) -> jax.Array:
        """`[B]` int32, how many committed tokens before the newest one the drafter has not seen."""

        def on_shard(state):
            return self._of_shard.lag(self._inside(state))

        return self._on_shards(on_shard, (P(DATA),))(state)

    def on_row(
        self, function, params: PyTree, state: DecodeState, row: jax.Array, *arguments: PyTree
    ) -> DecodeState:
        """`function(params, state, row, *arguments)` on the shard that has the row."""
        shard = jnp.arange(self.num_shards, dtype=jnp.int32)
        is_here = row // self.rows_per_shard == shard

        def on_shard(params, state, is_here, row, arguments):
            return self._if(
                is_here[0], lambda state: function(params, state, row, *arguments), state
            )

        on_shards = self._on_shards(on_shard, (P(), P(DATA), P(DATA), P(), P()))
        return on_shards(params, state, is_here, row % self.rows_per_shard, arguments)

    def of_row(self, function, state: DecodeState, row: jax.Array, *arguments: jax.Array) -> PyTree:
        """What `function(state, row, *arguments)` returns on the shard that has the row."""

        def on_shard(state, row, arguments):
            found = function(self._inside(state), row, *arguments)
            return jax.tree.map(lambda leaf: leaf[None], found)

        on_shards = self._on_shards(on_shard, (P(DATA), P(), P()))
        of_all = on_shards(state, row % self.rows_per_shard, arguments)
        return jax.tree.map(lambda leaf: leaf[row // self.rows_per_shard], of_all)

    def _on_rows(
        self, function, params: PyTree, state: DecodeState, rows: jax.Array, starts: jax.Array
    ) -> DecodeState:
        """`function(params, state, rows, starts)` on each shard that has any."""

        def on_shard(params, state, rows, starts):
            rows, starts = rows[0], starts[0]
            read = functools.partial(
                self._with_heads_axes, lambda state: function(params, state, rows, starts)
            )
            return self._if(rows[0] >= 0, read, state)

        on_shards = self._on_shards(on_shard, (P(), P(DATA), P(DATA), P(DATA)))
        return on_shards(params, state, rows, starts)

    def run(
        self, params: PyTree, state: DecodeState, num_rounds: jax.Array, min_running: jax.Array
    ) -> DecodeState:
        """State after `num_rounds` rounds on each shard, or after fewer where less than its
        `min_running` (`[D]` int32) rows are left."""

        def on_shard(params, state, num_rounds, min_running):
            state = self._with_heads_axes(
                lambda state: self._of_shard.run(params, state, num_rounds, min_running[0]),
                self._inside(state),
            )
            return self._outside(state)

        on_shards = self._on_shards(on_shard, (P(), P(DATA), P(), P(DATA)))
        return on_shards(params, state, num_rounds, min_running)

    def _if(self, is_wanted: jax.Array, function, state: DecodeState) -> DecodeState:
        """`function` of one shard's part of the state, where it is wanted.

        This is a loop of one trip or none, because a conditional would copy the cache.
        """
        inside = self._inside(state)
        trips = is_wanted.astype(jnp.int32)
        return self._outside(lax.fori_loop(0, trips, lambda _, state: function(state), inside))
