"""Candidates compared on the same prompts: drafters, draft lengths, verifiers, temperatures.

Prompts differ far more than candidates do: any drafter does well on a list of names, and none on a
poem. So candidates are compared by what changes on the same prompts, with an interval over prompts
(`jaxspec.lab.intervals`). Tokens per round are *pooled*, all tokens over all rounds, unless *per
prompt*, the mean of each prompt's own figure, is asked for.

Counts do not depend on the machine. The time of one prompt inside a batch cannot be measured; wall
time is that of the whole batch of prompts, in alternating runs, and is given as the ratio of two
neighbouring runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np
import xxhash

from jaxspec.audit.judge import Divergences, judge_all
from jaxspec.audit.probe import probe
from jaxspec.decode.settings import choose_verify_length, default_draft_length
from jaxspec.drafters.base import Drafter
from jaxspec.engine.config import EngineConfig, EngineSettings
from jaxspec.engine.engine import Engine, Progress
from jaxspec.errors import SettingError
from jaxspec.kernels.base import unpacked
from jaxspec.lab.bench.cells import CellStore
from jaxspec.lab.comparison import Candidate, Comparison
from jaxspec.load.drafters import MakeDrafter, choose_drafter
from jaxspec.load.models import as_model
from jaxspec.models.base import Model
from jaxspec.requests.completions import Completion, Completions
from jaxspec.requests.requests import (
    Params,
    Prompt,
    Request,
    make_requests,
    params_of_prompts,
    prompt_token_ids,
)
from jaxspec.requests.sampling_params import SamplingParams, as_sampling_params
from jaxspec.requests.shapes import as_prompts
from jaxspec.runtime.documents import as_json
from jaxspec.runtime.turns import take_turns
from jaxspec.runtime.values import check_callable, check_kind, flag, listed, text, whole_number
from jaxspec.telemetry.counters import Acceptance
from jaxspec.types import PyTree

OF_ENGINE = tuple(field.name for field in dataclasses.fields(EngineConfig))
OF_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))
# Settings that plain decoding has none of.
OF_DRAFTING = ("draft_length", "verify_length", "tree_depth", "verifier", "exactness")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What a candidate differs in.

    Attributes:
      drafter: a drafter, a function that makes it for the target, or None for plain decoding.
      engine: settings of its engine.
      sampling: fields of `SamplingParams` that replace those of every prompt.
    """

    drafter: Drafter | MakeDrafter | None
    engine: Mapping[str, Any]
    sampling: Mapping[str, Any]

    def make_drafter(self, target: Model) -> Drafter | None:
        """The drafter for a target."""
        if self.drafter is None or isinstance(self.drafter, Drafter):
            return self.drafter
        return self.drafter(target)


def make_setup(
    candidate: Drafter | str | Mapping[str, Any] | Setup | None,
    settings: Mapping[str, Any] | None = None,
    *,
    label: str = "",
    dtype: Any = None,
) -> Setup:
    """Checks what a candidate is, before models are loaded.

    Args:
      candidate: see `compare`.
      settings: of its engine, where it has none of its own.
      label: that of the candidate, for messages.
      dtype: of a named drafter.

    Raises:
      SettingError: a setting is unknown or out of range, or the drafter is.
    """
    if isinstance(candidate, Setup):
        return candidate
    own: dict[str, Any] = {"drafter": candidate}
    if isinstance(candidate, Mapping) and "kind" not in candidate:
        own = dict(candidate)
    known = ("drafter", "tree", *OF_ENGINE, *OF_SAMPLING)
    if unknown := [name for name in own if name not in known]:
        raise SettingError(
            f"{unknown[0]!r} was given for the candidate {label!r}, which takes "
            f"{', '.join(known)}; a drafter by its settings has a 'kind' too."
        )
    drafter, arguments = own.get("drafter"), {key: own[key] for key in ("tree",) if key in own}
    if isinstance(drafter, str | Mapping):
        drafter = choose_drafter(drafter, arguments, dtype=dtype)
    elif arguments:
        raise SettingError(
            f"A tree was given for the candidate {label!r} without a drafter's name; name one, or "
            "make the drafter with its tree."
        )
    elif drafter is not None:
        check_kind("drafter", drafter, Drafter, "a drafter, what names one, or None")
    engine = dict(settings or {})
    if drafter is None:
        engine = {name: value for name, value in engine.items() if name not in OF_DRAFTING}
    engine |= {name: own[name] for name in OF_ENGINE if name in own}
    sampling = {name: own[name] for name in OF_SAMPLING if name in own}
    EngineConfig(**engine)
    as_sampling_params({"max_tokens": 2**30} | sampling)
    return Setup(drafter=drafter, engine=engine, sampling=sampling)


def compare(
    target: Model | str,
    candidates: Mapping[str, Drafter | str | Mapping[str, Any] | Setup | None] | Sequence[str],
    prompts: Sequence[Prompt] | Prompt,
    params: Params | Sequence[Params] | None = None,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    categories: Sequence[str] | None = None,
    repeats: int = 5,
    output: str | os.PathLike | None = None,
    resume: bool = False,
    on_stage: Callable[[str], None] | None = None,
    on_result: Callable[[Comparison], None] | None = None,
    **settings: Unpack[EngineSettings],
) -> Comparison:
    """Compares candidates on the same prompts and seeds: rounds, emitted tokens per round, wall
    time.

    A candidate is a drafter, or a dict of anything that decoding depends on, besides the target:
    `{"drafter": "draft_model:demo-draft", "tree": "4x4:12", "draft_length": "auto", "verifier":
    "rejection", "temperature": 0.7}`. Its keys are `drafter`, `tree` (of a named drafter), those of
    `EngineConfig`, and those of `SamplingParams`, which replace the ones in `params`. A dict with a
    `kind` is a drafter with its settings. `None` is plain decoding by the window-1 loop, the
    fastest there is, which is the baseline for time.

    Outputs of coupled verifiers are compared with plain decoding in their own program, where every
    token must be equal, and with those of the first coupled candidate with the same sampling
    parameters. These must be equal too if both verify windows of one length and the start-up probe
    holds, otherwise equal except at proven ties. Where bits depend on the width of a window, all
    that draft have the widest window of them, unless they have a `verify_length` of their own.

    A candidate that fails has a row that says why, and the others go on. Every run begins with an
    empty engine, so a drafter that learns from the requests it serves does not see prompts from an
    earlier run again.

    Args:
      target: the model that all of them draft for; a name is passed to `load_model`.
      candidates: by label, or names of drafters, at least two. The first is the baseline.
      prompts: as for `Engine.generate`; for a chat model lists of messages.
      params: one for all, or one each; default `SamplingParams()`. Requests without a seed get
        consecutive ones from 0, the same for every candidate.
      chat_template: Jinja template for messages instead of the tokenizer's own.
      chat_template_kwargs: further variables of the template.
      categories: one for each prompt; default the same for all.
      repeats: timed runs of each candidate, in alternation; 0 counts only, which needs one engine
        at a time and no idle machine.
      output: a JSON file for outputs and figures, written whenever a candidate or a turn of timed
        runs has finished.
      resume: go on with such a file. A candidate that was changed since is run again.
      on_stage: called with the name of each stage as it begins.
      on_result: called with what there is whenever the file would be written.
      settings: of all engines; those of a candidate go before. `batch_size` is at most the number
        of prompts.

    Raises:
      PromptError, SettingError, ModelError: as in `Engine` and `Engine.generate`.

    Example:
      >>> import jaxspec
      >>> target, draft = jaxspec.load_model("demo-target"), jaxspec.load_model("demo-draft")
      >>> comparison = jaxspec.compare(
      ...     target,
      ...     {
      ...         "plain": None,
      ...         "n-gram": {"drafter": "ngram", "draft_length": 2},
      ...         "draft": jaxspec.DraftModel(draft),
      ...     },
      ...     ["Once upon a time", "def main():", "1, 2, 3, 4, 5, 6, "],
      ...     jaxspec.SamplingParams(max_tokens=32, ignore_eos=True),
      ...     max_length=128,
      ...     repeats=1,
      ... )
      >>> comparison.holds
      True
      >>> comparison.difference("rounds", "draft", "plain").value < 0
      True
    """
    check_callable(on_stage=on_stage, on_result=on_result)
    repeats, resume = whole_number("repeats", repeats, least=0), flag("resume", resume)
    if output is not None:
        check_kind("output", output, (str, os.PathLike), "a path")
    if not isinstance(candidates, Mapping):
        names = [text("candidates", name, "names") for name in listed("candidates", candidates)]
        candidates = dict(zip(names, names, strict=True))
    plain = as_prompts(prompts)
    _check(candidates, plain, categories)
    setups = {label: make_setup(one, settings, label=label) for label, one in candidates.items()}
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
    each, first_seed = [], 0
    for one in params_of_prompts(params, len(encoded)):
        each.append(one if one.seed is not None else dataclasses.replace(one, seed=first_seed))
        first_seed += one.n
    labels = tuple(categories or ["all"] * len(encoded))
    run = _Run(model, setups, encoded, each, labels, on_stage, on_result)
    if output is not None:
        run.open(pathlib.Path(output), resume=resume)
    return run.compare(repeats)


class _Run:
    """A comparison that is being made; the arguments are those of `compare`.

    Attributes:
      found: the candidates so far, by label.
      errors: of those that failed.
    """

    def __init__(
        self,
        target: Model,
        setups: Mapping[str, Setup],
        prompts: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        categories: tuple[str, ...],
        on_stage: Callable[[str], None] | None,
        on_result: Callable[[Comparison], None] | None,
    ):
        self.target, self.prompts, self.categories = target, prompts, categories
        self.on_stage, self.on_result = on_stage, on_result
        self.setups, self.store, self.notes = setups, None, ()
        self.found: dict[str, Candidate] = {}
        self.errors: dict[str, Exception] = {}
        self.called: list[Exception] = []  # what callbacks raised
        self.engines: dict[str, Engine] = {}
        self.params = {
            label: [dataclasses.replace(one, **setup.sampling) for one in params]
            for label, setup in setups.items()
        }
        self.drafters = {
            label: self._tried(label, setup.make_drafter, target) for label, setup in setups.items()
        }
        self.settings = self._settings()

    def open(self, path: pathlib.Path, *, resume: bool) -> None:
        """Opens the file."""
        prompts = json.dumps([self.prompts, self.categories])
        header = {
            "command": "compare",
            "target": self.target.name,
            "weights": _digest(self.target.params),
            "prompts": hashlib.sha256(prompts.encode()).hexdigest(),
            "kernels": getattr(self.target, "kernels", None),
        }
        self.store = CellStore(path, header=header, resume=resume)
        self.given = {
            label: self._given(label) for label in self.setups if label not in self.errors
        }

    def compare(self, repeats: int) -> Comparison:
        """Counts what each candidate emits, then times them in turns."""
        for label in self.setups:
            if label in self.errors:
                continue
            known = self._known(label)
            own = known or self._tried(label, self._counted, label, is_kept=repeats > 0)
            if own is not None:
                others = self.found.values()
                self.found[label] = judged(self.target, own, others, self._engine)
                if known is None:
                    words = Completions(own.completions).summary
                    self._tell(f"{label}: {words}")
                    self._write()
        if not self.found:
            raise next(iter(self.errors.values()))
        if repeats:
            engines = {label: self._engine(label, is_kept=True) for label in self.found}
            num_done = min(len(own.run_s) for own in self.found.values())
            self.found = {
                label: dataclasses.replace(own, run_s=own.run_s[:num_done])
                for label, own in self.found.items()
            }
            for turn in range(num_done + 1, repeats + 1):
                self.found = time_once(
                    self.found, engines, tell=self._tell, name=f"run {turn} of {repeats}"
                )
                self._write()
        return self.result

    @property
    def result(self) -> Comparison:
        """What there is."""
        failed = {
            label: Candidate(label=label, engine={}, error=" ".join(str(error).split()))
            for label, error in self.errors.items()
        }
        every = failed | self.found
        return Comparison(
            candidates=tuple(every[label] for label in self.setups if label in every),
            categories=self.categories,
            notes=self.notes,
        )

    def _settings(self) -> dict[str, dict[str, Any]]:
        """Those of each engine, with windows as wide as they must be."""
        found, windows = {}, {}
        for label, drafter in self.drafters.items():
            own = dict(self.setups[label].engine)
            num_requests = sum(one.n for one in self.params[label])
            own["batch_size"] = min(own.get("batch_size", EngineConfig.batch_size), num_requests)
            found[label] = own
            if drafter is not None and own.get("verify_length") is None:
                length = own.get("draft_length")
                length = None if length == "auto" else length
                wide = self._tried(label, choose_verify_length, drafter, length, None)
                windows |= {} if wide is None else {label: wide[0]}
        if not getattr(self.target, "is_width_invariant", False) and len(windows) > 0:
            widest = max(windows.values())
            for label in (label for label, width in windows.items() if width < widest):
                own = found[label]
                own["verify_length"] = widest
                if own.get("draft_length") is None:
                    own["draft_length"] = default_draft_length(self.drafters[label])
            if min(windows.values()) < widest:
                self.notes += (
                    f"Bits depend on the width of a window here, so all that draft score {widest} "
                    "tokens per round, as many as the widest of them needs; their times are those "
                    "of that window.",
                )
        return found

    def _engine(self, label: str, *, is_kept: bool = False) -> Engine:
        if label in self.engines:
            return self.engines[label]
        engine = Engine(self.target, self.drafters[label], **self.settings[label])
        if is_kept:
            self.engines[label] = engine
            if label in self.found:  # it was counted in an earlier run
                self._tell(f"{label}: compiling")
                _warm_up(engine)
        return engine

    def _counted(self, label: str, *, is_kept: bool) -> Candidate:
        engine = self._engine(label, is_kept=is_kept)
        requests = make_requests(
            self.prompts, self.params[label], self.target, longest=engine.longest_prompt
        )
        return count(label, engine, requests, tell=self._tell)

    def _tried(self, label: str, do: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What a function returns; None if it fails, which ends this candidate only."""
        try:
            return do(*args, **options)
        except Exception as error:
            if any(error is one for one in self.called):
                raise
            self.errors[label] = error
            return None

    def _tell(self, stage: str) -> None:
        try:
            if self.on_stage is not None:
                self.on_stage(stage)
        except Exception as error:
            self.called.append(error)
            raise

    # The file.

    def _given(self, label: str) -> dict[str, Any]:
        """What a candidate's counts depend on, besides target and prompts."""
        drafter, params = self.drafters[label], self.params[label]
        sampling = json.dumps([dataclasses.asdict(one) for one in params], default=str)
        return as_json(
            {
                "drafter": "none" if drafter is None else drafter.name,
                "weights": None if drafter is None else _digest(drafter.params),
                "settings": {name: str(one) for name, one in self.settings[label].items()},
                "sampling": hashlib.sha256(sampling.encode()).hexdigest(),
            }
        )

    def _known(self, label: str) -> Candidate | None:
        """The candidate as the file has it, if it is the same."""
        cell = self.store and self.store.cells.get(label)
        if not cell or cell["given"] != self.given[label]:
            return None
        requests = make_requests(self.prompts, self.params[label], self.target, longest=2**30)
        unequal = cell["unequal_to_plain"]
        return Candidate(
            label=label,
            requests=tuple(requests),
            completions=tuple(_completion(fields) for fields in cell["completions"]),
            unequal_to_plain=None if unequal is None else tuple(unequal),
            run_s=tuple(cell["run_s"]),
            **{name: cell[name] for name in ("engine", "compile_s")},
        )

    def _write(self) -> None:
        """Writes what there is, and hands it out."""
        if self.store is not None:
            for label, own in self.found.items():
                names = ("engine", "compile_s", "run_s", "unequal_to_plain")
                cell = {name: getattr(own, name) for name in names}
                cell["completions"] = [one.to_json() for one in own.completions]
                self.store.cells[label] = as_json({"given": self.given[label], **cell})
            self.store.header["comparison"] = as_json(self.result.to_json())
            self.store.write()
        if self.on_result is not None:
            self.on_result(self.result)


def run_candidates(
    engines: Mapping[str, Engine],
    prompts: Sequence[Prompt],
    params: Params | Sequence[Params],
    *,
    repeats: int,
    tell: Callable[[str], None],
) -> tuple[Candidate, ...]:
    """Runs engines of one target, by label, in the way of `compare`; `repeats` may be 0."""
    target = next(iter(engines.values())).target
    longest = min(engine.longest_prompt for engine in engines.values())
    requests = make_requests(prompts, params, target, longest=longest)
    found: dict[str, Candidate] = {}
    for label, engine in engines.items():
        own = count(label, engine, requests, tell=tell)
        found[label] = judged(target, own, found.values(), engines.__getitem__)
    for turn in range(1, repeats + 1):
        found = time_once(found, engines, tell=tell, name=f"run {turn} of {repeats}")
    return tuple(found.values())


def count(
    label: str, engine: Engine, requests: Sequence[Request], *, tell: Callable[[str], None]
) -> Candidate:
    """Decodes the requests, and plainly in the same program if that must give the same tokens."""
    tell(f"{label}: compiling")
    compile_s = _warm_up(engine)
    plain = None
    if engine.drafter is not None and engine.verifier.is_coupled:
        plain = _decode(engine, requests, tell, f"{label}: plain decoding", speculate=False)
        engine.reset()
    completions = _decode(engine, requests, tell, f"{label}: decoding")
    return Candidate(
        label=label,
        engine=engine.describe(),
        completions=tuple(completions),
        requests=tuple(requests),
        compile_s=compile_s,
        unequal_to_plain=None if plain is None else _differing(plain, completions),
    )


def judged(
    target: Model,
    own: Candidate,
    others: Sequence[Candidate] | Any,
    engine_of: Callable[[str], Engine],
) -> Candidate:
    """A candidate with its divergences from the first of `others` that must emit the same."""
    alike = (one for one in others if one.is_coupled and one.requests == own.requests)
    reference = next(alike, None) if own.is_coupled else None
    if reference is None:  # a coupled one is its own
        num = len(own.completions) if own.is_coupled else 0
        itself = Divergences(num_outputs=num, differing=(), judged={})
        return dataclasses.replace(own, divergences=itself, must_be_equal=True)
    params = [request.params for request in own.requests]
    found = judge_all(target, own.completions, reference.token_ids, params)
    layout = ("verify_length", "tree_depth")
    must_be_equal = all(own.engine[name] == reference.engine[name] for name in layout)
    if must_be_equal and found.differing:
        must_be_equal = all(probe(engine_of(one.label)).holds for one in (own, reference))
    return dataclasses.replace(
        own, reference=reference.label, divergences=found, must_be_equal=must_be_equal
    )


def time_once(
    found: Mapping[str, Candidate],
    engines: Mapping[str, Engine],
    *,
    tell: Callable[[str], None],
    name: str,
) -> dict[str, Candidate]:
    """One more timed run of each candidate; its outputs must be those that were counted."""

    def empty(label: str) -> None:
        tell(f"{name}: {label}")
        engines[label].reset()
        jax.block_until_ready(engines[label].executor.state)

    runs = {
        label: lambda own=own, engine=engines[label]: list(engine.run(own.requests))
        for label, own in found.items()
    }
    turn = take_turns(runs, 1, prepare=empty)
    timed = {}
    for label, own in found.items():
        unequal = own.unequal_to_plain
        if unequal is not None:
            differing = _differing(own.completions, turn.results[label])
            unequal = tuple(sorted({*unequal, *differing}))
        run_s = (*own.run_s, *turn.seconds[label])
        timed[label] = dataclasses.replace(own, run_s=run_s, unequal_to_plain=unequal)
    return timed


def _warm_up(engine: Engine) -> float:
    """Compiles, runs everything once and empties the engine; returns the seconds taken."""
    started_s = time.perf_counter()
    engine.warm_up()
    engine.generate([[0, 0]], SamplingParams(max_tokens=1))
    seconds = time.perf_counter() - started_s
    engine.reset()
    return seconds


def _decode(
    engine: Engine,
    requests: Sequence[Request],
    tell: Callable[[str], None],
    stage: str,
    **options: Any,
) -> list[Completion]:
    num_tenths = 0
    tell(stage)

    def show(seen: Progress) -> None:
        nonlocal num_tenths
        if 10 * seen.num_finished // len(requests) > num_tenths:
            num_tenths = 10 * seen.num_finished // len(requests)
            tell(f"{stage}: {seen.num_finished} of {len(requests)} done")

    return list(engine.run(requests, on_progress=show, **options))


def _differing(some: Sequence[Completion], others: Sequence[Completion]) -> tuple[int, ...]:
    pairs = enumerate(zip(some, others, strict=True))
    return tuple(index for index, (a, b) in pairs if a.token_ids != b.token_ids)


def _completion(fields: Mapping[str, Any]) -> Completion:
    """A completion of its JSON fields."""
    counts = {field.name for field in dataclasses.fields(Acceptance)}
    own: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields["acceptance"].items()
        if name in counts
    }
    names = ("request_id", "text", "finish_reason", "stop_reason", "index", "seed")
    return Completion(
        **{name: fields[name] for name in names},
        prompt_token_ids=tuple(fields["prompt_token_ids"]),
        token_ids=tuple(fields["token_ids"]),
        acceptance=Acceptance(**own),
        origins=(),
    )


def _digest(params: PyTree) -> str:
    """A digest of all weights, whatever kernels they are packed for."""
    digest = xxhash.xxh3_128()
    for leaf in jax.tree.leaves(unpacked(params)):
        values = np.ascontiguousarray(jax.device_get(leaf))
        digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _check(
    candidates: Mapping[str, Any], prompts: Sequence[Prompt], categories: Sequence[str] | None
) -> None:
    if len(candidates) < 2:
        raise SettingError(
            f"{len(candidates)} candidates were given to compare; give at least two, None (plain "
            "decoding) among them if a speed-up is wanted."
        )
    if len(prompts) == 0:
        raise SettingError("No prompts were given to compare candidates on; give at least one.")
    if categories is not None and len(listed("categories", categories)) != len(prompts):
        raise SettingError(
            f"{len(categories)} categories were given for {len(prompts)} prompts; give one each."
        )
