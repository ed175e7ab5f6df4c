"""Drafters compared on the same prompts, prompt by prompt.

Prompts differ far more than drafters do: any drafter does well on a list of names, and none on a
poem. So drafters are compared by their difference on each prompt, with an interval from drawing the
prompts again and again (`jaxspec.lab.intervals`).

Rounds and emitted tokens per round are counted per prompt and do not depend on the machine. The
time of one prompt inside a batch cannot be measured; wall time is that of the whole batch of
prompts, in alternating runs, and is given as the ratio of two neighbouring runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.audit.judge import Divergences, judge_all
from jaxspec.audit.probe import probe
from jaxspec.cache import pages as kv
from jaxspec.decode.settings import choose_verify_length, default_draft_length, does_not_fit
from jaxspec.drafters.base import Drafter
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.lab.intervals import CONFIDENCE, Interval, mean_interval
from jaxspec.load.drafters import make_drafter
from jaxspec.load.models import as_model
from jaxspec.models.base import Model
from jaxspec.requests.completions import Completion
from jaxspec.requests.requests import (
    Params,
    Prompt,
    make_requests,
    params_of_prompts,
    prompt_token_ids,
)
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.requests.shapes import as_prompts
from jaxspec.runtime.report import new_figure
from jaxspec.runtime.turns import take_turns
from jaxspec.runtime.values import check_callable, listed, text, whole_number
from jaxspec.telemetry.counters import Acceptance

METRICS: dict[str, Callable[[Acceptance], float]] = {
    "rounds": lambda own: float(own.num_rounds),
    "emitted per round": lambda own: own.emitted_per_round,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One drafter's runs.

    Attributes:
      label: the given label.
      engine: `Engine.describe()`.
      completions: one per request, in order, from the last timed run.
      run_s: seconds of each timed run over all requests, including prefill.
      compile_s: seconds before the first run.
      num_unequal_to_plain: number of outputs that in any run differ from plain decoding by the same
        engine; None for plain decoding itself.
      divergences: from the first candidate's outputs, by index of the request.
      must_be_equal: whether outputs may not differ from the first candidate's even at ties: both
        verify windows of one length, and the start-up probe found that bits do not depend on the
        position.
    """

    label: str
    engine: dict[str, Any]
    completions: tuple[Completion, ...]
    run_s: tuple[float, ...]
    compile_s: float
    num_unequal_to_plain: int | None
    divergences: Divergences
    must_be_equal: bool

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance totals over all requests."""
        return Acceptance.total([completion.acceptance for completion in self.completions])

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
        return agrees and not self.num_unequal_to_plain

    def values(self, metric: str) -> np.ndarray:
        """`[num_requests]` float64, a metric of `METRICS` for each request."""
        of = METRICS[metric]
        return np.array([of(completion.acceptance) for completion in self.completions])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterComparison:
    """The result of `compare`. Everything is relative to the first candidate.

    Attributes:
      candidates: in the order in which they were given.
      categories: the category of each request.
    """

    candidates: tuple[Candidate, ...]
    categories: tuple[str, ...]

    @property
    def baseline(self) -> Candidate:
        """The first candidate."""
        return self.candidates[0]

    @property
    def holds(self) -> bool:
        """Whether all outputs are equal or, where programs differ, differ only at proven ties."""
        return all(candidate.holds for candidate in self.candidates)

    @property
    def category_names(self) -> tuple[str, ...]:
        """Names of categories, in the order in which they first appear."""
        return tuple(dict.fromkeys(self.categories))

    def values(self, metric: str, label: str, category: str | None = None) -> Interval:
        """A candidate's metric, over all prompts or those of one category."""
        return self._interval(self._named(label).values(metric), category)

    def difference(
        self, metric: str, label: str, other: str, category: str | None = None
    ) -> Interval:
        """How much a candidate's metric exceeds another's on the same prompt."""
        values = self._named(label).values(metric) - self._named(other).values(metric)
        return self._interval(values, category)

    def speedups(self, label: str) -> np.ndarray:
        """`[repeats]` float64: the first candidate's seconds over this one's, turn by turn."""
        return self._named(label).speedups(self.baseline)

    def _named(self, label: str) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.label == label)

    def _interval(self, values: np.ndarray, category: str | None) -> Interval:
        is_in = np.array([category in (None, own) for own in self.categories])
        return mean_interval(values[is_in])

    def to_json(self) -> dict[str, Any]:
        """All figures, with the differences of every pair."""
        return {
            "holds": self.holds,
            "baseline": self.baseline.label,
            "confidence": CONFIDENCE,
            "num_prompts": len(self.categories),
            "candidates": [self._candidate_json(candidate) for candidate in self.candidates],
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
                    **{
                        metric: {
                            candidate.label: float(candidate.values(metric)[index])
                            for candidate in self.candidates
                        }
                        for metric in METRICS
                    },
                }
                for index, category in enumerate(self.categories)
            ],
        }

    def _candidate_json(self, candidate: Candidate) -> dict[str, Any]:
        total, divergences = candidate.acceptance, candidate.divergences
        return {
            "label": candidate.label,
            "engine": candidate.engine,
            "acceptance": total.to_json(),
            "tokens_per_s": [total.num_emitted_tokens / run_s for run_s in candidate.run_s],
            "speedup": self.speedups(candidate.label).tolist(),
            "run_s": list(candidate.run_s),
            "compile_s": candidate.compile_s,
            "holds": candidate.holds,
            "num_unequal_to_plain": candidate.num_unequal_to_plain,
            "num_unequal_to_baseline": len(divergences.differing),
            "divergences": [
                {"request": index, **divergence.to_json()}
                for index, divergence in divergences.judged.items()
            ],
            "by_category": {
                category: {
                    metric: self.values(metric, candidate.label, category).to_json()
                    for metric in METRICS
                }
                for category in self.category_names
            },
        }

    def pairs(self) -> list[tuple[str, str]]:
        """Labels of every two candidates, the later one first."""
        labels = [candidate.label for candidate in self.candidates]
        return [(label, other) for i, label in enumerate(labels) for other in labels[:i]]

    def plot(self) -> Any:
        """A matplotlib figure: emitted tokens per round by category, and speed-ups.

        Raises:
          SettingError: matplotlib is not installed.
        """
        names = [*self.category_names, "all"] if len(self.category_names) > 1 else ["all"]
        height = 1.6 + 0.2 * len(names) * len(self.candidates)
        figure, (left, right) = new_figure(1, 2, size=(9.6, height), width_ratios=(3, 2))
        places = np.arange(len(names))
        for index, candidate in enumerate(self.candidates):
            found = [
                self.values("emitted per round", candidate.label, None if name == "all" else name)
                for name in names
            ]
            mean, low, high = np.array([(one.mean, one.low, one.high) for one in found]).T
            left.errorbar(
                mean,
                places + 0.8 * (index + 0.5) / len(self.candidates) - 0.4,
                xerr=np.nan_to_num([mean - low, high - mean]),
                fmt="o",
                markersize=4,
                capsize=2,
                label=candidate.label,
            )
            ratios = self.speedups(candidate.label)
            right.plot(ratios, np.full(len(ratios), index), "o", alpha=0.5, markersize=4)
            right.plot(np.median(ratios), index, "|", color="black", markersize=14)
        left.set(
            yticks=places,
            yticklabels=names,
            xlabel=f"emitted tokens per round\nmean over prompts, {CONFIDENCE:.0%} interval",
        )
        left.invert_yaxis()
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
        right.set(
            yticks=[],
            xlabel=f"wall time of {self.baseline.label} / its own\neach turn, and their median",
            ylim=(len(self.candidates) - 0.5, -0.5),
        )
        for axes in (left, right):
            axes.axvline(1, color="#888", linewidth=1)
        return figure


def compare(
    target: Model | str,
    drafters: Mapping[str, Drafter | str | Mapping[str, Any] | None] | Sequence[str],
    prompts: Sequence[Prompt] | Prompt,
    params: Params | Sequence[Params] | None = None,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    categories: Sequence[str] | None = None,
    draft_length: int | None = None,
    verify_length: int | None = None,
    batch_size: int = 8,
    max_length: int = 1024,
    prefill_chunk: int = 128,
    repeats: int = 5,
    on_stage: Callable[[str], None] | None = None,
) -> DrafterComparison:
    """Compares drafters on the same prompts, seeds and window: rounds, emitted tokens per round,
    wall time.

    `None` is plain decoding by the window-1 loop, the fastest there is, which is the baseline for
    time. Each drafter's outputs are compared with plain decoding in its own program, where every
    token must be equal, and with the first candidate's. These must be equal too if both verify
    windows of one length and the start-up probe holds, otherwise equal except at proven ties.

    Every run begins with an empty engine, so a drafter that learns from the requests it serves does
    not see prompts from an earlier run again.

    Args:
      target: the model that all of them draft for; a name is passed to `load_model`.
      drafters: by label, or their names (see `Engine`), at least two; None and `none` decode
        plainly. The first is the baseline.
      prompts: as for `Engine.generate`.
      params: one for all, or one each; default `SamplingParams()`. Requests without a seed get one,
        the same for every drafter.
      chat_template: Jinja template for messages instead of the tokenizer's own.
      chat_template_kwargs: further variables of the template.
      categories: one for each prompt; default the same for all.
      draft_length: tokens proposed per round (for a tree, its nodes); default the number of nodes
        of each drafter's tree, or 4.
      verify_length: tokens scored per round by all that draft; default one more than the longest
        draft.
      batch_size: prompts decoded together.
      max_length: slots per row for prompt and output.
      prefill_chunk: tokens of a chunk of a prompt.
      repeats: timed runs of each candidate, in alternation.
      on_stage: called with the name of each stage as it begins.

    Raises:
      PromptError, SettingError, ModelError: as in `Engine` and `Engine.generate`.

    Example:
      >>> import jaxspec
      >>> target, draft = jaxspec.load_model("demo-target"), jaxspec.load_model("demo-draft")
      >>> comparison = jaxspec.compare(
      ...     target,
      ...     {"plain": None, "n-gram": jaxspec.NGram(), "draft": jaxspec.DraftModel(draft)},
      ...     ["Once upon a time", "def main():", "1, 2, 3, 4, 5, 6, "],
      ...     jaxspec.SamplingParams(max_tokens=32, ignore_eos=True),
      ...     max_length=128,
      ...     repeats=1,
      ... )
      >>> comparison.holds
      True
      >>> comparison.difference("rounds", "draft", "plain").mean < 0
      True
    """
    check_callable(on_stage=on_stage)
    tell = on_stage or (lambda _: None)
    repeats = whole_number("repeats", repeats, least=1)
    batch_size = whole_number("batch_size", batch_size, least=1)
    max_length = whole_number("max_length", max_length, least=1)
    if draft_length is not None:
        draft_length = whole_number("draft_length", draft_length)
    if not isinstance(drafters, Mapping):
        names = [text("drafters", name, "names") for name in listed("drafters", drafters)]
        drafters = dict(zip(names, names, strict=True))
    plain = as_prompts(prompts)
    _check(drafters, plain, categories)
    model = as_model(target)
    encoded = [
        prompt_token_ids(
            prompt,
            model,
            name=f"Prompt {index}",
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        for index, prompt in enumerate(plain)
    ]
    made = {label: make_drafter(one, model) for label, one in drafters.items()}
    lengths = {
        label: default_draft_length(one) if draft_length is None else draft_length
        for label, one in made.items()
    }
    if verify_length is None:
        windows = [
            choose_verify_length(one, draft_length, None)
            for one in made.values()
            if one is not None
        ]
        verify_length, given = max(windows, default=(1, ""))
        if verify_length > kv.round_up_to_block(max_length):
            raise does_not_fit(given, verify_length, max_length)
    engines = {
        label: Engine(
            model,
            drafter,
            draft_length=lengths[label] if drafter is not None else None,
            verify_length=verify_length if drafter is not None else None,
            batch_size=min(batch_size, len(encoded)),
            max_length=max_length,
            prefill_chunk=prefill_chunk,
        )
        for label, drafter in made.items()
    }
    each = params_of_prompts(params, len(encoded))
    candidates = run_candidates(engines, encoded, each, repeats=repeats, tell=tell)
    # A prompt that asks for n completions is n requests.
    of_prompts = zip(categories or ["all"] * len(prompts), each, strict=True)
    return DrafterComparison(
        candidates=candidates,
        categories=tuple(category for category, own in of_prompts for _ in range(own.n)),
    )


def run_candidates(
    engines: Mapping[str, Engine],
    prompts: Sequence[Prompt],
    params: Params | Sequence[Params],
    *,
    repeats: int,
    is_judged: bool = True,
    tell: Callable[[str], None],
) -> tuple[Candidate, ...]:
    """Runs engines of one target, by label, in the way of `compare`.

    Args:
      is_judged: False skips the comparison of outputs, because those of a verifier that keeps only
        the target's distribution are different draws.
    """
    target = next(iter(engines.values())).target
    longest = min(engine.longest_prompt for engine in engines.values())
    requests = make_requests(prompts, params, target, longest=longest)
    compile_s, plain = {}, {}
    for label, engine in engines.items():
        started_s = time.perf_counter()
        engine.warm_up(lambda program, label=label: tell(f"{label}: compiling {program}"))
        engine.generate([[0, 0]], SamplingParams(max_tokens=1))
        compile_s[label] = time.perf_counter() - started_s
        if engine.drafter is not None and is_judged:
            tell(f"{label}: plain decoding by the same engine")
            plain[label] = [one.token_ids for one in engine.run(requests, speculate=False)]

    def empty(label: str) -> None:
        engines[label].reset()
        jax.block_until_ready(engines[label].executor.state)

    outputs: dict[str, list[list[Completion]]] = {label: [] for label in engines}
    turns = take_turns(
        {
            label: lambda own=outputs[label], engine=engine: own.append(list(engine.run(requests)))
            for label, engine in engines.items()
        },
        repeats,
        prepare=empty,
        on_turn=lambda label, turn: tell(f"run {turn} of {repeats}: {label}"),
    )
    tell("judging outputs")
    first = next(iter(engines))
    expected = [one.token_ids for one in outputs[first][-1]]
    drawn_by = [request.params for request in requests]
    candidates = []
    for label, engine in engines.items():
        among = None if is_judged else ()
        found = judge_all(target, outputs[label][-1], expected, drawn_by, among=among)
        num_unequal = None
        if label in plain:
            tokens = [[one.token_ids for one in run] for run in outputs[label]]
            num_unequal = sum(len(set(ids)) > 1 for ids in zip(plain[label], *tokens, strict=True))
        candidates.append(
            Candidate(
                label=label,
                engine=engine.describe(),
                completions=tuple(outputs[label][-1]),
                run_s=tuple(turns.seconds[label]),
                compile_s=compile_s[label],
                num_unequal_to_plain=num_unequal,
                divergences=found,
                must_be_equal=_must_be_equal(
                    engine, engines[first], do_differ=bool(found.differing)
                ),
            )
        )
    return tuple(candidates)


def _check(
    drafters: Mapping[str, Drafter | str | Mapping[str, Any] | None],
    prompts: Sequence[Prompt],
    categories: Sequence[str] | None,
) -> None:
    if len(drafters) < 2:
        raise SettingError(
            f"{len(drafters)} drafters were given to compare; give at least two, None (plain "
            "decoding) among them if a speed-up is wanted."
        )
    if len(prompts) == 0:
        raise SettingError("No prompts were given to compare drafters on; give at least one.")
    if categories is not None and len(listed("categories", categories)) != len(prompts):
        raise SettingError(
            f"{len(categories)} categories were given for {len(prompts)} prompts; give one each."
        )


def _must_be_equal(engine: Engine, other: Engine, *, do_differ: bool) -> bool:
    """Whether the two engines' outputs must agree in every token, because their windows have the
    same layout. The probe is run only if they do not agree."""
    mine, theirs = ((each.shape.verify_length, each.shape.tree_depth) for each in (engine, other))
    if engine is other or mine != theirs:
        return engine is other
    return not do_differ or (probe(engine).holds and probe(other).holds)
