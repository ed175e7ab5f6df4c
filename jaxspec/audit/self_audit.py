"""Audit of jaxspec's own runs: the levels of equality, on token ids cut after the stop token.

`jaxspec.audit.levels.CLAIMS` says what each level claims. At E1 and E2 the bits of each token's
log-probability (if the engine keeps them) and of the committed KV are compared too. Verifiers that
draw other tokens than plain decoding promise only the distribution; they also decode the tables of
`jaxspec.audit.scenes`, which reveal faults that a few outputs of a real model cannot.

In the aligned layout bits depend on the neighbours' lengths and, with kernels whose bits depend on
the width, in windows of several widths on the drafts; there every level allows ties.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxspec.audit.endings import judge_end
from jaxspec.audit.judge import judge_all
from jaxspec.audit.kv_distance import measure_kv_distance
from jaxspec.audit.levels import (
    ComparedOutput,
    DistributionLevel,
    EngineAudit,
    Level,
    StudyMetrics,
    TablesLevel,
)
from jaxspec.audit.probe import probe, rows_of
from jaxspec.audit.samples import Sample, judge_samples
from jaxspec.audit.scenes import SCENES
from jaxspec.audit.scoring import Scorer
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.models.base import LanguageModel, kv_dtype_of
from jaxspec.requests.completions import Completion
from jaxspec.requests.requests import Prompt, Request, make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.values import LARGEST_BYTES, check_callable, check_kind, whole_number
from jaxspec.telemetry.counters import Acceptance
from jaxspec.verifiers import Verifier

NUM_ALONE = 4  # requests that are also decoded alone, for E2, and continued as chats, for E5
NUM_LATER_TURNS, TURN_LENGTH = 2, 8  # per chat; tokens of the user in a later turn

# For each request of a run, its completion and a digest of its KV; None if bits are not compared.
_Run: TypeAlias = Sequence[tuple[Completion, str | None]]


def audit_engine(
    engine: Engine,
    prompts: Sequence[Prompt] | Prompt,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    on_stage: Callable[[str], None] | None = None,
) -> EngineAudit:
    """Audits an engine on a workload.

    The workload is decoded speculatively, plainly by the same engine, in another order, partly
    alone, and by the reference loop; some requests continue for a few turns in sessions. KV of the
    caller's own sessions in the engine's rows is dropped, and prefilled again with their next turn.
    If the engine has `max_logprobs=0` or more, E1 and E2 also compare the bits of the tokens'
    log-probabilities.

    Args:
      engine: an idle engine with a drafter.
      prompts: as for `Engine.generate`.
      params: one for all, or one each.
      chat_template, chat_template_kwargs: as for `Engine.generate`.
      seed: seed of the other order.
      on_stage: called with the name of each stage as it begins.

    Raises:
      PromptError, SettingError: as `Engine.generate`.
    """
    check_kind("engine", engine, Engine, "an Engine")
    seed = whole_number("seed", seed, least=0, most=LARGEST_BYTES)
    check_callable(on_stage=on_stage)
    tell = on_stage or (lambda _: None)
    requests = make_requests(
        prompts,
        params,
        engine.target,
        longest=engine.longest_prompt,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
    )
    if engine.max_logprobs is not None:
        requests = _with_logprobs(requests, 0)
    verifier = engine.verifier
    engine.reset()
    tell("the start-up probe")
    seen = probe(engine)
    # If bits depend on neighbours or widths, only the promise of E4 can be kept.
    keeps_bits = engine.executor.is_width_invariant and engine.layout == "ragged"
    is_bit_exact = seen.holds and keeps_bits
    # Plain decoding draws as coupled verification does; other verifiers equal it for greedy rows.
    sampled = [i for i, request in enumerate(requests) if request.params.temperature > 0]
    own = [i for i in range(len(requests)) if verifier.is_coupled or i not in sampled]
    # Other draws are repeated exactly or not at all: no tie of a keyed draw explains a difference.
    is_repeatable = verifier.is_coupled or (is_bit_exact and engine.adaptive is None)
    repeated = list(range(len(requests))) if is_repeatable else own

    tell("speculative run")
    drafted = _run(engine, requests)
    tell("E1: plain decoding by the same engine")
    plain = _run(engine, requests, speculate=False)
    tell("E2: another order, and alone")
    order = np.random.default_rng(seed).permutation(len(requests)).tolist()
    shuffled = _run(engine, [requests[i] for i in order])
    few = repeated[:: max(1, len(repeated) // NUM_ALONE)][:NUM_ALONE]
    alone = _run(engine, [requests[i] for i in few], batch_size=1)
    tell("E4: the reference loop")
    reference = _run_reference_loop(engine, requests)
    tell("E5: chats in sessions, and from nothing")
    some = own[:: max(1, len(own) // NUM_ALONE)][:NUM_ALONE]
    why_no_chats, later, in_sessions, anew = _run_chats(engine, [requests[i] for i in some])

    tell("judging divergences")
    every = (*drafted, *reference, *in_sessions, *anew)
    longest = max(len(c.prompt_token_ids + c.token_ids) for c, _ in every)
    scorer = Scorer(engine.target, max_length=longest + 1)

    def level(name: str, chosen: Sequence[int], expected: _Run) -> Level:
        """Compares the speculative output of some requests with what is expected."""
        if chosen:
            found = _compare(scorer, requests, chosen, [drafted[i] for i in chosen], expected)
            return Level(outputs=found, allows_ties=name == "E4" or not is_bit_exact)
        if name == "E3" and not sampled:
            return Level(reason="no request is sampled")
        return Level(reason=f"{verifier.name} draws other tokens than plain decoding")

    in_order = [shuffled[order.index(i)] for i in repeated]
    independent = _compare(scorer, requests, repeated, in_order, drafted)
    independent += _compare(scorer, requests, few, alone, drafted)
    is_none = "sampled tokens may change with rounding and draft length" if not repeated else None
    levels = {
        "E1": level("E1", own, plain),
        "E2": Level(outputs=independent, reason=is_none, allows_ties=not is_bit_exact),
        "E3": level("E3", [i for i in own if i in sampled], [(c, None) for c, _ in plain]),
        "E4": level("E4", own, reference),
        "E5": Level(
            outputs=_compare(scorer, later, range(len(later)), in_sessions, anew),
            reason=why_no_chats if own else level("E4", own, reference).reason,
            allows_ties=not (is_bit_exact and engine.row_store.keeps_prompt_bits),
        ),
    }
    tell("the distribution of sampled outputs")
    distribution = _distribution(scorer, engine, requests, [c for c, _ in drafted])
    tell("the verifier on tables of known distributions")
    tables = _tables(verifier, is_sampled=bool(sampled))
    kv_distance = None
    if kv_dtype_of(engine.target) is not None and isinstance(engine.target, LanguageModel):
        tell(f"the distance of KV in {engine.target.kv_dtype} to full KV")
        texts = [[*c.prompt_token_ids, *c.token_ids] for c, _ in drafted]
        kv_distance = measure_kv_distance(engine.target, texts)
    return EngineAudit(
        engine=engine.describe(),
        dtype=scorer.dtype.name,
        promise=promise_of(verifier, is_bit_exact=is_bit_exact),
        num_requests=len(requests),
        num_sampled=len(sampled),
        levels=levels,
        distribution=distribution,
        tables=tables,
        study=StudyMetrics.of(
            engine.target,
            outputs=[c.token_ids for c, _ in drafted],
            references=[c.token_ids for c, _ in reference],
        ),
        probe=seen,
        acceptance=Acceptance.total([c.acceptance for c, _ in drafted]),
        kv_distance=kv_distance,
    )


def promise_of(verifier: Verifier, *, is_bit_exact: bool = True) -> str:
    """What an engine with this verifier promises, in words; `is_bit_exact` says whether the
    start-up probe holds, and layout and exactness keep bits."""
    if not is_bit_exact and verifier.is_lossless:
        kept = "tokens of plain decoding" if verifier.is_coupled else "target's distribution"
        return (
            f"equal up to proven ties: the {kept}, as far as rounding with these settings and on "
            "this machine allows"
        )
    if verifier.is_coupled:
        return (
            "bit-exact: the tokens of plain decoding by the same engine, at any temperature; "
            "against other programs, equal up to proven ties"
        )
    if verifier.is_lossless:
        return (
            "distribution only: sampled tokens follow the target's distribution; greedy output is "
            "plain decoding's, bit-exact"
        )
    return f"lossy: {verifier.promise.removeprefix('lossy: ')}; greedy output is plain decoding's"


def _run(
    engine: Engine,
    requests: Sequence[Request],
    *,
    speculate: bool = True,
    batch_size: int | None = None,
) -> _Run:
    """Decodes requests `batch_size` at a time (default: as many as there are rows)."""
    size = batch_size or engine.shape.batch_size
    found = []
    for first in range(0, len(requests), size):
        batch = requests[first : first + size]
        completions = list(engine.run(batch, speculate=speculate))
        # The rows keep their KV until the next batch takes them.
        for row, completion in zip(rows_of(engine, batch), completions, strict=True):
            found.append((completion, _digest_of_kv(engine, row)))
    return found


def _run_chats(
    engine: Engine, requests: Sequence[Request]
) -> tuple[str | None, list[Request], _Run, _Run]:
    """Continues requests as chats, each in its own session, all open at the same time. Returns the
    reason why there are none, or None; the requests of later turns; their completions in sessions;
    and those decoded from scratch. KV is only digested if the engine's sessions keep bits."""
    try:
        sessions = [engine.session() for _ in requests]
    except SettingError:
        return "this engine keeps no sessions", [], (), ()
    later: list[Request] = []
    found: list[tuple[Completion, str | None]] = []
    histories = [request.prompt_token_ids for request in requests]
    for turn in range(1 + NUM_LATER_TURNS):
        for index, (session, request) in enumerate(zip(sessions, requests, strict=True)):
            if turn > 0:
                histories[index] += requests[index - 1].prompt_token_ids[:TURN_LENGTH]
            prompt = histories[index]
            if len(prompt) > engine.longest_prompt:
                continue
            completion = session.generate(prompt, request.params)
            histories[index] += completion.token_ids
            if turn > 0:
                request_id = f"{request.request_id}, turn {turn + 1}"
                later.append(
                    dataclasses.replace(request, request_id=request_id, prompt_token_ids=prompt)
                )
                found.append((completion, _digest_of_kv(engine, session.row)))
    for session in sessions:
        session.close()
    engine.reset()
    anew = _run(engine, later)
    if not engine.row_store.keeps_prompt_bits:
        found = [(completion, None) for completion, _ in found]
    return (None if later else "no second turn fits the max_length"), later, found, anew


def _digest_of_kv(engine: Engine, row: int | None) -> str | None:
    """A digest of the committed KV of a row."""
    if row is None:
        return None
    kv = b"".join(values.tobytes() for values in engine.executor.committed_kv(row))
    return hashlib.sha256(kv).hexdigest()


def _run_reference_loop(engine: Engine, requests: Sequence[Request]) -> _Run:
    """Decodes requests one token at a time, with another program."""
    loop = Engine(
        engine.target,
        batch_size=engine.shape.batch_size,
        max_length=engine.shape.max_length,
    )
    return [(completion, None) for completion in loop.run(_with_logprobs(requests, None))]


def _with_logprobs(requests: Sequence[Request], logprobs: int | None) -> list[Request]:
    """The requests, with this number of log-probabilities requested."""
    params = (dataclasses.replace(request.params, logprobs=logprobs) for request in requests)
    return [dataclasses.replace(r, params=own) for r, own in zip(requests, params, strict=True)]


def _compare(
    scorer: Scorer, requests: Sequence[Request], chosen: Sequence[int], run: _Run, expected: _Run
) -> tuple[ComparedOutput, ...]:
    """Compares the outputs of a run, which are those of the requests `chosen`, with what is
    expected for each request."""
    asked = [requests[i] for i in chosen]
    theirs = [expected[i] for i in chosen]
    found = judge_all(
        scorer,
        [completion for completion, _ in run],
        [completion.token_ids for completion, _ in theirs],
        [request.params for request in asked],
    )

    def bits_agree(ours: tuple[Completion, str | None], other: tuple[Completion, str | None]):
        kvs = ours[1], other[1]
        return None if None in kvs else ours[0].logprobs == other[0].logprobs and kvs[0] == kvs[1]

    return tuple(
        ComparedOutput(
            request_id=request.request_id,
            num_tokens=len(other[0].token_ids),
            are_bits_equal=bits_agree(ours, other),
            divergence=found.judged.get(place),
        )
        for place, (request, ours, other) in enumerate(zip(asked, run, theirs, strict=True))
    )


def _distribution(
    scorer: Scorer, engine: Engine, requests: Sequence[Request], completions: Sequence[Completion]
) -> DistributionLevel:
    """The evidence of an engine's sampled outputs about the distribution."""
    if not engine.verifier.is_lossless:
        return DistributionLevel(reason=_lossy(engine.verifier))
    room = engine.longest_prompt + 1  # tokens of prompt and output

    def sample(request: Request, completion: Completion) -> Sample:
        own = request.params
        limit = min(own.max_tokens, room - len(request.prompt_token_ids))
        least = min(own.min_tokens, limit)
        return Sample(
            prompt_ids=request.prompt_token_ids,
            output_ids=completion.token_ids,
            params=dataclasses.replace(own, seed=None, min_tokens=least, max_tokens=limit),
            seed=own.seed,
        )

    samples = [
        sample(request, completion)
        for request, completion in zip(requests, completions, strict=True)
        if request.params.temperature > 0
    ]
    if not samples:
        return DistributionLevel(reason="no request is sampled")
    ends = [
        judge_end(scorer, prompt_ids=s.prompt_ids, output_ids=s.output_ids, params=s.params)
        for s in samples
    ]
    return DistributionLevel(
        samples=judge_samples(scorer, samples)[1],
        num_wrong_ends=sum(end is not None for end in ends),
    )


def _tables(verifier: Verifier, *, is_sampled: bool) -> TablesLevel:
    """Runs the scenes with this verifier, unless it or the requests promise less."""
    if not verifier.is_lossless:
        return TablesLevel(reason=_lossy(verifier))
    if verifier.is_coupled:
        return TablesLevel(reason=f"{verifier.name} draws the tokens of plain decoding")
    if not is_sampled:
        return TablesLevel(reason="no request is sampled")
    scenes = {name: make(verifier) for name, make in SCENES.items()}
    return TablesLevel(
        p_values={name: scene.p_value() for name, scene in scenes.items()},
        num_outputs=sum(scene.num_rows for scene in scenes.values()),
    )


def _lossy(verifier: Verifier) -> str:
    """Why the levels of the distribution do not apply."""
    return f"{verifier.name} does not promise the distribution"
