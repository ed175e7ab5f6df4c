"""Prefill, insert, generate, free: the functions with which JAX serving stacks drive an engine.

`jaxspec.Engine` owns its requests and decides when to step. A serving stack does both itself; it
needs compiled functions, and a state that it passes from call to call:

    prefilled = engine.prefill(prompt, params)          one row, on any thread, ahead of time
    state = engine.insert(prefilled, state, row)        into the batch, while other rows run
    state, result = engine.generate(state)              one round for all rows
    state = engine.free(state, row)                     at any time

With a draft length of 3, a step may return this for three rows. In row 0 two drafts were accepted,
in row 1 none, and row 2 has ended (or is empty):

    row    tokens          num_new   done
    0        7  3  9 -1     3         no
    1       12 -1 -1 -1     1         no
    2       -1 -1 -1 -1     0         yes

Prefill emits no token. It stops before the prompt's last token, which the first round scores, so a
request's first tokens come from the first `generate` after its `insert`.

**Fewer new tokens do not mean that a request has ended.** Some stacks expect a fixed number of
tokens per slot, each with a `valid` flag. JetStream's orchestrator, for example, treats an invalid
token as the end of the request, so an adapter that turned `num_new` into such flags would end
requests at their first rejected draft. Buffer tokens instead: append `tokens[row, :num_new[row]]`
to a queue per row after each step, and return as many columns as the shortest queue of a running
row holds, all of them valid. A running row emits at least one token per round, so there is at least
one column. When a row is `done`, empty its queue first; only then send the invalid column that ends
the request, and reuse the row. A stack that needs a constant width takes one column per call, and
steps the engine only when the queue of a running row is empty.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.decode.loop import DecodeLoop
from jaxspec.decode.settings import (
    LONGER_DRAFTS,
    check_draft_length,
    default_draft_length,
    warn_of_long_rows,
    warn_of_unused,
)
from jaxspec.decode.sharded import ShardedLoop, first_shard, on_first_shard
from jaxspec.decode.state import Admission, form_of, mark_prefilled, take_over_row
from jaxspec.drafters.base import Drafter
from jaxspec.engine.admission import make_admission
from jaxspec.engine.config import EngineConfig, ServingSettings
from jaxspec.engine.executor import Executor, working_parts
from jaxspec.errors import SettingError
from jaxspec.load.drafters import make_drafter
from jaxspec.load.models import as_model
from jaxspec.models.base import Model
from jaxspec.requests.requests import Params, Prompt, Request, make_request
from jaxspec.requests.sampling_params import SamplingParams, as_sampling_params
from jaxspec.runtime import compilation
from jaxspec.runtime.compilation import Compiled, OnProgram
from jaxspec.runtime.values import check_kind, whole_number
from jaxspec.types import DecodeState, EngineShape, Finish, PyTree

ALONE = np.int32(0)  # the only row of a one-row state
ONE = np.int32(1)


class Prefilled(struct.PyTreeNode, kw_only=True):
    """A prefilled prompt, ready for a row of any engine of this shape.

    It is a pytree, so it can be moved to other devices, kept, and inserted more than once.

    Attributes:
      admission: the row's settings and tokens.
      cache: the target's KV of the prompt, in a cache of one row.
      drafter: the drafter's state for one row.
      request: static; its `params` hold the seed of a sampled request.
      shape: static, the shape of the engine, with one row.
      num_updates: static, how often `update_params` had replaced the engine's weights.
    """

    admission: Admission
    cache: PyTree
    drafter: PyTree
    request: Request = struct.field(pytree_node=False)
    shape: EngineShape = struct.field(pytree_node=False)
    num_updates: int = struct.field(pytree_node=False, default=0)


class ServingState(DecodeState, kw_only=True):
    """The rows of a batch, and the number of the weights that wrote their KV.

    Attributes:
      num_updates: static, how often `update_params` had replaced the engine's weights.
    """

    num_updates: int = struct.field(pytree_node=False)

    @property
    def rows(self) -> DecodeState:
        """The rows without the number, as programs take them."""
        return DecodeState(**{name: getattr(self, name) for name in DecodeState.__annotations__})


class StepResult(struct.PyTreeNode, kw_only=True):
    """What one round did, row by row.

    Attributes:
      tokens: `[B, N + 1]` int32, the new tokens, including a final stop token; -1 after the first
        `num_new`.
      num_new: `[B]` int32, at least 1 for rows that were running and whose logits are finite, 0 for
        the others.
      done: `[B]` bool, rows that are not running after the round, including empty ones.
      finish: `[B]` int32, the reason, as `types.Finish`.
      num_drafted: `[B]` int32, tokens drafted in this round.
      num_accepted: `[B]` int32, how many of them are among the new tokens. `DecodeState.counts` has
        a row's totals since it was inserted; see `Acceptance.of_row`.
    """

    tokens: jax.Array
    num_new: jax.Array
    done: jax.Array
    finish: jax.Array
    num_drafted: jax.Array
    num_accepted: jax.Array


class ServingEngine:
    """Compiled functions over a `DecodeState` that the caller holds.

    With a `coupled` verifier a request's tokens are those of `jaxspec.Engine` with the same
    settings, bit for bit, whatever the other rows hold and whenever the request was inserted. Every
    function is compiled once. `insert`, `generate` and `free` donate the state they are given, so
    use the one they return. `prefill` touches no state and may run on another thread during a
    round.

    To prefill on another device, make a second engine with its parameters on that device. A
    `Prefilled` of the same shape fits this engine too, and is moved when it is inserted.

    With a `mesh`, rows are shared out over its data shards as in `Engine`. Prompts are prefilled by
    the devices of the first shard, and an inserted one is copied to the shard that has the row.

    Args:
      target: the model to decode with.
      drafter: what proposes tokens; None decodes plainly, one token per step.
      draft_length: tokens proposed per round, 1 to `verify_length - 1`; default the drafter's own
        number of nodes, or 4.
      settings: `verifier`, `verify_length`, `batch_size`, `max_length`, `budget_bytes` and `mesh`,
        as in `EngineConfig`. Each `Prefilled` has `max_length` slots, which the budget does not
        count.

    Attributes:
      num_updates: how often `update_params` has replaced weights.

    Raises:
      SettingError: a setting out of range.
      ModelError: the drafter cannot draft for the target.

    Example:
      >>> import jax, jaxspec
      >>> from jaxspec.serving import ServingEngine
      >>> engine = ServingEngine(jaxspec.load_model("demo-target"), jaxspec.NGram(), batch_size=2)
      >>> prefilled = engine.prefill("def main():", jaxspec.SamplingParams(max_tokens=24))
      >>> state = engine.insert(prefilled, engine.init_decode_state(), row=1)
      >>> token_ids, is_done = [], False
      >>> while not is_done:
      ...     state, result = engine.generate(state)
      ...     new = jax.device_get(result)
      ...     token_ids += new.tokens[1, : new.num_new[1]].tolist()
      ...     is_done = new.done[1]
      >>> state = engine.free(state, row=1)
      >>> len(token_ids)
      24
    """

    def __init__(
        self,
        target: Model | str,
        drafter: Drafter | str | Mapping[str, Any] | None = None,
        *,
        draft_length: int | None = None,
        **settings: Unpack[ServingSettings],
    ):
        # `prefill_chunk` was a setting, and `EngineConfig` says what to do.
        for name in settings.keys() - {*ServingSettings.__annotations__, "prefill_chunk"}:
            raise TypeError(f"ServingEngine got an unexpected keyword argument {name!r}")
        if draft_length is not None:
            draft_length = whole_number("draft_length", draft_length)
        config = EngineConfig(scheduler="static", draft_length=draft_length, **settings)
        target = as_model(target)
        self.drafter = drafter = make_drafter(drafter, target)
        parts = working_parts(target, drafter, config)
        self.target, self.num_updates = parts.target, 0
        warn_of_long_rows(target, drafter, config.max_length)
        warn_of_unused(drafter, draft_length=draft_length)
        self.draft_length = 0
        if drafter is not None:
            self.draft_length = draft_length or default_draft_length(drafter)
        # Prompts are prefilled by the same functions, in a state of one row.
        one_row = dataclasses.replace(parts.shape, batch_size=1)
        self._batch = Executor(parts, mesh=config.mesh)
        self._row = Executor(
            dataclasses.replace(parts, shape=one_row),
            mesh=None if config.mesh is None else first_shard(config.mesh),
        )
        self.shape = self._batch.shape
        self._share_params()
        home = with_result = self._batch.home
        self._places = (home, home, home)  # of what is inserted
        if isinstance(self._batch.loop, ShardedLoop):
            everywhere = NamedSharding(self._batch.loop.mesh, PartitionSpec())
            row = cast(DecodeState, self._row.home)
            self._places = (everywhere, *self._batch.loop.place_of_row(row.cache, row.drafter))
            with_result = (home, None)
        program = self._batch.program
        self.programs: dict[str, Any] = {
            "init": self._batch.programs["init"],
            "init_row": self._row.programs["init"],
            "admit_row": self._row.programs["admit"],
            "prefill": self._row.programs["prefill"],
            "insert": program("insertion", self._insert_row, donate_argnums=1, out_shardings=home),
            "generate": program(
                "decode round", self._step, donate_argnums=1, out_shardings=with_result
            ),
            "free": program("freeing of a row", _free_row, donate_argnums=0, out_shardings=home),
        }
        compilation.numbered(*self.programs.values())
        row = self._row.eval_state()
        self._form = form_of((row.cache, row.drafter))

    @property
    def longest_prompt(self) -> int:
        """The most prompt tokens that leave room for one round."""
        return self._batch.longest_prompt

    def warm_up(self, on_program: OnProgram | None = None) -> tuple[Compiled, ...]:
        """Compiles every function ahead of the first request; see `Executor.warm_up`. Can be called
        on any thread."""
        number = np.int32(0)
        admission = make_admission(
            self._make_request([0], SamplingParams(seed=0)), self._batch.parts, draft_length=0
        )
        state = compilation.shapes_at(self._batch.eval_state(), self._batch.home)
        row = compilation.shapes_at(self._row.eval_state(), self._row.home)
        # `insert` puts what was prefilled on the devices that hold the state.
        inserted = jax.eval_shape(lambda: (admission, row.cache, row.drafter))
        placed = map(compilation.shapes_at, inserted, self._places)
        weights = self._row.params
        arguments = {
            "init": (),
            "init_row": (),
            "admit_row": (weights, row, ALONE, admission),
            "prefill": (weights, row, *next(self._row.prefill_calls([(0, 0)]))),
            "insert": (self.params, state, number, *placed),
            "generate": (self.params, state, ONE),
            "free": (state, number),
        }
        programs = {self.programs[name]: each for name, each in arguments.items()}
        return compilation.warm_up(programs, on_program)

    def update_params(self, *, target: PyTree | None = None, draft: PyTree | None = None) -> None:
        """Replaces the weights of the target, the draft model or both, as `Engine.update_params`
        does; nothing is recompiled. States and prompts of older weights are refused from now on. An
        engine that prefills for another must be given as many updates.

        Raises:
          SettingError: a pytree of another structure, shape or dtype, or arrays that were deleted.
        """
        self._batch.update_params(target=target, drafter=draft)
        # In this order: a prompt that is being prefilled meanwhile counts as of the old weights.
        self._share_params()
        self.num_updates += 1
        self.target = self._batch.target

    def _share_params(self) -> None:
        """Gives the batch's weights to the state of one row."""
        params = of_row = self._batch.params
        if isinstance(self._row.loop, ShardedLoop):
            of_row = on_first_shard(params, self._row.loop.param_shardings)
        self.params, self._row.params = params, of_row  # another thread may be prefilling

    def init_decode_state(self) -> ServingState:
        """A state in which every row of the batch is empty."""
        return self._numbered(self.programs["init"]())

    def _numbered(self, rows: DecodeState) -> ServingState:
        fields = {name: getattr(rows, name) for name in DecodeState.__annotations__}
        return ServingState(**fields, num_updates=self.num_updates)

    def prefill(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        draft_length: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prefilled:
        """The prompt's KV, for target and drafter, with the row's settings.

        A program call prefills a few chunks of the prompt, and rounds of a batch on the same device
        run between calls. Returns before the device has finished.

        Args:
          prompt: token ids, text or chat messages.
          params: default `SamplingParams()`. A sampled request without a seed gets one, which is in
            `Prefilled.request`.
          draft_length: replaces the engine's, up to `verify_length - 1`; 0 decodes plainly in the
            same program, with the same tokens.
          chat_template: Jinja template for messages instead of the tokenizer's own.
          chat_template_kwargs: further variables of the template.

        Raises:
          PromptError: the prompt is empty, too long or malformed.
          SettingError: a parameter out of range, or one that this engine does not support: stop
            strings, `n`, log-probabilities.
        """
        number, weights = self.num_updates, self._row.params
        params = as_sampling_params(params)
        _refuse_host_settings(params)
        request = self._make_request(prompt, params, chat_template, chat_template_kwargs)
        if draft_length is not None:
            draft_length = whole_number("draft_length", draft_length)
        warn_of_unused(self.drafter, draft_length=draft_length or None)
        if draft_length is None or self.drafter is None:
            draft_length = self.draft_length
        elif draft_length != 0:
            check_draft_length(draft_length, self.shape.verify_length, advice=LONGER_DRAFTS)
        admission = make_admission(request, self._batch.parts, draft_length=draft_length)
        programs = self.programs
        state = programs["admit_row"](weights, programs["init_row"](), ALONE, admission)
        first = range(0, len(request.prompt_token_ids) - 1, self.shape.prefill_chunk)
        for rows, starts in self._row.prefill_calls((0, start) for start in first):
            state = programs["prefill"](weights, state, rows, starts)
        return Prefilled(
            admission=admission,
            cache=state.cache,
            drafter=state.drafter,
            request=request,
            shape=self._row.shape,
            num_updates=number,
        )

    def insert(self, prefilled: Prefilled, state: ServingState, row: int) -> ServingState:
        """`state` (donated) with the prompt in `row`, to be decoded from the next round on.

        Copies the live blocks of its KV on the device. A previous request in `row` need not be
        cleared, because nothing of it is read.

        Raises:
          SettingError: there is no such row, an engine with another shape prefilled the prompt, the
            prompt or the state is of older weights, or the state was donated before.
        """
        row = self._check_row(row)
        check_kind("prefilled", prefilled, Prefilled, "what prefill returned")
        rows = self._rows(state)
        self._check_number(prefilled, "prompt", "prefill it again")
        parts = (prefilled.admission, prefilled.cache, prefilled.drafter)
        if prefilled.shape != self._row.shape or form_of(parts[1:]) != self._form:
            raise SettingError(
                "A prompt was inserted that an engine with another model, drafter, verifier, "
                f"verify_length or max_length has prefilled ({prefilled.shape}, not "
                f"{self._row.shape}); prefill it with an engine of these settings."
            )
        if self._batch.home is not None:
            parts = jax.device_put(parts, self._places)  # no copy if it is there already
        rows = self.programs["insert"](self.params, rows, np.int32(row), *parts)
        return self._numbered(rows)

    def generate(self, state: ServingState) -> tuple[ServingState, StepResult]:
        """`state` (donated) after one round, and what the round did. Does not wait for the device:
        fetch the result with `jax.device_get`. If no row is running, the target is not called.

        Raises:
          SettingError: this is not a state, it is of older weights, or it was donated before.
        """
        rows, result = self.programs["generate"](self.params, self._rows(state), ONE)
        return self._numbered(rows), result

    def free(self, state: ServingState, row: int) -> ServingState:
        """`state` (donated) with `row` empty; a request that is running there is cancelled. A row
        that has ended need not be freed before the next `insert`.

        Raises:
          SettingError: there is no such row, the state is of older weights, or it was donated
            before.
        """
        row = self._check_row(row)
        return self._numbered(self.programs["free"](self._rows(state), np.int32(row)))

    def _rows(self, state: ServingState) -> DecodeState:
        """The rows of a state, as programs take them.

        Raises:
          SettingError: it was written by older weights, or a call has taken over its arrays;
            within a caller's own `jit` JAX keeps account of that.
        """
        check_kind("state", state, ServingState, "a state of this engine")
        leaves = [leaf for leaf in jax.tree.leaves(state) if not isinstance(leaf, Tracer)]
        if any(leaf.is_deleted() for leaf in leaves):
            raise SettingError(
                "A state was given that an earlier call of insert, generate or free has taken over "
                "(donated); use the state that this call returned."
            )
        self._check_number(state, "state", "begin another with init_decode_state()")
        return state.rows

    def _check_number(self, given: Prefilled | ServingState, what: str, advice: str) -> None:
        if given.num_updates != self.num_updates:
            raise SettingError(
                f"A {what} was given whose KV is that of weights number {given.num_updates}, and "
                f"the engine has number {self.num_updates} (update_params); {advice}."
            )

    def _make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Request:
        """The request of a prompt, with a seed if it is sampled."""
        return make_request(
            prompt,
            params,
            self.target,
            longest=self.longest_prompt,
            request_id="0",
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            name="The prompt",
        )

    def _check_row(self, row: int) -> int:
        row = whole_number("row", row)
        if not 0 <= row < self.shape.batch_size:
            raise SettingError(
                f"Row {row} was given, and the engine has {self.shape.batch_size}; name one from 0 "
                f"to {self.shape.batch_size - 1}."
            )
        return row

    def _insert_row(
        self,
        params: PyTree,
        state: DecodeState,
        row: jax.Array,
        admission: Admission,
        cache: PyTree,
        drafter: PyTree,
    ) -> DecodeState:
        """State with a prefilled request in `row`."""
        loop = self._batch.loop
        if isinstance(loop, ShardedLoop):
            insert = functools.partial(_insert, DecodeLoop(self._batch.parts))
            return loop.on_row(insert, params, state, row, admission, cache, drafter)
        return _insert(loop, params, state, row, admission, cache, drafter)

    def _step(
        self, params: PyTree, before: DecodeState, one: jax.Array
    ) -> tuple[DecodeState, StepResult]:
        """State after one round of the loop that `jaxspec.Engine` runs, and what has changed.

        The number of rounds is an argument, so that the compiler cannot unroll the loop and change
        the order of sums.
        """
        min_running = one
        if isinstance(self._batch.loop, ShardedLoop):
            min_running = jnp.broadcast_to(one, (self._batch.num_shards,))
        state = self._batch.loop.run(params, before, one, min_running)
        num_new = state.num_committed - before.num_committed
        index = jnp.arange(self.shape.verify_length, dtype=jnp.int32)[None]
        slots = before.num_committed[:, None] + index
        tokens = jnp.take_along_axis(state.tokens, slots, axis=1, mode="clip")
        counts = jax.tree.map(jnp.subtract, state.counts, before.counts)
        result = StepResult(
            tokens=jnp.where(index < num_new[:, None], tokens, -1),
            num_new=num_new,
            done=~state.is_running,
            finish=state.finish,
            num_drafted=counts.num_draft_tokens,
            num_accepted=counts.num_accepted_tokens,
        )
        return state, result


def _insert(
    loop: DecodeLoop,
    params: PyTree,
    state: DecodeState,
    row: jax.Array,
    admission: Admission,
    cache: PyTree,
    drafter: PyTree,
) -> DecodeState:
    """A shard's state with a prefilled request in its row `row`."""
    state = loop.admit(params, state, row, admission)
    length = jnp.asarray(admission.length)
    state = mark_prefilled(state, row, length - 1)
    return take_over_row(state, row, cache, drafter, source=jnp.asarray(ALONE), length=length)


def _free_row(state: DecodeState, row: jax.Array) -> DecodeState:
    """State with `row` empty; whatever it still stores is garbage."""
    return state.replace(finish=state.finish.at[row].set(jnp.int32(Finish.EMPTY_ROW)))


def _refuse_host_settings(params: SamplingParams) -> None:
    """Raises `SettingError` for parameters that `Engine` handles on the host."""
    if params.n > 1:
        raise SettingError(
            f"n {params.n} was given, and prefill makes one row of a prompt; call it once per seed."
        )
    if params.stop:
        raise SettingError(
            f"The stop strings {params.stop} were given, and this engine does not read text; look "
            "for them in the output and free the row, or name stop_token_ids."
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (number := getattr(params, name)) is not None:
            raise SettingError(
                f"{number} {name} were asked for, and this engine keeps none; use "
                "jaxspec.Engine with max_logprobs."
            )
