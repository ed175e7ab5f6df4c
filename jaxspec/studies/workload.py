"""The models, requests and engines of a study."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.audit.scoring import Scorer
from jaxspec.bench.measure import seconds_to_compile
from jaxspec.cache.layouts import Layout
from jaxspec.checkpoint.format import is_converted, read_manifest
from jaxspec.checkpoint.resolve import cached_models, load_model
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.oracle import Oracle
from jaxspec.engine.engine import Engine
from jaxspec.errors import CheckpointError
from jaxspec.models.base import Model
from jaxspec.requests.prompts import (
    SAMPLE_PROMPTS,
    PromptLine,
    encode_prompts,
    read_prompts,
    sample_prompts,
)
from jaxspec.requests.requests import Request, make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import sha256_of
from jaxspec.schedulers import Continuous, Pool, Scheduler, Static
from jaxspec.studies import published

# The file that the published study decodes, by its hash.
SPEC_BENCH = {
    "sha256": "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    "source": "github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl",
    "commit": "fd2c1cd7d2201ef71db4c5f4e455008f017967bf",
}
LAYOUTS: tuple[Layout, ...] = ("ragged", "aligned")
SCHEDULERS = ("static", "pool", "continuous")
PUBLISHED = {"EQSPEC": ("aligned", "static"), "EXSPEC": ("aligned", "pool")}
PLAIN = "plain, ragged + continuous"
NAMED = ("EQSPEC", "EXSPEC", "jaxspec", PLAIN)  # measured at every batch size, also when quick


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """What a cell decodes with.

    Attributes:
      layout: of the target's cache.
      scheduler: a name of `SCHEDULERS`.
      batch_size: rows of a round.
      speculates: False decodes plainly, by the window-1 loop.
      is_published: drafting and verification are those of the published code; see
        `studies.published`.
    """

    layout: Layout
    scheduler: str
    batch_size: int
    speculates: bool
    is_published: bool = False

    @property
    def system(self) -> str:
        """`EQSPEC` and `EXSPEC` as published; `jaxspec`, its default; else layout and scheduler,
        with jaxspec's own drafting and verification."""
        place = f"{self.layout} + {self.scheduler}"
        if not self.speculates:
            return f"plain, {place}"
        if self.is_published:
            return next(name for name, each in PUBLISHED.items() if each == self._place)
        return "jaxspec" if self._place == ("ragged", "continuous") else place

    @property
    def _place(self) -> tuple[str, str]:
        return self.layout, self.scheduler

    @property
    def cell(self) -> str:
        """What identifies it in the names of cells."""
        kind = "published" if self.is_published else "speculative" if self.speculates else "plain"
        return f"{self.layout}-{self.scheduler}-{kind}-b{self.batch_size}"


class Workload:
    """The models and requests of a study, and the engines that decode them.

    Args:
      options: a `Study`.
      reference: returns the outputs of batch-1 plain decoding, for an oracle to draft.
    """

    def __init__(self, options: Any, reference: Callable[[], list[list[int]]]):
        self.options, self._reference = options, reference
        lines = sample_prompts() if options.prompts is None else read_prompts(options.prompts)
        lines = lines[: options.limit]
        path = SAMPLE_PROMPTS if options.prompts is None else options.prompts
        self.inputs = {pathlib.Path(str(path)).name: sha256_of(str(path))}
        self.is_spec_bench = SPEC_BENCH["sha256"] in self.inputs.values()
        self.target = load_model(options.target, dtype=options.dtype)
        self.draft = load_model(options.draft, dtype=options.dtype)
        self.models = {
            "target": identity(options.target, self.target),
            "draft": identity(options.draft, self.draft),
        }
        if self.target.tokenizer is None:
            self.prompts = self.in_file_order = self._random_prompts(len(lines))
        else:
            self.in_file_order = self._encode(lines)
            self.prompts = self._encode(_in_turn(lines))

    def _encode(self, lines: Sequence[PromptLine]) -> list[tuple[int, ...]]:
        return encode_prompts(lines, self.target, max_prompt_tokens=self.options.max_prompt_tokens)

    def _random_prompts(self, num_prompts: int) -> list[tuple[int, ...]]:
        """Random ids, for a target without a tokenizer."""
        random = np.random.default_rng(self.options.seed)
        longest = self.options.max_prompt_tokens
        lengths = random.integers(max(longest // 8, 1), longest + 1, num_prompts)
        vocab_size = min(self.target.vocab_size, self.draft.vocab_size)
        return [tuple(random.integers(0, vocab_size, length).tolist()) for length in lengths]

    # ---- requests

    def requests(self, batch_size: int) -> list[Request]:
        """A quick study decodes three times as many requests as there are rows, at least 24; where
        there are fewer prompts they come again, each time cut by eight more tokens."""
        num = max(24, 3 * batch_size) if self.options.quick else len(self.prompts)
        if self.options.limit is not None:
            num = min(num, self.options.limit)
        prompts = []
        for index in range(num):
            turn, place = divmod(index, len(self.prompts))
            kept = max(1, self.options.max_prompt_tokens - 8 * turn)
            prompts.append(self.prompts[place][:kept])
        # The embedded pair writes on until it is stopped; so do random weights.
        params = SamplingParams(max_tokens=self.options.max_tokens)
        return make_requests(prompts, params, self.target, longest=self.max_length)

    @property
    def max_length(self) -> int:
        """Room for the longest prompt, its completion, and a window that begins at its end."""
        longest = max(map(len, (*self.prompts, *self.in_file_order)))
        return longest + self.options.max_tokens + self.options.draft_length + 2

    # ---- what decodes them

    def decodings(self, batch_size: int) -> list[Decoding]:
        """All combinations, and the published systems; a quick study leaves out what has no name,
        except at batch 8."""
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
            layout="aligned" if layout == "aligned" else "ragged",
            scheduler=scheduler,
            batch_size=batch_size,
            speculates=system != PLAIN,
            is_published=system in PUBLISHED,
        )

    def scheduler(self, decoding: Decoding, pool: int | None = None) -> Scheduler:
        """Of a decoding; a pool has at least twice as many rows as the batch."""
        if decoding.scheduler == "pool":
            return Pool(max(pool or self.options.pool, 2 * decoding.batch_size))
        return {"static": Static, "continuous": Continuous}[decoding.scheduler]()

    def engine(
        self, decoding: Decoding, *, pool: int | None = None, is_oracle: bool | None = None
    ) -> Engine:
        """An engine, its programs compiled.

        Args:
          decoding: what it decodes with.
          pool: rows of a pool; default the study's.
          is_oracle: whether an oracle drafts; default the study's.
        """
        settings: dict[str, Any] = {}
        if decoding.speculates:
            if is_oracle is None:
                is_oracle = self.options.oracle is not None
            draft = DraftModel(self.draft)
            if decoding.is_published:
                draft = published.RereadingDraftModel(self.draft)
                settings["verifier"] = published.WithoutBonus()
            drafter: Any = self._oracle(draft) if is_oracle else draft
            if decoding.is_published:
                drafter = published.BatchMinimum(drafter)
            settings |= {"drafter": drafter, "draft_length": self.options.draft_length}
        engine = Engine(
            self.target,
            layout=decoding.layout,
            scheduler=self.scheduler(decoding, pool),
            batch_size=decoding.batch_size,
            max_length=self.max_length,
            prefill_chunk=64 if self.options.quick else 128,
            **settings,
        )
        seconds_to_compile(engine)
        return engine

    def _oracle(self, cost: Drafter) -> Oracle:
        """Drafts what the target will emit, right as often as asked for, at the cost of `cost`."""
        requests = self.requests(max(self.options.batch_sizes))
        sequences = [
            request.prompt_token_ids + tuple(output)
            for request, output in zip(requests, self._reference(), strict=True)
        ]
        return Oracle(sequences, acceptance=self.options.oracle, cost_of=cost)

    @functools.cached_property
    def scorer(self) -> Scorer:
        """For judging divergences."""
        return Scorer(self.target, max_length=self.max_length)


def _in_turn(lines: Sequence[PromptLine]) -> list[PromptLine]:
    """The lines of each category in turn, so that the first few are of all categories."""
    by_category: dict[str, list[PromptLine]] = {}
    for line in lines:
        name = str(line.fields.get("category", line.fields.get("domain")))
        by_category.setdefault(name, []).append(line)
    turns = itertools.zip_longest(*by_category.values())
    return [line for turn in turns for line in turn if line is not None]


def identity(name: str, model: Model) -> dict[str, Any]:
    """What tells one checkpoint from another: a digest of its parameters as they are used, and the
    revision it was downloaded at, if it was."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(np.asarray(leaf).tobytes())
    return {
        "name": pathlib.Path(name).name if os.path.isdir(name) else name,
        "sha256": digest.hexdigest(),
        "revision": _revision(name),
    }


def _revision(name: str) -> str | None:
    """Commit of a hub id that was converted, or of the source of a converted directory."""
    if is_converted(name):
        with contextlib.suppress(CheckpointError):
            return read_manifest(name)["revision"]
    return next((model.revision for model in cached_models() if model.source == name), None)
