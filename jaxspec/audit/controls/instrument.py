"""How faults are switched on: functions of the decode loop are replaced while an engine is built.

    with FAULTS["bonus_from_draft"].apply():
        broken = Engine(target, drafter).generate(prompts, params)

The production loop has no switches. Most faults are *edits*: at a named place of the round, the
right value is turned into a wrong one. Because both values exist at that place, one compiled
program can hold many faults and choose one at run time (`installed` with `is_armed`), so that a
fault and its control run use the same program.

Published systems keep a rectangular batch by padding. Here a row has no padding: slot i holds
position i. So their faults are expressed by their effect on a row, with the padding that the row
would have had: positions that are too high by it, slots that are seen although nothing was stored
there, an offset that belongs to another row. Three invariants are named (they hold for any layout):

    I1  every row stands at an offset of its own: its length is that of its tokens, no more
    I2  a token's position is the number of the row's tokens before it
    I3  the KV that a query sees is that of exactly the tokens before it, the newest one written
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxspec.cache import pages as kv
from jaxspec.decode import loop as decode_loop
from jaxspec.decode import round as decode_round
from jaxspec.engine import executor
from jaxspec.engine.engine import Engine
from jaxspec.kernels.base import Kernels
from jaxspec.kernels.xla import block_attention
from jaxspec.models import decoder, layers
from jaxspec.types import DecodeState, Finish, Window
from jaxspec.verifiers import coupled

Kind = Literal["tokens", "sampling", "order", "distribution", "efficiency", "numerics"]
Edit = Callable[[Any, "Place"], Any]
Patch = tuple[Any, str, Callable[..., Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to be wrong (or, for an efficiency control, to be right and slow).

    Attributes:
      name: for reports.
      source: the published systems that had it.
      invariant: the invariant that it breaks: I1 to I3 of this module, or C1 to E4 of the package's
        design.
      kind: what to compare. `tokens`: greedy tokens; `sampling`: tokens of sampled rows; `order`:
        which output belongs to which prompt; `distribution`: the distribution; `efficiency` and
        `numerics`: nothing, because the output is right.
      edits: by place of the round; see `PLACES`.
      patches: `(owner, attribute, wrap)`: functions replaced by `wrap(function, pad_token)`.
    """

    name: str
    source: str
    invariant: str
    kind: Kind = "tokens"
    edits: Mapping[str, Edit] = dataclasses.field(default_factory=dict)
    patches: Sequence[Patch] = ()

    @contextlib.contextmanager
    def apply(self, *, pad_token: int = 0) -> Iterator[None]:
        """Engines that are built and first run in this context have the fault; `pad_token` is what
        the published system pads with."""
        with contextlib.ExitStack() as stack:
            for owner, name, wrap in self.patches:
                with_pad = functools.partial(wrap, pad_token=pad_token)
                stack.enter_context(_replaced(owner, name, with_pad))
            if self.edits or not self.patches:
                stack.enter_context(installed([self], pad_token=pad_token))
            yield


class OpenWindow(Window, kw_only=True):
    """A window whose rotary positions and visibility can be set apart from its positions.

    Attributes:
      rotary: `[B, T]` int32, the positions that enter the rotation.
      limit: `[B, T]` int32, the last slot that each query sees.
      is_hidden: `[B, S]` bool, slots that no query of the row sees.
    """

    rotary: jax.Array
    limit: jax.Array
    is_hidden: jax.Array


class OpenState(DecodeState, kw_only=True):
    """A decode state with extra fields for faults.

    Attributes:
      armed: int32 scalar, which of the installed faults is on; 0 is none.
      is_reused: `[B]` bool, whether the row has held a request before its present one.
      padding: `[B]` int32, padding that the row has accumulated.
    """

    armed: jax.Array
    is_reused: jax.Array
    padding: jax.Array


class KvSource(struct.PyTreeNode, kw_only=True):
    """Where each slot's KV comes from after a round; healthy is each slot from itself.

    Attributes:
      slot: `[B, S]` int32.
      is_kept: `[B, S]` bool; the others become zeros.
    """

    slot: jax.Array
    is_kept: jax.Array


class Place(types.SimpleNamespace):
    """What an edit may look at, if it is available at its place (see `PLACES`).

    Attributes:
      state: the state before the step.
      pad_token: the token that the published system pads with.
      draft: that of the round, until it is verified.
      verdict: that of the round, until the state is committed.
      info: that of the round, once it is verified.
      chosen: `[B, N + 1]` the target's tokens at each node.
      after: the state after the commit.
      row: the row that is filled.
      admission: the request that enters.
      rows: the row of each chunk that is prefilled, or -1.
      starts: first token of each chunk.
    """


def _as_is(value: Any, at: Place) -> Any:
    return value


def _with_history(after: OpenState, at: Place) -> OpenState:
    """Whether the row was used before; no padding of an earlier request."""
    was_used = at.state.is_reused[at.row] | (at.state.finish[at.row] != Finish.EMPTY_ROW)
    return after.replace(
        is_reused=at.state.is_reused.at[at.row].set(was_used),
        padding=at.state.padding.at[at.row].set(0),
    )


def _opened(window: Window, at: Place) -> OpenWindow:
    """The same window of a chain, as an `OpenWindow`."""
    is_hidden = jnp.zeros(at.state.tokens.shape, bool)
    own = {"rotary": window.positions, "limit": window.positions, "is_hidden": is_hidden}
    return OpenWindow(**vars(window), **own)


# Where edits act: the function whose value they change, the names of its arguments in `Place` (None
# if it does not have them), and a function that prepares the value for edits.
PLACES: dict[str, tuple[Any, str, tuple[str | None, ...], Edit]] = {
    "admit_row": (decode_loop, "admit_row", ("state", "row", "admission"), _with_history),
    "prefill": (decode_loop, "prefill", (None, None, "state", "rows", "starts"), _as_is),
    "rows": (decode_round, "batch_view", ("state",), _as_is),
    "window": (decode_round, "make_window", ("state", "draft"), _opened),
    "verdict": (coupled, "follow", ("chosen", "draft"), _as_is),
    "emitted": (decode_round, "emitted_tokens", ("draft", "verdict"), _as_is),
    "emission": (decode_round, "emit", ("state", "draft", "verdict"), _as_is),
    "commit": (decode_round, "commit", ("state", "info", None), _as_is),
}
# And "kv", a KvSource that says where the KV comes from after the round.


def _replaced(owner: Any, name: str, wrap: Callable[[Callable], Callable]):
    return mock.patch.object(owner, name, wrap(getattr(owner, name)))


@contextlib.contextmanager
def installed(
    faults: Sequence[Fault], *, pad_token: int = 0, is_armed: bool = False
) -> Iterator[None]:
    """Engines that are built and first run in this context make these faults' edits.

    Args:
      faults: those with edits; if empty, only the harmless machinery is installed.
      pad_token: the token that the published systems pad with.
      is_armed: if False, all of them are on; if True, only the one whose number, counted from 1, is
        in `OpenState.armed`.
    """
    scope: list[OpenState | None] = [None]  # the state of the round that is being traced

    def edited(place: str, value: Any, at: Place) -> Any:
        for number, fault in enumerate(faults, start=1):
            if place not in fault.edits:
                continue
            new = fault.edits[place](value, at)
            if is_armed:
                is_on = at.state.armed == number
                new = jax.tree.map(functools.partial(jnp.where, is_on), new, value)
            value = new
        return value

    def empty_state(real):
        def wrapped(shape, **fields):
            state = real(shape, **fields)
            nothing = jnp.zeros_like(state.num_committed)
            own = {"armed": jnp.int32(0), "is_reused": nothing.astype(bool), "padding": nothing}
            return OpenState(**vars(state), **own)

        return wrapped

    def edit(real, place: str):
        _, _, names, prepare = PLACES[place]

        def wrapped(*arguments, **options):
            seen = {name: x for name, x in zip(names, arguments, strict=True) if name}
            at = Place(**{"state": scope[-1], "pad_token": pad_token} | seen)
            return edited(place, prepare(real(*arguments, **options), at), at)

        return wrapped

    def speculative_round(real):
        def wrapped(parts, params, state: OpenState) -> OpenState:
            scope.append(state)
            try:
                after = real(parts, params, state)
            finally:
                scope.pop()
            if not any("kv" in fault.edits for fault in faults):
                return after
            slot = lax.broadcasted_iota(jnp.int32, state.tokens.shape, 1)
            healthy = KvSource(slot=slot, is_kept=jnp.ones(slot.shape, bool))
            at = Place(state=state, pad_token=pad_token, after=after)
            return after.replace(cache=_moved(after.cache, edited("kv", healthy, at)))

        return wrapped

    with contextlib.ExitStack() as stack:
        for owner, name, wrap in (
            *((*at[:2], functools.partial(edit, place=place)) for place, at in PLACES.items()),
            (decode_loop, "empty_state", empty_state),
            (decode_loop, "speculative_round", speculative_round),
            (decoder, "run_layers", _open_layers),
            # Edits may use what nobody drafted.
            (executor, "may_skip_padding", lambda _: lambda parts: False),
        ):
            stack.enter_context(_replaced(owner, name, wrap))
        yield


def arm(engine: Engine, number: int) -> None:
    """Turns on the fault with this number, counted from 1, among those that were `installed` with
    `is_armed` while the engine was built; 0 turns all off."""
    state = engine.executor.state
    assert isinstance(state, OpenState)
    armed = jax.device_put(np.int32(number), state.armed.sharding)
    engine.executor.state = state.replace(armed=armed)


def _open_layers(real):
    """The decoder's layers, with support for an `OpenWindow`."""

    def run_layers(config, params, hidden, window, cache, **options):
        if not isinstance(window, OpenWindow):
            return real(config, params, hidden, window, cache, **options)
        with _replaced(
            layers, "rotary_angles", lambda angles: lambda rope, _: angles(rope, window.rotary)
        ):
            product = options.get("kernels", Kernels()).product
            options["kernels"] = Kernels(attention=open_attention, product=product)
            return real(config, params, hidden, window, cache, **options)

    return run_layers


def open_attention(queries, layer, table, window, *, dtype, sliding_window=None):
    """Attention over every slot of a row, with the visibility of an `OpenWindow`.

    It is dense, so its sums run in another order than those of `block_attention`, which describes
    the arguments.
    """
    if not isinstance(window, OpenWindow):
        return block_attention(
            queries, layer, table, window, dtype=dtype, sliding_window=sliding_window
        )
    slot = jnp.arange(window.is_hidden.shape[1], dtype=jnp.int32)
    k, v = kv.read_slots(layer, table, jnp.broadcast_to(slot, window.is_hidden.shape), dtype)
    is_seen = (slot <= window.limit[..., None]) & ~window.is_hidden[:, None]
    if sliding_window is not None:
        is_seen &= slot > window.limit[..., None] - sliding_window
    v = jnp.where(jnp.any(is_seen, axis=1)[..., None, None], v, jnp.zeros((), dtype))
    # A query that sees nothing weighs all slots equally instead of giving NaN.
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(queries, k, v, mask=is_seen[:, None])


def _moved(cache: kv.KVCache, source: KvSource) -> kv.KVCache:
    """The cache with each slot's KV taken from its source."""
    slot = lax.broadcasted_iota(jnp.int32, source.slot.shape, 1)
    is_lost = ~source.is_kept

    def move(layer):
        layer = kv.move_slots(layer, cache.table, source.slot, cache.table, slot)
        k, v = kv.read_slots(layer, cache.table, slot, cache.dtype)
        lost = jnp.where(is_lost, slot, -1)
        return kv.write(layer, cache.table, jnp.zeros_like(k), jnp.zeros_like(v), lost)

    return cache.replace(layers=tuple(move(layer) for layer in cache.layers))
