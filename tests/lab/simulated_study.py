"""Rows of scaling studies whose truth is known, as `analyse` takes them."""

import numpy as np
import pandas as pd

from jaxspec.lab.studies.scaling.fits import chain_rate

TOKENS = tuple(31_250 * 2**power for power in range(6))
# tau of D, the training tokens over the smallest number of them. The second never exceeds 3, and is
# nearly a straight line over log D from 1 to 128.
TRUTHS = {
    "log-linear": lambda d: 1.2 + 0.7 * np.log10(d),
    "saturating": lambda d: 3.0 - 1.8 * d**-0.25,
}


def simulate(
    truth,
    *,
    seed=1,
    tokens=TOKENS,
    num_seeds=3,
    num_prompts=48,
    draft_length=8,
    max_tokens=64,
    prompt_spread=0.35,
    seed_spread=0.02,
):
    """Each draft token is accepted with the chance at which an uncut round emits what the truth
    says, for a prompt and a seed. Outputs end after `max_tokens`, so the last round is cut.

    Args:
      truth: tau of D, the mean over prompts and seeds.
      seed: of what is drawn.
      prompt_spread: standard deviation, between prompts, of log(tau - 1).
      seed_spread: standard deviation of tau between training seeds.
    """
    random, tokens = np.random.default_rng(seed), np.asarray(tokens)
    shape = len(tokens), num_seeds, num_prompts
    # The mean of exp(s z) is exp(s^2 / 2).
    of_prompt = np.exp(prompt_spread * random.standard_normal(num_prompts) - prompt_spread**2 / 2)
    of_seed = seed_spread * random.standard_normal((1, num_seeds, 1))
    tau = 1 + (truth(tokens / tokens[0])[:, None, None] - 1 + of_seed) * of_prompt
    rate = chain_rate(np.clip(tau, 1, draft_length + 0.9), draft_length)
    depth = np.arange(draft_length)
    accepted = np.zeros((*shape, draft_length), int)
    offered, rounds, limited = accepted.copy(), np.zeros(shape, int), np.zeros(shape, int)
    remaining = np.full(shape, max_tokens)
    while (remaining > 0).any():
        is_running = remaining > 0
        limit = np.clip(remaining - 1, 0, draft_length)
        is_accepted = random.random((*shape, draft_length)) < rate[..., None]
        run = np.minimum(np.cumprod(is_accepted, axis=-1).sum(axis=-1), limit)
        offered += is_running[..., None] & (depth < limit[..., None])
        accepted += is_running[..., None] & (depth < run[..., None])
        limited += is_running & (run == limit) & (limit < draft_length)
        rounds += is_running
        remaining = np.where(is_running, remaining - run - 1, remaining)
    point, of_training, prompt = (index.ravel() for index in np.indices(shape))
    return pd.DataFrame(
        {
            "target": "simulated",
            "drafter": "2x128",
            "num_params_without_embedding": 400_000,
            "num_layers": 2,
            "width": 128,
            "training_tokens": tokens[point],
            "seed": of_training,
            "prompt_set": "simulated",
            "prompt": prompt,
            "verifier": "rejection",
            "temperature": 1.0,
            "draft_length": draft_length,
            "rounds": rounds.ravel(),
            "emitted": max_tokens,
            "offered_at": list(offered.reshape(-1, draft_length)),
            "accepted_at": list(accepted.reshape(-1, draft_length)),
            "num_limited_rounds": limited.ravel(),
        }
    )
