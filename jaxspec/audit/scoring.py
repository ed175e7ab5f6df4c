"""The logits of a given output under a model, by teacher forcing, and how far rounding moves them.

A compiled program reads a sequence of any length: the prompt in chunks, the output in segments of
`SEGMENT` tokens. Each segment is scored with fp32 compute, which is the reference. To measure
rounding, it is scored again in the dtype of the output by several programs: with the target's
kernels and with XLA's, or in windows of several widths if XLA's are the target's own; and with
logits in fp32 or rounded to the dtype. See `jaxspec.audit.noise`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec import sampling
from jaxspec.audit import evidence
from jaxspec.audit.segment import Segment
from jaxspec.cache import pages as kv
from jaxspec.checkpoint.format import weights_digest
from jaxspec.decode.settings import MAX_STOP_TOKENS
from jaxspec.errors import ModelError, PromptError
from jaxspec.models.base import LanguageModel, Model, packed_model
from jaxspec.models.prefill import chain_window, prefill_chunks
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.compilation import Program, numbered
from jaxspec.runtime.environment import loops_run_on_host
from jaxspec.types import BatchView, PyTree

SEGMENT = 64  # output tokens scored by one call
PROMPT_CHUNK = 128  # for re-scoring; fp32 scoring reads prompts in chunks of SEGMENT
WIDTHS = (1, 4, SEGMENT)  # windows in which outputs are re-scored; divisors of SEGMENT


class _Rescoring(NamedTuple):
    """Programs that score again with other rounding: a model, the program that reads its prompts,
    and one that scores segments for each width of window."""

    model: Model
    read: Program
    by_width: dict[int, Program]


class Scorer:
    """Scores outputs under a target.

    Args:
      target: the model whose outputs these are claimed to be. Its parameters are copied in fp32.
      max_length: most tokens of a prompt and its output together.
      dtype: the dtype in which the outputs were computed; default the target's own.
      reference_weights: the dtype that the weights of the reference are rounded to, before it
        computes in fp32; default `dtype`.

    Raises:
      ModelError: the target's parameters cannot be cast (it is not a dataclass).
    """

    def __init__(
        self,
        target: Model,
        *,
        max_length: int = 1024,
        dtype: Any = None,
        reference_weights: Any = None,
    ):
        self.target = target
        self.dtype = parameter_dtype(target) if dtype is None else jnp.dtype(dtype)
        self.reference_weights = jnp.dtype(reference_weights or self.dtype)
        # One segment more than requested, because the last one may be padded.
        self.max_length = kv.round_up_to_block(max_length + SEGMENT)
        is_same = self.reference_weights == self.dtype
        rounded = self._rounded if is_same else with_dtype(target, self.reference_weights)
        self._wide = packed_model(with_dtype(rounded, jnp.float32))
        read_wide = functools.partial(self._read, self._wide, chunk=SEGMENT)
        self._read_wide = self._program("reading of prompts", jnp.float32, read_wide)
        self._score = self._program("scoring", jnp.float32, self._score_segment, donate_argnums=1)
        numbered(self._read_wide, self._score)

    @functools.cached_property
    def _rounded(self) -> Model:
        """The target in the dtype of the outputs."""
        return with_dtype(self.target, self.dtype)

    @functools.cached_property
    def _rescorings(self) -> tuple[_Rescoring, ...]:
        """Made when rounding is first measured, because they may hold weights of their own."""
        models = self._with_other_sums(self._rounded)
        is_invariant = getattr(models[0], "is_width_invariant", False)
        widths = (SEGMENT,) if len(models) > 1 or is_invariant else WIDTHS
        found = tuple(self._rescoring(model, widths) for model in models)
        again = ((one.read, *one.by_width.values()) for one in found)
        numbered(*itertools.chain.from_iterable(again))
        return found

    def _with_other_sums(self, model: Model) -> list[Model]:
        """The model in the dtype with its own kernels, and with XLA's."""
        if not isinstance(model, LanguageModel) or model.kernels == "xla":
            return [model]
        others: list[Model] = [dataclasses.replace(model, kernels="xla")]
        # In fp32, kernels whose bits do not depend on the width are the reference itself.
        is_reference = self.dtype == jnp.float32 and model.is_width_invariant
        return others if is_reference else [model, *others]

    def _rescoring(self, rounded: Model, widths: Sequence[int]) -> _Rescoring:
        model = packed_model(rounded)
        kernels = f"{model.kernels} kernels, " if isinstance(model, LanguageModel) else ""
        read = functools.partial(self._read, model, chunk=PROMPT_CHUNK)
        return _Rescoring(
            model=model,
            read=self._program("reading of prompts", self.dtype, read),
            by_width={
                width: self._program(
                    f"scoring with {kernels}{width} at a time,",
                    self.dtype,
                    functools.partial(self._rescore_segment, model, width=width),
                    donate_argnums=1,
                )
                for width in widths
            },
        )

    def _program(self, what: str, dtype: Any, function: Callable, **donated: Any) -> Program:
        name = f"the {what} of {self.target.name} in {jnp.dtype(dtype).name}"
        return Program(jax.jit(function, **donated), name)

    @functools.cached_property
    def reference(self) -> str:
        """What outputs are judged by, in words, with a digest of the target's weights."""
        words = f"fp32 compute, weights rounded to {self.reference_weights.name}"
        if not isinstance(self.target, LanguageModel):
            return words
        return f"{words} (digest {weights_digest(self.target.params)})"

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
          measures_noise: False leaves `Segment.noise` zero and `gap_changes` empty, and is several
            times faster.

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
        again = []  # the program, parameters and cache of each re-scoring
        for one in self._rescorings if measures_noise else ():
            read = one.read(one.model.params, tokens, before)
            again += [
                [program, one.model.params, jax.tree.map(jnp.copy, read)]
                for program in one.by_width.values()
            ]
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
            noise, gap_changes = np.zeros((SEGMENT,), np.float32), []
            for one in again:
                program, parameters, cache = one
                (largest, changes), one[2] = program(
                    parameters, cache, tokens, *at, scored["logits"], scored["pair"]
                )
                noise = np.maximum(noise, np.asarray(largest))
                gap_changes.append(np.asarray(changes)[:, :n])
            # Penalties scale the logits of some tokens, and their noise.
            factor = max(params.repetition_penalty, 1 / params.repetition_penalty)
            on_device = ("logits", "adjusted", "gumbel", "pair")
            host = jax.device_get({k: x for k, x in scored.items() if k not in on_device})
            yield Segment(
                first=start + 1 - num_prompt,
                tokens=tokens[start + 1 : stop + 1],
                noise=factor * noise[:n],
                gap_changes=factor * np.concatenate(gap_changes or [np.zeros((0, n))]),
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
            place = {"rows": jnp.zeros((1,), jnp.int32), "starts": index[None] * chunk}
            place["stops"] = stop[None]
            return prefill_chunks(model, params, cache, tokens[None], **place, chunk=chunk)[0]

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

        def sampled() -> dict[str, jax.Array]:
            filtered = sampling.filtered_logits(adjusted, rows.sampling)[0]
            distribution = jax.nn.log_softmax(filtered, axis=-1)
            keys = sampling.position_keys(rows.sampling, prefix.position)
            gumbel = sampling.gumbel(keys, logits.shape[-1])[0]
            return {
                "gumbel": gumbel,
                "perturbed": rows.sampling.temperature[0] * (filtered + gumbel),
                "log_probs": jnp.take_along_axis(distribution, following[:, None], axis=1)[:, 0],
                **evidence.bets(distribution, following),
            }

        def greedy() -> dict[str, jax.Array]:
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sampled))
            return {**nothing, "perturbed": adjusted[0]}

        drawn = lax.cond(rows.sampling.temperature[0] > 0, sampled, greedy)
        perturbed = drawn.pop("perturbed")
        best = jnp.argmax(perturbed, axis=-1)
        others = perturbed.at[jnp.arange(SEGMENT), best].set(-jnp.inf)
        scored = {
            "logits": logits,
            "adjusted": adjusted[0],
            "chosen": sampling.choose(logits[None], rows, prefix)[0],
            "pair": jnp.stack([best, jnp.argmax(others, axis=-1)], axis=1),
            "gap": jnp.max(perturbed, axis=-1) - jnp.max(others, axis=-1),
            **drawn,
        }
        return scored, cache

    def _rescore_segment(
        self, model: Model, params, cache, tokens, start, stop, reference, pair, *, width: int
    ):
        is_rounded = self.dtype != jnp.float32

        def gap(logits, pair):
            two = jnp.take_along_axis(logits, pair, axis=1)
            return two[:, 0] - two[:, 1]

        def body(index, carry):
            largest, changes, cache = carry
            place = index * width
            first = start + place
            logits, cache = window_logits(model, params, cache, tokens, first, stop, width)
            before = lax.dynamic_slice_in_dim(reference, place, width)
            two = lax.dynamic_slice_in_dim(pair, place, width)
            kept_as = [logits, logits.astype(self.dtype).astype(jnp.float32)][: 1 + is_rounded]
            change = jnp.stack([gap(kept, two) for kept in kept_as]) - gap(before, two)[None]
            furthest = jnp.max(jnp.abs(logits - before), axis=-1)
            largest = lax.dynamic_update_slice_in_dim(largest, furthest, place, axis=0)
            changes = lax.dynamic_update_slice_in_dim(changes, change, place, axis=1)
            return largest, changes, cache

        num_windows = (stop - start + width - 1) // width
        none = jnp.zeros((1 + is_rounded, SEGMENT), jnp.float32)
        carry = (none[0], none, cache)
        largest, changes, cache = lax.fori_loop(jnp.int32(0), num_windows, body, carry)
        return (largest, changes), cache


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
