"""The logits of a given output under a model, by teacher forcing, and how far rounding moves them.

One compiled program per width reads a sequence of any length: the prompt in chunks, the output in
segments of `SEGMENT` tokens. Each segment is scored with fp32 parameters, which is the reference,
and again in the dtype of the output, in windows of several widths. The largest difference between
these is the rounding noise of scoring, measured on this model and in this context instead of
assumed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec import sampling
from jaxspec.audit import evidence
from jaxspec.audit.segment import Segment
from jaxspec.cache import pages as kv
from jaxspec.decode.settings import MAX_STOP_TOKENS
from jaxspec.errors import ModelError, PromptError
from jaxspec.models.base import Model, packed_model
from jaxspec.models.prefill import chain_window, prefill_chunk
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.compilation import Program, numbered
from jaxspec.runtime.environment import loops_run_on_host
from jaxspec.types import BatchView, PyTree

SEGMENT = 64  # output tokens scored by one call
PROMPT_CHUNK = 128  # for re-scoring; fp32 scoring reads prompts in chunks of SEGMENT
WIDTHS = (1, 4, SEGMENT)  # windows in which outputs are re-scored; divisors of SEGMENT


class Scorer:
    """Scores outputs under a target.

    Args:
      target: the model whose outputs these are claimed to be. Its parameters are copied in fp32.
      max_length: most tokens of a prompt and its output together.
      dtype: the dtype in which the outputs were computed; default the target's own.

    Raises:
      ModelError: the target's parameters cannot be cast (it is not a dataclass).
    """

    def __init__(self, target: Model, *, max_length: int = 1024, dtype: Any = None):
        own = parameter_dtype(target) if dtype is None else jnp.dtype(dtype)
        self.target = target
        self.dtype = own
        # One segment more than requested, because the last one may be padded.
        self.max_length = kv.round_up_to_block(max_length + SEGMENT)
        self._wide = packed_model(with_dtype(target, jnp.float32))
        self._own = packed_model(with_dtype(target, own))

        def program(what: str, dtype: Any, function: Callable, **donated: Any) -> Program:
            name = f"the {what} of {target.name} in {jnp.dtype(dtype).name}"
            return Program(jax.jit(function, **donated), name)

        read_wide = functools.partial(self._read, self._wide, chunk=SEGMENT)
        self._read_wide = program("reading of prompts", jnp.float32, read_wide)
        read_own = functools.partial(self._read, self._own, chunk=PROMPT_CHUNK)
        self._read_own = program("reading of prompts", own, read_own)
        self._score = program("scoring", jnp.float32, self._score_segment, donate_argnums=1)
        self._rescore = {}
        for width in WIDTHS:
            rescore = functools.partial(self._rescore_segment, width=width)
            what = f"scoring {width} at a time"
            self._rescore[width] = program(what, own, rescore, donate_argnums=1)
        numbered(self._read_wide, self._read_own, self._score, *self._rescore.values())

    @property
    def rounding(self) -> float:
        """Relative error of rounding a number to `dtype`."""
        return float(jnp.finfo(self.dtype).eps) / 2

    def segments(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams,
        *,
        measures_noise: bool = True,
    ) -> Iterator[Segment]:
        """Scores of an output, segment by segment.

        Args:
          prompt_ids: at least one.
          output_ids: ids of the vocabulary.
          params: how the output was drawn; without a seed the draws are those of seed 0.
          measures_noise: False leaves `Segment.noise` zero, and is several times faster.

        Raises:
          PromptError: prompt and output are longer than `max_length`, or an id is outside of the
            vocabulary.
        """
        self._check(prompt_ids, output_ids)
        tokens = np.zeros((self.max_length,), np.int32)
        num_prompt, end = len(prompt_ids), len(prompt_ids) + len(output_ids)
        tokens[:num_prompt], tokens[num_prompt:end] = prompt_ids, output_ids
        before = np.int32(num_prompt - 1)  # the prompt's last token is scored, not just prefilled
        wide = self._read_wide(self._wide.params, tokens, before)
        own = {}
        if measures_noise:
            read = self._read_own(self._own.params, tokens, before)
            own = {width: jax.tree.map(jnp.copy, read) for width in WIDTHS}
        row = jax.tree.map(lambda value: value[None], params.of_row(prompt_length=num_prompt))
        row = row.replace(loops_run_on_host=loops_run_on_host())
        stops = np.full((1, MAX_STOP_TOKENS), -1, np.int32)
        wanted = params.stop_tokens(self.target)[:MAX_STOP_TOKENS]
        stops[0, : len(wanted)] = wanted
        for start in range(num_prompt - 1, end - 1, SEGMENT):
            stop = min(start + SEGMENT, end - 1)  # logits after the last token decide nothing
            n = stop - start
            at = (np.int32(start), np.int32(stop))
            scored, wide = self._score(self._wide.params, wide, tokens, *at, stops, row)
            noise = np.zeros((SEGMENT,), np.float32)
            for width, cache in own.items():
                change, own[width] = self._rescore[width](
                    self._own.params, cache, tokens, *at, scored["logits"]
                )
                noise = np.maximum(noise, np.asarray(change))
            # Penalties scale the logits of some tokens, and their noise.
            noise = noise * max(params.repetition_penalty, 1 / params.repetition_penalty)
            on_device = ("logits", "adjusted", "gumbel")
            host = jax.device_get({k: x for k, x in scored.items() if k not in on_device})
            yield Segment(
                first=start + 1 - num_prompt,
                tokens=tokens[start + 1 : stop + 1],
                noise=noise[:n],
                adjusted=scored["adjusted"],
                gumbel=scored["gumbel"],
                **{name: values[:n] for name, values in host.items()},
            )

    def _check(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        room = self.max_length - SEGMENT
        if not prompt_ids or len(prompt_ids) + len(output_ids) > room:
            raise PromptError(
                f"A prompt of {len(prompt_ids)} and an output of {len(output_ids)} tokens were "
                f"given to score; there must be a prompt, and room is for {room} tokens, so give a "
                "larger max_length."
            )
        size = self.target.vocab_size
        outside = [t for t in (*prompt_ids, *output_ids) if not 0 <= t < size]
        if outside:
            raise PromptError(
                f"The token id {outside[0]} was given to score, and the vocabulary of "
                f"{self.target.name} ends at {size - 1}; give ids of this model's tokenizer."
            )

    def _read(self, model: Model, params: PyTree, tokens: jax.Array, stop, *, chunk: int):
        """A cache with the KV of tokens 0 to `stop`."""

        def body(index, cache):
            place = {"row": jnp.int32(0), "start": index * chunk, "stop": stop}
            return prefill_chunk(model, params, cache, tokens[None], **place, chunk=chunk)[0]

        num_chunks = (stop + chunk - 1) // chunk
        cache = model.init_cache(1, self.max_length)
        return lax.fori_loop(jnp.int32(0), num_chunks, body, cache)

    def _score_segment(self, params, cache, tokens, start, stop, stops, row):
        logits, cache = window_logits(self._wide, params, cache, tokens, start, stop, SEGMENT)
        rows = BatchView(
            tokens=tokens[None],
            num_committed=(start + 1)[None],
            draft_limit=jnp.zeros((1,), jnp.int32),
            stop_tokens=stops,
            sampling=row,
        )
        # For penalties, the segment's tokens are like a draft: later ones see earlier ones.
        following = lax.dynamic_slice(tokens, (start + 1,), (SEGMENT,))
        prefix = sampling.chain_prefix(rows, following[None, :-1])
        adjusted = sampling.adjust(logits[None], rows, prefix)
        keys = sampling.position_keys(rows.sampling, prefix.position)
        distribution = jax.nn.log_softmax(
            sampling.filtered_logits(adjusted, rows.sampling)[0], axis=-1
        )

        scored = {
            "logits": logits,
            "adjusted": adjusted[0],
            "gumbel": sampling.gumbel(keys, logits.shape[-1])[0],
            "chosen": sampling.choose(logits[None], rows, prefix)[0],
            "log_probs": jnp.take_along_axis(distribution, following[:, None], axis=1)[:, 0],
            **evidence.bets(distribution, following),
        }
        return scored, cache

    def _rescore_segment(self, params, cache, tokens, start, stop, reference, *, width: int):
        def body(index, carry):
            change, cache = carry
            place = index * width
            first = start + place
            logits, cache = window_logits(self._own, params, cache, tokens, first, stop, width)
            here = lax.dynamic_slice_in_dim(reference, place, width)
            largest = jnp.max(jnp.abs(logits - here), axis=-1)
            return lax.dynamic_update_slice_in_dim(change, largest, place, axis=0), cache

        num_windows = (stop - start + width - 1) // width
        carry = (jnp.zeros((SEGMENT,), jnp.float32), cache)
        return lax.fori_loop(jnp.int32(0), num_windows, body, carry)


def window_logits(
    model: Model, params: PyTree, cache: Any, tokens: jax.Array, start, stop, width: int
) -> tuple[jax.Array, Any]:
    """Logits `[width, V]` after each of the tokens from `start`, and the cache with their KV.

    Tokens from `stop` on are padding: they repeat the last token and are not stored.
    """
    window = chain_window(start[None], width, stop=stop[None])
    hidden, cache = model.forward(params, tokens[window.positions], window, cache)
    return model.logits(params, hidden)[0], cache


def parameter_dtype(model: Model) -> jnp.dtype:
    """The dtype of most of a model's floating parameters."""
    sizes = collections.Counter()
    for leaf in filter(_is_floating, jax.tree.leaves(model.params)):
        sizes[leaf.dtype] += leaf.size
    return sizes.most_common(1)[0][0]


def _is_floating(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def with_dtype(model: Model, dtype: Any) -> Model:
    """The same model with its floating parameters, compute and cache in `dtype`.

    Raises:
      ModelError: the model is not a dataclass with a field `params`.
    """
    dtype = jnp.dtype(dtype)
    floating = filter(_is_floating, jax.tree.leaves(model.params))
    if all(leaf.dtype == dtype for leaf in floating):
        return model
    record: Any = model
    if "params" not in getattr(record, "__dataclass_fields__", {}):
        raise ModelError(
            f"The model {model.name} cannot be scored in {dtype.name}: it is not a dataclass with "
            "a field 'params' that could be cast, so make it one."
        )
    params = jax.tree.map(
        lambda leaf: leaf.astype(dtype) if _is_floating(leaf) else leaf, model.params
    )
    return dataclasses.replace(record, params=params)
