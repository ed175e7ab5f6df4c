"""Acceptance of every verifier beside sum(min(p, q)), per domain, and what sampling costs a round.

    python -m jaxspec.bench.verifiers --temperature 0.8

The same prompts, seeds and draft length for all. sum(min(p, q)) is the mean over the positions of
plain sampled outputs: the chance that `rejection` keeps a drafted token there (Leviathan et al.,
2211.17192, corollary 3.6).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jaxspec.checkpoint.resolve import load_model
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import sample_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.environment import provenance
from jaxspec.telemetry.counters import Acceptance
from jaxspec.verifiers import Block, Coupled, Rejection, Typical, Verifier

VERIFIERS: tuple[Verifier, ...] = (
    Coupled(),
    Coupled(is_noise_shared=False),
    Rejection(),
    Block(),
    Typical(),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verifiers:
    """Compare verifiers on the sample prompts."""

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    draft: str = "demo-draft"
    """Its draft model."""
    temperature: float = 0.8
    """Of target and draft."""
    draft_length: int = 4
    """Tokens drafted per round."""
    max_tokens: int = 64
    """Tokens emitted per output."""
    samples: int = 4
    """Outputs per prompt."""
    batch_size: int = 8
    """BatchView."""
    repeats: int = 7
    """Timed runs of each kind of sampling parameters."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of parameters, compute and cache."""

    def run(self, console: Console) -> dict[str, Any]:
        """Prints the tables; returns the JSON document."""
        target = load_model(self.target, dtype=self.dtype)
        draft = load_model(self.draft, dtype=self.dtype)
        lines = sample_prompts()
        domains = [line.fields["domain"] for line in lines]
        params = [
            SamplingParams(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                n=self.samples,
                seed=index * self.samples,
                ignore_eos=True,
            )
            for index in range(len(lines))
        ]
        prompts = [line.prompt for line in lines]
        shape: dict[str, Any] = {"batch_size": self.batch_size, "max_length": 512}
        of_output = [domain for domain in domains for _ in range(self.samples)]
        plain = Engine(target, **shape).generate(prompts, params)
        overlap = overlaps(target, draft, plain, self.temperature)
        results = []
        for verifier in VERIFIERS:
            engine = Engine(
                target,
                DraftModel(draft),
                verifier=verifier,
                draft_length=self.draft_length,
                **shape,
            )
            completions = engine.generate(prompts, params)
            same = [a.token_ids == b.token_ids for a, b in zip(completions, plain, strict=True)]
            for domain in [*dict.fromkeys(domains), "all"]:
                chosen = [i for i, of in enumerate(of_output) if domain in (of, "all")]
                total = Acceptance.total([completions[i].acceptance for i in chosen])
                results.append(
                    {
                        "verifier": verifier.name,
                        "domain": domain,
                        "num_outputs": len(chosen),
                        "emitted_per_round": total.emitted_per_round,
                        "accepted_per_tested": accepted_per_tested(total),
                        "sum_min_p_q": float(np.mean([overlap[i] for i in chosen])),
                        "num_equal_to_window_1": sum(same[i] for i in chosen),
                    }
                )
        cost = self._cost(target, draft, shape)
        console.print(acceptance_table(results), cost_table(cost))
        return {
            "command": "bench verifiers",
            "config": dataclasses.asdict(self),
            "results": results,
            "round_cost": cost,
            **provenance(),
        }

    def _cost(
        self, target: LanguageModel, draft: LanguageModel, shape: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Milliseconds per round of one engine under several sampling parameters, in turns."""
        engine = Engine(target, DraftModel(draft), draft_length=self.draft_length, **shape)
        kinds = {
            "greedy": {},
            "temperature": {"temperature": 0.8},
            "temperature, min_p": {"temperature": 0.8, "min_p": 0.05},
            "temperature, top_p": {"temperature": 0.8, "top_p": 0.9},
            "temperature, top_k, top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
            "temperature, repetition_penalty": {"temperature": 0.8, "repetition_penalty": 1.1},
        }
        prompts = [line.prompt for line in sample_prompts()[: self.batch_size]]
        ms: dict[str, list[float]] = {kind: [] for kind in kinds}
        num_traces = num_programs(engine)
        for repeat in range(self.repeats + 1):  # the first run compiles
            for kind, fields in kinds.items():
                params = SamplingParams(
                    max_tokens=self.max_tokens, ignore_eos=True, seed=repeat, **fields
                )
                started_s = time.perf_counter()
                completions = engine.generate(prompts, params, speculate=False)
                seconds = time.perf_counter() - started_s
                rounds = max(completion.acceptance.num_rounds for completion in completions)
                if repeat:
                    ms[kind].append(seconds / rounds * 1e3)
        assert num_programs(engine) - num_traces == 1, "sampling parameters compiled anew"
        greedy = np.array(ms["greedy"])
        return [
            {
                "sampling": kind,
                "ms_per_round": float(np.median(values)),
                "ratio_to_greedy": float(np.median(np.array(values) / greedy)),
            }
            for kind, values in ms.items()
        ]


def num_programs(engine: Engine) -> int:
    """How often the engine's loop has been compiled."""
    return engine.executor.compile_counts()["run"]


def overlaps(
    target: LanguageModel,
    draft: LanguageModel,
    completions: Sequence[Completion],
    temperature: float,
) -> list[float]:
    """sum(min(p, q)) of each completion, the mean over its positions."""

    @jax.jit
    def of_row(target_params, draft_params, tokens):
        segments = jnp.zeros_like(tokens)
        p, q = (
            jax.nn.softmax(
                decoder.training_logits(model.config, params, tokens, segments) / temperature
            )
            for model, params in ((target, target_params), (draft, draft_params))
        )
        return jnp.sum(jnp.minimum(p, q), axis=-1)[0]

    overlap = Program(of_row, f"the overlap of {target.name} and {draft.name}")
    longest = max(len(c.prompt_token_ids) + len(c.token_ids) for c in completions)
    found = []
    for completion in completions:
        ids = completion.prompt_token_ids + completion.token_ids
        tokens = np.zeros((1, longest), np.int32)
        tokens[0, : len(ids)] = ids
        each = np.asarray(overlap(target.params, draft.params, tokens))
        # The scores after token i are of token i + 1.
        found.append(float(np.mean(each[len(completion.prompt_token_ids) - 1 : len(ids) - 1])))
    return found


def accepted_per_tested(total: Acceptance) -> float:
    """Accepted draft tokens per draft token that was reached: all before it had been accepted."""
    reached = [total.num_drafts, *total.num_accepted_tokens_per_pos[:-1]]
    tested = sum(
        min(before, drafted)
        for before, drafted in zip(reached, total.num_drafts_per_pos, strict=True)
    )
    return total.num_accepted_tokens / tested if tested else 0.0


def acceptance_table(results: Sequence[dict[str, Any]]) -> Table:
    """Verifiers down, domains across."""
    domains = list(dict.fromkeys(result["domain"] for result in results))
    caption = "emitted per round, and accepted per draft token that was reached"
    table = Table("verifier", *domains, caption=caption)
    for verifier in dict.fromkeys(result["verifier"] for result in results):
        cells = [
            f"{result['emitted_per_round']:.2f}  {result['accepted_per_tested']:.2f}"
            for result in results
            if result["verifier"] == verifier
        ]
        table.add_row(verifier, *cells)
    first = results[: len(domains)]
    table.add_row("sum(min(p, q))", *(f"      {result['sum_min_p_q']:.2f}" for result in first))
    return table


def cost_table(cost: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds per round, and the ratio to greedy."""
    table = Table("sampling", "ms per round", "ratio to greedy")
    for line in cost:
        table.add_row(
            line["sampling"], f"{line['ms_per_round']:.2f}", f"{line['ratio_to_greedy']:.2f}"
        )
    return table


if __name__ == "__main__":
    print(json.dumps(tyro.cli(Verifiers).run(Console(stderr=True))))
