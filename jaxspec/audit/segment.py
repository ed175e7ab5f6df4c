"""The scores of a part of an output: what the scorer measures, and evidence is computed from."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Scores of consecutive output tokens, each given the output's own tokens before it.

    Attributes:
      first: index in the output of the segment's first token.
      tokens: `[n]` int32, the output's tokens.
      chosen: `[n]` int32, the token that the target emits there by its fp32 logits: the arg max, or
        the keyed draw of a sampled request (only meaningful if its seed is known).
      gap: `[n]` fp32, by how much the best token leads the second best by the fp32 logits, with the
        position's noise if the request is sampled; inf if the filters keep one token only.
      noise: `[n]` fp32, the largest change of any logit when it is computed in the output's dtype;
        0 where that was not measured.
      gap_changes: `[P, n]` fp32, the change of `gap` by each of `P` programs; `P` is 0 where that
        was not measured.
      log_probs: `[n]` fp32, log-probability of each token under the distribution it should be drawn
        from, -inf if a filter removed it; 0 for a greedy request.
      log_bets, expected, variance, spread: `[n, A]` fp32, the bets on each of the `A` alternatives
        to that distribution; see `evidence.bets`. Zeros for a greedy request.
      adjusted: `[SEGMENT, V]` fp32 on the device, logits after biases, penalties and
        `min_tokens`.
      gumbel: `[SEGMENT, V]` fp32 on the device, noise of the keyed draws; 0 for a greedy request.
    """

    first: int
    tokens: np.ndarray
    chosen: np.ndarray
    gap: np.ndarray
    noise: np.ndarray
    gap_changes: np.ndarray
    log_probs: np.ndarray
    log_bets: np.ndarray
    expected: np.ndarray
    variance: np.ndarray
    spread: np.ndarray
    adjusted: jax.Array
    gumbel: jax.Array

    @property
    def end(self) -> int:
        """Index in the output after the segment's last token."""
        return self.first + len(self.tokens)

    def logits_at(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The adjusted logits and keyed noise, `[V]` float64 each, with which output token `index`
        is drawn."""
        row = index - self.first
        fetched = jax.device_get((self.adjusted[row], self.gumbel[row]))
        return fetched[0].astype(np.float64), fetched[1].astype(np.float64)
