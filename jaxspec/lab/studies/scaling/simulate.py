"""Studies whose truth is known: does the analysis find it, and how large must a study be?

Each draft token is accepted with the chance at which an uncut round emits what the truth says, for
a prompt and a seed. Outputs end after so many tokens, so the last round is cut as in a decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxspec.runtime.extras import import_extra

if TYPE_CHECKING:
    import pandas

Truth = Callable[[np.ndarray], np.ndarray]  # tau of D, the tokens over the smallest number of them


def log_linear_truth(amount: np.ndarray) -> np.ndarray:
    """1.2 + 0.7 log10 D."""
    return 1.2 + 0.7 * np.log10(amount)


def saturating_truth(amount: np.ndarray) -> np.ndarray:
    """3.0 - 1.8 D^-0.25: from 1 to 128 nearly a straight line over log D."""
    return 3.0 - 1.8 * amount**-0.25


TRUTHS: dict[str, Truth] = {"log-linear": log_linear_truth, "saturating": saturating_truth}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """The size of a study, and what varies in it.

    Attributes:
      tokens: training tokens of the points.
      num_seeds: training seeds.
      num_prompts: prompts, the same at every point.
      draft_length: N.
      max_tokens: of each output; the round that reaches it is cut.
      prompt_spread: standard deviation, between prompts, of the logarithm of the accepted tokens
        per round, tau - 1.
      slope_spread: of its slope per decade between prompts.
      seed_spread: of tau between seeds, the same at all points of a seed.
      branch_spread: of tau between the branches of a seed.
    """

    tokens: Sequence[int] = (31_250, 62_500, 125_000, 250_000, 500_000, 1_000_000)
    num_seeds: int = 3
    num_prompts: int = 48
    draft_length: int = 8
    max_tokens: int = 64
    prompt_spread: float = 0.35
    slope_spread: float = 0.1
    seed_spread: float = 0.02
    branch_spread: float = 0.01

    def rows(self, truth: Truth, *, seed: int) -> pandas.DataFrame:
        """Rows of a study as `analyse` takes them.

        Args:
          truth: the mean over prompts and seeds of tau.
          seed: of what is drawn.
        """
        pd = import_extra("pandas", "a scaling study")
        random, tokens = np.random.default_rng(seed), np.asarray(self.tokens, np.float64)
        n, num_seeds, num_prompts = len(tokens), self.num_seeds, self.num_prompts
        decades = np.log10(tokens / tokens.min())
        place = (decades - decades.mean())[:, None, None]
        of_prompt = self.prompt_spread * random.standard_normal(num_prompts)
        of_prompt = of_prompt + self.slope_spread * place * random.standard_normal(num_prompts)
        # Its mean is 1: the mean of exp(s z) is exp(s^2 / 2).
        factor = np.exp(of_prompt - (self.prompt_spread**2 + (self.slope_spread * place) ** 2) / 2)
        of_seed = self.seed_spread * random.standard_normal((1, num_seeds, 1))
        of_branch = self.branch_spread * random.standard_normal((n, num_seeds, 1))
        accepted = truth(tokens / tokens.min())[:, None, None] - 1.0 + of_seed + of_branch
        tau = np.clip(1.0 + accepted * factor, 1.0, self.draft_length + 0.9)
        counts = self._decode(chain_rate(tau, self.draft_length), random)
        index = np.stack(np.meshgrid(*map(np.arange, tau.shape), indexing="ij"), -1).reshape(-1, 3)
        return pd.DataFrame(
            {
                "target": "simulated",
                "drafter": "2x128",
                "num_params_without_embedding": 400_000,
                "num_layers": 2,
                "width": 128,
                "training_tokens": tokens[index[:, 0]].astype(int),
                "seed": index[:, 1],
                "prompt_set": "simulated",
                "prompt": index[:, 2],
                "verifier": "rejection",
                "temperature": 1.0,
                "draft_length": self.draft_length,
                **{name: list(each.reshape(-1, *each.shape[3:])) for name, each in counts.items()},
            }
        )

    def _decode(self, rate: np.ndarray, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Counts of decodes whose tokens are accepted at a rate `[n, S, P]` each."""
        accepted = np.zeros((*rate.shape, self.draft_length), np.int64)
        offered, rounds = accepted.copy(), np.zeros(rate.shape, np.int64)
        limited, remaining = rounds.copy(), np.full(rate.shape, self.max_tokens)
        depth = np.arange(self.draft_length)
        with np.errstate(divide="ignore"):
            log_rate = np.log(rate)
        while (remaining > 0).any():
            is_running = remaining > 0
            limit = np.clip(np.minimum(remaining - 1, self.draft_length), 0, None)
            # The number of successes before the first failure.
            run = np.floor(
                np.log(random.random(rate.shape)) / np.where(rate > 0, log_rate, -np.inf)
            )
            length = np.minimum(run, limit).astype(np.int64)
            offered += is_running[..., None] & (depth < limit[..., None])
            accepted += is_running[..., None] & (depth < length[..., None])
            limited += is_running & (length == limit) & (limit < self.draft_length)
            rounds += is_running
            remaining = np.where(is_running, remaining - length - 1, remaining)
        emitted = np.full(rate.shape, self.max_tokens)
        return {
            "rounds": rounds,
            "emitted": emitted,
            "offered_at": offered,
            "accepted_at": accepted,
            "num_limited_rounds": limited,
        }


def chain_rate(tau: np.ndarray, draft_length: int) -> np.ndarray:
    """The acceptance rate, the same at every position, at which a chain emits `tau` per round; tau
    from 1 to N + 1."""
    rates = np.linspace(0.0, 1.0, 4097)
    emitted = np.sum(rates[:, None] ** np.arange(draft_length + 1), axis=1)
    return np.interp(tau, emitted, rates)
