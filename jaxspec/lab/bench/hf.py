"""`transformers` on the same weights, prompt ids and limits: greedy, assisted, prompt lookup.

One Hugging Face directory serves both sides: `load_model` converts it, torch loads it directly. The
embedded pair and random presets are written as such a directory (`exported`). Needs the `parity`
extra (torch).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.oracle import Oracle
from jaxspec.errors import ModelError, SettingError
from jaxspec.lab.bench.decode import PLAIN, DecodeBench, agreement
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.directories import temporary_directory
from jaxspec.runtime.turns import take_turns
from jaxspec.training.export import write_hugging_face

_SHARD_BYTES = 2**30  # shard size of a preset's tensors on disk

LOOKUP_TOKENS = 10  # for prompt lookup with defaults, from transformers' guide


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """Models of `transformers`, decoding greedily to a fixed length.

    Attributes:
      target: an `AutoModelForCausalLM`.
      draft: another, or None.
    """

    target: Any
    draft: Any

    @classmethod
    def load(cls, target: str, draft: str | None, *, dtype: str) -> HuggingFace:
        """Loads both from directories, or hub ids that are in the local cache.

        Raises:
          SettingError: torch is not installed.
          ModelError: `transformers` cannot load one of them.
        """
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise SettingError(
                "--against hf was given, but torch is not installed; install the `parity` extra."
            ) from error

        def load(name: str) -> Any:
            try:
                model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
            except (OSError, ValueError) as error:
                raise ModelError(
                    f"transformers cannot load {os.path.basename(name)}; --against hf needs a "
                    "Hugging Face directory or hub id for both models."
                ) from error
            # EOS is ignored on both sides, so that every run emits the same number of tokens.
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
            model.generation_config.do_sample = False
            return model.eval()

        return cls(target=load(target), draft=load(draft) if draft else None)

    def greedy(
        self, prompts: Sequence[Sequence[int]], *, batch_size: int = 1, **settings: Any
    ) -> list[list[int]]:
        """Outputs of consecutive batches, padded on the left; `settings` are those of `generate`,
        `max_new_tokens` among them."""
        import torch

        outputs = []
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            longest = max(map(len, batch))
            padding = [longest - len(prompt) for prompt in batch]
            ids = [[0] * n + [*prompt] for n, prompt in zip(padding, batch, strict=True)]
            mask = [[0] * n + [1] * (longest - n) for n in padding]
            with torch.inference_mode():
                output = self.target.generate(
                    input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), **settings
                )
            outputs += output[:, longest:].tolist()
        return outputs

    def assisted(
        self, prompts: Sequence[Sequence[int]], *, draft_length: int | None, **settings: Any
    ) -> list[list[int]]:
        """Outputs of assisted generation, one prompt at a time.

        Args:
          draft_length: number of tokens drafted in every round, with a constant schedule and
            threshold 0; None uses the defaults.
        """
        # A copy, because the default schedule changes its length from call to call, which must not
        # carry over to the next run.
        draft = copy.copy(self.draft)
        draft.generation_config = config = copy.deepcopy(draft.generation_config)
        if draft_length is not None:
            config.num_assistant_tokens = draft_length
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
        return self.greedy(prompts, assistant_model=draft, **settings)

    def lookup(
        self, prompts: Sequence[Sequence[int]], *, draft_length: int | None, **settings: Any
    ) -> list[list[int]]:
        """Outputs of prompt lookup, one prompt at a time; `draft_length` as in `assisted`."""
        settings["prompt_lookup_num_tokens"] = draft_length or LOOKUP_TOKENS
        if draft_length is not None:
            settings["max_matching_ngram_size"] = NGram().prompt_lookup_max
        return self.greedy(prompts, **settings)


@contextlib.contextmanager
def exported(model: LanguageModel) -> Iterator[str]:
    """A temporary Hugging Face directory with this model's weights, in its dtype.

    Raises:
      ModelError: the family cannot be written.
    """
    with temporary_directory() as root:
        directory = root / "model"
        write_hugging_face(
            directory,
            model.config,
            model.params,
            None,
            dtype=model.dtype,
            max_shard_bytes=_SHARD_BYTES,
        )
        yield str(directory)


def compare(bench: DecodeBench, hf: HuggingFace) -> list[dict[str, Any]]:
    """Both libraries in alternation, A B A B; ratios are medians over the turns.

    At every batch size: greedy against the window-1 loop, every draft length, and the automatic
    draft length under each promise. At batch 1 also assisted generation and prompt lookup, with
    their defaults and with each draft length matched, against the same engines and the n-gram
    drafter's. With an oracle, greedy only, because the text is noise that no lookup predicts.
    """
    return [found for batch_size in bench.batch_sizes for found in _at(bench, hf, batch_size)]


def _at(bench: DecodeBench, hf: HuggingFace, batch_size: int) -> list[dict[str, Any]]:
    max_tokens, lengths = bench.max_tokens, bench.draft_lengths
    repeats = bench.repeats
    ours = bench.engines(batch_size)
    has_lookup = batch_size == 1 and not isinstance(bench.drafter, Oracle)
    if has_lookup and not isinstance(bench.drafter, NGram):
        ngram = dataclasses.replace(bench, drafter=NGram())
        ours |= {f"n-gram {length}": ngram.engine(1, length) for length in lengths}
    settings: dict[str, Any] = {"prompts": bench.prompts, "max_new_tokens": max_tokens}
    theirs = {"hf greedy": functools.partial(hf.greedy, batch_size=batch_size, **settings)}
    for length in (None, *lengths) if has_lookup else ():
        setting = "defaults" if length is None else f"matched {length}"
        settings["draft_length"] = length
        if hf.draft is not None:
            theirs[f"hf assisted, {setting}"] = functools.partial(hf.assisted, **settings)
        theirs[f"hf lookup, {setting}"] = functools.partial(hf.lookup, **settings)
    turns = take_turns(
        theirs
        | {
            name: functools.partial(engine.generate, bench.prompts, bench.params)
            for name, engine in ours.items()
        },
        repeats,
        num_warm_ups=1,
        on_turn=lambda name, turn: bench.say(
            f"batch {batch_size}, {name}: run {turn} of {repeats}"
        ),
    )
    num_tokens = len(bench.prompts) * max_tokens
    found = []
    for name, own in itertools.product(theirs, ours):
        num_equal, num_not_ties = agreement(bench.target, turns.results[own], turns.results[name])
        found.append(
            {
                "batch_size": batch_size,
                "hf": name,
                "ours": own,
                "exactness": ours[own].exactness,
                "ratio_to_hf": turns.speedup(own, over=name),
                "ratios": turns.ratios(own, over=name),
                "hf_tokens_per_s": num_tokens / turns.median_s(name),
                "tokens_per_s": num_tokens / turns.median_s(own),
                "plain_tokens_per_s": num_tokens / turns.median_s(PLAIN),
                "hf_run_s": turns.seconds[name],
                "run_s": turns.seconds[own],
                "num_equal": num_equal,
                "num_not_ties": num_not_ties,
            }
        )
    return found
