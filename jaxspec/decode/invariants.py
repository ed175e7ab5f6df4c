"""Invariants of the decode state, checked on the host after every round, for debugging."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxspec.cache import pages as kv
from jaxspec.cache.layouts import kv_by_position
from jaxspec.types import DecodeState, Finish


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What the invariants refer to, copied to the host, for every resident row.

    Attributes:
      num_committed: `[B]`; 0 where the row is empty.
      finish: `[B]`, `Finish`.
      num_rounds: `[B]`, rounds the row has taken part in.
      tokens: `[B, S]`.
      first_slot: `[B]`, or None in the ragged layout.
      kv: k and v of each layer, `[B, S, K, H]` by position, as unsigned integers.
    """

    num_committed: np.ndarray
    finish: np.ndarray
    num_rounds: np.ndarray
    tokens: np.ndarray
    first_slot: np.ndarray | None
    kv: tuple[np.ndarray, ...]


def snapshot(state: DecodeState) -> Snapshot:
    """A copy of what the invariants refer to."""
    finish, first_slot = np.array(state.finish), state.cache.first_slot
    values = [np.array(each) for each in kv_by_position(state.cache)]
    return Snapshot(
        num_committed=np.where(finish == Finish.EMPTY_ROW, 0, np.array(state.num_committed)),
        finish=finish,
        num_rounds=np.array(state.counts.num_rounds),
        tokens=np.array(state.tokens),
        first_slot=None if first_slot is None else np.array(first_slot),
        kv=tuple(each.view(f"u{each.dtype.itemsize}") for each in values),
    )


def broken_invariants(
    before: Snapshot, after: Snapshot, *, verify_length: int, regroups: bool
) -> list[str]:
    """A sentence for each invariant of 2510.22876, section 3.1, that one round has broken.

    - I1 (aligned only): all rows of the round end at one slot. This holds after the round or, if
      the scheduler `regroups` and rows are aligned only when they enter the batch, before it.
    - I2: a token's position is its slot minus the padding, and positions are contiguous: a row
      grows by 1 to `verify_length` tokens, keeps the tokens that it had, and stays within its
      max_length.
    - I3: a row's slots hold the KV of all its tokens but the newest. For tokens committed before
      the round it is unchanged, bit for bit; for the others it has been written.

    Args:
      before: with NaN in all slots without committed KV (`pages.poison_uncommitted`), so that KV
        that was not written can be seen, and KV that was read by mistake makes the row's logits
        non-finite.
      after: one round later.
    """
    sentences = []
    num_before, num_after = before.num_committed, after.num_committed
    was_active = after.num_rounds > before.num_rounds
    max_length = before.tokens.shape[1]
    if after.first_slot is not None:
        ends = after.first_slot + (num_before if regroups else num_after)
        ends = ends[was_active].tolist()
        if len(set(ends)) > 1:
            sentences.append(f"I1: rows of one round end at slots {ends}.")
        outside = (num_after > 0) & (
            (after.first_slot < 0) | (after.first_slot + num_after > max_length)
        )
        for row in np.flatnonzero(outside):
            sentences.append(
                f"I2: row {row} has {num_after[row]} tokens from slot {after.first_slot[row]} on, "
                f"and {max_length} slots."
            )
    for row in np.flatnonzero(num_before > 0):
        old, new = int(num_before[row]), int(num_after[row])
        if not (1 <= new - old <= verify_length if was_active[row] else new == old):
            sentences.append(f"I2: row {row} went from {old} to {new} tokens in one round.")
        if not np.array_equal(before.tokens[row, :old], after.tokens[row, :old]):
            sentences.append(f"I2: committed tokens of row {row} have changed.")
        for index, (was, now) in enumerate(zip(before.kv, after.kv, strict=True)):
            name = f"{'kv'[index % 2]} of layer {index // 2}"
            differs = np.any(was[row, : old - 1] != now[row, : old - 1], axis=(1, 2))
            if np.any(differs):
                sentences.append(
                    f"I3: {name} of row {row} has changed at position {np.argmax(differs)}, which "
                    "was committed before the round."
                )
            stale = np.any(was[row, old - 1 : new - 1] == now[row, old - 1 : new - 1], axis=(1, 2))
            if np.any(stale):
                sentences.append(
                    f"I3: {name} of row {row} was not written at position "
                    f"{old - 1 + np.argmax(stale)}, whose token was committed in the round."
                )
        if after.finish[row] == Finish.NON_FINITE != before.finish[row]:
            sentences.append(
                f"I3: row {row} has read a slot that holds no committed KV (or the model's own "
                "scores are not finite)."
            )
    return sentences


def poison_uncommitted(state: DecodeState) -> DecodeState:
    """The state with NaN in every slot of the target's cache that holds no committed KV."""
    is_empty = state.finish == Finish.EMPTY_ROW
    num_live = jnp.where(is_empty, 0, state.num_committed - 1)
    return state.replace(cache=kv.poison_uncommitted(state.cache, num_live))
