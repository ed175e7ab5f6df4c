"""Negative controls: does the auditor catch the faults of published systems, and nothing else?

For every fault of `jaxspec.audit.controls.faults` two runs are compared with the reference loop:
one with the fault, and a control run with the same requests and engine without it. A fault counts
as caught if its run differs for a reason that is not a tie. A control is good if the fault is
caught and nothing is found in the control run.

Faults that are edits of a round share one compiled program, in which a number selects the active
one; their control run is that program with none active. The requests are chosen so that each fault
can show: ragged prompts, more requests than rows, rows that accept different numbers, stop tokens
inside accepted drafts and in a prompt, a pad token that occurs in prompts and drafts, greedy and
sampled rows side by side. Faults that no single output can show are judged by a chi-square test of
many rows (`jaxspec.audit.scenes`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from jaxspec.audit.controls.faults import FAULTS
from jaxspec.audit.controls.instrument import Fault, arm, installed
from jaxspec.audit.evidence import ALPHA
from jaxspec.audit.judge import Divergences, judge_all
from jaxspec.audit.scenes import DistributionScene, filtered, memoryless
from jaxspec.audit.scoring import Scorer
from jaxspec.drafters.base import Drafter
from jaxspec.engine.engine import Engine
from jaxspec.errors import ModelError, SettingError
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import encode_prompts, sample_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.report import TextTable
from jaxspec.types import Origin
from jaxspec.verifiers import Block, Rejection

BATCH_SIZE = 3
MAX_LENGTH = 128
DRAFT_LENGTH = 4
WINDOW = DRAFT_LENGTH + 2  # leaves room in drafts that nothing fills
PROMPT_LENGTHS = (3, 29, 11, 40, 7, 20, 35)
MAX_TOKENS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlResult:
    """The result of one control.

    Attributes:
      fault: what was switched on.
      caught: whether it was caught; for an `efficiency` or `numerics` control, whether its output
        passed and its cost or change was seen.
      control_passes: whether the same requests pass without the fault.
      detail: what was seen, in words.
      needs_batch: for a caught `tokens` control, whether the wrong output is right when its request
        is decoded alone, so that the fault is one of synchronisation between rows.
    """

    fault: Fault
    caught: bool
    control_passes: bool
    detail: str
    needs_batch: bool | None = None

    @property
    def is_good(self) -> bool:
        """Whether the fault was caught, and nothing was found in the control run."""
        return self.caught and self.control_passes

    def to_json(self) -> dict[str, Any]:
        """What the fault is, and what was found, as JSON values."""
        fields = vars(self.fault) | vars(self)
        return {name: x for name, x in fields.items() if name not in ("edits", "patches", "fault")}


def run_controls(
    target: LanguageModel,
    drafter: Drafter,
    *,
    names: Sequence[str] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> list[ControlResult]:
    """The results of all controls, in the order of `FAULTS`.

    Args:
      target: a model of the package's own decoder, because the faults change its functions.
      drafter: one that drafts chains, and is right about as often as wrong.
      names: those of the faults to run; default all.
      prompts: seven lists of token ids of different lengths, none above 64 and with some tokens
        that are common in the target's output; default the sample prompts, or random ones for a
        target without a tokenizer.
      on_progress: called with the name of each control before it is run.

    Raises:
      ModelError: the target is of another decoder.
      SettingError: no such fault.
    """
    if not isinstance(target, LanguageModel):
        raise ModelError(
            f"The target {target.name} was given for the negative controls; they reach into the "
            "package's own decoder, so give a model that load_model returns."
        )
    wanted = list(FAULTS) if names is None else list(names)
    unknown = [name for name in wanted if name not in FAULTS]
    if unknown:
        raise SettingError(f"There is no fault {unknown[0]!r}; choose among {', '.join(FAULTS)}.")
    chosen = [fault for name, fault in FAULTS.items() if name in wanted]
    edited = [fault for fault in chosen if not fault.patches]

    @functools.cache
    def runs() -> ControlRuns:
        return ControlRuns(target, drafter, faults=edited, prompts=prompts)

    results = []
    for fault in chosen:
        if on_progress is not None:
            on_progress(fault.name)
        is_of_runs = fault.kind != "distribution"
        results.append(runs().run(fault) if is_of_runs else run_distribution_control(fault))
    return results


class ControlRuns:
    """The engines and requests that all controls of one target share; see `run_controls`. `faults`
    are those with edits that will be run; they are compiled into one program.

    Attributes:
      prompts: of the requests, as token ids.
      params: one for each prompt.
      pad_token: a token of the prompts that is also drafted and accepted.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        *,
        faults: Sequence[Fault],
        prompts: Sequence[Sequence[int]] | None = None,
    ):
        self._target, self._drafter = target, drafter
        self._production = _engine(target, drafter)
        self.prompts = _prompts(target) if prompts is None else prompts
        with _metered(target) as rows:
            self.params, self.pad_token = _workload(self._production, self.prompts)
        self._num_rows = max(rows)
        self._scorer = Scorer(target, max_length=MAX_LENGTH)
        self._reference = self._generate(_engine(target))
        self._generate(self._production)
        self._production_kv = _committed_kv(self._production)
        self._faults = list(faults)
        self._switched = None
        if self._faults:
            with installed(self._faults, pad_token=self.pad_token, is_armed=True):
                self._switched = _engine(target, drafter)
                self._generate(self._switched)  # compiles it while the edits are in place

    def _generate(self, engine: Engine) -> list[Completion]:
        return engine.generate(self.prompts, self.params)

    def compare(
        self, completions: Sequence[Completion], *, among: Sequence[int] | None = None
    ) -> Divergences:
        """Outputs of all requests, or of those `among` them, against the reference loop's; judged
        up to the first one that is not a tie."""
        expected = [completion.token_ids for completion in self._reference]
        return judge_all(
            self._scorer, completions, expected, self.params, among=among, stops_at_fault=True
        )

    def run(self, fault: Fault) -> ControlResult:
        """The result of one control: the requests are run without the fault, then with it, on the
        same engine (or, if functions are replaced, on one that differs in nothing else)."""
        control_engine = self._production if fault.patches else self._switched
        if control_engine is None or not (fault.patches or fault in self._faults):
            raise SettingError(
                f"The fault {fault.name} was asked for, but not compiled in; name it when "
                "ControlRuns is made."
            )
        control_run = self._generate(control_engine)
        control_kv = _committed_kv(control_engine)
        with self._faulty(fault) as engine, _metered(self._target) as rows:
            completions = self._generate(engine)
        control = self.compare(control_run)
        greedy = [i for i, p in enumerate(self.params) if p.temperature == 0]
        sampled = [i for i, p in enumerate(self.params) if p.temperature > 0]
        among = {"tokens": greedy, "sampling": sampled}.get(fault.kind)
        found = self.compare(completions, among=among)
        detail, needs_batch = found.describe(), None
        caught = found.are_ties == (fault.kind in ("efficiency", "numerics"))

        if fault.kind == "tokens" and found.first_wrong is not None:
            needs_batch = self._is_right_alone(fault, found.first_wrong)
            detail += "; right if decoded alone" if needs_batch else ""
        elif fault.kind == "sampling":
            caught &= self.compare(completions, among=greedy).are_ties
            detail += "; greedy rows are right"
        elif fault.kind == "order":
            ours, theirs = (sorted(c.token_ids for c in x) for x in (completions, control_run))
            caught &= ours == theirs
            detail = f"as a set {'equal' if ours == theirs else 'different'}; {detail}"
        elif fault.kind == "efficiency":
            before, after = (
                sum(c.acceptance.num_rounds for c in x) for x in (control_run, completions)
            )
            num_rows = max(rows, default=self._num_rows)
            caught &= after * num_rows > before * self._num_rows
            detail = (
                f"{after} rounds instead of {before}, {num_rows} target rows a call instead of "
                f"{self._num_rows}; {detail}"
            )
        elif fault.kind == "numerics":
            differs = not all(map(np.array_equal, control_kv, self._production_kv))
            caught &= differs
            detail = f"KV {'differs' if differs else 'is equal'} in its bits; {detail}"
        return ControlResult(
            fault=fault,
            caught=caught,
            control_passes=control.are_ties,
            detail=detail,
            needs_batch=needs_batch,
        )

    @contextlib.contextmanager
    def _faulty(self, fault: Fault) -> Iterator[Engine]:
        """An engine that has the fault."""
        if not fault.patches:
            engine = self._switched
            assert engine is not None
            arm(engine, self._faults.index(fault) + 1)
            try:
                yield engine
            finally:
                arm(engine, 0)
            return
        with fault.apply(pad_token=self.pad_token):
            is_around = all(owner is Engine for owner, _, _ in fault.patches)
            yield self._production if is_around else _engine(self._target, self._drafter)

    def _is_right_alone(self, fault: Fault, index: int) -> bool:
        """Whether a request's output is right when nothing else is in the batch."""
        for engine in (self._production, self._switched):
            if engine is not None:
                engine.reset()  # for a fault, finished rows are neighbours too
        with self._faulty(fault) as engine:
            alone = engine.generate([self.prompts[index]], self.params[index])
        completions = list(self._reference)
        completions[index] = alone[0]
        return self.compare(completions, among=[index]).are_ties


def _engine(target: LanguageModel, drafter: Drafter | None = None) -> Engine:
    lengths: dict[str, Any] = {}
    if drafter is not None:
        lengths = {"draft_length": DRAFT_LENGTH, "verify_length": WINDOW}
    return Engine(
        target,
        drafter,
        scheduler="static",  # as in the published systems that had these faults
        batch_size=BATCH_SIZE,
        max_length=MAX_LENGTH,
        **lengths,
    )


def _committed_kv(engine: Engine) -> list[np.ndarray]:
    """KV of the committed tokens of every row, as bits."""
    return [bits for row in range(BATCH_SIZE) for bits in engine.executor.committed_kv(row)]


@contextlib.contextmanager
def _metered(target: LanguageModel) -> Iterator[list[int]]:
    """The number of rows of each call of the target's layers that is traced in this context."""
    rows: list[int] = []
    real = decoder.run_layers

    def run_layers(config, params, hidden, *arguments, **options):
        if config is target.config:
            rows.append(hidden.shape[0])
        return real(config, params, hidden, *arguments, **options)

    with mock.patch.object(decoder, "run_layers", run_layers):
        yield rows


# The requests.


def _prompts(target: LanguageModel) -> list[list[int]]:
    """Prompts of `PROMPT_LENGTHS` tokens."""
    if target.tokenizer is None:
        rng = np.random.default_rng(0)
        return [rng.integers(0, target.vocab_size, n).tolist() for n in PROMPT_LENGTHS]
    texts = encode_prompts(sample_prompts(), target)
    found = []
    for length in PROMPT_LENGTHS:
        index = next(i for i, ids in enumerate(texts) if len(ids) >= length)
        found.append(list(texts.pop(index)[:length]))
    return found


def _workload(engine: Engine, prompts: Sequence[Sequence[int]]) -> tuple[list[SamplingParams], int]:
    """Parameters of requests for these prompts that give every fault a chance to show, and the pad
    token; a first run shows where stop tokens and pads have to be."""
    lengths = [len(prompt) for prompt in prompts]
    if len(prompts) <= 2 * BATCH_SIZE or not all(0 < n <= MAX_LENGTH // 2 for n in lengths):
        raise SettingError(
            f"Prompts of {lengths} tokens were given for the negative controls; give at least "
            f"{2 * BATCH_SIZE + 1} of 1 to {MAX_LENGTH // 2} tokens, of different lengths."
        )
    greedy = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    params = [greedy] * len(prompts)
    params[2] = dataclasses.replace(greedy, temperature=1.2, top_k=4, seed=11)
    params[5] = dataclasses.replace(greedy, temperature=1.2, top_p=0.5, seed=12)
    completions = engine.generate(prompts, params)
    accepted: collections.Counter[int] = collections.Counter()
    num_stops = 0
    for index, completion in enumerate(completions):
        if params[index].temperature > 0:
            continue
        output = completion.token_ids
        pairs = list(zip(output, completion.origins, strict=True))
        accepted.update(token for token, origin in pairs if origin == Origin.ACCEPTED)
        # Two rows stop at an accepted token that is not too early and is new in its output; the
        # others have a stop token in their prompt.
        inside = [
            token
            for place, (token, origin) in enumerate(pairs[:-1])
            if place >= 4 and origin == Origin.ACCEPTED and token not in output[:place]
        ]
        is_stopped = bool(inside) and num_stops < 2
        num_stops += is_stopped
        stops = inside if is_stopped else [t for t in prompts[index] if t not in output]
        params[index] = dataclasses.replace(greedy, stop_token_ids=tuple(stops[:1]))
    in_prompts = {token for prompt in prompts for token in prompt}
    common = [token for token, _ in accepted.most_common() if token in in_prompts]
    if not common or num_stops == 0:
        raise SettingError(
            f"Of the drafts for these {len(prompts)} prompts no token was accepted that could be "
            "the pad and a stop token; give a drafter that is right more often."
        )
    return params, common[0]


def scene_of(fault: Fault) -> DistributionScene:
    """The scene that shows a distribution fault."""
    is_of_block = fault.name == "position_only_keys"
    return memoryless(Block()) if is_of_block else filtered(Rejection())


def run_distribution_control(fault: Fault) -> ControlResult:
    """The result of one control of kind `distribution`; it needs no model."""
    scene = scene_of(fault)
    healthy = scene.healthy_p_value
    with fault.apply():
        faulty = scene.p_value()
    return ControlResult(
        fault=fault,
        caught=faulty < ALPHA,
        control_passes=healthy >= ALPHA,
        detail=(
            f"p-value {faulty:.2g} against {healthy:.2g} of the control run, alpha {ALPHA:g}, "
            f"{scene.num_rows} outputs under {scene.verifier.name}"
        ),
    )


def controls_table(results: Sequence[ControlResult]) -> TextTable:
    """The results, in the order of `FAULTS`, with a line between those of different kinds."""

    def seen(result: ControlResult) -> str:
        good = {"efficiency": "passes, cost seen", "numerics": "passes"}
        return good.get(result.fault.kind, "caught") if result.caught else "MISSED"

    columns = {
        "fault": lambda result: result.fault.name.replace("_", " "),
        "as in": lambda result: result.fault.source,
        "breaks": lambda result: result.fault.invariant,
        "auditor": seen,
        "control": lambda result: "passes" if result.control_passes else "FAILS",
    }
    title = "Negative controls: each fault, and the same run without it"
    return TextTable.of_columns(title, columns, results, group=lambda result: result.fault.kind)
