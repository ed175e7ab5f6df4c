"""The models, requests and engines of a study."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from jaxspec.audit.scoring import Scorer
from jaxspec.cache.layouts import LAYOUTS, Layout
from jaxspec.checkpoint.format import weights_digest
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.oracle import Oracle
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench.measure import PairBench
from jaxspec.lab.studies import published
from jaxspec.load.models import load_model
from jaxspec.requests.prompts import PromptLine, encode_within, load_prompts
from jaxspec.requests.requests import Request, make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.schedulers import Continuous, Pool, Static
from jaxspec.training.trainer import NoOption

Cell: TypeAlias = dict[str, Any]
Cells: TypeAlias = Mapping[str, Cell]

SCHEDULERS = ("static", "pool", "continuous")
PUBLISHED: dict[str, tuple[Layout, str]] = {
    "EQSPEC": ("aligned", "static"),
    "EXSPEC": ("aligned", "pool"),
}
PLAIN = "plain, ragged + continuous"
NAMED = ("EQSPEC", "EXSPEC", "jaxspec", PLAIN)  # measured at every batch size, also when quick


def of_kind(cells: Cells, prefix: str) -> list[Cell]:
    """The cells whose names begin with `prefix`."""
    return [cell for name, cell in cells.items() if name.startswith(prefix)]


def nearest(wanted: int, sizes: Iterable[int]) -> int:
    """The size nearest to the wanted one."""
    return min(sizes, key=lambda size: abs(size - wanted))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadOptions(PairBench):
    """Options for what is decoded, and for the shapes of the engines."""

    prompts: pathlib.Path | None = None
    """Prompt file, such as Spec-Bench's question.jsonl; default the sample prompts."""
    limit: int | None = None
    """Use only this many prompts, from the beginning of the file."""
    chat: bool = False
    """Take each text prompt as a user's message, and apply the chat template."""
    max_prompt_tokens: NoOption[int] = 1024
    """Cut longer prompts after this many tokens; with `chat`, leave them out."""
    max_tokens: int = 128
    """Tokens emitted per prompt; fewer if the model stops by itself."""
    draft_length: int = 5
    """Tokens drafted per round."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Rows decoded together."""

    pool: ClassVar[int] = 48  # rows of the pool, at least twice the batch size
    quick: ClassVar[bool] = False
    repeats: ClassVar[int] = 1
    oracle: ClassVar[float | None] = None
    seed: ClassVar[int] = 0  # of arrivals and of random prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """The configuration that a cell decodes with.

    Attributes:
      layout: that of the target's cache.
      scheduler: a name of `SCHEDULERS`.
      batch_size: rows of a round.
      speculates: False decodes plainly, by the window-1 loop.
      is_published: whether drafting and verification are those of the published code; see
        `studies.published`.
    """

    layout: Layout
    scheduler: str
    batch_size: int
    speculates: bool
    is_published: bool = False

    @property
    def system(self) -> str:
        """`EQSPEC` and `EXSPEC` as published; `jaxspec`, its default; otherwise layout and
        scheduler, with jaxspec's own drafting and verification."""
        place = self.layout, self.scheduler
        if not self.speculates:
            return "plain, {} + {}".format(*place)
        if self.is_published:
            return next(name for name, each in PUBLISHED.items() if each == place)
        return "jaxspec" if place == ("ragged", "continuous") else " + ".join(place)

    @property
    def cell(self) -> str:
        """Its identifier in the names of cells."""
        kind = "published" if self.is_published else "speculative" if self.speculates else "plain"
        return f"{self.layout}-{self.scheduler}-{kind}-b{self.batch_size}"


class Workload:
    """The models and requests of a study, and the engines that decode them.

    Args:
      options: what to decode.
      reference: returns the outputs of batch-1 plain decoding, for an oracle to draft.
    """

    def __init__(self, options: WorkloadOptions, reference: Callable[[], list[list[int]]]):
        self.options, self._reference = options, reference
        lines, self.inputs = load_prompts(options.prompts, options.limit)
        self.target = load_model(options.target, dtype=options.dtype)
        self.draft = load_model(options.draft, dtype=options.dtype)
        self.models = {
            name: weights_digest(model.params)
            for name, model in (("target", self.target), ("draft", self.draft))
        }
        if self.target.tokenizer is None:
            self.prompts = self.in_file_order = self._random_prompts(len(lines))
        else:
            self.in_file_order, self.prompts = map(self._encoded, (lines, _in_turn(lines)))

    def _encoded(self, lines: Sequence[PromptLine]) -> list[tuple[int, ...]]:
        """Token ids of prompts."""
        options = self.options
        kept = encode_within(options.max_prompt_tokens, lines, self.target, is_chat=options.chat)
        return [ids for _, ids in kept]

    def _random_prompts(self, num_prompts: int) -> list[tuple[int, ...]]:
        """Random ids, for a target without a tokenizer."""
        random = np.random.default_rng(self.options.seed)
        longest = self.options.max_prompt_tokens
        lengths = random.integers(max(longest // 8, 1), longest + 1, num_prompts)
        vocab_size = min(self.target.vocab_size, self.draft.vocab_size)
        return [tuple(random.integers(0, vocab_size, length).tolist()) for length in lengths]

    # ---- requests

    def requests(self, batch_size: int) -> list[Request]:
        """All prompts; in a quick study three times as many as there are rows, at least 24."""
        num = max(24, 3 * batch_size) if self.options.quick else None
        # The embedded pair writes until it is stopped; so do random weights.
        return self.as_requests(self.prompts[:num], self.options.max_tokens)

    def as_requests(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[Request]:
        """Greedy requests."""
        params = SamplingParams(max_tokens=max_tokens)
        return make_requests(prompts, params, self.target, longest=self.max_length)

    @property
    def max_length(self) -> int:
        """Room for the longest prompt, its completion, and a window that begins at its end."""
        longest = max(map(len, (*self.prompts, *self.in_file_order)))
        return longest + self.options.max_tokens + self.options.draft_length + 2

    # ---- engines

    def decodings(self, batch_size: int) -> list[Decoding]:
        """All combinations, and the published systems; a quick study leaves out combinations
        without a name, except at batch 8."""
        every = [
            Decoding(
                layout=layout, scheduler=scheduler, batch_size=batch_size, speculates=speculates
            )
            for speculates in (False, True)
            for layout in LAYOUTS
            for scheduler in SCHEDULERS
        ]
        every += [self.named(name, batch_size) for name in PUBLISHED]
        if not self.options.quick or batch_size == 8:
            return every
        return [decoding for decoding in every if decoding.system in NAMED]

    def named(self, system: str, batch_size: int) -> Decoding:
        """The decoding of a system of `NAMED`."""
        layout, scheduler = PUBLISHED.get(system, ("ragged", "continuous"))
        return Decoding(
            layout=layout,
            scheduler=scheduler,
            batch_size=batch_size,
            speculates=system != PLAIN,
            is_published=system in PUBLISHED,
        )

    def engine(
        self, decoding: Decoding, *, pool: int | None = None, is_oracle: bool = True
    ) -> Engine:
        """An engine with compiled programs.

        Args:
          decoding: its configuration.
          pool: rows of a pool; default the study's, and at least twice the batch size.
          is_oracle: whether an oracle may draft, if the study has one.
        """
        num_pooled = max(pool or self.options.pool, 2 * decoding.batch_size)
        schedulers = {"static": Static(), "pool": Pool(num_pooled), "continuous": Continuous()}
        settings: dict[str, Any] = {}
        if decoding.speculates:
            kind, oracle = DraftModel, Oracle
            if decoding.is_published:
                kind, oracle = published.PublishedDraftModel, published.PublishedOracle
                settings["verifier"] = published.WithoutBonus()
            drafter: Drafter = kind(self.draft)
            if is_oracle and self.options.oracle is not None:
                drafter = oracle(
                    self._known_outputs(), acceptance=self.options.oracle, cost_of=drafter
                )
            settings |= {"drafter": drafter, "draft_length": self.options.draft_length}
        engine = Engine(
            self.target,
            layout=decoding.layout,
            scheduler=schedulers[decoding.scheduler],
            batch_size=decoding.batch_size,
            max_length=self.max_length,
            **settings,
        )
        engine.warm_up()
        engine.generate([[0, 0]], SamplingParams(max_tokens=2))
        return engine

    def _known_outputs(self) -> list[tuple[int, ...]]:
        """Prompts and what the target will emit after them, for an oracle."""
        requests = self.requests(max(self.options.batch_sizes))
        return [
            request.prompt_token_ids + tuple(output)
            for request, output in zip(requests, self._reference(), strict=True)
        ]

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The scorer for judging divergences."""
        return Scorer(self.target, max_length=self.max_length)


def _in_turn(lines: Sequence[PromptLine]) -> list[PromptLine]:
    """The lines of the categories in alternation, so that the first few are from all categories."""
    by_category: dict[str, list[PromptLine]] = {}
    for line in lines:
        name = str(line.fields.get("category", line.fields.get("domain")))
        by_category.setdefault(name, []).append(line)
    turns = itertools.zip_longest(*by_category.values())
    return [line for turn in turns for line in turn if line is not None]
