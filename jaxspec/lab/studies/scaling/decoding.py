"""What the drafters of a study draft for: prompts, ways of decoding, engines, and a row for every
output."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jaxspec.cache.pages import round_up_to_block
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.lab.studies.scaling.drafters import Drafters
from jaxspec.lab.studies.scaling.settings import ScalingSettings
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import encode_within, load_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.training import data

# Verifier and temperature; greedy decoding is the same under both verifiers.
DECODINGS: tuple[tuple[Literal["coupled", "rejection"], float], ...] = (
    ("coupled", 0.0),
    ("coupled", 1.0),
    ("rejection", 1.0),
)
_HELD_OUT_PROMPT_TOKENS = 32
_NUM_HELD_OUT_PROMPTS = 3  # of each domain


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts to decode.

    Attributes:
      name: of the set.
      domains: of each prompt.
      token_ids: of each.
    """

    name: str
    domains: Sequence[str]
    token_ids: Sequence[Sequence[int]]


def given_prompts(
    settings: ScalingSettings, target: LanguageModel
) -> tuple[PromptSet, dict[str, str]]:
    """The prompts that a study was given, and the SHA-256 of their file by its name."""
    lines, inputs = load_prompts(settings.prompts, settings.limit)
    kept = encode_within(settings.longest_prompt, lines, target, is_chat=settings.chat)
    domains = [str(line.fields.get("domain", "")) for line, _ in kept]
    return PromptSet(name="prompts", domains=domains, token_ids=[ids for _, ids in kept]), inputs


def held_out_prompts(drafters: Drafters) -> PromptSet:
    """Beginnings of held-out text, or short prompts of held-out texts that the target wrote: some
    of each domain."""
    domains: list[str] = []
    beginnings: list[list[int]] = []
    if drafters.held_out_texts:
        longest = drafters.settings.longest_prompt
        for text in drafters.held_out_texts:
            is_full = domains.count(text.domain) == _NUM_HELD_OUT_PROMPTS
            if len(text.prompt) <= longest and not is_full:
                domains.append(text.domain)
                beginnings.append(text.prompt)
        return PromptSet(name="held_out", domains=domains, token_ids=beginnings)
    for name, stream in drafters.held_out.items():
        length = _HELD_OUT_PROMPT_TOKENS
        windows = data.held_out_windows(stream, length, 4 * length * _NUM_HELD_OUT_PROMPTS)
        whole = [row[:length].tolist() for row in windows if drafters.end_of_text not in row]
        beginnings += whole[:_NUM_HELD_OUT_PROMPTS]
        domains += [name] * len(whole[:_NUM_HELD_OUT_PROMPTS])
    return PromptSet(name="held_out", domains=domains, token_ids=beginnings)


class Decoder:
    """Decodes prompts with one drafter after another.

    Args:
      settings: of the study.
      target: the model to be drafted for.
      prompt_sets: of all engines, which have room for the longest prompt.
    """

    def __init__(
        self, settings: ScalingSettings, target: LanguageModel, prompt_sets: Sequence[PromptSet]
    ):
        self._settings = settings
        self._target = target
        self._longest = max(len(ids) for each in prompt_sets for ids in each.token_ids)
        self._engines: dict[tuple[str, str], Engine] = {}
        self._plain: dict[tuple[str, float], list[Any]] = {}

    def engine(self, draft: LanguageModel, verifier: Any, batch_size: int) -> Engine:
        """An engine of this drafter's size, compiled once for all drafters of the size."""
        shape = f"{draft.config.num_layers}x{draft.config.width}, batch {batch_size}"
        if any(kept != shape for kept, _ in self._engines):
            self._engines.clear()  # sizes come one after the other
        if (shape, verifier) not in self._engines:
            length = max(self._settings.draft_lengths)
            self._engines[shape, verifier] = Engine(
                self._target,
                DraftModel(draft),
                verifier=verifier,
                draft_length=length,
                batch_size=batch_size,
                max_length=round_up_to_block(
                    self._longest + self._settings.max_tokens + length + 1
                ),
            )
        engine = self._engines[shape, verifier]
        engine.update_params(draft=draft.params)
        return engine

    def params(self, prompts: PromptSet, temperature: float) -> list[SamplingParams]:
        """Of every prompt, the same for all drafters: a seed of its own, and no early end."""
        return [
            SamplingParams(
                max_tokens=self._settings.max_tokens,
                temperature=temperature,
                seed=index,
                ignore_eos=True,
            )
            for index in range(len(prompts.token_ids))
        ]

    def decode(
        self, engine: Engine, prompts: PromptSet, temperature: float, draft_length: int
    ) -> list[Completion]:
        """The outputs of prompts."""
        params = self.params(prompts, temperature)
        return engine.generate(prompts.token_ids, params, draft_length=draft_length)

    def num_equal_to_plain(
        self, engine: Engine, prompts: PromptSet, temperature: float, done: Sequence[Completion]
    ) -> int:
        """How many outputs are what the target writes without a drafter; that is the same whatever
        engine decodes it, so it is decoded once."""
        key = prompts.name, temperature
        if key not in self._plain:
            params = self.params(prompts, temperature)
            plain = engine.generate(prompts.token_ids, params, speculate=False)
            self._plain[key] = [each.token_ids for each in plain]
        return sum(one.token_ids == two for one, two in zip(done, self._plain[key], strict=True))


def rows_of(
    completions: Sequence[Completion],
    prompts: PromptSet,
    verifier: str,
    temperature: float,
    draft_length: int,
) -> list[dict[str, Any]]:
    """A row for every prompt, without what is its drafter's."""
    rows = []
    for index, (done, domain) in enumerate(zip(completions, prompts.domains, strict=True)):
        counts = done.acceptance
        offered = counts.num_drafts_per_pos[:draft_length]
        rows.append(
            {
                "prompt_set": prompts.name,
                "domain": domain,
                "prompt": index,
                "verifier": verifier,
                "temperature": temperature,
                "draft_length": draft_length,
                "rounds": counts.num_rounds,
                "emitted": counts.num_emitted_tokens,
                "offered_at": list(offered),
                "accepted_at": list(counts.num_accepted_tokens_per_pos[:draft_length]),
                # Stop tokens are ignored, so only the end of the row cuts a draft short.
                "num_limited_rounds": int(offered[-1] < counts.num_rounds),
            }
        )
    return rows
