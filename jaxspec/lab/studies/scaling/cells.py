"""A study under way: a cell for every drafter, every batch size and every time."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxspec import __version__
from jaxspec.checkpoint.format import weights_digest
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.errors import ModelError
from jaxspec.lab.bench.cells import Cell, CellStore
from jaxspec.lab.bench.decode import DecodeBench
from jaxspec.lab.bench.measure import Say
from jaxspec.lab.studies.scaling.decoding import (
    DECODINGS,
    Decoder,
    PromptSet,
    given_prompts,
    held_out_prompts,
    rows_of,
)
from jaxspec.lab.studies.scaling.drafters import Drafters
from jaxspec.lab.studies.scaling.settings import ScalingSettings, Shape
from jaxspec.load.models import load_model
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.environment import provenance

CELLS = "cells.json"  # in the output directory
# Options that say which cells there are, or how well they are timed, and not what a cell holds.
_CHOOSE_CELLS = (
    "layers", "widths", "tokens", "first_seed_tokens", "other_tokens", "seeds", "batch_sizes",
    "time_draft_lengths", "repeats", "epochs", "rows", "quick",
)  # fmt: skip
_FORMAT = 1  # of the cells; a file with cells of another format is not resumed


class Running:
    """A study under way: its target and prompts, and the cells that are known.

    Raises:
      SettingError: the output directory holds a study that is not to be resumed, or another one.
    """

    def __init__(self, settings: ScalingSettings):
        self.settings = settings
        path = settings.out / CELLS
        CellStore(path, header={}, resume=settings.resume)  # refuses before models are loaded
        self.target = load_model(settings.target, dtype="float32")
        if self.target.tokenizer is None:
            raise ModelError(
                f"The target {settings.target} has no tokenizer, and drafters are trained on its "
                "tokens; name a model with one."
            )
        self.drafters = Drafters(settings, self.target)
        self.drafters.write_texts()
        self.given, self.inputs = given_prompts(settings, self.target)
        self.models = {"target": weights_digest(self.target.params)}
        config = settings.document()["config"]
        for name in _CHOOSE_CELLS:
            del config[name]
        header = {
            "format": _FORMAT,
            "config": config | {"reference": settings.reference.name},
            "inputs": self.inputs,
            "models": self.models,
            "kernels": self.target.kernels,
        }
        self.store = CellStore(path, header=header, resume=settings.resume)

    @functools.cached_property
    def prompt_sets(self) -> list[PromptSet]:
        """The prompts that were given, and beginnings of held-out text; there are such as soon as a
        drafter is trained."""
        held_out = held_out_prompts(self.drafters)
        return [self.given, held_out] if held_out.token_ids else [self.given]

    @functools.cached_property
    def decoder(self) -> Decoder:
        """What decodes the prompts."""
        return Decoder(self.settings, self.target, self.prompt_sets)

    def measure(self, *, say: Say) -> None:
        """Trains and measures what is missing."""
        self.store.run(self.cells(), say=say)

    def cells(self) -> dict[str, Callable[[], Cell]]:
        """What measures each cell, by name."""
        settings = self.settings
        found: dict[str, Callable[[], Cell]] = {}
        for shape in settings.shapes():
            for seed in settings.seeds_of(shape):
                for tokens in settings.tokens_of(shape, seed):
                    name = _name(shape, seed, tokens)
                    found[name] = functools.partial(self.measure_drafter, shape, seed, tokens)
        _, _, most = settings.longest_trained
        for batch_size in settings.batch_sizes:
            name = f"batch-{batch_size}-{most}"
            found[name] = functools.partial(self.measure_batch, batch_size)
        for batch_size, length in itertools.product(
            settings.batch_sizes, (0, *settings.time_draft_lengths)
        ):
            found[f"times-{batch_size}-{length}"] = functools.partial(
                self.measure_times, batch_size, length
            )
        return found

    def measure_drafter(self, shape: Shape, seed: int, tokens: int) -> Cell:
        """What a drafter is, how near it is to the target, and its rows."""
        result = self.drafters.trained(shape, seed, tokens)
        draft = self.drafters.model(shape, seed, tokens)
        rows: list[dict[str, Any]] = []
        num_compared = num_equal = 0
        for (verifier, temperature), prompts in itertools.product(DECODINGS, self.prompt_sets):
            engine = self.decoder.engine(draft, verifier, max(self.settings.batch_sizes))
            for length in self.settings.draft_lengths:
                done = self.decoder.decode(engine, prompts, temperature, length)
                rows += rows_of(done, prompts, verifier, temperature, length)
                if verifier == "coupled":
                    num_equal += self.decoder.num_equal_to_plain(engine, prompts, temperature, done)
                    num_compared += len(done)
        return {
            "drafter": self._drafter(draft, shape, seed, result),
            "train_s": result["wall_s"],
            "num_compared_with_plain": num_compared,
            "num_equal_to_plain": num_equal,
            "rows": rows,
        }

    def _drafter(
        self, draft: LanguageModel, shape: Shape, seed: int, result: dict[str, Any]
    ) -> dict[str, Any]:
        """What all rows of a drafter have in common."""
        num_params = decoder.num_params(draft.config)
        of_text = list(self.drafters.held_out)
        near = [result["acceptance"][name] for name in of_text]
        return {
            "target": self.settings.document()["config"]["target"],
            "drafter": shape.name,
            "num_params": num_params,
            "num_params_without_embedding": (
                num_params - draft.config.vocab_size * draft.config.width
            ),
            "num_layers": shape.num_layers,
            "width": shape.width,
            "training_tokens": result["tokens"],
            "recipe": self.drafters.recipe,
            "seed": seed,
            "held_out_loss": float(np.mean([result["held_out_loss"][n] for n in of_text])),
            "target_loss": self.drafters.target_loss,
            "overlap": float(np.mean([each["sampled"] for each in near])),
            "greedy_agreement": float(np.mean([each["greedy"] for each in near])),
            "commit": str(provenance().get("commit", "")),
            "version": __version__,
        }

    def measure_batch(self, batch_size: int) -> Cell:
        """Tokens and counts of the reference drafter at a batch size, beside those of its row in
        the largest batch: a request's acceptance does not depend on the batch."""
        shape, seed, tokens = self.settings.longest_trained
        draft = self.drafters.model(shape, seed, tokens)
        known = self.store.cells[_name(shape, seed, tokens)]["rows"]
        length = max(self.settings.draft_lengths)
        num_equal = num_same_counts = num_compared = 0
        for temperature in (0.0, 1.0):
            engine = self.decoder.engine(draft, "coupled", batch_size)
            done = self.decoder.decode(engine, self.given, temperature, length)
            num_compared += len(done)
            num_equal += self.decoder.num_equal_to_plain(engine, self.given, temperature, done)
            expected = [
                row
                for row in known
                if (row["verifier"], row["temperature"], row["draft_length"], row["prompt_set"])
                == ("coupled", temperature, length, self.given.name)
            ]
            found = rows_of(done, self.given, "coupled", temperature, length)
            num_same_counts += sum(a == b for a, b in zip(found, expected, strict=True))
        return {
            "batch_size": batch_size,
            "num_compared": num_compared,
            "num_equal_to_plain": num_equal,
            "num_same_counts": num_same_counts,
        }

    def measure_times(self, batch_size: int, draft_length: int) -> Cell:
        """Seconds of a round of the reference drafter, or at draft length 0 of a plain round."""
        settings = self.settings
        draft = self.drafters.model(*settings.longest_trained)
        bench = DecodeBench(
            target=self.target,
            drafter=DraftModel(draft),
            prompts=[tuple(ids) for ids in self.given.token_ids],
            batch_sizes=(batch_size,),
            draft_lengths=(max(settings.time_draft_lengths),),
            max_tokens=settings.max_tokens,
            repeats=settings.repeats,
        )
        measured = bench.time_stages(bench.engine(batch_size, draft_length), draft_length)
        return {
            "batch": batch_size,
            "draft_length": draft_length,
            "round_s": measured["round_ms"] / 1e3,
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "cpu_count": os.cpu_count(),
        }


def _name(shape: Shape, seed: int, tokens: int) -> str:
    """Of a drafter's cell."""
    return f"{shape.name}-seed{seed}-{tokens}"
