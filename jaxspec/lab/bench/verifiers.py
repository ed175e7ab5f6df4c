"""Acceptance of every verifier compared with sum(min(p, q)), by domain, and the cost of sampling
per round.

All use the same prompts, seeds and draft length. sum(min(p, q)) is the mean over the positions of
plain sampled outputs: the probability that `rejection` accepts a drafted token there (Leviathan et
al., 2211.17192, corollary 3.6).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.lab.bench.measure import PairBench
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import sample_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.report import Columns, TextTable
from jaxspec.runtime.turns import take_turns
from jaxspec.telemetry.counters import Acceptance
from jaxspec.verifiers import Block, Coupled, Rejection, Typical, Verifier

VERIFIERS: tuple[Verifier, ...] = (
    Coupled(),
    Coupled(is_noise_shared=False),
    Rejection(),
    Block(),
    Typical(),
)
COST: Columns = {
    "sampling": "{sampling}",
    "ms per round": "{ms_per_round:.2f}",
    "of greedy": "{ratio_to_greedy:.2f}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiersBench(PairBench):
    """Compare verifiers on the sample prompts."""

    NAME: ClassVar[str] = "verifiers"

    temperature: float = 0.8
    """Temperature of target and draft."""
    draft_length: int = 4
    """Tokens drafted per round."""
    max_tokens: int = 64
    """Tokens emitted per output."""
    samples: int = 4
    """Outputs per prompt."""
    batch_size: int = 8
    """Rows decoded together."""
    repeats: int = 7
    """Timed runs of each kind of sampling parameters."""

    def measure(self) -> dict[str, Any]:
        """Acceptance by verifier and domain, and the cost of sampling."""
        target, draft = self.load()
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
        return {"results": results, "round_cost": self._cost(target, draft, shape)}

    def tables(self, document: Mapping[str, Any]) -> list[TextTable]:
        """Acceptance, and the cost of sampling."""
        cost = TextTable.of_columns("cost of sampling", COST, document["round_cost"])
        return [acceptance_table(document["results"]), cost]

    def _cost(
        self, target: LanguageModel, draft: LanguageModel, shape: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Milliseconds per speculative round of one engine with several sampling parameters, in
        alternation."""
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
        num_compiled = engine.executor.compile_counts()["run"]

        def decode(fields: dict[str, Any]) -> int:
            params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, seed=0, **fields)
            completions = engine.generate(prompts, params)
            return max(completion.acceptance.num_rounds for completion in completions)

        turns = take_turns(
            {kind: functools.partial(decode, fields) for kind, fields in kinds.items()},
            self.repeats,
            num_warm_ups=1,
        )
        num_compiled = engine.executor.compile_counts()["run"] - num_compiled
        assert num_compiled == 1, "sampling parameters compiled anew"
        return [
            {
                "sampling": kind,
                "ms_per_round": 1e3 * turns.median_s(kind) / turns.results[kind],
                "ratio_to_greedy": float(np.median(turns.ratios("greedy", over=kind))),
            }
            for kind in kinds
        ]


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
    outputs = [(c.prompt_token_ids + c.token_ids, len(c.prompt_token_ids)) for c in completions]
    longest = max(len(ids) for ids, _ in outputs)
    found = []
    for ids, first in outputs:
        tokens = np.pad(np.array([ids], np.int32), ((0, 0), (0, longest - len(ids))))
        each = np.asarray(overlap(target.params, draft.params, tokens))
        # The logits after token i are those for token i + 1.
        found.append(float(np.mean(each[first - 1 : len(ids) - 1])))
    return found


def accepted_per_tested(total: Acceptance) -> float:
    """Accepted draft tokens per draft token that was reached (all tokens before it had been
    accepted)."""
    reached = [total.num_drafts, *total.num_accepted_tokens_per_pos[:-1]]
    tested = sum(
        min(before, drafted)
        for before, drafted in zip(reached, total.num_drafts_per_pos, strict=True)
    )
    return total.num_accepted_tokens / tested if tested else 0.0


def acceptance_table(results: Sequence[dict[str, Any]]) -> TextTable:
    """Verifiers down, domains across: emitted per round, and accepted per draft token that was
    reached; below them the probability that `rejection` accepts."""
    shown = "{emitted_per_round:.2f} {accepted_per_tested:.2f}"
    rows: dict[str, dict[str, str]] = {}
    for found in results:
        rows.setdefault(found["verifier"], {})[found["domain"]] = shown.format_map(found)
    overlap = {found["domain"]: f"{found['sum_min_p_q']:.2f}" for found in results}
    return TextTable(
        title="emitted per round, and accepted per draft token that was reached",
        header=["verifier", *overlap],
        rows=[[name, *row.values()] for name, row in (rows | {"sum(min(p, q))": overlap}).items()],
    )
