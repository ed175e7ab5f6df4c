"""The learning rate of every run: warm-up, a constant rate, and a decay at the end.

The rate rises linearly for a fixed number of steps and then stays. The last sixth of a run's steps
lower it linearly to a tenth (the schedule of 2404.06395 and 2405.18392). Only the decay depends on
where a run ends. So one run can end in models of several token counts: a *trunk* keeps the constant
rate, and a *branch* for every token count copies the trunk's state on the way and decays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxspec.errors import SettingError
from jaxspec.runtime.options import LARGEST_COUNT, LARGEST_NUMBER, check_between

DECAY_SHARE = 1 / 6  # of a run's steps: a fifth of those before


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
    """The end of a run: a trunk, and the decay after it.

    Attributes:
      tokens: the requested number; the run has that of `num_steps` whole steps.
      leaves_at: number of trunk steps before the decay.
      num_steps: total number of steps, including the trunk's.
    """

    tokens: int
    leaves_at: int
    num_steps: int


def plan_branches(tokens: Sequence[int], *, step_tokens: int, warmup_steps: int) -> list[Branch]:
    """The branches that end after these numbers of tokens.

    Raises:
      SettingError: there are none, they do not increase by at least a step, or a decay would
        begin before the warm-up ends.
    """
    check_between("warmup_steps", warmup_steps, 0, LARGEST_COUNT)
    if not tokens:
        raise SettingError("tokens has no number; give one or several.")
    branches: list[Branch] = []
    for each in tokens:
        check_between("tokens", each, 1, LARGEST_NUMBER)
        num_steps = round(each / step_tokens)
        branch = Branch(tokens=each, leaves_at=_leaves_at(num_steps), num_steps=num_steps)
        if branches and num_steps <= branches[-1].num_steps:
            raise SettingError(
                f"tokens {branches[-1].tokens} and {each} were given in this order; give numbers "
                f"that increase, by a step of {step_tokens} at least."
            )
        if branch.leaves_at < warmup_steps:
            enough = max(warmup_steps + 1, int(warmup_steps / (1 - DECAY_SHARE)) - 2)
            while _leaves_at(enough) < warmup_steps:
                enough += 1
            raise SettingError(
                f"A run of {each} tokens has {num_steps} steps of {step_tokens}, and its decay "
                f"would begin before the {warmup_steps} steps of the warm-up end; give at least "
                f"{enough * step_tokens} tokens, or lower batch_tokens or warmup_steps."
            )
        branches.append(branch)
    return branches


def branch_after(num_steps: int, *, step_tokens: int) -> Branch:
    """The shortest branch whose decay begins after so many steps."""
    total = num_steps + 1
    while _leaves_at(total) < num_steps:
        total += 1
    return Branch(tokens=total * step_tokens, leaves_at=num_steps, num_steps=total)


def _leaves_at(num_steps: int) -> int:
    return num_steps - max(1, round(DECAY_SHARE * num_steps))


def rate_at(step: int, *, learning_rate: float, warmup_steps: int, branch: Branch | None) -> float:
    """Learning rate of the step with this index, on the trunk or, with `branch`, on the way to its
    end."""
    if branch is None or step < branch.leaves_at:
        return learning_rate * min(1.0, (step + 1) / max(1, warmup_steps))
    done = (step + 1 - branch.leaves_at) / (branch.num_steps - branch.leaves_at)
    return learning_rate * (1.0 - 0.9 * done)
