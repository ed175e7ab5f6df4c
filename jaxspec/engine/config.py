"""The settings of an engine: named, documented and checked in one place."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, TypedDict, get_args

import jax

from jaxspec.cache import pages as kv
from jaxspec.cache.layouts import Layout, check_layout
from jaxspec.decode.checks import check_parts
from jaxspec.decode.parts import RoundParts
from jaxspec.decode.settings import (
    LARGEST_NUM_SLOTS,
    MAX_STOP_TOKENS,
    DraftLength,
    Exactness,
    as_draft_length,
    check_exactness,
    choose_tree_depth,
    choose_verify_length,
    does_not_fit,
)
from jaxspec.decode.sharded import batch_size_per_shard, check_mesh
from jaxspec.decode.state import LogprobsConfig, check_rows
from jaxspec.drafters.base import Drafter, NoDrafter
from jaxspec.errors import SettingError
from jaxspec.models import prefill
from jaxspec.models.base import Model, check_taps, packed_model
from jaxspec.runtime.environment import loops_run_on_host
from jaxspec.runtime.values import (
    LARGEST_BYTES,
    LARGEST_COUNT,
    flag,
    is_one_of,
    refusal,
    seconds,
    whole_number,
)
from jaxspec.schedulers import Scheduler, SchedulerName, make_scheduler
from jaxspec.telemetry.trace import TraceConfig, TraceLevel
from jaxspec.types import EngineShape
from jaxspec.verifiers import Verifier, VerifierName, make_verifier

LogprobsMode: TypeAlias = Literal["raw_logprobs", "processed_logprobs"]


class ServingSettings(TypedDict, total=False):
    """The keywords of `ServingEngine` that `Engine` has too; see `EngineConfig`."""

    verifier: Verifier | VerifierName | None
    verify_length: int | None
    batch_size: int
    max_length: int
    budget_bytes: int | None
    mesh: jax.sharding.Mesh | None


class EngineSettings(ServingSettings, total=False):
    """The keywords of `Engine`, for type checkers; see `EngineConfig`."""

    scheduler: Scheduler | SchedulerName | None
    layout: Layout
    draft_length: DraftLength | None
    exactness: Exactness
    tree_depth: int | None
    rounds_per_sync: int
    rounds_per_piece: int
    max_queue: int
    step_timeout_s: float | None
    session_bytes: int | None
    max_logprobs: int | None
    logprobs_mode: LogprobsMode
    trace: TraceLevel | None
    check_invariants: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of an engine besides its target and its drafter; `Engine` takes them as
    keywords.

    Attributes:
      verifier: how much of a draft is kept, or its name; default `Coupled()`.
      scheduler: which rows take part in a round. The default `Continuous()` replaces a finished row
        in the next round by one whose prompt has already been prefilled; `Static()` decodes batch
        after batch, each to its end; `Pool()` groups rows of equal length, as EXSPEC does.
      layout: how the target's KV cache is laid out: `ragged` never moves KV; `aligned` pads rows on
        the left so that all end at one slot, and moves them after every round, as 2510.22876 does.
      draft_length: tokens drafted per round, 1 to `verify_length - 1` (for a tree, its number of
        nodes), and no more than the drafter can draft unless a `verify_length` is given; default
        the drafter's own number of nodes, or 4. `auto` chooses them, or none, by acceptance and by
        the measured cost of rounds; see `engine.adaptive`. `warm_up` measures that cost, or else
        the first `generate`; requests before that use the default.
      exactness: with `bitwise`, drafts do not change a bit of the output. With `ties`, two tokens
        that tie within rounding may be exchanged; every round scores only as many tokens as its
        drafts need, down to one. Where the kernels' bits do not depend on the width of a window
        (`native`), both score narrow windows and both are bitwise; with other kernels `bitwise`
        uses one width only.
      verify_length: T, tokens scored per round (with `ties`, at most this many); default
        `draft_length + 1`, where `auto` counts as the default draft length. Runs that should agree
        bit for bit must share it.
      tree_depth: the depth of the deepest tree that windows are laid out for; default the
        drafter's, 0 for chains. Where the kernels' bits depend on the width of a window, runs that
        should agree bit for bit must share this too.
      batch_size: B, rows of a batch, over all data shards of a mesh. A scheduler's own row counts
        are per shard.
      max_length: slots per row for prompt and output, rounded up to a multiple of 128. The last
        round of a row needs `verify_length` slots. More than target or draft model was trained for
        is said once in the log.
      budget_bytes: what weights, state and compiled programs may take together, per device.
        `batch_size` is then an upper limit, and is lowered to what fits this and the free memory
        (docs/memory.md). None: all that is free on the device. `plan_memory` chooses more
        settings.
      rounds_per_sync: most rounds that run before the host checks for finished rows.
      rounds_per_piece: most rounds between two pieces of a stream, two chunks of prompts while rows
        are running, and two checks of deadlines.
      max_queue: requests that may wait for a row; `submit` refuses more.
      step_timeout_s: seconds that a step may take, not counting compilation. After that every
        request ends with the stop reason `device timeout`, and the engine accepts no more. None: no
        limit.
      session_bytes: most bytes of sessions' and common prefixes' KV kept on the host; default a
        quarter of the host's free memory.
      max_logprobs: log-probabilities kept per position, besides the emitted token's, for requests
        that ask for them; None keeps none.
      logprobs_mode: log-probabilities under the model's own logits (`raw_logprobs`), or under the
        distribution that tokens are drawn from (`processed_logprobs`; for a greedy row, at
        temperature 1).
      trace: what to record for `Completions.rounds()` and `.tokens()`: `rounds`; `tokens`, also one
        record per drafted token; or `distributions`, also entropies and the overlap of p and q.
      check_invariants: check KV, padding and positions after every round, and raise
        `AssertionError` if `decode.invariants` finds a fault; many times slower.
      mesh: devices to use, with an axis `data` and optionally an axis `model`; default one device.

    Raises:
      SettingError: a setting out of range. Settings that contradict each other, or do not suit the
        target and the drafter, are refused where the engine is made.
    """

    verifier: Verifier | VerifierName | None = None
    scheduler: Scheduler | SchedulerName | None = None
    layout: Layout = "ragged"
    draft_length: DraftLength | None = None
    exactness: Exactness = "bitwise"
    verify_length: int | None = None
    tree_depth: int | None = None
    batch_size: int = 8
    max_length: int = 1024
    budget_bytes: int | None = None
    rounds_per_sync: int = 32
    rounds_per_piece: int = 4
    max_queue: int = 1024
    step_timeout_s: float | None = None
    session_bytes: int | None = None
    max_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    trace: TraceLevel | None = None
    check_invariants: bool = False
    mesh: jax.sharding.Mesh | None = None
    prefill_chunk: dataclasses.InitVar[None] = None  # refused

    def __post_init__(self, prefill_chunk: None):
        if prefill_chunk is not None:
            raise SettingError(
                f"prefill_chunk {prefill_chunk} was given, but it is no longer a setting (prompts "
                f"are prefilled in chunks of {prefill.CHUNK} tokens); leave it out."
            )
        check_layout(self.layout)
        check_exactness(self.exactness)
        if not is_one_of(self.logprobs_mode, get_args(LogprobsMode)):
            expected = f"one of {', '.join(get_args(LogprobsMode))}"
            raise refusal("logprobs_mode", self.logprobs_mode, expected)
        checked = {
            "draft_length": as_draft_length(self.draft_length),
            "verify_length": _number_or_none("verify_length", self.verify_length, least=1),
            "tree_depth": _number_or_none("tree_depth", self.tree_depth, least=0),
            "batch_size": whole_number("batch_size", self.batch_size, least=1),
            "max_length": whole_number("max_length", self.max_length, least=1),
            "budget_bytes": _number_or_none(
                "budget_bytes", self.budget_bytes, least=1, most=LARGEST_BYTES
            ),
            "rounds_per_sync": whole_number("rounds_per_sync", self.rounds_per_sync, least=1),
            "rounds_per_piece": whole_number("rounds_per_piece", self.rounds_per_piece, least=1),
            "max_queue": whole_number("max_queue", self.max_queue, least=1),
            "step_timeout_s": seconds("step_timeout_s", self.step_timeout_s),
            "session_bytes": _number_or_none(
                "session_bytes", self.session_bytes, least=0, most=LARGEST_BYTES
            ),
            "check_invariants": flag("check_invariants", self.check_invariants),
            "mesh": None if self.mesh is None else check_mesh(self.mesh),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _number_or_none(
    name: str, value: int | None, *, least: int, most: int = LARGEST_COUNT
) -> int | None:
    return None if value is None else whole_number(name, value, least=least, most=most)


def make_parts(target: Model, drafter: Drafter | None, config: EngineConfig) -> RoundParts:
    """What the rounds of an engine (of one shard of its mesh) are made of; without a drafter they
    decode plainly. The default draft length is the drafter's own, and the default verify length is
    one more than the draft length.

    Raises:
      SettingError: two settings that contradict each other, or one that does not suit the models.
      ModelError: the drafter cannot draft for the target, or one of them returns arrays with dtypes
        or shapes that the loop does not take; see `decode.checks`.
    """
    verifier = make_verifier("coupled" if config.verifier is None else config.verifier)
    scheduler = make_scheduler("continuous" if config.scheduler is None else config.scheduler)
    batch_size = config.batch_size
    if config.mesh is not None:
        batch_size = batch_size_per_shard(batch_size, config.mesh)
    if batch_size * config.max_length > LARGEST_NUM_SLOTS:
        raise SettingError(
            f"batch_size {batch_size} and max_length {config.max_length} were given; their product "
            f"may be at most {LARGEST_NUM_SLOTS}, so lower one of them."
        )
    draft_length, verify_length = config.draft_length, config.verify_length
    tree_depth = config.tree_depth
    if draft_length == "auto":
        if drafter is not None and verify_length == 1:
            raise SettingError(
                "A verify_length of 1 was given with draft_length='auto', and leaves no room for "
                "drafts; raise it, or leave it out."
            )
        draft_length = None if verify_length is None else verify_length - 1
    if drafter is None:
        if not verifier.is_coupled:
            raise SettingError(
                f"The verifier {verifier.name} was given without a drafter, so there is nothing to "
                "verify; leave it out or give a drafter."
            )
        if verify_length not in (None, 1):
            raise SettingError(
                f"A verify_length of {verify_length} was given without a drafter; plain decoding "
                "scores one token per step, so leave it out or give a drafter."
            )
        verify_length, tree_depth, given = 1, 0, ""
    else:
        verify_length, given = choose_verify_length(drafter, draft_length, verify_length)
        drafter.check(target)
        check_taps(target, drafter.taps, f"The drafter {drafter.name}")
        if not (drafter.is_chain or verifier.takes_trees):
            raise SettingError(
                f"The drafter {drafter.name} drafts trees, and the verifier {verifier.name} takes "
                "chains only; use the coupled verifier, rejection or typical."
            )
        if drafter.prunes_by_token and verifier.needs_draft_probs:
            raise SettingError(
                f"The drafter {drafter.name} leaves out nodes because of their own tokens, which "
                f"would bias the output of the verifier {verifier.name}; use the coupled verifier, "
                "or a tree whose nodes do not depend on the tokens drawn for them."
            )
        if config.layout == "aligned" and drafter.uses_target_cache:
            raise SettingError(
                f"The drafter {drafter.name} writes to the target's cache, which the layout "
                "'aligned' would move; use the layout 'ragged' with it."
            )
        kv_window = getattr(drafter, "kv_window", None)
        if config.layout == "aligned" and kv_window is not None:
            raise SettingError(
                f"The layout 'aligned' and a kv_window of {kv_window} were given; that layout "
                "compares with published systems, whose draft models keep all KV, so use the "
                "layout 'ragged' with it."
            )
        tree_depth = choose_tree_depth(drafter, verify_length - 1, tree_depth)
    trace = None if config.trace is None else TraceConfig(level=config.trace)
    records_tokens = trace is not None and trace.has_tokens
    shape = EngineShape(
        batch_size=batch_size,
        max_length=kv.round_up_to_block(config.max_length),
        verify_length=verify_length,
        prefill_chunk=prefill.CHUNK,
        vocab_size=target.vocab_size,
        tree_depth=tree_depth,
        is_noise_shared=verifier.is_noise_shared,
        needs_draft_probs=verifier.needs_draft_probs or records_tokens,
        needs_greedy_probs=records_tokens,
        loops_run_on_host=loops_run_on_host(),
        chunks_per_call=prefill.chunks_per_call(target),
    )
    parts = RoundParts(
        target=packed_model(target),
        drafter=NoDrafter() if drafter is None else drafter.for_target(target),
        verifier=verifier,
        scheduler=scheduler,
        shape=shape,
        num_stop_tokens=MAX_STOP_TOKENS,
        layout=config.layout,
        logprobs=_logprobs(config, target),
        trace=trace,
    )
    if parts.longest_prompt < 1:
        raise does_not_fit(given, verify_length, config.max_length)
    state = jax.eval_shape(lambda: parts.drafter.init(parts.resident_shape))
    check_rows(parts.drafter.name, state, parts.resident_shape.batch_size)
    check_parts(parts, drafter)
    return parts


def _logprobs(config: EngineConfig, target: Model) -> LogprobsConfig | None:
    """Which log-probabilities are kept."""
    if config.max_logprobs is None:
        return None
    largest = target.vocab_size
    expected = f"from 0 to {largest}, the size of the vocabulary"
    num_top = whole_number(
        "max_logprobs", config.max_logprobs, least=0, most=largest, expected=expected
    )
    is_processed = config.logprobs_mode == "processed_logprobs"
    return LogprobsConfig(num_top=num_top, is_processed=is_processed)
