"""What a comparison of candidates found: figures with intervals, tables, frames and plots."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from jaxspec.audit.judge import Divergences, Finding
from jaxspec.errors import SettingError
from jaxspec.lab.intervals import CONFIDENCE, FEWEST, Interval, ratio_interval
from jaxspec.lab.plots import draw_intervals
from jaxspec.requests.completions import Completion
from jaxspec.requests.requests import Request
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.report import Printed, TextTable, new_figure
from jaxspec.telemetry.counters import Acceptance

if TYPE_CHECKING:
    import pandas

Estimator: TypeAlias = Literal["pooled", "per prompt"]
METRICS = ("rounds", "emitted per round")
NONE_COMPARED = Divergences(num_outputs=0, differing=(), judged={})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate's runs.

    Attributes:
      label: the given label.
      engine: `Engine.describe()`.
      requests: what was decoded.
      completions: one per request, in order. Those of an earlier run have no origins.
      run_s: seconds of each timed run over all requests, including prefill.
      compile_s: seconds before the first run.
      unequal_to_plain: indices of outputs that in any run differ from plain decoding by the same
        engine; None for plain decoding itself, and where the verifier is not coupled.
      reference: label of the first candidate whose outputs must be the same, because both are
        coupled and have the same sampling parameters; None without one.
      divergences: from the reference's outputs, by index of the request.
      must_be_equal: whether outputs may not differ from the reference's even at ties: both verify
        windows of one length, and the start-up probe found that bits do not depend on the position.
      error: why it has no runs; None if it has.
    """

    label: str
    engine: dict[str, Any]
    requests: tuple[Request, ...] = ()
    completions: tuple[Completion, ...] = ()
    run_s: tuple[float, ...] = ()
    compile_s: float = 0.0
    unequal_to_plain: tuple[int, ...] | None = None
    reference: str | None = None
    divergences: Divergences = NONE_COMPARED
    must_be_equal: bool = False
    error: str | None = None

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance totals over all requests."""
        return Acceptance.total([completion.acceptance for completion in self.completions])

    @property
    def num_unequal_to_plain(self) -> int | None:
        """Number of these outputs."""
        return None if self.unequal_to_plain is None else len(self.unequal_to_plain)

    @property
    def is_coupled(self) -> bool:
        """Whether outputs are those of plain decoding with the same seeds."""
        return self.engine["exactness"] in ("bitwise", "ties")

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """The outputs."""
        return [completion.token_ids for completion in self.completions]

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens over the median run."""
        return self.acceptance.num_emitted_tokens / float(np.median(self.run_s))

    def speedups(self, over: Candidate) -> np.ndarray:
        """`[repeats]` float64: another's seconds over this one's, turn by turn."""
        return np.array(over.run_s) / np.array(self.run_s)

    @property
    def holds(self) -> bool:
        """Whether the outputs are what they must be."""
        found = self.divergences
        agrees = not found.differing if self.must_be_equal else found.are_ties
        return agrees and not self.unequal_to_plain

    def by_prompt(self) -> tuple[np.ndarray, np.ndarray]:
        """Emitted tokens and rounds of each prompt, `[num_prompts]` float64; a prompt's `n`
        completions count together."""
        prompt = [int(one.request_id.split("-")[0]) for one in self.completions]
        tokens = [one.acceptance.num_emitted_tokens for one in self.completions]
        rounds = [max(one.acceptance.num_rounds, 1) for one in self.completions]
        return np.bincount(prompt, weights=tokens), np.bincount(prompt, weights=rounds)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Printed):
    """The result of `compare`. It prints as tables.

    Attributes:
      candidates: in the order in which they were given.
      categories: the category of each prompt.
      notes: sentences below the tables.
    """

    candidates: tuple[Candidate, ...]
    categories: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ran(self) -> tuple[Candidate, ...]:
        """The candidates that did not fail."""
        return tuple(candidate for candidate in self.candidates if candidate.error is None)

    @property
    def failed(self) -> dict[str, str]:
        """Why candidates failed, by label."""
        return {own.label: own.error for own in self.candidates if own.error is not None}

    @property
    def baseline(self) -> Candidate:
        """The first candidate that ran."""
        return self.ran[0]

    @property
    def is_timed(self) -> bool:
        """Whether there are timed runs."""
        return all(candidate.run_s for candidate in self.ran)

    @property
    def holds(self) -> bool:
        """Whether all outputs are what they must be: equal or, where programs differ, equal except
        at proven ties."""
        return all(candidate.holds for candidate in self.ran)

    @property
    def category_names(self) -> tuple[str, ...]:
        """Names of categories, in the order in which they first appear."""
        return tuple(dict.fromkeys(self.categories))

    def values(
        self,
        metric: str,
        label: str,
        category: str | None = None,
        *,
        estimator: Estimator = "pooled",
    ) -> Interval:
        """A candidate's metric, over all prompts or those of one category. Of `METRICS`: `rounds`
        are those of a prompt, `emitted per round` are tokens by the named estimator."""
        most = float(self._named(label).engine["verify_length"])
        within = (1.0, np.inf if metric == "rounds" else most)
        return ratio_interval(*self._of(metric, label, category, estimator), within=within)

    def difference(
        self,
        metric: str,
        label: str,
        other: str,
        category: str | None = None,
        *,
        estimator: Estimator = "pooled",
    ) -> Interval:
        """How much a candidate's metric exceeds another's on the same prompts."""
        mine, theirs = (self._of(metric, name, category, estimator) for name in (label, other))
        return ratio_interval(*mine, minus=theirs)

    def _of(
        self, metric: str, label: str, category: str | None, estimator: str
    ) -> tuple[np.ndarray, np.ndarray]:
        if metric not in METRICS or estimator not in get_args(Estimator):
            raise SettingError(
                f"{estimator} {metric} were asked for; metrics are {', '.join(METRICS)}, and "
                f"estimators {', '.join(get_args(Estimator))}."
            )
        is_in = np.array([category in (None, own) for own in self.categories])
        tokens, rounds = (each[is_in] for each in self._named(label).by_prompt())
        ones = np.ones(len(rounds))
        if metric == "rounds":
            return rounds, ones
        return (tokens, rounds) if estimator == "pooled" else (tokens / rounds, ones)

    def speedups(self, label: str) -> np.ndarray:
        """`[repeats]` float64: the baseline's seconds over this one's, turn by turn."""
        return self._named(label).speedups(self.baseline)

    def _named(self, label: str) -> Candidate:
        return next(candidate for candidate in self.ran if candidate.label == label)

    def to_json(self) -> dict[str, Any]:
        """All figures, with the differences of every pair."""
        ran = self.ran
        return {
            "holds": self.holds,
            "failed": self.failed,
            "baseline": self.baseline.label,
            "confidence": CONFIDENCE,
            "estimator": "pooled",
            "num_prompts": len(self.categories),
            "candidates": [self._candidate_json(candidate) for candidate in ran],
            "differences": [
                {
                    "metric": metric,
                    "label": label,
                    "other": other,
                    **self.difference(metric, label, other).to_json(),
                }
                for metric in METRICS
                for label, other in self.pairs()
            ],
            "prompts": [
                {
                    "category": category,
                    "tokens": {own.label: int(own.by_prompt()[0][index]) for own in ran},
                    "rounds": {own.label: int(own.by_prompt()[1][index]) for own in ran},
                }
                for index, category in enumerate(self.categories)
            ],
        }

    def _candidate_json(self, own: Candidate) -> dict[str, Any]:
        total = own.acceptance
        return {
            "label": own.label,
            "engine": own.engine,
            "acceptance": total.to_json(),
            "emitted_per_round": {
                name: self.values("emitted per round", own.label, estimator=name).to_json()
                for name in get_args(Estimator)
            },
            "tokens_per_s": [total.num_emitted_tokens / run_s for run_s in own.run_s],
            "speedup": self.speedups(own.label).tolist() if self.is_timed else [],
            "run_s": list(own.run_s),
            "compile_s": own.compile_s,
            "holds": own.holds,
            "reference": own.reference,
            "num_unequal_to_plain": own.num_unequal_to_plain,
            "num_unequal_to_reference": len(own.divergences.differing),
            "divergences": [
                {"request": index, **divergence.to_json()}
                for index, divergence in own.divergences.judged.items()
            ],
            "by_category": {
                category: {
                    metric: self.values(metric, own.label, category).to_json() for metric in METRICS
                }
                for category in self.category_names
            },
        }

    def to_frame(self) -> pandas.DataFrame:
        """A row per candidate and completion, with the candidate's settings; needs pandas."""
        names = ("drafter", "verifier", "draft_length", "verify_length")
        counts = [field.name for field in dataclasses.fields(Acceptance)]
        rows = [
            {
                "candidate": own.label,
                **{name: own.engine[name] for name in names},
                "temperature": request.params.temperature,
                "prompt": int(one.request_id.split("-")[0]),
                "index": one.index,
                "category": self.categories[int(one.request_id.split("-")[0])],
                **{name: getattr(one.acceptance, name) for name in counts},
                "emitted_per_round": one.acceptance.emitted_per_round,
            }
            for own in self.ran
            for one, request in zip(own.completions, own.requests, strict=True)
        ]
        return import_extra("pandas", "frames").DataFrame(rows)

    def pairs(self) -> list[tuple[str, str]]:
        """Labels of every two candidates, the later one first."""
        labels = [candidate.label for candidate in self.ran]
        return [(label, other) for i, label in enumerate(labels) for other in labels[:i]]

    @property
    def all_tables(self) -> list[TextTable]:
        """The candidates; their speed; emitted tokens per round by category and candidate;
        differences on the same prompts between every two; and the candidates that failed."""

        def speedup(own: Candidate) -> str:
            ratios = self.speedups(own.label)
            return f"{np.median(ratios):.2f}x ({ratios.min():.2f}-{ratios.max():.2f})"

        columns: dict[str, Any] = {
            "candidate": "{label}",
            "draft,\nwindow": lambda own: "{draft_length}, {verify_length}".format_map(own.engine),
        }
        columns |= {
            "rounds": lambda own: own.acceptance.num_rounds,
            "emitted\n/round": lambda own: f"{own.acceptance.emitted_per_round:.2f}",
            "accepted at\n1, 2, ... (%)": lambda own: " ".join(
                f"{100 * share:.0f}" for share in own.acceptance.per_position
            ),
            "outputs": _equality,
        }
        tables = [TextTable.of_columns("", columns, self.ran)]
        if self.is_timed:
            columns = {
                "candidate": "{label}",
                "tokens/s": lambda own: f"{own.tokens_per_s:.0f}",
                "speed-up (range)": speedup,
            }
            tables.append(TextTable.of_columns("", columns, self.ran))
        categories = self.category_names
        found = [
            (category, own.label)
            for category in (*(categories if len(categories) > 1 else ()), None)
            for own in self.ran
        ]
        num = {name: self.categories.count(name) for name in categories}
        metric = METRICS[1]
        columns = {
            "category (prompts)": lambda one: (
                f"{one[0] or 'all'} ({num.get(one[0], len(self.categories))})"
            ),
            "emitted/round, pooled": lambda one: f"{self.values(metric, one[1], one[0]):.2f}",
            "per\nprompt": lambda one: (
                f"{self.values(metric, one[1], one[0], estimator='per prompt').value:.2f}"
            ),
            "candidate": lambda one: one[1],
        }
        tables.append(TextTable.of_columns("", columns, found, group=lambda one: one[0]))
        columns = {"on the same prompts": lambda pair: " - ".join(pair)}
        for name, what in zip(METRICS, ("rounds per prompt", "emitted/round, pooled"), strict=True):
            columns[f"difference in\n{what}"] = lambda pair, name=name: (
                f"{self.difference(name, *pair):+.2f}"
            )
        if pairs := self.pairs():
            tables.append(TextTable.of_columns("", columns, pairs))
        if failed := self.failed:
            columns = {"candidate": lambda one: one[0], "failed": lambda one: one[1]}
            tables.append(TextTable.of_columns("", columns, failed.items()))
        return tables

    @property
    def remarks(self) -> list[tuple[str, str]]:
        """Notes on the tables."""
        num_ties = sum(len(candidate.divergences.differing) for candidate in self.ran)
        others = [own for own in self.ran if not own.is_coupled]
        which = "outputs of coupled verifiers" if others else "outputs"
        if not self.holds:
            found = ("Some outputs differ, and no tie explains it: this is a bug.", "bold red")
        elif num_ties:
            found = (
                f"All {which} are what plain decoding emits, and equal between candidates with "
                f"the same sampling except {num_ties}, which diverge at proven ties: programs of "
                "other shapes round differently.",
                "bold",
            )
        else:
            found = (f"All {which} are equal, token for token.", "bold")
        if len(others) == len(self.ran):
            found = ("No outputs are compared, because no verifier is coupled.", "bold")
        notes = [
            f"Tokens per round are pooled (all tokens over all rounds) unless per prompt. In "
            f"brackets: {CONFIDENCE:.0%} intervals over prompts. Fewer than {FEWEST} prompts have "
            "none; [their own figures] are shown. (=): all, or all but a few, are equal.",
            *self.notes,
        ]
        if self.is_timed:
            notes.append(
                f"Speed-ups over {self.baseline.label} are ratios of whole runs in turns, prefill "
                "included."
            )
        return [found, *((note, "dim") for note in notes)]

    def plot(self) -> Any:
        """A matplotlib figure: emitted tokens per round by category and, where they were timed,
        speed-ups.

        Raises:
          SettingError: matplotlib is not installed.
        """
        names = [*self.category_names, "all"] if len(self.category_names) > 1 else ["all"]
        height = 1.6 + 0.2 * len(names) * len(self.ran)
        panels = 2 if self.is_timed else 1
        figure, axes = new_figure(
            1, panels, size=(9.6, height), width_ratios=(3, 2)[:panels], squeeze=False
        )
        left, right = axes[0, 0], axes[0, -1]
        places = np.arange(len(names))
        for index, candidate in enumerate(self.ran):
            found = [
                self.values("emitted per round", candidate.label, None if name == "all" else name)
                for name in names
            ]
            at = places + 0.8 * (index + 0.5) / len(self.ran) - 0.4
            draw_intervals(left, at, found, is_across=True, label=candidate.label)
            if self.is_timed:
                ratios = self.speedups(candidate.label)
                right.plot(ratios, np.full(len(ratios), index), "o", alpha=0.5, markersize=4)
                right.plot(np.median(ratios), index, "|", color="black", markersize=14)
        left.set(
            yticks=places,
            yticklabels=names,
            xlabel=f"emitted tokens per round\npooled, {CONFIDENCE:.0%} interval over prompts",
        )
        left.invert_yaxis()
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
        if self.is_timed:
            right.set(
                yticks=[],
                xlabel=f"wall time of {self.baseline.label} / its own\neach turn, and their median",
                ylim=(len(self.ran) - 0.5, -0.5),
            )
        for each in axes.flat:
            each.axvline(1, color="#888", linewidth=1)
        return figure


def _equality(own: Candidate) -> str:
    if not own.is_coupled:
        return own.engine["exactness"]
    if not own.holds:
        return "NO"
    num_ties = own.divergences.count(Finding.TIE)
    return f"{num_ties} ties" if num_ties else "equal"
