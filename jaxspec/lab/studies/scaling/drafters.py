"""The drafters of a study: trained where they are not there yet, read as models, and the texts that
they are trained and measured on."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np

from jaxspec.checkpoint.format import weights_digest
from jaxspec.lab.studies.scaling.settings import ScalingSettings, Shape
from jaxspec.load.models import load_model
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.directories import write_atomically
from jaxspec.training import data, lm
from jaxspec.training.lm_runs import load_run
from jaxspec.training.texts import Text, check_writer, held_out_part, read_texts
from jaxspec.training.trainer import branch_directory, finished_branches


class Drafters:
    """The drafters of a study.

    Args:
      settings: of the study.
      target: the model to be drafted for, which has a tokenizer.
    """

    def __init__(self, settings: ScalingSettings, target: LanguageModel):
        self.settings = settings
        self.target = target

    def trained(self, shape: Shape, seed: int, tokens: int) -> dict[str, Any]:
        """The result of a branch. If it is not there yet, all branches of its trunk are trained."""
        config = self.settings.train_config(shape, seed)
        this = dataclasses.replace(config, tokens=(tokens,))
        found = finished_branches(this) or lm.train_lm(config)["branches"]
        return found[str(tokens)]

    def model(self, shape: Shape, seed: int, tokens: int) -> LanguageModel:
        """A finished drafter."""
        self.trained(shape, seed, tokens)
        trunk = self.settings.train_config(shape, seed).out
        run = load_run(branch_directory(trunk, tokens))
        return LanguageModel(
            name=f"{shape.name}, {tokens} tokens, seed {seed}",
            config=run.config,
            params=run.params,
            eos_token_ids=self.target.eos_token_ids,
            kernels=self.target.kernels,
        )

    @property
    def recipe(self) -> str:
        """How they were trained, in a line."""
        settings = self.settings
        return (
            f"distilled, trunk and branches, {settings.batch_tokens} tokens a step in rows of "
            f"{settings.sequence_length}, rate {settings.learning_rate:g}"
        )

    @functools.cached_property
    def held_out_texts(self) -> list[Text]:
        """Where the corpora are texts that the target wrote, those that are measured on."""
        if not self.settings.are_corpora_written:
            return []
        path = self.settings.corpora
        assert path is not None
        return held_out_part(read_texts(path).texts, path)[1]

    @functools.cached_property
    def held_out(self) -> dict[str, np.ndarray]:
        """Held-out tokens of each domain that is measured on."""
        if self.held_out_texts:
            return {data.TEXTS: lm.held_out_stream(self.held_out_texts, self.end_of_text)}
        out = self.settings.train_config(self.settings.reference, self.settings.seeds[0]).out
        return {
            name: np.asarray(data.map_tokens(out / "tokens" / f"{name}.held_out"))
            for name in self.settings.held_out_domains()
        }

    @functools.cached_property
    def target_loss(self) -> float:
        """The target's held-out loss, where the drafters' is measured; mean over domains."""
        config, params = self.target.config, self.target.params
        length, count = self.settings.sequence_length, self.settings.evaluate_tokens
        losses = []
        for stream in self.held_out.values():
            windows = data.held_out_windows(stream, min(length, len(stream) - 1), count)
            losses.append(lm.held_out_loss(config, params, windows, self.end_of_text))
        return float(np.mean(losses))

    @functools.cached_property
    def end_of_text(self) -> int:
        """The token that ends a document."""
        assert self.target.tokenizer is not None
        return data.end_of_text_id(self.target.tokenizer.hf.backend_tokenizer)

    def write_texts(self) -> None:
        """Writes the target's own texts, where some were given, as documents of a domain."""
        path, tokenizer = self.settings.texts, self.target.tokenizer
        if path is None or tokenizer is None:
            return
        found = read_texts(path)
        digest = weights_digest(load_model(self.settings.target).params)
        check_writer(found, path, target=self.settings.target, weights=digest)
        lines = [
            json.dumps(
                {"source": each.source, "text": tokenizer.decode([*each.prompt, *each.output])}
            )
            for each in found.texts
        ]
        write_atomically(self.settings.written, "\n".join([*lines, ""]).encode())
