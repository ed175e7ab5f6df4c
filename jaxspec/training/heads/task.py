"""The parts of a run: its target, its texts, and the heads that it trains."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxspec.checkpoint.format import weights_digest
from jaxspec.drafters.heads.config import HeadsConfig
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.kernels.base import unpacked
from jaxspec.load.drafters import save_drafter
from jaxspec.load.models import load_model
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.compilation import Program
from jaxspec.training import drafters, runs
from jaxspec.training.head_accuracy import RankedText, accuracy_of, best_trees, rank_texts
from jaxspec.training.heads.settings import HeadsTrainConfig
from jaxspec.training.heads.steps import init_heads, train_step
from jaxspec.training.runs import OnStep, TrainState
from jaxspec.training.text_rows import pack_texts
from jaxspec.training.texts import Text
from jaxspec.types import PyTree

_COMMAND = "jaxspec train heads"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A run's target, texts and heads.

    Attributes:
      config: the run.
      target: the model that the heads read, as it is loaded.
      target_params: its parameters, not packed.
      heads: the heads that are trained.
      split: the texts.
      fingerprint: everything that decides the run's result.
    """

    config: HeadsTrainConfig
    target: LanguageModel
    target_params: PyTree
    heads: HeadsConfig
    split: drafters.Split
    fingerprint: dict[str, Any]

    def initial_state(
        self,
        out: pathlib.Path,
        optimizer: optax.GradientTransformation,
        fingerprint: dict[str, Any],
        *,
        resume: bool,
    ) -> tuple[TrainState, int]:
        """The initial state, and the number of steps taken before it."""

        def init(target_params: PyTree) -> TrainState:
            key = jax.random.key(self.config.seed)
            params = init_heads(self.heads, self.target.config, target_params, key)
            # Copies, because training donates them, and the target keeps its own.
            params = jax.tree.map(jnp.copy, params)
            return TrainState(params=params, optimizer=optimizer.init(params))

        return runs.initial_state(
            out,
            init,
            fingerprint,
            operands=(self.target_params,),
            resume=resume,
            command=_COMMAND,
        )

    def step(self, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
        """`train_step` as a function of the state and the index of a step, from 0; a trunk adds the
        rate."""
        config, texts = self.config, self.split.training
        plan = drafters.plan_rows(config, texts, max(config.ends))
        program = functools.partial(
            Program(train_step, "the training step"),
            config=self.heads,
            target_config=self.target.config,
            optimizer=optimizer,
        )

        def step(state: TrainState, index: int, **rate: Any):
            chosen = plan[index * config.num_rows : (index + 1) * config.num_rows]
            rows = [[texts[text] for text in row] for row in chosen]
            batch = pack_texts(rows, config.sequence_length)
            return program(state, self.target_params, batch, **rate)

        return step

    def run_steps(
        self,
        out: pathlib.Path,
        state: TrainState,
        steps: range,
        *,
        step: Callable[[TrainState, int], tuple[TrainState, dict[str, jax.Array]]],
        fingerprint: dict[str, Any],
        on_step: OnStep | None,
    ) -> tuple[TrainState, dict[str, float]]:
        """`runs.run_steps` with the accuracy of these heads."""

        def evaluate(params: PyTree) -> dict[str, float]:
            some = accuracy_of(self._ranked(params, self.split.held_out[: config.evaluate_texts]))
            return {f"held_out/top1/{i}": share for i, share in enumerate(some["all"].top1)}

        config = self.config
        return runs.run_steps(
            config,
            out,
            state,
            steps,
            step=step,
            step_tokens=lambda _: config.step_tokens,
            evaluate=evaluate,
            fingerprint=fingerprint,
            described=self.described,
            on_step=on_step,
        )

    @property
    def described(self) -> dict[str, Any]:
        """What the parameters belong to, as JSON values for a checkpoint."""
        return {"heads": self.heads.to_json()}

    def finish(
        self, out: pathlib.Path, params: PyTree, *, steps: int, train_loss: float
    ) -> dict[str, Any]:
        """Writes the heads; returns the result, measured on all held-out texts."""
        config = self.config
        measured = self._ranked(params, self.split.held_out)
        trees = best_trees(measured, config.tree_nodes)
        drafter = Heads(self.heads, self._cast(params))
        save_drafter(drafter, out / "heads", target=self.target, overwrite=True)
        return {
            "kind": config.kind,
            "steps": steps,
            "tokens": steps * config.step_tokens,
            "train_loss": train_loss,
            "num_params": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "num_texts": len(self.split.training),
            "num_skipped_texts": self.split.num_skipped,
            "held_out": {
                name: dataclasses.asdict(each) for name, each in accuracy_of(measured).items()
            },
            "trees": {
                str(nodes): [list(path) for path in tree.choices]
                for nodes, (tree, _) in trees.items()
            },
            "tokens_per_round": {str(nodes): tokens for nodes, (_, tokens) in trees.items()},
            "heads": str(out / "heads"),
        }

    def _ranked(self, params: PyTree, texts: Sequence[Text]) -> list[RankedText]:
        target = self.target.config, self.target_params
        length = self.config.sequence_length
        return rank_texts(self.heads, self._cast(params), target, texts, length)

    def _cast(self, params: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(self.target.dtype), params)


def begin(config: HeadsTrainConfig) -> Task:
    """Loads the target, and reads the texts that it wrote."""
    target = load_model(config.target, dtype=config.dtype, kernels="xla")
    target_params = unpacked(target.params)
    heads = config.heads_config(target.config)
    digest = weights_digest(target_params)
    split = drafters.read_split(
        config,
        digest,
        lambda text: _has_labels(text, heads, config.sequence_length),
        needs=f"the {heads.num_heads} tokens after its prompt that {heads.num_heads} heads are "
        "trained on",
    )
    fingerprint = drafters.fingerprint(
        config,
        split.training,
        free=config.free_fields,
        heads=heads.to_json(),
        target_weights=digest,
    )
    config.out.mkdir(parents=True, exist_ok=True)
    return Task(
        config=config,
        target=target,
        target_params=target_params,
        heads=heads,
        split=split,
        fingerprint=fingerprint,
    )


def _has_labels(text: Text, heads: HeadsConfig, row_length: int) -> bool:
    """Whether every head has a label: a token of the output that is far enough from the beginning,
    within a row."""
    length = min(len(text.prompt) + len(text.output), row_length)
    return length - len(text.prompt) >= heads.num_heads and length >= heads.num_heads + 2
