"""Makes the record with which a request enters a row of the batch."""

from __future__ import annotations

import numpy as np

from jaxspec.decode.parts import RoundParts
from jaxspec.decode.settings import MAX_STOP_TOKENS
from jaxspec.decode.state import Admission
from jaxspec.errors import SettingError
from jaxspec.models.base import Model
from jaxspec.requests.requests import Request
from jaxspec.types import Finish


def stop_tokens(request: Request, model: Model) -> tuple[int, ...]:
    """Every token that ends the request's output.

    Raises:
      SettingError: there are more stop tokens than the decode state has room for.
    """
    stops = request.params.stop_tokens(model)
    if len(stops) > MAX_STOP_TOKENS:
        raise SettingError(
            f"Request {request.request_id} has {len(stops)} stop tokens (with the model's EOS "
            f"tokens); there is room for {MAX_STOP_TOKENS}, so name fewer."
        )
    return stops


def make_admission(
    request: Request, parts: RoundParts, *, draft_length: int, arrival: int = 0
) -> Admission:
    """The record of a request whose prompt is no longer than `parts.longest_prompt`.

    Args:
      request: the request to decode.
      parts: those of one shard, which limit the length of a row.
      draft_length: tokens drafted per round; 0 decodes plainly.
      arrival: order among requests; schedulers prefer the oldest.
    """
    prompt, params = request.prompt_token_ids, request.params
    tokens = np.zeros((parts.shape.max_length,), np.int32)
    tokens[: len(prompt)] = prompt
    stops = stop_tokens(request, parts.target)
    padded_stops = np.full((MAX_STOP_TOKENS,), -1, np.int32)
    padded_stops[: len(stops)] = stops
    wanted, largest = len(prompt) + params.max_tokens, parts.longest_prompt + 1
    limit_finish = Finish.MAX_TOKENS if wanted <= largest else Finish.MAX_LENGTH
    return Admission(
        tokens=tokens,
        length=np.int32(len(prompt)),
        limit=np.int32(min(wanted, largest)),
        limit_finish=np.int32(limit_finish),
        draft_limit=np.int32(draft_length),
        stop_tokens=padded_stops,
        sampling=params.of_row(prompt_length=len(prompt)),
        wants_logprobs=np.bool_(params.logprobs is not None),
        arrival=np.int32(arrival),
    )
