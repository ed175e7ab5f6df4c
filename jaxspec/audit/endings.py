"""Checks that an output ends where it must: at its first stop token or string, or at its limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.audit.judge import Divergence
from jaxspec.audit.scoring import Scorer
from jaxspec.models.base import Model
from jaxspec.requests.completions import find_stop
from jaxspec.requests.sampling_params import SamplingParams


def judge_end(
    scorer: Scorer,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    params: SamplingParams,
    after_stop: Sequence[int] = (),
) -> Divergence | None:
    """Where an output ends too early or too late; None if it ends where it must.

    For an output that ends too early, the token that the target would have emitted next is given:
    its draw if the seed is known, otherwise the likeliest.

    Args:
      scorer: a scorer of the target, with room for one token more than prompt and output.
      prompt_ids: at least one.
      output_ids: ids of the vocabulary, cut after the first stop token; may be empty.
      params: how it was decoded; `max_tokens` is the limit that applied, which may be that of the
        cache.
      after_stop: tokens that followed the stop token. One token repeated is padding, if it is a
        stop token or the tokenizer's own padding.
    """
    num_tokens, limit = len(output_ids), params.max_tokens
    if num_tokens > limit:
        return Divergence(index=limit, token=output_ids[limit], expected=-1)
    stops = params.stop_tokens(scorer.target)
    if output_ids and output_ids[-1] in stops:
        if is_padding(scorer.target, stops, after_stop):
            return None
        return Divergence(index=num_tokens, token=after_stop[0], expected=-1)
    if num_tokens == limit or _has_stop_string(scorer.target, prompt_ids, output_ids, params):
        return None
    expected = _next_token(scorer, prompt_ids, output_ids, params)
    return Divergence(index=num_tokens, token=-1, expected=expected)


def is_padding(target: Model, stops: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether tokens after a stop token are padding (or there are none)."""
    pad = getattr(target.tokenizer and target.tokenizer.hf, "pad_token_id", None)
    return len(set(tokens)) <= 1 and set(tokens) <= {*stops, *target.eos_token_ids, pad}


def _has_stop_string(
    target: Model, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
) -> bool:
    if not params.stop or target.tokenizer is None or not output_ids:
        return False
    found = find_stop(
        target.tokenizer,
        output_ids,
        params.stop,
        min_tokens=params.min_tokens,
        prompt_token_ids=prompt_ids,
    )
    return found is not None


def _next_token(
    scorer: Scorer, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
) -> int:
    followed = [*output_ids, 0]  # any token: only its position is scored
    *_, segment = scorer.segments(prompt_ids, followed, params, measures_noise=False)
    if params.temperature == 0 or params.seed is not None:
        return int(segment.chosen[-1])
    logits, _ = segment.logits_at(len(output_ids))
    return int(np.argmax(logits))
