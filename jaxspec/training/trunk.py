"""One training run for many token counts: a trunk with a constant learning rate, and branches that
decay it.

A cosine schedule must know where it ends, so models for several token counts would each be trained
from scratch. Here a trunk warms up for a fixed number of steps and then keeps its learning rate. A
branch copies its state on the way and lowers the rate linearly to a tenth, over a fifth of the
tokens seen until then (the decay of 2404.06395 and 2405.18392). It ends with a finished model of
`tokens` tokens, decay included, five sixths of them from the trunk.

The order of rows does not depend on the size of the model or the end of the run: a branch sees the
rows that the trunk would have seen next. So a trunk can be continued to later branches, models of
every size are compared on the same text, and a teacher's states for a row need to be computed only
once.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxspec.errors import CheckpointError, SettingError
from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.options import LARGEST_COUNT, LARGEST_NUMBER, check_between
from jaxspec.training import runs
from jaxspec.training.runs import TrainState

# Fraction of a finished model's tokens over which the rate is lowered: 20 % of those before.
DECAY_SHARE = 1 / 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
    """A branch of a trunk.

    Attributes:
      tokens: the requested number; the branch has that of `num_steps` whole steps.
      leaves_at: number of trunk steps before it.
      num_steps: total number of steps, including the trunk's.
    """

    tokens: int
    leaves_at: int
    num_steps: int

    @property
    def name(self) -> str:
        """The name of its directory."""
        return str(self.tokens)


def plan_branches(tokens: Sequence[int], *, step_tokens: int, warmup_steps: int) -> list[Branch]:
    """The branches that end after these numbers of tokens.

    Raises:
      SettingError: they do not increase by at least a step, or one leaves before the warm-up ends.
    """
    check_between("warmup_steps", warmup_steps, 0, LARGEST_COUNT)
    branches: list[Branch] = []
    for each in tokens:
        check_between("branches", each, 1, LARGEST_NUMBER)
        num_steps = round(each / step_tokens)
        decay = max(1, round(DECAY_SHARE * num_steps))
        branch = Branch(tokens=each, leaves_at=num_steps - decay, num_steps=num_steps)
        if branches and num_steps <= branches[-1].num_steps:
            raise SettingError(
                f"The branches {branches[-1].tokens} and {each} were given in this order; give "
                f"tokens that increase, by a step of {step_tokens} at least."
            )
        if branch.leaves_at < warmup_steps:
            raise SettingError(
                f"A branch of {each} tokens has {num_steps} steps of {step_tokens} and would leave "
                f"before the {warmup_steps} steps of the warm-up end; give at least "
                f"{_smallest(step_tokens, warmup_steps)} tokens, or lower batch_tokens or "
                "warmup_steps."
            )
        branches.append(branch)
    return branches


def rate_at(step: int, *, learning_rate: float, warmup_steps: int, branch: Branch | None) -> float:
    """Learning rate of the step with this index, for the trunk or for a branch that has left it."""
    if branch is None or step < branch.leaves_at:
        return learning_rate * min(1.0, (step + 1) / max(1, warmup_steps))
    done = (step + 1 - branch.leaves_at) / (branch.num_steps - branch.leaves_at)
    return learning_rate * (1.0 - 0.9 * done)


def check_schedule(schedule: str, branches: Sequence[int]) -> None:
    """Raises `SettingError` unless a trunk has branches, and only a trunk."""
    if bool(branches) != (schedule == "trunk"):
        raise SettingError(
            f"schedule {schedule} was given with {len(branches)} branches; give branches with the "
            "schedule trunk, and only with it."
        )


def branch_directory(out: pathlib.Path, tokens: int) -> pathlib.Path:
    """The directory of the finished model of this many tokens, in a trunk's directory."""
    return out / "branches" / str(tokens)


class TrunkSettings(Protocol):
    """The settings of a run that a trunk needs: its directory, whether it is continued, its
    learning rate, its warm-up steps."""

    @property
    def out(self) -> pathlib.Path: ...  # noqa: D102

    @property
    def resume(self) -> bool: ...  # noqa: D102

    @property
    def learning_rate(self) -> float: ...  # noqa: D102

    @property
    def warmup_steps(self) -> int: ...  # noqa: D102


class Trained(Protocol):
    """What a trunk needs from the thing that it trains. `fingerprint` is everything that decides
    the result."""

    def initial_state(
        self, out: pathlib.Path, fingerprint: dict[str, Any], *, resume: bool
    ) -> tuple[TrainState, int]:
        """The initial state, and the number of steps taken before it."""
        ...

    def run_steps(
        self,
        out: pathlib.Path,
        state: TrainState,
        steps: range,
        *,
        rate: Callable[[int], np.float32],
        fingerprint: dict[str, Any],
    ) -> tuple[TrainState, dict[str, float]]:
        """The state after these steps, each with its learning rate, and the last one's metrics."""
        ...

    def begin(
        self, out: pathlib.Path, state: TrainState, step: int, fingerprint: dict[str, Any]
    ) -> None:
        """Writes a branch's first checkpoint, and everything else that its directory needs."""
        ...

    def finish(
        self, out: pathlib.Path, state: TrainState, branch: Branch, metrics: dict[str, float]
    ) -> dict[str, Any]:
        """Writes what a branch has trained; returns its result."""
        ...


def train_trunk(
    config: TrunkSettings,
    branches: Sequence[Branch],
    fingerprint: dict[str, Any],
    trained: Trained,
) -> tuple[dict[str, Any], int]:
    """Trains a trunk, and every branch as soon as the trunk reaches it.

    Args:
      config: the run's.
      branches: as `plan_branches` returns them.
      fingerprint: everything that decides the trunk's result, which does not include branches.
      trained: what is trained.

    Returns:
      The results of the branches by name, and the steps of trunk and branches together.

    Raises:
      SettingError: the trunk is already past a branch that was not made.
    """

    def advance(
        out: pathlib.Path,
        state: TrainState,
        steps: range,
        branch: Branch | None,
        fingerprint: dict[str, Any],
    ) -> tuple[TrainState, dict[str, float]]:
        def rate(index: int) -> np.float32:
            of_trunk = {
                "learning_rate": config.learning_rate,
                "warmup_steps": config.warmup_steps,
            }
            return np.float32(rate_at(index, branch=branch, **of_trunk))

        return trained.run_steps(out, state, steps, rate=rate, fingerprint=fingerprint)

    state, num_done = trained.initial_state(config.out, fingerprint, resume=config.resume)
    results = {}
    for branch in branches:
        out = branch_directory(config.out, branch.tokens)
        of_branch = fingerprint | {"branch": branch.tokens}
        if not (out / runs.CHECKPOINT).is_file():
            if num_done > branch.leaves_at:
                raise SettingError(
                    f"The trunk in {config.out} has taken {num_done} steps, and a branch of "
                    f"{branch.tokens} tokens leaves it after {branch.leaves_at}; add later "
                    "branches, or train this one in another directory."
                )
            steps = range(num_done, branch.leaves_at)
            state, _ = advance(config.out, state, steps, None, fingerprint)
            num_done = branch.leaves_at
            trained.begin(out, state, num_done, of_branch)
        if (out / runs.RESULT).is_file():
            results[branch.name] = runs.read_result(out)
            continue
        start_s = time.perf_counter()
        ending, first_step = trained.initial_state(out, of_branch, resume=True)
        steps = range(first_step, branch.num_steps)
        ending, metrics = advance(out, ending, steps, branch, of_branch)
        results[branch.name] = trained.finish(out, ending, branch, metrics) | {
            "wall_s": time.perf_counter() - start_s
        }
        runs.write_result(out, results[branch.name])
    num_steps = branches[-1].leaves_at + sum(
        branch.num_steps - branch.leaves_at for branch in branches
    )
    return results, num_steps


class HiddenStates:
    """A teacher's last hidden states `[B, T, E]` of every step's rows, each computed once.

    The file only grows at its end, so it holds the steps from the first one on, and what a crash
    cut off is computed again. It takes 4 E bytes per token.

    Args:
      path: that of the file; what it depends on is stored beside it.
      shape: `[B, T, E]` of a step.
      origin: everything that decides the states, as JSON values.
      compute: computes the states of the step with a given index.

    Raises:
      CheckpointError: the file holds the states of another teacher, or of other rows.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        shape: tuple[int, int, int],
        origin: Mapping[str, Any],
        compute: Callable[[int], np.ndarray],
    ):
        self._path, self._shape, self._compute = path, shape, compute
        about = path.with_suffix(".json")
        expected = json.loads(json.dumps({"shape": list(shape), **origin}))
        if about.is_file() and runs.json_object(about.read_bytes()) != expected:
            raise CheckpointError(
                f"{path} holds the hidden states of another teacher or of other rows; remove it, "
                "or name another teacher_states."
            )
        if not about.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            write_atomically(about, json.dumps(expected).encode())
        self._step_bytes = 4 * int(np.prod(shape))
        self._num_known = path.stat().st_size // self._step_bytes if path.exists() else 0

    def __call__(self, step: int) -> np.ndarray:
        """fp32 states of a step's rows."""
        with self._path.open("r+b" if self._path.exists() else "w+b") as file:
            while self._num_known <= step:
                file.seek(self._num_known * self._step_bytes)
                file.write(np.asarray(self._compute(self._num_known), np.float32).tobytes())
                self._num_known += 1
            file.seek(step * self._step_bytes)
            found = np.frombuffer(file.read(self._step_bytes), np.float32)
        return found.reshape(self._shape)


def _smallest(step_tokens: int, warmup_steps: int) -> int:
    """Tokens of the shortest branch that leaves after the warm-up."""
    num_steps = max(warmup_steps + 1, int(warmup_steps / (1 - DECAY_SHARE)) - 2)
    while num_steps - max(1, round(DECAY_SHARE * num_steps)) < warmup_steps:
        num_steps += 1
    return num_steps * step_tokens
