"""A plan: settings of an engine, the bytes that they take, and their predicted speed."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import KvDtype
from jaxspec.drafters.base import Drafter
from jaxspec.engine.engine import Engine
from jaxspec.engine.memory import PlanBytes, in_units
from jaxspec.errors import SettingError, warn_once
from jaxspec.load.drafters import make_drafter
from jaxspec.load.models import as_model
from jaxspec.models.base import Model, kv_dtype_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The settings that a plan chooses. Those without `num` are also options of `jaxspec generate`.

    Attributes:
      batch_size: rows of a batch, over all data shards.
      max_length: slots per row.
      draft_length: tokens drafted per round; 0 decodes plainly, without the drafter.
      kv_dtype: that of the target's KV; None is the model's dtype.
      draft_kv_window: tokens whose KV the draft model keeps; None keeps all.
      num_data_shards: devices of the mesh axis `data`.
      num_model_shards: devices of the mesh axis `model`.
    """

    batch_size: int
    max_length: int
    draft_length: int
    kv_dtype: KvDtype | None = None
    draft_kv_window: int | None = None
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

    @property
    def drafter_options(self) -> dict[str, Any]:
        """The arguments of `DraftModel` that a plan chooses."""
        return {} if self.draft_kv_window is None else {"kv_window": self.draft_kv_window}

    @property
    def sentence(self) -> str:
        """E.g. `batch 4, max_length 2176, draft length 5, int8 KV of the target`."""
        found = [
            f"batch {self.batch_size}",
            f"max_length {self.max_length}",
            f"draft length {self.draft_length}" if self.draft_length else "no drafter",
        ]
        if self.kv_dtype is not None:
            found.append(f"{self.kv_dtype} KV of the target")
        if self.draft_kv_window is not None:
            found.append(f"draft KV of {self.draft_kv_window} tokens")
        if self.num_devices > 1:
            found.append(f"mesh data={self.num_data_shards},model={self.num_model_shards}")
        return ", ".join(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Settings, the bytes they take and their predicted speed.

    Attributes:
      settings: those of the engine.
      bytes: the bytes per device.
      tokens_per_s: of the rounds, predicted for all rows together.
    """

    settings: PlanSettings
    bytes: PlanBytes
    tokens_per_s: float

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "settings": dataclasses.asdict(self.settings),
            "sentence": self.settings.sentence,
            "bytes": self.bytes.to_json(),
            "tokens_per_s": self.tokens_per_s,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The settings that fit a budget at the least cost in speed; see `plan_memory`.

    Attributes:
      target: name of the target.
      draft: name of the draft model; None without one.
      draft_options: arguments of `DraftModel` that were given: a `tree`, a `min_confidence`,
        `kv_sinks`, `kv_dtype`.
      drafter: name of the drafter used instead of a draft model, or None.
      dtype: that of the target's weights, compute and (unless `kv_dtype` differs) KV.
      draft_dtype: that of the draft model's weights; None without one.
      device: name of the device whose speed is predicted.
      platform: JAX's name of the kind of device for which the bytes are planned, such as `gpu`.
      scheduler: name of the scheduler.
      max_logprobs: log-probabilities that are kept per position, or None.
      verifier: name of the verifier.
      budget_bytes: the budget per device.
      keep: smallest fraction of the best predicted speed that the chosen settings may have.
      chosen: the plan, whose programs were compiled.
      fastest: the fastest plan that fits; its bytes are computed if it is another. It changes the
        output only if the chosen plan does.
      num_candidates: number of settings that were considered.
      remarks: notes on the figures, in sentences.
    """

    target: str
    draft: str | None
    draft_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drafter: str | None = None
    dtype: str
    draft_dtype: str | None = None
    device: str
    platform: str
    scheduler: str
    max_logprobs: int | None = None
    verifier: str
    budget_bytes: int
    keep: float
    chosen: PlannedRun
    fastest: PlannedRun
    num_candidates: int
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
        settings = self.settings
        options: dict[str, Any] = {
            "batch_size": settings.batch_size,
            "max_length": settings.max_length,
            "scheduler": self.scheduler,
        }
        if settings.draft_length:
            options |= {"draft_length": settings.draft_length, "verifier": self.verifier}
        if self.max_logprobs is not None:
            options["max_logprobs"] = self.max_logprobs
        return options

    def engine(
        self,
        target: Model | str,
        drafter: Drafter | str | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Engine:
        """The engine that the plan describes, on the plan's mesh if it has one.

        A plan for another kind of device, or for a target in another dtype, warns: the engine may
        then take more bytes than planned.

        Args:
          target: the model that the plan was made for, loaded as `describe` says.
          drafter: likewise; a plan that decodes plainly does not use it.
          **options: further arguments of `Engine`.

        Raises:
          SettingError: target or drafter store KV in another dtype or window than planned, there
            are fewer devices, or a setting that `Engine` refuses.
        """
        settings, target = self.settings, as_model(target)
        drafter = make_drafter(drafter, target)
        self._check(target, drafter)
        self._warn_of_differences(target)
        if settings.num_devices > 1 and "mesh" not in options:
            devices = jax.local_devices()
            if len(devices) < settings.num_devices:
                raise SettingError(
                    f"The plan is for {settings.num_devices} devices, and JAX has {len(devices)}; "
                    "run it where they are, or plan for fewer."
                )
            shape = (settings.num_data_shards, settings.num_model_shards)
            options["mesh"] = jax.make_mesh(
                shape, ("data", "model"), devices=devices[: settings.num_devices]
            )
        if not settings.draft_length:
            drafter = None
        return Engine(target, drafter, **{**self.engine_options, **options})

    def describe(self) -> str:
        """Python that makes the engine, and below it the beginning of a `jaxspec generate` command
        with the same settings, unless that has no option for one of them."""
        settings, arguments = self.settings, ["target"]
        of_target: dict[str, Any] = {"dtype": self.dtype}
        if settings.kv_dtype is not None:
            of_target["kv_dtype"] = settings.kv_dtype
        lines = [f"target = {_call('jaxspec.load_model', repr(self.target), **of_target)}"]
        words = ["jaxspec generate --target", self.target, "--dtype", self.dtype]
        if settings.draft_length and self.drafter is not None:
            arguments.append(repr(self.drafter))
            words += ["--drafter", shlex.quote(self.drafter)]
        elif settings.draft_length:
            loaded = _call("jaxspec.load_model", repr(self.draft), dtype=self.draft_dtype)
            options = {**self.draft_options, **settings.drafter_options}
            lines.append(f"drafter = {_call('jaxspec.DraftModel', loaded, **options)}")
            arguments.append("drafter")
            words += ["--draft", str(self.draft)]
            if options:
                named = {name: getattr(value, "name", value) for name, value in options.items()}
                words += ["--drafter-args", shlex.quote(json.dumps(named))]
        if settings.num_devices > 1:
            shape = (settings.num_data_shards, settings.num_model_shards)
            arguments.append(f'mesh=jax.make_mesh({shape}, ("data", "model"))')
        lines.append(f"engine = {_call('jaxspec.Engine', *arguments, **self.engine_options)}")
        if settings.draft_length:
            words += ["--verifier", self.verifier]
        if self.scheduler != "continuous":
            words += ["--engine-args", shlex.quote(json.dumps({"scheduler": self.scheduler}))]
        for name, value in dataclasses.asdict(settings).items():
            if value and not name.startswith(("num", "draft_kv")):
                words += [f"--{name.replace('_', '-')}", str(value)]
        is_command = self.max_logprobs is None and self.draft_dtype in (None, self.dtype)
        if settings.num_devices == 1 and is_command:
            lines.append(" ".join(words))
        return "\n".join(lines)

    def _check(self, target: Model, drafter: Drafter | None) -> None:
        """Raises `SettingError` unless models and drafter match the plan."""
        settings = self.settings
        if settings.draft_length and drafter is None:
            raise SettingError(
                f"The plan drafts {settings.draft_length} tokens with "
                f"{self.drafter or self.draft}, and no drafter was given; give one, or plan "
                "without one."
            )
        pairs = [("target", "kv_dtype", settings.kv_dtype, kv_dtype_of(target))]
        if settings.draft_length:
            own, model = self.draft_options.get("kv_dtype"), getattr(drafter, "model", None)
            kept = getattr(drafter, "kv_window", None)
            pairs += [
                ("drafter", "kv_dtype", own, kv_dtype_of(model)),
                ("drafter", "kv_window", settings.draft_kv_window, kept),
            ]
        if settings.draft_length and self.drafter is None:
            tree = getattr(drafter, "tree", None)
            pairs.append(("drafter", "tree", self.draft_options.get("tree"), tree))
        for what, argument, planned, given in pairs:
            if planned != given:
                raise SettingError(
                    f"The plan has {argument}={planned!r} for the {what}, which was made with "
                    f"{argument}={given!r}; make it as `MemoryPlan.describe()` says."
                )

    def _warn_of_differences(self, target: Model) -> None:
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
        options = {
            name: getattr(value, "name", value) for name, value in self.draft_options.items()
        }
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "chosen": self.chosen.to_json(),
            "fastest": self.fastest.to_json(),
            "draft_options": options,
            "programs": [dataclasses.asdict(each) for each in self.chosen.bytes.programs],
            "remarks": list(self.remarks),
            "description": self.describe(),
        }


def _call(function: str, *arguments: str, **options: Any) -> str:
    """A call in Python; a tree is a record of `jaxspec.trees`."""
    named = [
        f"{name}={'jaxspec.trees.' if name == 'tree' else ''}{value!r}"
        for name, value in options.items()
    ]
    return f"{function}({', '.join([*arguments, *named])})"
