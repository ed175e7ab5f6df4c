"""The executor: the rows on the device, and the compiled programs that change them.

It has no queue and no clock. The caller decides which request goes into which row, when a chunk of
a prompt is prefilled and how many rounds run:

    executor = make_executor(target, drafter, batch_size=2)
    executor.admit_and_prefill(0, request, draft_length=4)
    executor.run(8)
    executor.fetch("tokens", "num_committed")

`Engine` makes these decisions for users; audits, benchmarks and tests call the executor directly,
as `engine.executor` or as one of their own. It is not thread-safe.

With a mesh, rows are numbered across the data shards: shard 0 has rows 0 to `rows_per_shard - 1`,
shard 1 the next ones. Everything here takes these numbers.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import pages as kv
from jaxspec.decode import invariants
from jaxspec.decode.buckets import (
    choose_windows,
    keeps_bits_at_every_width,
    may_skip_padding,
)
from jaxspec.decode.loop import DecodeLoop
from jaxspec.decode.parts import RoundParts, params_of
from jaxspec.decode.settings import (
    Exactness,
    check_exactness,
    check_num_nodes,
    home_of,
    warn_of_long_rows,
)
from jaxspec.decode.sharded import ShardedLoop, check_mesh
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.admission import make_admission
from jaxspec.engine.config import EngineConfig, EngineSettings, make_parts
from jaxspec.engine.memory import (
    MENTIONED_WINDOW,
    Memory,
    fit_rows,
    measure_memory,
    window_break_even,
)
from jaxspec.engine.watchdog import set_result
from jaxspec.errors import RequestError, SettingError, warn_once
from jaxspec.kernels.base import splittable, unpacked
from jaxspec.load.drafters import make_drafter
from jaxspec.load.models import as_model
from jaxspec.models.base import LanguageModel, Model
from jaxspec.models.decoder import without_tied_head
from jaxspec.models.kernel_probe import windows_of, with_working_kernels
from jaxspec.requests.requests import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime import compilation
from jaxspec.runtime.compilation import Compiled, OnProgram, Program
from jaxspec.runtime.environment import devices, devices_sentence, unused_accelerator
from jaxspec.runtime.kinds import are_arrays, first_mismatch, kinds_of
from jaxspec.types import DecodeState, EngineShape, Finish, PyTree

_log = logging.getLogger(__name__)

# The state after rounds, and a copy of it; see `Executor.run`.
Started: TypeAlias = concurrent.futures.Future[tuple[DecodeState, DecodeState]]


class Executor:
    """The state of a batch on the device, and the operations on it.

    Every program is compiled once. Each program takes the state as a donated argument, so keep no
    reference to `state` across calls.

    Args:
      parts: the parts of one data shard; `make_parts` makes them from settings.
      exactness: `ties` compiles rounds of several verify lengths, and `run` uses the narrowest that
        fits a draft length. So does `bitwise` if that changes no bit; see `decode.buckets`.
      is_adaptive: whether the draft length may change from round to round. Then rounds of more
        verify lengths and drafter variants are compiled where that changes no bit (or with `ties`),
        and the programs that pause the drafter and let it catch up are among those of `warm_up`.
      check_invariants: run round by round, with NaN wherever there is no committed KV, and check
        the state with `invariants.broken_invariants` after each round.
      mesh: devices to use, as in `Engine`; its data axis multiplies the rows.

    Raises:
      SettingError: the state does not fit into memory, or the mesh does not fit the parts.

    Attributes:
      parts: the parts of one shard.
      loop: the functions of `decode.loop` on these devices.
      mesh: a mesh with axes `data` and `model`, or None.
      shape: the shape of the whole batch, whose `batch_size` counts the rows of all shards.
      num_rows: number of rows of the state, in the batch or waiting to join it.
      num_shards: D, data shards.
      params: the parameters of target and drafter, on the devices where the programs expect them.
      home: where the state is: the sharding of its arrays, or None for wherever JAX puts it.
      memory: the bytes that weights and state take.
      verify_lengths: tokens scored per round, from the narrowest bucket to the widest.
      variants: the numbers that `run` takes as `variant`; see `Drafter.variants`. `(0,)` if there
        is no choice: 0 is then the variant that `choose_variant` returned.
      are_variants_exact: whether rounds of each keep the promise of `exactness`; otherwise the
        caller takes those out of `variants` that give other bits than the first.
      is_width_invariant: whether tokens get the same bits in each of these windows.
      is_resting_program_used: whether rounds that draft nothing run in a program without draft
        steps, of the same width as the others (`programs["rest"]`). It is compiled if the draft
        length is adaptive and there is only one width; the caller sets this once it knows that the
        program gives the same bits.
      runs_ahead: whether the engine starts rounds before it has read the result of the last ones.
      programs: compiled functions by name: `init`, `admit`, `prefill`, `run` and others. A caller
        may replace one by a wrapper, to watch its calls.
    """

    def __init__(
        self,
        parts: RoundParts,
        *,
        exactness: Exactness = "bitwise",
        is_adaptive: bool = False,
        check_invariants: bool = False,
        mesh: jax.sharding.Mesh | None = None,
    ):
        self.mesh = None if mesh is None else check_mesh(mesh)
        if check_invariants and mesh is not None:
            raise SettingError(
                "check_invariants was given with a mesh, and it reads the state of one device "
                "only; leave the mesh out to hunt the fault."
            )
        check_exactness(exactness)
        # Before anything is allocated or compiled. Several variants may need more.
        variant = parts.drafter.choose_variant(parts.shape)
        measure_memory(self._on_mesh(parts.with_variant(variant)))
        # A mesh may split what is summed; XLA then does the sum.
        keeps_bits = not parts.is_plain and mesh is None and keeps_bits_at_every_width(parts)
        if mesh is None and may_skip_padding(parts):
            parts = dataclasses.replace(parts, skips_padding=True)
        self.verify_lengths = choose_windows(
            parts, exactness=exactness, is_adaptive=is_adaptive, keeps_bits=keeps_bits
        )
        self.is_width_invariant = keeps_bits or len(self.verify_lengths) == 1
        # Programs that differ in draft steps only may well give the same bits.
        has_own_pass = mesh is None and not parts.is_plain and parts.drafter.score is None
        self.are_variants_exact = exactness == "ties" or keeps_bits
        may_be_exact = self.are_variants_exact or (has_own_pass and parts.verifier.is_coupled)
        self.variants = (0,)
        if is_adaptive and may_be_exact:
            self.variants = tuple(range(1 + len(parts.drafter.variants)))
        else:
            parts = parts.with_variant(variant)
        self.parts = parts
        self.loop = everywhere = self._on_mesh(parts)
        self.memory: Memory = measure_memory(everywhere)
        self.num_rows: int = everywhere.resident_shape.batch_size
        self.num_shards = self.num_rows // parts.resident_shape.batch_size
        self.shape: EngineShape = dataclasses.replace(
            parts.shape, batch_size=self.num_shards * parts.shape.batch_size
        )
        # A program is recompiled if an argument is committed to a device and was not before, so
        # parameters and state are committed from the start: to the device of the parameters, or to
        # their places on the mesh.
        self.params, self.home = everywhere.params, home_of(params_of(parts))
        if isinstance(everywhere, ShardedLoop):
            self.params, self.home = everywhere.place(self.params), everywhere.state_shardings
        elif self.home is not None:
            self.params = jax.device_put(self.params, self.home)
        self._state: DecodeState | None = None
        self._started: Started | None = None  # the newest rounds, until `_settle`
        self._is_checked = check_invariants
        self.runs_ahead = _is_accelerated(self.home) and not check_invariants
        self._poison = jax.jit(invariants.poison_uncommitted, donate_argnums=0)

        on_home: dict[str, Any] = {"out_shardings": self.home}
        updates = {"donate_argnums": 1, **on_home}
        self.programs: dict[str, Any] = {
            "init": self.program("empty state", everywhere.init, **on_home),
            "admit": self.program("admission", everywhere.admit, **updates),
            "prefill": self.program("prefill", everywhere.prefill, **updates),
        }
        self.is_resting_program_used = False
        if is_adaptive and len(self.verify_lengths) == 1 and has_own_pass:
            self.programs["rest"] = self.program(
                "round without drafts", DecodeLoop(parts.resting).run, **updates
            )
        for variant in self.variants:
            for length in self.verify_lengths:
                rounds = self._on_mesh(parts.with_variant(variant).at(length)).run
                self.programs.setdefault(
                    self._run_name(length, variant),
                    self.program("decode round", rounds, verify_length=length, **updates),
                )
        self.programs |= {
            "prefill_target": self.program(
                "target's prefill", everywhere.prefill_target, **updates
            ),
            "catch_up": self.program("catching up", everywhere.catch_up, **updates),
            "lag": self.program("lag", everywhere.lag),
        }
        if parts.logprobs is not None:
            self.programs["score"] = self.program(
                "prefill with log-probabilities", everywhere.score, **updates
            )
        self.programs["end_rows"] = self.program(
            "cancellation", _end_rows, donate_argnums=0, **on_home
        )
        shardings: Any = self.home
        if isinstance(everywhere, ShardedLoop):
            shardings = _without_kv(everywhere.state_shardings)
        self.programs["copy"] = self.program("copy of counts", _copy, out_shardings=shardings)
        is_used = {"score": False, "copy": self.runs_ahead}
        is_used |= dict.fromkeys(("prefill_target", "catch_up", "lag"), is_adaptive)
        self._expected = {n: each for n, each in self.programs.items() if is_used.get(n, True)}
        compilation.numbered(*self._expected.values())

    def program(
        self, what: str, function: Callable, *, verify_length: int | None = None, **options: Any
    ) -> Program:
        """A function compiled by `jax.jit` with these options, with a name for messages made from
        what it does, the models and the sizes of the batch."""
        models = self.parts.target.name
        if not self.parts.is_plain:
            models = f"{models} with {self.parts.drafter.name}"
        window = self.shape.verify_length if verify_length is None else verify_length
        sizes = f"batch size {self.shape.batch_size}, verify length {window}"
        return Program(jax.jit(function, **options), f"the {what} of {models}, {sizes}")

    def _on_mesh(self, parts: RoundParts) -> DecodeLoop | ShardedLoop:
        if self.mesh is None:
            return DecodeLoop(parts)
        return ShardedLoop(parts=parts, mesh=self.mesh)

    def _run_name(self, verify_length: int, variant: int) -> str:
        is_widest = verify_length == self.parts.shape.verify_length
        name = "run" if is_widest else f"run_{verify_length}"
        # Plain steps have no drafter.
        return name if variant == 0 or verify_length == 1 else f"{name}_variant_{variant}"

    @property
    def longest_prompt(self) -> int:
        """The most prompt tokens that leave room for one round."""
        return self.parts.longest_prompt

    # Rows and shards.

    @property
    def rows_per_shard(self) -> int:
        """The number of rows of one shard's state."""
        return self.num_rows // self.num_shards

    def shard_of(self, row: int) -> int:
        """The data shard that holds a row."""
        return row // self.rows_per_shard

    def free_rows(self, taken: Collection[int]) -> list[int]:
        """Rows that may be assigned now, given the taken ones: those of the shard with the fewest
        taken rows first. If the scheduler does not refill rows, a shard's rows become free when all
        of them are."""
        num_taken = collections.Counter(map(self.shard_of, taken))
        next_place, free = num_taken.copy(), []
        for row in range(self.num_rows):
            shard = self.shard_of(row)
            if row not in taken and (self.parts.scheduler.refills_rows or not num_taken[shard]):
                free.append((next_place[shard], row))
                next_place[shard] += 1
        return [row for _, row in sorted(free)]

    def prefill_calls(self, chunks: Iterable[tuple[int, int]]) -> Iterator[tuple[Any, Any]]:
        """The calls that prefill chunks `(row, start)`: rows within shards and starts, each
        `[D, R]`, with -1 after the last row of a shard."""
        of_shards: list[list[tuple[int, int]]] = [[] for _ in range(self.num_shards)]
        for row, start in chunks:
            shard, own = divmod(row, self.rows_per_shard)
            of_shards[shard].append((own, start))
        num_chunks = self.shape.chunks_per_call
        for first in range(0, max(map(len, of_shards)), num_chunks):
            call = np.full((2, self.num_shards, num_chunks), -1, np.int32)
            for shard, own in enumerate(of_shards):
                for place, chunk in enumerate(own[first : first + num_chunks]):
                    call[:, shard, place] = chunk
            yield self._per_shard(call[0]), self._per_shard(call[1])

    def _per_shard(self, values: np.ndarray) -> Any:
        """`[D, ...]` int32 in the form that programs take: without D if there is no mesh."""
        return values[0] if self.mesh is None else values

    # The state.

    @property
    def state(self) -> DecodeState:
        """The decode state on the device; it is made on first use, with every row empty."""
        self._settle()
        state = self.programs["init"]() if self._state is None else self._state
        self._state = state
        return state

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state, self._started = state, None

    def _settle(self) -> None:
        """Waits until rounds that were started have been given to the device, and takes their state
        over; if they failed, it stays the one before them."""
        if (started := self._started) is not None:
            concurrent.futures.wait([started])
            self._started = None
            if started.exception() is None:
                self._state = started.result()[0]

    @property
    def is_lost(self) -> bool:
        """Whether the state was donated to a call that failed, or weights were deleted."""
        self._settle()
        return _has_deleted(self._state) or _has_deleted(self.params)

    def check_weights(self) -> None:
        """Raises `RequestError` if weights were deleted, e.g. donated to a step of training."""
        if _has_deleted(self.params):
            raise RequestError(
                "The engine's weights were deleted, perhaps donated to a step of training "
                "(donate_argnums); give it weights with update_params first."
            )

    def reset(self) -> None:
        """Drops the state, so that every row is empty; no output depends on it."""
        self._state = self._started = None

    @property
    def is_idle(self) -> bool:
        """Whether the device has finished all its work."""
        return cast(Any, self.state.finish).is_ready()  # not in the declared type

    def wait(self) -> None:
        """Waits until the device has finished all its work."""
        jax.block_until_ready(self.state.finish)

    def fetch(self, *fields: str, state: DecodeState | None = None) -> Any:
        """A copy of the state, or of one that `run` has copied, on the host: of everything but
        caches and drafter, or of the named fields of `DecodeState` only."""
        state = self.state if state is None else state
        if not fields:
            return jax.device_get(_without_kv(state))
        others = {field.name: None for field in dataclasses.fields(DecodeState)}
        wanted = {name: getattr(state, name) for name in fields}
        return jax.device_get(state.replace(**{**others, **wanted}))

    # Requests and prompts.

    def admit(self, row: int, request: Request, *, draft_length: int, arrival: int = 0) -> None:
        """Puts a request into a row; `prefill` must then prefill its prompt.

        Args:
          row: the row; its old content is not read again.
          request: a request whose prompt has at most `longest_prompt` tokens.
          draft_length: tokens drafted per round; 0 decodes plainly.
          arrival: order among requests.
        """
        admission = make_admission(request, self.parts, draft_length=draft_length, arrival=arrival)
        self.state = self.programs["admit"](self.params, self.state, np.int32(row), admission)

    def prefill(
        self,
        chunks: Iterable[tuple[int, int]],
        *,
        target_only: bool = False,
        is_scored: bool = False,
    ) -> None:
        """Prefills chunks of prompts, with as few calls as these fit into.

        Args:
          chunks: a row and the index of the chunk's first token, for each chunk; those of a row in
            order and without a gap.
          target_only: whether to leave out the drafter, which then lags; see `catch_up`.
          is_scored: whether to record log-probabilities of the prompts' tokens, from the first on;
            the drafter is left out.
        """
        name = "prefill_target" if target_only else "prefill"
        prefill = self.programs["score" if is_scored else name]
        for rows, starts in self.prefill_calls(chunks):
            self.state = prefill(self.params, self.state, rows, starts)

    def admit_and_prefill(
        self, row: int, request: Request, *, draft_length: int, arrival: int = 0
    ) -> None:
        """Puts a request into a row and prefills its whole prompt, so that the row is ready for
        `run`."""
        self.admit(row, request, draft_length=draft_length, arrival=arrival)
        starts = range(0, len(request.prompt_token_ids) - 1, self.shape.prefill_chunk)
        self.prefill((row, start) for start in starts)

    # Rounds.

    def set_draft_limits(self, limits: Sequence[int] | np.ndarray) -> None:
        """Sets the draft length of every row, `[B]`, for the next rounds."""
        # Put on the state's device, otherwise the round would be compiled again.
        place = self.state.draft_limit.sharding
        limits = np.asarray(limits, np.int32)
        self.state = self.state.replace(draft_limit=jax.device_put(limits, place))

    def set_least_live(self, num_tokens: int) -> None:
        """Makes the next rounds compute at least `num_tokens` tokens of every running row, drafted
        or not, so that their times can be compared; 0 undoes this. It has no effect on rounds that
        compute whole windows anyway."""
        place = self.state.least_live.sharding
        least = np.full((self.num_rows,), num_tokens, np.int32)
        self.state = self.state.replace(least_live=jax.device_put(least, place))

    def verify_length_for(self, draft_length: int) -> int:
        """The narrowest verify length for drafts of this length."""
        return min(length for length in self.verify_lengths if length > draft_length)

    def run(
        self,
        num_rounds: int,
        *,
        draft_length: int | None = None,
        min_running: int | Sequence[int] | np.ndarray = 1,
        variant: int = 0,
        in_background: bool = False,
    ) -> Started | None:
        """Runs rounds. A shard stops early when fewer than `min_running` of its rows are running.

        Args:
          num_rounds: the most rounds to run.
          draft_length: the longest of any row; with several verify lengths, the narrowest that fits
            it is used. By default the widest is used.
          min_running: one number for every shard, or one per shard.
          variant: the drafter's variant, one of `variants`.
          in_background: whether to return at once, and run them on a thread, after those that were
            started before. All other methods that read or change the state wait until the device
            has been given them, which takes as long as they run where the host controls their loop.

        Returns:
          with `in_background`, the state after these rounds, which is the executor's, and a copy of
          it without caches and drafter, which outlives later rounds; both on the device.
        """
        if draft_length is None:
            length = self.parts.shape.verify_length
        else:
            length = self.verify_length_for(draft_length)
        least = np.full((self.num_shards,), min_running, np.int32)
        rests = self.is_resting_program_used and draft_length == 0
        program = self.programs["rest" if rests else self._run_name(length, variant)]
        if self._is_checked:
            self._run_checked(program, num_rounds, int(least[0]), length)
            return None
        arguments = np.int32(num_rounds), self._per_shard(least)
        if in_background:
            params = self.params
            return self._start(lambda state: program(params, state, *arguments))
        self.state = program(self.params, self.state, *arguments)
        return None

    def _start(self, rounds: Callable[[DecodeState], DecodeState]) -> Started:
        before = self._started
        first: Any = self.state if before is None else None

        def run() -> tuple[DecodeState, DecodeState]:
            state = rounds(first if before is None else before.result()[0])
            return state, self.programs["copy"](state)

        self._started = started = concurrent.futures.Future()
        threading.Thread(target=set_result, args=(started, run), daemon=True).start()
        return started

    def _run_checked(
        self, program: Any, num_rounds: int, min_running: int, verify_length: int
    ) -> None:
        """`run` with a check after every round.

        Raises:
          AssertionError: an invariant is broken.
        """
        for _ in range(num_rounds):
            if np.sum(np.asarray(self.state.is_running)) < min_running:
                break
            self.poison()
            before = invariants.snapshot(self.state)
            self.state = program(self.params, self.state, np.int32(1), np.int32(min_running))
            broken = invariants.broken_invariants(
                before,
                invariants.snapshot(self.state),
                verify_length=verify_length,
                regroups=self.parts.scheduler.regroups,
            )
            if broken:
                raise AssertionError(" ".join(broken))

    def end_rows(self, rows: Collection[int], finish: Finish) -> None:
        """Ends those of the given rows that have not ended yet."""
        is_ended = np.zeros((self.num_rows,), bool)
        is_ended[list(rows)] = True
        self.state = self.programs["end_rows"](self.state, is_ended, np.int32(finish))

    # The drafter.

    def lags(self) -> np.ndarray:
        """`[B]` int32, how many committed tokens before the newest one the drafter has not seen."""
        return jax.device_get(self.programs["lag"](self.state))

    def catch_up(self, lags: Mapping[int, int]) -> int:
        """Lets the drafter catch up on some rows; returns the number of chunks that it read.

        Args:
          lags: the number of tokens that it has not seen, by row.
        """
        chunk = self.shape.prefill_chunk
        chunks = [(row, at) for row, lag in lags.items() for at in range(0, lag, chunk)]
        for rows, _ in self.prefill_calls(chunks):
            self.state = self.programs["catch_up"](self.params, self.state, rows)
        return len(chunks)

    # Weights and programs.

    def update_params(self, *, target: PyTree | None = None, drafter: PyTree | None = None) -> None:
        """Replaces weights by others of the same structure, shapes and dtypes, plain arrays or
        packed for the kernels (`LanguageModel.pack`); nothing is recompiled. KV of the old weights
        stays in the state.

        Raises:
          SettingError: a pytree of another structure, shape or dtype, arrays that were deleted, or
            a head that is not the embedding's where the config says that it is tied.
        """
        if drafter is not None and self.parts.is_plain:
            raise SettingError(
                "Draft weights were given to an engine without a drafter; leave them out."
            )
        parts, own = dict(self.params), self.parts.drafter
        if target is not None:
            parts["target"] = _like(parts["target"], target, self.parts.target, "target")
        derived = parts["drafter"] if drafter is None else drafter
        derived = own.derive_params(derived, parts["target"])
        if derived is not parts["drafter"]:
            parts["drafter"] = _like(parts["drafter"], derived, own, "drafter")
        self.params = parts

    @property
    def target_params(self) -> PyTree:
        """The target's parameters."""
        return self.params["target"]

    @property
    def target(self) -> Model:
        """The target with its present weights; as it was given if it is not a dataclass."""
        if not dataclasses.is_dataclass(self.parts.target):
            return self.parts.target
        target: Any = self.parts.target
        return dataclasses.replace(target, params=self.target_params)

    def warm_up(
        self, on_program: OnProgram | None = None, *, scoring: bool = False
    ) -> tuple[Compiled, ...]:
        """Compiles every program ahead of its first call. Nothing runs and no state is made.

        Args:
          on_program: called before each program is compiled, with an object that has `number`,
            `num_programs` and a name as its `str`.
          scoring: whether to compile what `prompt_logprobs` need, too.

        Returns:
          for each program, its name, the seconds that it took, and whether the persistent cache had
          it.
        """
        state = compilation.shapes_at(self.eval_state(), self.home)
        of_shards, number = self._per_shard(np.zeros((self.num_shards,), np.int32)), np.int32(0)
        chunks, _ = next(self.prefill_calls([(0, 0)]))
        request = Request(request_id="0", prompt_token_ids=(0,), params=SamplingParams(seed=0))
        admission = make_admission(request, self.parts, draft_length=0)
        arguments: dict[str, tuple[Any, ...]] = {
            "init": (),
            "admit": (self.params, state, number, admission),
            "prefill": (self.params, state, chunks, chunks),
            "prefill_target": (self.params, state, chunks, chunks),
            "score": (self.params, state, chunks, chunks),
            "catch_up": (self.params, state, chunks),
            "lag": (state,),
            "end_rows": (state, np.zeros((self.num_rows,), bool), number),
            "copy": (state,),
        }
        run = (self.params, state, number, of_shards)
        expected = dict(self._expected)
        if scoring and "score" in self.programs:
            names = ("score",) if self.parts.is_plain else ("score", "catch_up", "lag")
            expected |= {name: self.programs[name] for name in names}
            compilation.numbered(*expected.values())
        return compilation.warm_up(
            {program: arguments.get(name, run) for name, program in expected.items()},
            on_program,
        )

    def lower_run(self) -> jax.stages.Lowered:
        """The lowered program of rounds at the widest verify length, for reading its text, or for
        compiling it and reading its memory use."""
        min_running = self._per_shard(np.ones((self.num_shards,), np.int32))
        run = self.programs["run"]
        return run.lower(self.params, self.eval_state(), np.int32(1), min_running)

    def compile_counts(self) -> dict[str, int]:
        """How often each program has been compiled, by name."""
        return {name: program.num_compilations() for name, program in self.programs.items()}

    def eval_state(self) -> DecodeState:
        """Shapes and dtypes of the state; nothing is made."""
        return jax.eval_shape(self.loop.init)

    # For checks.

    def committed_kv(self, row: int) -> list[np.ndarray]:
        """k and v of each layer at the row's committed slots, `[num_slots, K, H]`, as unsigned
        integers: all tokens but the newest, whose KV the next round writes."""
        num_slots = max(int(self.state.num_committed[row]) - 1, 0)
        values = _row_kv(
            self.state.cache, np.int32(row), np.int32(self.shard_of(row)), self.num_shards
        )
        return [
            np.ascontiguousarray(np.asarray(each)[:num_slots]).view(f"u{each.dtype.itemsize}")
            for each in values
        ]

    def poison(self) -> None:
        """Puts NaN wherever the target's cache holds no committed KV, so that wrong reads can be
        seen. Works on a single device only."""
        self.state = self._poison(self.state)


def make_executor(
    target: Model | str,
    drafter: Drafter | str | Mapping[str, Any] | None = None,
    **settings: Unpack[EngineSettings],
) -> Executor:
    """The executor of an engine with these settings; see `executor_of`."""
    target = as_model(target)
    return executor_of(target, make_drafter(drafter, target), EngineConfig(**settings))


def executor_of(target: Model, drafter: Drafter | None, config: EngineConfig) -> Executor:
    """The executor of an engine.

    Raises:
      SettingError: settings that contradict each other, or do not suit the models.
      ModelError: the drafter cannot draft for the target.
    """
    draft_length = config.draft_length
    if isinstance(draft_length, int) and drafter is not None and config.verify_length is None:
        check_num_nodes(drafter, draft_length)
    parts = working_parts(target, drafter, config)
    warn_of_long_rows(target, drafter, config.max_length)
    is_adaptive, break_even = draft_length == "auto", window_break_even(parts)
    if is_adaptive and break_even is not None and config.layout == "ragged":
        assert isinstance(parts.drafter, DraftModel), "others have no break-even"
        drafter = parts.drafter.trying_window(MENTIONED_WINDOW)
        parts = dataclasses.replace(parts, drafter=drafter)
    executor = Executor(
        parts,
        exactness=config.exactness,
        is_adaptive=is_adaptive and drafter is not None,
        check_invariants=config.check_invariants,
        mesh=config.mesh,
    )
    _log.info(executor.memory.sentence)
    if break_even is not None:
        _log.info(
            "with a kv_window of %d for the draft model, rounds of full rows would read %.2f times "
            'the bytes; draft_length="auto" tries such a window, and `jaxspec compare` measures '
            "which part of the tokens per round is left",
            MENTIONED_WINDOW,
            break_even,
        )
    num_used = 1 if config.mesh is None else config.mesh.devices.size
    if (unused := unused_accelerator()) is not None:
        warn_once(unused)
    if jax.local_device_count() > num_used:
        _log.warning("this engine is %s", devices_sentence(devices(num_used)))
    return executor


def working_parts(target: Model, drafter: Drafter | None, config: EngineConfig) -> RoundParts:
    """The parts of one data shard, with kernels that were tried on this device, and with as many
    rows as the budget allows."""
    parts = make_parts(target, drafter, config)
    if getattr(target, "platform", "cpu") != "cpu":
        target, drafter = _with_working_kernels(target, drafter, parts.shape)
        parts = make_parts(target, drafter, config)
    if config.budget_bytes is None:
        return parts
    return fit_rows(parts, config.budget_bytes, mesh=config.mesh)


def _with_working_kernels(
    target: Model, drafter: Drafter | None, shape: EngineShape
) -> tuple[Model, Drafter | None]:
    """The models with kernels that were tried on this device; see `models.kernel_probe`."""
    if isinstance(target, LanguageModel):
        target = with_working_kernels(target, windows_of(shape))
    if isinstance(drafter, DraftModel) and isinstance(drafter.model, LanguageModel):
        # A chain's draft steps read one token, the first of a round two.
        length = 2 if shape.tree_depth == 0 else None
        model = with_working_kernels(drafter.model, windows_of(shape, verify_length=length))
        drafter = drafter.with_fields(model=model)
    return target, drafter


def _is_accelerated(home: Any) -> bool:
    """Whether any of these shardings is of other devices than CPUs."""
    shardings = jax.tree.leaves(home)
    return any(device.platform != "cpu" for each in shardings for device in each.device_set)


def _without_kv(state: DecodeState) -> DecodeState:
    """The state without what it holds of KV and of the drafter."""
    return state.replace(cache=(), drafter=())


def _copy(state: DecodeState) -> DecodeState:
    """A copy of the state that outlives it, without caches and drafter."""
    return jax.tree.map(jnp.copy, _without_kv(state))


def _end_rows(state: DecodeState, is_ended: jax.Array, finish: jax.Array) -> DecodeState:
    """State in which those of the rows `is_ended` `[B]` bool that have not ended yet end with this
    `Finish`."""
    is_live = state.is_running | (state.finish == Finish.PREFILLING)
    return state.replace(finish=jnp.where(is_ended & is_live, finish, state.finish))


@functools.partial(jax.jit, static_argnames="num_shards")
def _row_kv(
    cache: kv.KVCache, row: jax.Array, shard: jax.Array, num_shards: int
) -> list[jax.Array]:
    """k and v of each layer `[S, K, H]` of one row, by position."""
    positions = jnp.arange(cache.capacity, dtype=jnp.int32)[None]
    table = cache.table[row[None]]
    if num_shards > 1:  # page numbers are local to a shard
        first = shard * (cache.layers[0].k.shape[0] // num_shards)
        if isinstance(table, kv.AlignedTable):
            table = table.replace(pages=table.pages + first)
        else:
            table = table + first
    return [
        values[0]
        for layer in cache.layers
        for values in kv.read_slots(layer, table, positions, cache.dtype)
    ]


def _has_deleted(tree: PyTree) -> bool:
    """Whether any array of a pytree was deleted."""
    leaves = jax.tree.leaves(tree)
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


def _like(old: PyTree, given: PyTree, owner: Any, name: str) -> PyTree:
    """`given`, put on the devices of `old` and packed like it, if it has the same structure, shapes
    and dtypes; a tied model's head may be given too."""
    if not are_arrays(given):
        raise SettingError(
            f"The new weights of the {name} are not a pytree of arrays; give one like the engine's."
        )
    if _has_deleted(given):
        raise SettingError(
            f"The new weights of the {name} were deleted already, perhaps donated to a step of "
            "training (donate_argnums); give the arrays that it returned."
        )
    model = getattr(owner, "model", owner)  # a draft model's own
    if isinstance(model, LanguageModel) and isinstance(given, Mapping):
        given = without_tied_head(model.config, given, name=f"the {name} {model.name}")
    before, after = jax.eval_shape(unpacked, old), jax.eval_shape(unpacked, given)
    found, expected = kinds_of(after), kinds_of(before)
    if jax.tree.structure(before) != jax.tree.structure(after):
        at = "the same arrays in other containers"
        if not_in_both := [p for p in [*expected, *found] if not (p in found and p in expected)]:
            path = not_in_both[0]
            new, own = found.get(path, "nothing"), expected.get(path, "nothing")
            at = f"{new} at {path} instead of {own}"
        raise SettingError(
            f"The new weights of the {name} have another structure than those of the engine: {at}; "
            "give a pytree like them."
        )
    mismatch = first_mismatch(found, expected)
    if mismatch is not None:
        path, new, own = mismatch
        raise SettingError(
            f"The new weights of the {name} have {new} at {path}, and the engine was compiled for "
            f"{own}; convert them to that."
        )
    structure = jax.tree.structure(old)
    given = unpacked(given) if structure == jax.tree.structure(before) else owner.pack(given)
    if structure == jax.tree.structure(jax.eval_shape(splittable, old)):
        given = splittable(given)
    return jax.tree.map(lambda leaf, new: jax.device_put(new, leaf.sharding), old, given)
