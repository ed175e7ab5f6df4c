"""Checkpoints of a run, in `RUN/checkpoints`: a directory for each of the last steps that were
saved, written by Orbax' `CheckpointManager`.

Orbax writes a step beside its place and renames it when it is complete. What a killed run left
unfinished is no checkpoint, and the next save removes it. Checksums tell a damaged checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.checkpoint.format import quiet_orbax
from jaxspec.errors import CheckpointError
from jaxspec.runtime.files import absolute, check_tree_access, first_line, reading
from jaxspec.types import PyTree

CHECKPOINTS = "checkpoints"
_NUM_KEPT = 2  # where the newest is damaged, a run can go on from the one before


class TrainState(struct.PyTreeNode, kw_only=True):
    """The state of training: parameters and the optimizer's moments, fp32."""

    params: PyTree
    optimizer: PyTree


def latest_step(out: pathlib.Path) -> int | None:
    """The step of a run's newest checkpoint; None if there is none.

    Raises:
      UnreadableError: the system does not let this process look.
    """
    try:
        with reading(out / CHECKPOINTS):
            names = os.listdir(out / CHECKPOINTS)
    except OSError:  # there is no such directory
        return None
    return max((int(name) for name in names if name.isdecimal()), default=None)


def save(out: pathlib.Path, state: TrainState, step: int, about: Mapping[str, Any]) -> None:
    """Saves the state after `step` steps, completely or not at all.

    Args:
      out: the run's directory.
      state: parameters and optimizer.
      step: number of steps taken.
      about: what the state belongs to, as JSON values.

    Raises:
      CheckpointError: it cannot be written.
    """
    arrays = {
        name: jax.tree.map(np.asarray, tree)
        for name, tree in (("params", state.params), ("optimizer", state.optimizer))
    }
    checksums = {name: checksum(tree) for name, tree in arrays.items()}
    checksums["about"] = _json_checksum(about)
    try:
        with _manager(out, is_writer=True) as (ocp, manager):
            manager.save(
                step,
                args=ocp.args.Composite(
                    about=ocp.args.JsonSave({**about, "checksums": checksums}),
                    **{name: ocp.args.StandardSave(tree) for name, tree in arrays.items()},
                ),
            )
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint of step {step} cannot be written into {out / CHECKPOINTS} "
            f"({first_line(error)}); mend that and run again, with --resume if there is an earlier "
            "checkpoint."
        ) from error


def read_about(out: pathlib.Path) -> tuple[int, dict[str, Any]]:
    """The step of a run's newest checkpoint, and what it belongs to.

    Raises:
      CheckpointError: there is no checkpoint, or it is damaged.
    """
    step = latest_step(out)
    if step is None:
        raise CheckpointError(
            f"There is no checkpoint in {out}; give the directory of a run of `jaxspec train`."
        )
    about = _restore(out, step, "about")
    parts = (about.get(name) for name in ("fingerprint", "checksums", "metrics"))
    if not all(isinstance(part, dict) for part in parts):
        raise _damaged(out, step, "it lacks what jaxspec writes about a state")
    own = {name: value for name, value in about.items() if name != "checksums"}
    if _json_checksum(own) != about["checksums"].get("about"):
        raise _damaged(out, step, "what it says about the state has another checksum")
    return step, about


def read_arrays(
    out: pathlib.Path, step: int, about: Mapping[str, Any], name: str, template: PyTree
) -> PyTree:
    """The `params` or the `optimizer` of a checkpoint.

    Args:
      out: the run's directory.
      step: that of the checkpoint.
      about: as `read_about` returns it.
      name: which of the two.
      template: their shapes and dtypes.

    Raises:
      CheckpointError: they are damaged, or of other shapes.
    """
    # Views of one number: Orbax takes structure, shapes and dtypes from them.
    views = jax.tree.map(
        lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), template
    )
    arrays = _restore(out, step, name, views)
    shapes, wanted = ([leaf.shape for leaf in jax.tree.leaves(t)] for t in (arrays, template))
    if shapes != wanted or checksum(arrays) != about["checksums"].get(name):
        raise _damaged(out, step, f"its {name} have another checksum")
    return jax.tree.map(jnp.asarray, arrays)


def checksum(params: PyTree) -> int:
    """A number that distinguishes parameters, computed leaf by leaf in order."""
    total = 0
    for leaf in jax.tree.leaves(params):
        total = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data, total)
    return total


def _json_checksum(about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _restore(out: pathlib.Path, step: int, name: str, template: PyTree = None) -> Any:
    """An item of a checkpoint: arrays like those of `template`, or JSON."""
    directory = out / CHECKPOINTS / str(step)
    with reading(directory, lambda reason: _damaged(out, step, reason)):
        check_tree_access(directory)
        with _manager(out, is_writer=False) as (ocp, manager):
            args = (
                ocp.args.JsonRestore() if template is None else ocp.args.StandardRestore(template)
            )
            return manager.restore(step, args=ocp.args.Composite(**{name: args}))[name]


def _damaged(out: pathlib.Path, step: int, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{out / CHECKPOINTS / str(step)} is damaged, not as it was written ({reason}); remove it "
        "to go on from the checkpoint before, or train again."
    )


@contextlib.contextmanager
def _manager(out: pathlib.Path, *, is_writer: bool) -> Iterator[tuple[Any, Any]]:
    """Orbax, and its manager of a run's checkpoints."""
    with quiet_orbax():
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(
            max_to_keep=_NUM_KEPT,
            create=is_writer,
            cleanup_tmp_directories=is_writer,
            enable_async_checkpointing=False,
        )
        with ocp.CheckpointManager(absolute(out / CHECKPOINTS), options=options) as manager:
            yield ocp, manager
