"""The bytes of settings: read off decode loops of shapes, and off XLA's compiled programs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from jaxspec.cache.pages import BLOCK, KVCache, KvDtype
from jaxspec.checkpoint.format import parse_dtype
from jaxspec.decode.loop import DecodeLoop, empty
from jaxspec.decode.parts import RoundParts
from jaxspec.decode.sharded import DATA, MODEL, ShardedLoop
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.flexdraft.shapes import ShapeFlexDraft
from jaxspec.engine.config import EngineConfig, make_parts
from jaxspec.engine.memory import Parts, measure_parts
from jaxspec.engine.plan import PlanBytes, PlanSettings, ProgramBytes, compile_programs
from jaxspec.kernels.registry import KernelsName, default_kernels
from jaxspec.lab.plan.request import Described, PlanRequest
from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig
from jaxspec.models.shapes import ShapeModel, shape_model, shortened
from jaxspec.runtime.environment import loops_run_on_host
from jaxspec.sampling import num_drawn_together

Compiles: TypeAlias = Literal["whole", "short"]
Say: TypeAlias = Callable[[str], None]


class Layers(NamedTuple):
    """Layers of the target and of the draft model."""

    target: int
    draft: int


# Where programs are compiled to estimate temporaries: layers of each model at most, and rows, of
# which the fewest and the most are taken that draft in one way.
SHORT_LAYERS = Layers(2, 2)
SHORT_BATCHES = (1, 2, 3, 4)
PLAIN = "plain"
DEFAULT_CHUNK = 128


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoopBytes:
    """The bytes of an engine by its settings.

    Attributes:
      request: what is planned for.
      say: called with what is being compiled.
    """

    request: PlanRequest
    say: Say

    def loop(
        self,
        settings: PlanSettings,
        *,
        layers: Layers | None = None,
        dtype: str | None = None,
        on: Any = None,
    ) -> DecodeLoop | ShardedLoop:
        """The decode loop of an engine with these settings, of shapes only.

        Args:
          settings: of the engine.
          layers: of each model at most; None for all of them.
          dtype: of all weights, instead of the settings'.
          on: a mesh; by default one without devices, of the settings' axes.
        """
        parts = self._parts(settings, layers, dtype)
        if settings.num_devices == 1:
            return DecodeLoop(parts)
        if on is None:
            axes = (settings.num_data_shards, settings.num_model_shards)
            on = AbstractMesh(axes, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))
        return ShardedLoop(parts=parts, mesh=on)

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _parts(
        self, settings: PlanSettings, layers: Layers | None, dtype: str | None
    ) -> RoundParts:
        request = self.request
        of_target, of_draft = layers or (None, None)
        target = self._model(
            request.target, dtype or request.dtype, settings, of_target, kv_dtype=settings.kv_dtype
        )
        drafter = None
        if settings.draft_length and request.draft is not None:
            draft_dtype = dtype or settings.draft_dtype or request.dtype
            draft = self._model(request.draft, draft_dtype, settings, of_draft)
            options = {**request.draft_options, **settings.options_of("drafter")}
            drafter = DraftModel(draft, **options)
        elif settings.draft_length:
            drafter = request.drafter_at(settings)
        if isinstance(drafter, ShapeFlexDraft):
            drafter = drafter.resized(num_layers=of_target, dtype=target.dtype)
        return make_parts(
            target,
            drafter,
            EngineConfig(
                verifier=request.verifier if settings.draft_length else None,
                scheduler=request.scheduler,
                draft_length=settings.draft_length,
                batch_size=settings.batch_size // settings.num_data_shards,
                max_length=settings.max_length,
                prefill_chunk=settings.prefill_chunk,
            ),
        )

    def _model(
        self,
        model: Described,
        dtype: str,
        settings: PlanSettings,
        num_layers: int | None,
        *,
        kv_dtype: KvDtype | None = None,
    ) -> ShapeModel:
        config = model.config if num_layers is None else shortened(model.config, num_layers)
        kernels: KernelsName = "xla"
        if self.request.is_here and settings.num_model_shards == 1:
            kernels = model.kernels or default_kernels()
        return shape_model(
            config,
            name=model.name,
            dtype=parse_dtype(dtype),
            kernels=kernels,
            is_packed=self.request.is_here,
            kv_dtype=kv_dtype,
        )

    def parts(self, settings: PlanSettings) -> Parts:
        """Where the bytes are. The chunk changes only the pages of a draft model's window of KV."""
        if settings.draft_kv_window is None:
            settings = dataclasses.replace(settings, prefill_chunk=DEFAULT_CHUNK)
        return self._parts_at_chunk(settings)

    @functools.cache  # noqa: B019
    def _parts_at_chunk(self, settings: PlanSettings) -> Parts:
        return measure_parts(self.loop(settings))

    @functools.cached_property
    def _programs_dtype(self) -> str | None:
        """In which programs are compiled: as they are, or, for a device of another kind, in
        float32. XLA:CPU turns whole weights in fewer bytes into float32 ones, a GPU does not. The
        parameters of a drafter that is planned as it is have the dtype that they have, but n-grams
        have none and FlexDraft's are shapes."""
        drafter = self.request.drafter
        is_fixed = not isinstance(drafter, (ShapeFlexDraft, type(None))) and drafter.params != ()
        return None if self.request.is_here or is_fixed else "float32"

    def programs(
        self, settings: PlanSettings, layers: Layers | None = None
    ) -> tuple[ProgramBytes, ...]:
        """The compiled programs of these settings; those of a mesh need its devices.

        Args:
          settings: of the engine.
          layers: of each model at most; None for all of them.
        """
        mesh = None
        if settings.num_devices > 1:
            axes = (settings.num_data_shards, settings.num_model_shards)
            mesh = jax.make_mesh(
                axes,
                (DATA, MODEL),
                axis_types=(AxisType.Auto, AxisType.Auto),
                devices=jax.local_devices()[: settings.num_devices],
            )
        return compile_programs(
            self.loop(settings, layers=layers, dtype=self._programs_dtype, on=mesh)
        )

    def compiled(
        self, settings: PlanSettings, compiles: Compiles
    ) -> tuple[int, tuple[ProgramBytes, ...]]:
        """What the programs of these settings need besides their arguments, and the programs that
        were compiled to know it. To short ones is added what the layers that they lack are
        estimated to need."""
        if compiles == "whole":
            programs = self.programs(settings)
            return max(each.added_bytes for each in programs), programs
        programs = self.programs(settings, SHORT_LAYERS)
        further = self.temporaries(settings).further_bytes(settings)
        added = [each.added_bytes + more for each, more in zip(programs, further, strict=True)]
        return math.ceil(max(added)), programs

    def temporaries(self, settings: PlanSettings) -> Estimate:
        """Temporaries of one device, from short programs of a few sizes, for settings in which what
        drafts does it in the same way."""
        return self._temporaries(self._way(settings))

    def _way(self, settings: PlanSettings) -> str | None:
        """What tells apart rounds whose temporaries are no one function of their sizes: FlexDraft's
        modes, and plain decoding beside them. None where nothing does."""
        drafter = self.request.drafter_at(settings)
        if not isinstance(drafter, ShapeFlexDraft):
            return None
        return drafter.name if settings.draft_length else PLAIN

    @functools.cache  # noqa: B019
    def _temporaries(self, way: str | None) -> Estimate:
        candidates = [
            dataclasses.replace(each, num_data_shards=1, num_model_shards=1)
            for each in self.request.candidates()
        ]
        longest = max(candidates, key=lambda each: (each.draft_length, each.batch_size))
        if way == PLAIN:
            longest = dataclasses.replace(longest, draft_length=0)
        batches = [
            batch
            for batch in SHORT_BATCHES
            if self._way(dataclasses.replace(longest, batch_size=batch)) == way
        ]
        chunks = sorted({each.prefill_chunk for each in candidates})
        small = dataclasses.replace(longest, batch_size=batches[0], prefill_chunk=chunks[0])
        large = dataclasses.replace(
            longest, batch_size=batches[-1], prefill_chunk=max(2 * chunks[0], 128)
        )
        further = self._further_layers(longest)
        sizes = [(small, SHORT_LAYERS), (large, SHORT_LAYERS)]
        drafting = [each for each in candidates if 0 < each.draft_length < longest.draft_length]
        if drafting or further.draft:  # a round of other proportions, a prefill of a deeper draft
            shortest = min(drafting, key=lambda each: each.draft_length, default=large)
            other = dataclasses.replace(large, draft_length=shortest.draft_length)
            sizes.append((other, SHORT_LAYERS._replace(draft=SHORT_LAYERS.draft + 1)))
        if further.target:
            sizes.append((large, SHORT_LAYERS._replace(target=SHORT_LAYERS.target + 1)))
        points = []
        for each, layers in sizes:
            self.say(f"compiling short programs of {each.sentence}")
            rounds, prefill = self.programs(each, layers)
            compiled = Layers(*map(min, further, _beyond_short(layers)))
            points.append((each, compiled, rounds.added_bytes, prefill.added_bytes))
        return Estimate.through(*points, further=further)

    def _further_layers(self, settings: PlanSettings) -> Layers:
        """How many more layers the models have than short programs."""
        draft = self.request.draft if settings.draft_length else None
        return _beyond_short(
            Layers(
                target=self.request.target.config.num_layers,
                draft=0 if draft is None else draft.config.num_layers,
            )
        )

    def estimated(self, settings: PlanSettings, *, correction: float = 1.0) -> PlanBytes:
        """The bytes of settings whose programs have not been compiled.

        Args:
          settings: of the engine.
          correction: what the estimate is multiplied by.
        """
        added = correction * self.temporaries(settings).added_bytes(settings)
        return PlanBytes.of_programs(self.parts(settings), math.ceil(added), "estimated")

    def formulas(self, settings: PlanSettings) -> dict[str, str]:
        """By part of `Parts`, how its bytes come about."""
        request = self.request
        rows = settings.batch_size // settings.num_data_shards
        residents = request.scheduler.num_residents(rows)
        vocab_size = request.target.config.vocab_size

        def of_kv(config: ModelConfig, kv_dtype: KvDtype | None, dtype: str, slots: int) -> str:
            itemsize, scale = (1, " + 4") if kv_dtype else (jnp.dtype(dtype).itemsize, "")
            return (
                f"{residents} rows x {slots} slots x 2 x {config.num_layers} layers x "
                f"{config.num_kv_heads} heads x ({config.head_size} x {itemsize}{scale}) B"
            )

        target, parts = request.target.config, self._parts(settings, None, None)
        state = jax.eval_shape(lambda: empty(parts, parts.shape))

        def num_slots(cache: KVCache) -> int:
            return cache.layers[0].k.shape[0] * BLOCK // rows

        found = {
            "target_weights_bytes": _weights_in_words(target, request.dtype),
            "target_kv_bytes": of_kv(
                target, settings.kv_dtype, request.dtype, num_slots(state.cache)
            ),
            "logits_bytes": (
                f"{rows} rows x {settings.draft_length + 1} tokens x {vocab_size} x 4 B"
            ),
        }
        if request.draft is not None and settings.draft_length:
            draft, dtype = request.draft.config, settings.draft_dtype or request.dtype
            found["draft_weights_bytes"] = _weights_in_words(draft, dtype)
            found["draft_kv_bytes"] = of_kv(
                draft, settings.draft_kv_dtype, dtype, num_slots(state.drafter.cache)
            )
        elif settings.draft_length and request.drafter is not None:
            found["draft_weights_bytes"] = f"parameters of {request.drafter.name}"
        if settings.draft_length and request.verifier.needs_draft_probs:
            found["draft_probs_bytes"] = (
                f"{rows} rows x {settings.draft_length} drafts x {vocab_size} x 4 B"
            )
        if settings.num_model_shards > 1:
            found = {
                name: words + f", split over {settings.num_model_shards} devices where it is split"
                if name.startswith("target")
                else words
                for name, words in found.items()
            }
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What programs need besides their arguments, as linear functions that go through a few short
    ones: of a round the tokens that it scores and those that it draws at a time
    (`sampling.choose`), of a prefill the tokens of its chunk, and of both what every further layer
    adds to a token. Most temporaries of a layer are used again by the next. What it begins its
    attention with (per query head zeros for the H numbers of the output, a maximum and a sum) XLA
    allocates before the first layer, for all of them. The context does not matter: attention reads
    KV block by block.

    Attributes:
      round_bytes: constant, per token scored, per token drawn at a time, and per token scored and
        further layer of the target. (A draft model's layers do not matter: it reads few tokens at a
        time.)
      prefill_bytes: constant, per token, and per token and further layer of the target and of the
        draft model.
      further: the layers that the models have and short programs have not.
    """

    round_bytes: tuple[float, ...]
    prefill_bytes: tuple[float, ...]
    further: Layers

    @classmethod
    def through(cls, *points: tuple[PlanSettings, Layers, int, int], further: Layers) -> Estimate:
        """The functions through a few settings, the layers that their programs had beyond short
        ones, and the bytes that their round and their prefill added."""

        def solve(sizes: list[tuple[float, ...]], added: list[int]) -> tuple[float, ...]:
            # Fewer points than numbers: the settings are alike in what cannot be told apart.
            found = np.linalg.lstsq(np.array(sizes, float), np.array(added, float), rcond=None)
            return tuple(found[0].tolist())

        return cls(
            round_bytes=solve(
                [_round_sizes(each, layers) for each, layers, _, _ in points],
                [added for _, _, added, _ in points],
            ),
            prefill_bytes=solve(
                [_prefill_sizes(each, layers) for each, layers, _, _ in points],
                [added for _, _, _, added in points],
            ),
            further=further,
        )

    def added_bytes(self, settings: PlanSettings) -> float:
        """Of the larger program, on one device. Of devices that split a model it is an upper
        bound."""
        return max(self._programs_bytes(settings, self._further(settings)))

    def further_bytes(self, settings: PlanSettings) -> tuple[float, float]:
        """What the further layers add, to the round and to the prefill."""
        whole = self._programs_bytes(settings, self._further(settings))
        short = self._programs_bytes(settings, Layers(0, 0))
        return whole[0] - short[0], whole[1] - short[1]

    def _further(self, settings: PlanSettings) -> Layers:
        return self.further if settings.draft_length else self.further._replace(draft=0)

    def _programs_bytes(self, settings: PlanSettings, further: Layers) -> tuple[float, float]:
        pairs = (
            (self.round_bytes, _round_sizes(settings, further)),
            (self.prefill_bytes, _prefill_sizes(settings, further)),
        )
        of_round, of_prefill = (max(float(np.dot(each, sizes)), 1.0) for each, sizes in pairs)
        return of_round, of_prefill


def _beyond_short(layers: Layers) -> Layers:
    return Layers(*(max(own - short, 0) for own, short in zip(layers, SHORT_LAYERS, strict=True)))


def _round_sizes(settings: PlanSettings, further: Layers) -> tuple[float, ...]:
    """One, the tokens that a round of a shard scores, those that it draws at a time, and the first
    times the target's further layers, whose heads a mesh splits."""
    rows, length = settings.batch_size // settings.num_data_shards, settings.draft_length + 1
    per_layer = rows * length / settings.num_model_shards
    drawn = rows * num_drawn_together(rows, length, loops_run_on_host=loops_run_on_host())
    return 1, rows * length, drawn, further.target * per_layer


def _prefill_sizes(settings: PlanSettings, further: Layers) -> tuple[float, ...]:
    """One, the tokens of a chunk, and these times the target's further layers, whose heads a mesh
    splits, and the draft model's."""
    chunk = settings.prefill_chunk
    of_target = further.target * chunk / settings.num_model_shards
    return 1, chunk, of_target, further.draft * chunk


def _weights_in_words(config: ModelConfig, dtype: str) -> str:
    num_params = decoder.num_params(config) / 1e9
    return f"{num_params:.3g} billion parameters x {jnp.dtype(dtype).itemsize} B"
