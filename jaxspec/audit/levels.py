"""The levels of an engine's audit, and the audit as it is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.audit.evidence import ALPHA
from jaxspec.audit.judge import Divergence, Finding, first_difference, json_number, mean
from jaxspec.audit.kv_distance import KvDistance
from jaxspec.audit.probe import ProbeReport
from jaxspec.audit.report import Audit, prefix_shares
from jaxspec.audit.samples import SampleEvidence
from jaxspec.models.base import Model
from jaxspec.runtime.report import NONE, TextTable, percent
from jaxspec.telemetry.counters import Acceptance

CLAIMS = {
    "E1": "plain decoding by the same engine gives the same tokens and bits",
    "E2": "alone and in another order, a request gives the same tokens and bits",
    "E3": "sampled plain decoding with the same seeds gives the same tokens",
    "E4": "the window-1 reference loop gives the same tokens, except at proven ties",
    "E5": "later turns of a session give the same tokens and bits as the same chat from nothing",
    "distribution": "sampled tokens follow the target's distribution, and end where they have to",
    "tables": "so do many outputs of this verifier from tables whose distribution is known exactly",
}
_COMPARED_WITH = {
    "E1": "the same engine, nothing drafted",
    "E2": "another order, alone",
    "E3": "plain sampling, same seeds",
    "E4": "the reference loop",
    "E5": "the same chat from nothing",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedOutput:
    """One output compared with its reference.

    Attributes:
      request_id: that of the output.
      num_tokens: number of tokens of the reference.
      are_bits_equal: whether log-probabilities and KV are equal too; None if not compared.
      divergence: the first divergence, judged; None if tokens are equal.
    """

    request_id: str
    num_tokens: int
    are_bits_equal: bool | None
    divergence: Divergence | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """The results of the comparisons of one level.

    Attributes:
      outputs: those compared at this level; empty if it does not apply.
      reason: why it does not apply, or None.
      allows_ties: whether a proven tie is within the promise.
    """

    outputs: tuple[ComparedOutput, ...] = ()
    reason: str | None = None
    allows_ties: bool = False

    @property
    def exact(self) -> float:
        """Fraction of outputs whose tokens are all equal."""
        return mean([c.divergence is None for c in self.outputs])

    @property
    def prefix_match(self) -> float:
        """Mean over outputs of the fraction of tokens before the first difference."""
        pairs = [(c.divergence, c.num_tokens) for c in self.outputs]
        return mean([min(first.index / length, 1) if first else 1 for first, length in pairs])

    def count(self, finding: Finding) -> int:
        """Number of outputs whose first divergence has this finding."""
        return sum(d.finding == finding for _, d in self.divergences)

    @property
    def divergences(self) -> list[tuple[str, Divergence]]:
        """Every first divergence, with the request's id."""
        return [(c.request_id, c.divergence) for c in self.outputs if c.divergence is not None]

    @property
    def num_other_bits(self) -> int:
        """Number of outputs with equal tokens but different log-probabilities or KV."""
        return sum(c.divergence is None and c.are_bits_equal is False for c in self.outputs)

    @property
    def holds(self) -> bool | None:
        """Whether the claim held for every output; None if it does not apply."""
        if self.reason is not None:
            return None
        if self.allows_ties:
            return self.count(Finding.TIE) == len(self.divergences)
        return self.exact == 1 and self.num_other_bits == 0

    @property
    def figures(self) -> dict[str, Any]:
        """Figures for the report, by name."""
        return {
            "outputs": len(self.outputs),
            "exact": percent(self.exact),
            "prefix match": percent(self.prefix_match),
            "equal tokens, other bits": self.num_other_bits,
            "ties": self.count(Finding.TIE),
            "faults": self.count(Finding.FAULT),
            "other draws": self.count(Finding.SAMPLING),
        }

    def to_json(self) -> dict[str, Any]:
        """Figures, and every divergence."""
        return {
            "num_compared": len(self.outputs),
            "exact": json_number(self.exact),
            "prefix_match": json_number(self.prefix_match),
            "num_other_bits": self.num_other_bits,
            "num_ties": self.count(Finding.TIE),
            "num_faults": self.count(Finding.FAULT),
            "num_sampling": self.count(Finding.SAMPLING),
            "divergences": [
                {"request_id": request_id, **divergence.to_json()}
                for request_id, divergence in self.divergences
            ],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributionLevel:
    """Evidence of sampled outputs against the target's distribution.

    Attributes:
      samples: their evidence.
      num_wrong_ends: number of outputs that end without a stop token before their limit, or after
        it.
      reason: why it does not apply, or None.
    """

    samples: SampleEvidence = dataclasses.field(default_factory=SampleEvidence)
    num_wrong_ends: int = 0
    reason: str | None = None

    @property
    def holds(self) -> bool | None:
        """Whether there is no evidence against the distribution; None if no output was sampled."""
        if self.reason is not None:
            return None
        return self.samples.holds and self.num_wrong_ends == 0

    @property
    def figures(self) -> dict[str, Any]:
        """Figures for the report, by name."""
        samples = self.samples
        return {
            "outputs": len(samples.log_evidence),
            "faults": samples.num_excluded + self.num_wrong_ends,
            "log evidence of one, together": f"{max(samples.log_evidence, default=0):.1f}, "
            f"{samples.together.log_evidence:.1f}",
        }

    def to_json(self) -> dict[str, Any]:
        """Figures."""
        return {
            "num_compared": len(self.samples.log_evidence),
            "num_wrong_ends": self.num_wrong_ends,
            **self.samples.to_json(),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablesLevel:
    """The chi-square tests of `jaxspec.audit.scenes` with the engine's verifier.

    Attributes:
      p_values: by scene.
      num_outputs: number of outputs of each scene.
      reason: why it does not apply, or None.
    """

    p_values: dict[str, float] = dataclasses.field(default_factory=dict)
    num_outputs: int = 0
    reason: str | None = None

    @property
    def holds(self) -> bool | None:
        """Whether every scene follows its distribution; None if this does not apply."""
        if self.reason is not None:
            return None
        return min(self.p_values.values()) >= ALPHA

    @property
    def figures(self) -> dict[str, Any]:
        """Figures for the report, by name."""
        return {"outputs": self.num_outputs, "p, at least": f"{min(self.p_values.values()):.2g}"}

    def to_json(self) -> dict[str, Any]:
        """Figures."""
        return {"num_compared": self.num_outputs, "alpha": ALPHA, "p_values": self.p_values}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyMetrics:
    """The published study's metrics, on decoded text (eBay/spec_dec, `compare_outputs`).

    They judge text, including special tokens: `partial` ignores text after the reference's end, and
    tokens with the same text count as equal.

    Attributes:
      exact: fraction of outputs whose text equals the reference's.
      partial: mean fraction of the reference's tokens (its text encoded again) before the first
        difference.
    """

    exact: float
    partial: float

    @classmethod
    def of(
        cls, model: Model, outputs: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
    ) -> StudyMetrics | None:
        """The metrics of outputs and their references; None without a tokenizer."""
        if model.tokenizer is None or not outputs:
            return None
        hf = model.tokenizer.hf
        exact, partial = [], []
        for ours, theirs in zip(outputs, references, strict=True):
            texts = [hf.decode(list(ids)) for ids in (ours, theirs)]
            a, b = (hf.encode(text, add_special_tokens=False) for text in texts)
            at = first_difference(a, b)
            exact.append(texts[0] == texts[1])
            partial.append(1.0 if at is None or not b else at / len(b))
        return cls(exact=mean(exact), partial=mean(partial))


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class EngineAudit(Audit):
    """An audit of an engine. It prints as tables.

    Attributes:
      engine: `Engine.describe()`.
      dtype: of the target.
      promise: what the verifier promises, in words.
      num_requests: number of audited requests.
      num_sampled: number of these with a temperature.
      levels: E1 to E5 by name.
      distribution: the level of the sampled outputs.
      tables: the level for verifiers that promise the distribution only.
      study: the published study's metrics against the reference loop; None without a tokenizer.
      probe: the start-up probe.
      acceptance: that of the speculative run.
      kv_distance: how far the target is from the same one with full KV, on the prompts and outputs
        of the speculative run; not part of the promise. None if its KV is full.
    """

    engine: dict[str, Any]
    dtype: str
    promise: str
    num_requests: int
    num_sampled: int
    levels: dict[str, Level]
    distribution: DistributionLevel
    tables: TablesLevel
    study: StudyMetrics | None
    probe: ProbeReport
    acceptance: Acceptance
    kv_distance: KvDistance | None = None

    @property
    def every_level(self) -> dict[str, Level | DistributionLevel | TablesLevel]:
        """All levels by name."""
        return {**self.levels, "distribution": self.distribution, "tables": self.tables}

    def _named(self, holds: bool) -> list[str]:
        """Names of the levels that apply and hold, or do not hold."""
        return [name for name, level in self.every_level.items() if level.holds == holds]

    @property
    def holds(self) -> bool:
        """Whether every level that applies holds. A lossy verifier promises no distribution."""
        return not self._named(False)

    @property
    def sentence(self) -> str:
        """What was found, in words."""
        if not self.holds:
            return f"The promise is broken: {', '.join(self._named(False))} does not hold."
        num_ties = self.levels["E4"].count(Finding.TIE)
        ties = f"; {num_ties} outputs differ from the reference loop, at proven ties"
        ties *= num_ties > 0
        names = ", ".join(self._named(True)) or "nothing"
        return f"The promise holds: {names} of {self.num_requests} requests{ties}."

    @property
    def title(self) -> str:
        """Target and drafter."""
        return f"Audit of {self.engine['target']} with {self.engine['drafter']}"

    @property
    def located(self) -> list[tuple[str, Divergence]]:
        """The first divergences of all levels, with their level and request."""
        return [
            (f"{name}, request {request_id}", divergence)
            for name, level in self.levels.items()
            for request_id, divergence in level.divergences
        ]

    @property
    def curves(self) -> dict[str, np.ndarray]:
        """Shares of outputs without a difference so far, by level."""
        return {
            f"{name}: {_COMPARED_WITH[name]}": prefix_shares(
                (c.num_tokens, c.divergence) for c in level.outputs
            )
            for name, level in self.levels.items()
            if level.outputs
        }

    @property
    def result_tables(self) -> list[TextTable]:
        """The levels and what they claim; other metrics; and the run."""
        engine = self.engine
        claims = {
            name: CLAIMS[name] + (f" (n/a: {level.reason})" if level.reason else "")
            for name, level in self.every_level.items()
        }
        run = {
            "target": f"{engine['target']}, {self.dtype}{_kv_words(engine['kv_dtype'])}",
            "drafter": f"{engine['drafter']}{_kv_words(engine['draft_kv_dtype'])}, "
            f"{engine['draft_length']} tokens per round",
            "verifier": str(engine["verifier"]),
            "shape": f"batch {engine['batch_size']}, window {engine['verify_length']}, max_length "
            f"{engine['max_length']}",
            "requests": f"{self.num_requests}, {self.num_sampled} of them sampled",
            "emitted per round": f"{self.acceptance.emitted_per_round:.2f}",
            "start-up probe": self.probe.sentence,
        }
        tables = [self._level_table(), TextTable.of_values("What each level claims", claims)]
        if self.study is not None:
            found = {f"{name} match": percent(x) for name, x in vars(self.study).items()}
            title = "The published study's raw string metrics, against the reference loop"
            tables.append(TextTable.of_values(title, found))
        if self.distribution.samples.powers:
            tables.append(self.distribution.samples.power_table())
        if self.kv_distance is not None:
            tables.append(_kv_table(self.kv_distance))
        return [*tables, TextTable.of_values("Run", run)]

    def _level_table(self) -> TextTable:
        """A column for each level."""
        levels = {
            name: {"holds": "yes" if level.holds else "NO"} | level.figures
            for name, level in self.every_level.items()
            if level.reason is None
        }
        names = dict.fromkeys(name for found in levels.values() for name in found)
        cells = [levels.get(name, {}) for name in self.every_level]
        return TextTable(
            title="Levels, on token ids cut after the stop token",
            header=("", *self.every_level),
            rows=[(name, *(str(found.get(name, NONE)) for found in cells)) for name in names],
        )

    def to_json(self) -> dict[str, Any]:
        """The whole report."""
        return {
            "promise": self.promise,
            "holds": self.holds,
            "sentence": self.sentence,
            "dtype": self.dtype,
            "num_requests": self.num_requests,
            "num_sampled": self.num_sampled,
            "levels": {
                name: {
                    "claim": CLAIMS[name],
                    "holds": level.holds,
                    "reason": level.reason,
                    **level.to_json(),
                }
                for name, level in self.every_level.items()
            },
            "study_metrics": (
                dataclasses.asdict(self.study)
                | {"source": "eBay/spec_dec: decoded text, special tokens kept"}
                if self.study
                else None
            ),
            "probe": self.probe.to_json(),
            "acceptance": self.acceptance.to_json(),
            "kv_distance": self.kv_distance and dataclasses.asdict(self.kv_distance),
            "engine": self.engine,
        }


def _kv_words(kv_dtype: str | None) -> str:
    return "" if kv_dtype is None else f", KV in {kv_dtype}"


def _kv_table(distance: KvDistance) -> TextTable:
    title = f"This target beside the same one with full KV instead of {distance.kv_dtype}"
    found = {
        "tokens of prompts and outputs": str(distance.num_tokens),
        "same likeliest token": percent(distance.greedy_agreement),
        "mean KL divergence": f"{distance.mean_kl:.2g} nats",
        "largest KL divergence": f"{distance.max_kl:.2g} nats",
    }
    return TextTable.of_values(f"{title}, for information", found)
