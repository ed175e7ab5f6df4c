"""Plans: settings of an engine, the bytes that they take, and what XLA reports about their
programs.

`lab.plan.planner` decides which settings are searched and which are best, because this needs the
cost model, which this room may not import.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import KvDtype
from jaxspec.decode.loop import DecodeLoop
from jaxspec.decode.settings import home_of
from jaxspec.decode.sharded import ShardedLoop
from jaxspec.drafters.base import Drafter
from jaxspec.engine.memory import Parts, in_units
from jaxspec.errors import SettingError, warn_once
from jaxspec.models.base import Model, kv_dtype_of
from jaxspec.runtime.compilation import shapes_at

# Where the temporaries of a plan come from; see `PlanBytes`.
Source: TypeAlias = Literal["compiled", "compiled short", "estimated"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The settings that a plan chooses.

    Attributes:
      batch_size: rows of a batch, over all data shards.
      max_length: slots per row.
      draft_length: tokens drafted per round; 0 decodes plainly, without the drafter.
      prefill_chunk: prompt tokens prefilled per call.
      kv_dtype: that of the target's KV; None is the model's dtype.
      draft_kv_dtype: the same for the draft model's KV.
      draft_kv_window: tokens whose KV the draft model keeps; None keeps all.
      draft_dtype: that of the draft model's weights; None if the drafter is planned as it is.
      num_data_shards: devices of the mesh axis `data`.
      num_model_shards: devices of the mesh axis `model`.
    """

    batch_size: int
    max_length: int
    draft_length: int
    prefill_chunk: int
    kv_dtype: KvDtype | None = None
    draft_kv_dtype: KvDtype | None = None
    draft_kv_window: int | None = None
    draft_dtype: str | None
    num_data_shards: int = 1
    num_model_shards: int = 1

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh; 1 without a mesh."""
        return self.num_data_shards * self.num_model_shards

    @property
    def changes_output(self) -> bool:
        """Whether the target's own output changes, because its KV is rounded."""
        return self.kv_dtype is not None

    def options_of(self, owner: str) -> dict[str, Any]:
        """These settings as arguments of one of the owners in `KNOBS`, without defaults."""
        found = {
            knob.argument: getattr(self, field)
            for field, knob in KNOBS.items()
            if knob.owner == owner and getattr(self, field) is not None
        }
        if owner == "engine" and not self.draft_length:
            del found["draft_length"]
        return found

    @property
    def sentence(self) -> str:
        """E.g. `batch 4, max_length 2176, draft length 5, chunks of 128, int8 KV of the target`."""
        kv = {"target": self.kv_dtype, "draft model": self.draft_kv_dtype}
        found = [
            f"batch {self.batch_size}",
            f"max_length {self.max_length}",
            f"draft length {self.draft_length}" if self.draft_length else "no drafter",
            f"chunks of {self.prefill_chunk}",
            *(f"{dtype} KV of the {name}" for name, dtype in kv.items() if dtype is not None),
        ]
        if self.draft_length and self.draft_dtype is not None:
            found.append(f"draft weights in {self.draft_dtype}")
        if self.draft_kv_window is not None:
            found.append(f"draft KV of {self.draft_kv_window} tokens")
        if self.num_devices > 1:
            found.append(f"mesh data={self.num_data_shards},model={self.num_model_shards}")
        return ", ".join(found)


@dataclasses.dataclass(frozen=True)
class Knob:
    """How a setting is passed to the part that it belongs to.

    Attributes:
      owner: `engine`, `target` (when it is loaded), `draft` (likewise) or `drafter`.
      argument: the owner's argument.
      option: that of `jaxspec generate`; None if it has none.
    """

    owner: str
    argument: str
    option: str | None = None


# By field of `PlanSettings`.
KNOBS: Mapping[str, Knob] = {
    "batch_size": Knob("engine", "batch_size", "--batch-size"),
    "max_length": Knob("engine", "max_length", "--max-length"),
    "draft_length": Knob("engine", "draft_length", "--draft-length"),
    "prefill_chunk": Knob("engine", "prefill_chunk"),
    "kv_dtype": Knob("target", "kv_dtype", "--kv-dtype"),
    "draft_dtype": Knob("draft", "dtype"),
    "draft_kv_dtype": Knob("drafter", "kv_dtype"),
    "draft_kv_window": Knob("drafter", "kv_window"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramBytes:
    """What XLA reports about a compiled program, per device.

    Attributes:
      name: `round` or `prefill`.
      argument_bytes: its arguments, without parameters that it does not use.
      output_bytes: its results.
      alias_bytes: the part of the results that is written in place of arguments.
      temporary_bytes: its temporaries.
      lower_s: seconds to trace and lower it.
      compile_s: seconds to compile it, or to load it from the persistent cache.
    """

    name: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    lower_s: float
    compile_s: float

    @property
    def total_bytes(self) -> int:
        """Arguments + outputs - aliases + temporaries. (`peak_memory_in_bytes` leaves temporaries
        of donated arguments out.)"""
        return self.argument_bytes + self.added_bytes

    @property
    def added_bytes(self) -> int:
        """The bytes that it needs besides its arguments."""
        return self.output_bytes - self.alias_bytes + self.temporary_bytes


def compile_programs(loop: DecodeLoop | ShardedLoop) -> tuple[ProgramBytes, ...]:
    """The rounds and the prefill of a loop, compiled from shapes; nothing is allocated.

    Args:
      loop: a loop, whose parameters may be shapes. The devices of a mesh must exist, but may be
        virtual.
    """
    number = each = jax.ShapeDtypeStruct((), jnp.int32)
    state, params = jax.eval_shape(loop.init), jax.eval_shape(lambda: loop.params)
    if isinstance(loop, ShardedLoop):
        home, home_of_params = loop.state_shardings, loop.param_shardings
        each = jax.ShapeDtypeStruct((loop.num_shards,), jnp.int32)
    else:
        # That of an executor, which then finds these programs in the compilation cache.
        home = home_of(loop.params) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        home_of_params = home
    state, params = shapes_at(state, home), shapes_at(params, home_of_params)
    options: dict[str, Any] = {"donate_argnums": 1, "out_shardings": home}

    def compile_one(name: str, function: Any, *arguments: Any) -> ProgramBytes:
        started_s = time.perf_counter()
        lowered = jax.jit(function, **options).lower(params, state, *arguments)
        lowered_s = time.perf_counter()
        memory: Any = lowered.compile().memory_analysis()
        compiled_s = time.perf_counter()
        return ProgramBytes(
            name=name,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            lower_s=lowered_s - started_s,
            compile_s=compiled_s - lowered_s,
        )

    return (
        compile_one("round", loop.run, number, each),
        compile_one("prefill", loop.prefill, each, each),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanBytes:
    """The bytes of a plan, per device.

    Attributes:
      parts: exact bytes of weights, KV, buffers and logits.
      temporaries_bytes: what the larger of the two programs, the round and the prefill, needs
        besides these.
      source: `compiled`: from the plan's own programs; `compiled short`: from these programs with
        the first layers only, and an estimate of what the others add; or `estimated`: from such
        programs of other sizes.
    """

    parts: Parts
    temporaries_bytes: int
    source: Source

    @property
    def total_bytes(self) -> int:
        """All bytes."""
        return self.parts.weights_bytes + self.generation_bytes

    @property
    def generation_bytes(self) -> int:
        """All bytes except the weights."""
        parts = self.parts
        logits_bytes = parts.logits_bytes + parts.draft_probs_bytes
        return parts.state_bytes + logits_bytes + self.temporaries_bytes

    @classmethod
    def of_programs(cls, parts: Parts, added_bytes: int, source: Source) -> PlanBytes:
        """The bytes if programs need `added_bytes` besides their arguments; the logits, which are
        part of these, are counted once."""
        named = parts.logits_bytes + parts.draft_probs_bytes
        return cls(parts=parts, temporaries_bytes=max(added_bytes - named, 0), source=source)

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the sums."""
        return {
            **dataclasses.asdict(self.parts),
            "temporaries_bytes": self.temporaries_bytes,
            "temporaries": self.source,
            "generation_bytes": self.generation_bytes,
            "total_bytes": self.total_bytes,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Settings, the bytes they take and their predicted speed.

    Attributes:
      settings: those of the engine.
      bytes: the bytes per device.
      tokens_per_s: predicted for all rows together, including prompts.
      decode_tokens_per_s: predicted for rounds alone.
    """

    settings: PlanSettings
    bytes: PlanBytes
    tokens_per_s: float
    decode_tokens_per_s: float

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "settings": dataclasses.asdict(self.settings),
            "sentence": self.settings.sentence,
            "bytes": self.bytes.to_json(),
            "tokens_per_s": self.tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The settings that fit a budget at the least cost in speed; see `plan_memory`.

    Attributes:
      target: name of the target.
      draft: name of the draft model; None without one.
      draft_options: arguments of `DraftModel` that were not searched: a `tree`, a `min_confidence`,
        `kv_sinks`.
      drafter: name of the drafter used instead of a draft model, or None.
      dtype: that of the target's weights, compute and (unless `kv_dtype` differs) KV.
      device: name of the device whose speed is predicted.
      platform: JAX's name of the kind of device for which the bytes are planned, such as `gpu`.
      scheduler: name of the scheduler.
      verifier: name of the verifier.
      budget_bytes: the budget per device.
      keep: smallest fraction of the best predicted speed that the chosen settings may have.
      chosen: the plan.
      fastest: the fastest plan that fits. Here and below, settings that change the output are
        considered only if the chosen ones do.
      cheaper: the fastest plan that takes fewer bytes than the chosen one; None if there is none.
      faster: the smallest plan that is predicted to be faster, whether it fits or not.
      baseline_bytes: bytes of the baseline policy for the same rows, by part; see
        `lab.cost.baseline`.
      programs: those compiled for the chosen settings.
      formulas: by part of `engine.memory.Parts`, how its bytes are computed, in words.
      num_candidates: number of settings that were considered.
      num_fitting: number of these that fit the budget.
      remarks: notes on the figures, in sentences.
    """

    target: str
    draft: str | None
    draft_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drafter: str | None = None
    dtype: str
    device: str
    platform: str
    scheduler: str
    verifier: str
    budget_bytes: int
    keep: float
    chosen: PlannedRun
    fastest: PlannedRun
    cheaper: PlannedRun | None
    faster: PlannedRun | None
    baseline_bytes: Mapping[str, int]
    formulas: Mapping[str, str]
    programs: tuple[ProgramBytes, ...]
    num_candidates: int
    num_fitting: int
    remarks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        total = in_units(self.chosen.bytes.total_bytes)
        return f"<MemoryPlan: {total} of {in_units(self.budget_bytes)}: {self.settings.sentence}>"

    @property
    def settings(self) -> PlanSettings:
        """The settings of the chosen plan."""
        return self.chosen.settings

    @property
    def engine_options(self) -> dict[str, Any]:
        """The arguments of `Engine` other than models and mesh."""
        options = self.settings.options_of("engine") | {"scheduler": self.scheduler}
        return options | ({"verifier": self.verifier} if self.settings.draft_length else {})

    @property
    def code(self) -> str:
        """Python that makes the engine."""
        settings = self.settings

        def call(function: str, *arguments: str, **options: Any) -> str:
            shown = {name: repr(value) for name, value in options.items()}
            if options.get("tree") is not None:
                shown["tree"] = f"jaxspec.{shown['tree']}"
            named = [f"{name}={value}" for name, value in shown.items()]
            return f"{function}({', '.join([*arguments, *named])})"

        of_target = {"dtype": self.dtype, **settings.options_of("target")}
        lines = [f"target = {call('jaxspec.load_model', repr(self.target), **of_target)}"]
        arguments = ["target"]
        if settings.draft_length and self.drafter is not None:
            arguments.append(repr(self.drafter))
        elif settings.draft_length:
            loaded = call("jaxspec.load_model", repr(self.draft), **settings.options_of("draft"))
            options = {**self.draft_options, **settings.options_of("drafter")}
            drafter = call("jaxspec.DraftModel", loaded, **options)
            lines.append(f"drafter = {drafter}")
            arguments.append("drafter")
        if settings.num_devices > 1:
            shape = (settings.num_data_shards, settings.num_model_shards)
            lines.append(f'mesh = jax.make_mesh({shape}, ("data", "model"))')
            arguments.append("mesh=mesh")
        lines.append(f"engine = {call('jaxspec.Engine', *arguments, **self.engine_options)}")
        return "\n".join(lines)

    @property
    def command(self) -> str | None:
        """The beginning of a `jaxspec generate` command; None if it lacks an option for one of the
        settings."""
        settings = self.settings
        if settings.num_devices > 1 or settings.prefill_chunk != 128:
            return None
        if settings.draft_length and settings.draft_dtype not in (None, self.dtype):
            return None
        words = ["jaxspec generate --target", self.target, "--dtype", self.dtype]
        if settings.draft_length:
            if self.drafter is not None:
                words += ["--drafter", shlex.quote(self.drafter)]
            else:
                words += ["--draft", str(self.draft), *self._option_words]
            words += ["--verifier", self.verifier]
        words += ["--scheduler", self.scheduler]
        for field, knob in KNOBS.items():
            value = getattr(settings, field)
            if knob.option is not None and value:
                words += [knob.option, str(value)]
        return " ".join(words)

    @property
    def _option_words(self) -> list[str]:
        """What the draft model is made with, as command-line words."""
        settings = self.settings
        given = {
            **{name: getattr(value, "name", value) for name, value in self.draft_options.items()},
            "kv_dtype": settings.draft_kv_dtype,
            "kv_window": settings.draft_kv_window,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return ["--drafter-args", shlex.quote(json.dumps(given))] if given else []

    def check(self, target: Model, drafter: Drafter | None) -> None:
        """Raises `SettingError` unless models and drafter match the plan."""
        settings = self.settings
        if settings.draft_length and drafter is None:
            raise SettingError(
                f"The plan drafts {settings.draft_length} tokens with "
                f"{self.drafter or self.draft}, and no drafter was given; give one, or plan "
                "without one."
            )
        pairs: dict[tuple[str, str], tuple[Any, Any]] = {
            ("target", "kv_dtype"): (settings.kv_dtype, kv_dtype_of(target))
        }
        if settings.draft_length:
            pairs |= {
                ("drafter", "kv_dtype"): (
                    settings.draft_kv_dtype,
                    kv_dtype_of(getattr(drafter, "model", None)),
                ),
                ("drafter", "kv_window"): (
                    settings.draft_kv_window,
                    getattr(drafter, "kv_window", None),
                ),
            }
        if settings.draft_length and self.drafter is None:
            planned = self.draft_options.get("tree")
            pairs[("drafter", "tree")] = (planned, getattr(drafter, "tree", None))
        for (what, argument), (planned, given) in pairs.items():
            if planned != given:
                raise SettingError(
                    f"The plan has {argument}={planned!r} for the {what}, which was made with "
                    f"{argument}={given!r}; make it as `MemoryPlan.code` says."
                )

    def warn_of_differences(self, target: Model) -> None:
        """Warns, once in a process, if the engine will not take the planned bytes: it runs on
        another kind of device, or the target was loaded in another dtype."""
        here, dtype = jax.default_backend(), getattr(target, "dtype", None)
        found = []
        if self.platform != here:
            found.append(f"is for {self.platform} ({self.device}), and its engine runs on {here}")
        if dtype is not None and jnp.dtype(dtype).name != self.dtype:
            found.append(f"has the target in {self.dtype}, and it was loaded in {dtype}")
        if found:
            warn_once(
                f"The plan {', and '.join(found)}: the engine may take more than the planned "
                f"{in_units(self.chosen.bytes.total_bytes)}; plan with the loaded models and for "
                "this machine, or give the engine a budget_bytes."
            )

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        runs = {
            name: None if run is None else run.to_json()
            for name in ("chosen", "fastest", "cheaper", "faster")
            for run in (getattr(self, name),)
        }
        others = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name
            not in (*runs, "draft_options", "programs", "remarks", "baseline_bytes", "formulas")
        }
        return {
            **others,
            **runs,
            "draft_options": {
                name: getattr(value, "name", value) for name, value in self.draft_options.items()
            },
            "baseline_bytes": dict(self.baseline_bytes),
            "formulas": dict(self.formulas),
            "programs": [
                {**dataclasses.asdict(each), "total_bytes": each.total_bytes}
                for each in self.programs
            ],
            "remarks": list(self.remarks),
            "code": self.code,
            "command_line": self.command,
        }
