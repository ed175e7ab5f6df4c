"""What a decode round compiles to on a device that is not present: loops, copies, launches.

A round that is fine on a CPU can be very slow on a GPU: a loop with a dynamic trip count makes the
host wait for the device before every trip, and launching kernels one by one costs more than their
computation. All of this can be read from the compiled program, and compiling it needs no GPU
(`bench.deviceless`). Nothing is run.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import BLOCK
from jaxspec.decode.loop import DecodeLoop
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.config import EngineConfig, make_parts
from jaxspec.errors import SettingError
from jaxspec.kernels.registry import KernelsName, default_kernels
from jaxspec.lab.bench.deviceless import ABSENT_DEVICES, CompiledText, as_if_on, compile_for
from jaxspec.lab.bench.measure import case
from jaxspec.lab.cost.programs import (
    LAUNCHES_PER_LAYER,
    Hlo,
    Launches,
    count_launches,
    loop_numbers,
    read_thunks,
)
from jaxspec.models.base import LanguageModel
from jaxspec.models.config import ModelConfig
from jaxspec.models.registry import PRESETS
from jaxspec.models.shapes import shape_model, shortened
from jaxspec.runtime.environment import lacks_bfloat16
from jaxspec.runtime.report import Columns
from jaxspec.schedulers import Static
from jaxspec.types import DecodeState, PyTree, Window

BATCH_SIZE, DRAFT_LENGTH = 8, 4  # of the rounds that `jaxspec bench program` compiles
MAX_GRAPHS = 6  # launched per round of draft length 4; two, and one per further draft step
MAX_PREDICATES = 2  # read by the host per round
SHORT = 2048  # slots that all fit into one split of the attention kernels
PREFILL = ("prefill", "prefill_target", "catch_up")  # a prefill call, and its two halves
MAX_TEMPORARIES = 8  # times the target's logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The program that is compiled.

    Attributes:
      target: architecture of the target.
      draft: that of the draft model.
      kernels: those of both models.
      batch_size: number of rows.
      context: committed tokens per row; the cache has room for one more round.
      draft_length: tokens drafted per round.
      dtype: that of parameters, compute and cache.
      is_resting: whether rounds leave the draft steps out (`RoundParts.resting`).
    """

    target: ModelConfig
    draft: ModelConfig
    kernels: KernelsName
    batch_size: int
    context: int
    draft_length: int
    dtype: str = "bfloat16"
    is_resting: bool = False

    @property
    def logits_bytes(self) -> int:
        """Bytes of the target's fp32 logits in a round."""
        return 4 * self.batch_size * (self.draft_length + 1) * self.target.vocab_size

    def loop(self) -> DecodeLoop:
        """The decode loop, with parameters that are only shapes."""
        parts = make_parts(
            self._model("target", self.target),
            DraftModel(self._model("draft", self.draft)),
            EngineConfig(
                scheduler=Static(),
                draft_length=self.draft_length,
                batch_size=self.batch_size,
                max_length=self.context + self.draft_length + 1,
            ),
        )
        return DecodeLoop(parts.resting if self.is_resting else parts)

    def _model(self, name: str, config: ModelConfig) -> LanguageModel:
        return shape_model(config, name=name, dtype=self.dtype, kernels=self.kernels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The properties of a compiled run of rounds.

    Attributes:
      loops: depth and trip count of each; None if the compiler does not know it.
      cache_moves: copies, transpositions and conversions of arrays of a cache's shape, in rounds.
      weight_moves: those of matrices of weights, in a whole call.
      num_host_buffers: number of results in the host's memory.
      kv_bytes: bytes of both caches.
      aliased_bytes: bytes that are updated in place.
      temporary_bytes: bytes besides arguments and results.
      logits_bytes: bytes of the target's fp32 logits.
      greedy: what the host does for a round of greedy rows; None except for GPUs.
      sampled: the same for a round in which every conditional takes its longest branch: rows with
        penalties, top-k and top-p.
    """

    loops: list[tuple[int, int | None]]
    cache_moves: list[str]
    weight_moves: list[str]
    num_host_buffers: int
    kv_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    logits_bytes: int
    greedy: Launches | None
    sampled: Launches | None

    def problems(self, *, draft_length: int) -> list[str]:
        """Sentences about what is wrong with it, given the tokens drafted per round (0 for resting
        rounds); empty if nothing is."""
        found = []
        max_graphs = max(MAX_GRAPHS, draft_length + 2) if draft_length else 1
        unknown = [loop for loop in self.loops[1:] if loop[1] is None]
        if unknown:
            found.append(
                f"{len(unknown)} loops inside a round have no known trip count, so the host waits "
                "for the device before every trip"
            )
        deepest = max((depth for depth, _ in self.loops), default=0)
        if len(self.loops) > 2 or deepest > 2:
            found.append(
                f"{len(self.loops)} loops, {deepest} deep; rounds and the draft steps in them are "
                "2, 2 deep"
            )
        if self.cache_moves:
            found.append(f"KV is copied or converted: {', '.join(self.cache_moves)}")
        if self.weight_moves:
            found.append(f"weights are copied or converted: {', '.join(self.weight_moves)}")
        if self.num_host_buffers:
            found.append(f"{self.num_host_buffers} buffers lie in the host's memory")
        if self.aliased_bytes < self.kv_bytes:
            found.append(
                f"{self.aliased_bytes} bytes are updated in place, and the KV has {self.kv_bytes}"
            )
        if self.temporary_bytes > MAX_TEMPORARIES * self.logits_bytes + 2**20:
            found.append(
                f"temporaries of {self.temporary_bytes} bytes, for logits of {self.logits_bytes}"
            )
        for name, launches in (("greedy", self.greedy), ("sampled", self.sampled)):
            if launches is None:
                continue
            if launches.num_predicates > MAX_PREDICATES:
                found.append(
                    f"in a {name} round the host reads {launches.num_predicates} predicates"
                )
            if launches.num_graphs > max_graphs:
                found.append(f"a {name} round launches {launches.num_graphs} CUDA graphs")
        return found


def compile_run(device: str, shape: Shape) -> Program:
    """The decode loop of this shape, compiled for an absent device; call it within `as_if_on`."""
    loop = shape.loop()
    state = jax.eval_shape(loop.init)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    text = compile_for(device, loop.run, loop.params, state, count, count, donated=1)
    caches = _caches(state)
    hlo = Hlo(text.hlo)
    greedy, sampled = (
        _launches(hlo, text, shape, takes_longest=takes_longest) for takes_longest in (False, True)
    )
    return Program(
        loops=[(each.depth, each.trip_count) for each in hlo.loops()],
        cache_moves=hlo.moves_of({_shape_of(leaf) for leaf in caches}),
        weight_moves=_weight_moves(hlo, loop.params),
        num_host_buffers=hlo.num_host_buffers(),
        kv_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in caches),
        aliased_bytes=text.memory.alias_size_in_bytes,
        temporary_bytes=text.memory.temp_size_in_bytes,
        logits_bytes=shape.logits_bytes,
        greedy=greedy,
        sampled=sampled,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillProgram:
    """The properties of a compiled prefill call, or of one half of it.

    Attributes:
      cache_moves: copies, transpositions and conversions of arrays of a cache's shape.
      weight_moves: those of matrices of weights.
      kv_bytes: bytes of both caches.
      aliased_bytes: bytes that are updated in place.
      temporary_bytes: bytes besides arguments and results.
      launches: what the host does for a call that is full; None except for GPUs.
    """

    cache_moves: list[str]
    weight_moves: list[str]
    kv_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    launches: Launches | None

    def problems(self) -> list[str]:
        """Sentences about what is wrong with it; empty if nothing is."""
        found = []
        if self.cache_moves:
            found.append(f"KV is copied or converted: {', '.join(self.cache_moves)}")
        if self.weight_moves:
            found.append(f"weights are copied or converted: {', '.join(self.weight_moves)}")
        if self.aliased_bytes < self.kv_bytes:
            found.append(
                f"{self.aliased_bytes} bytes are updated in place, and the KV has {self.kv_bytes}"
            )
        if self.launches is not None:
            num_graphs, num_predicates = self.launches.num_graphs, self.launches.num_predicates
            if num_graphs > 1:
                found.append(f"a prefill call launches {num_graphs} CUDA graphs")
            if num_predicates > 0:
                found.append(f"in a prefill call the host reads {num_predicates} predicates")
        return found


def compile_prefill(device: str, shape: Shape, name: str) -> PrefillProgram:
    """One of `PREFILL` for this shape, compiled for an absent device; call it within `as_if_on`."""
    loop = shape.loop()
    state = jax.eval_shape(loop.init)
    num_chunks = loop.parts.shape.chunks_per_call
    chunks = jax.ShapeDtypeStruct((num_chunks,), jnp.int32)
    given = (chunks,) if name == "catch_up" else (chunks, chunks)
    text = compile_for(device, getattr(loop, name), loop.params, state, *given, donated=1)
    caches, hlo, thunks = _caches(state), Hlo(text.hlo), read_thunks(text.thunks)
    launches = None
    if thunks:
        trips = _trip_counts(hlo, text)
        launches = count_launches(thunks, trips, num_trips=num_chunks, takes_longest=True)
    return PrefillProgram(
        cache_moves=hlo.moves_of({_shape_of(leaf) for leaf in caches}, with_entry=True),
        weight_moves=_weight_moves(hlo, loop.params),
        kv_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in caches),
        aliased_bytes=text.memory.alias_size_in_bytes,
        temporary_bytes=text.memory.temp_size_in_bytes,
        launches=launches,
    )


def launches_per_layer(device: str, shape: Shape) -> int:
    """Kernels of one layer of the target in a round: the difference between a pass of two layers
    and a pass of one. Call it within `as_if_on`."""
    one, two = (
        _pass_launches(device, dataclasses.replace(shape, target=_cut(shape.target, num_layers)))
        for num_layers in (1, 2)
    )
    return two - one


def launch_problems(shape: Shape, per_layer: int) -> list[str]:
    """A sentence if a layer of the target launches more kernels than it should."""
    most = LAUNCHES_PER_LAYER[shape.kernels]
    if shape.kernels == "xla" or shape.context + shape.draft_length >= SHORT or per_layer <= most:
        return []
    return [f"a layer of the target has {per_layer} launches, and {most} are enough"]


def _pass_launches(device: str, shape: Shape) -> int:
    """Kernels of a pass of the target over a round's window."""
    loop = dataclasses.replace(shape, draft=_cut(shape.draft, 1)).loop()
    cache = jax.eval_shape(loop.init).cache

    def make_window() -> Window:
        positions = jnp.zeros((shape.batch_size, shape.draft_length + 1), jnp.int32)
        return Window(start=positions[:, 0], positions=positions, slots=positions)

    window = jax.eval_shape(make_window)

    def forward(params, cache, tokens, window):
        hidden, cache = loop.parts.target.forward(params, tokens, window, cache)
        return loop.parts.target.logits(params, hidden), cache

    text = compile_for(
        device, forward, loop.parts.target.params, cache, window.slots, window, donated=1
    )
    thunks = read_thunks(text.thunks)
    return count_launches(thunks, {}, num_trips=1, takes_longest=True).num_launched


def _launches(
    hlo: Hlo, text: CompiledText, shape: Shape, *, takes_longest: bool
) -> Launches | None:
    """What the host does for one round."""
    rounds = [thunk for thunk in read_thunks(text.thunks) if thunk.kind == "kWhile"]
    if not rounds:
        return None
    settings: dict[str, Any] = {
        "trip_counts": _trip_counts(hlo, text),
        # The remaining loops without a trip count are attention over the live blocks of KV.
        "num_trips": -(-(shape.context + shape.draft_length + 1) // BLOCK),
        "takes_longest": takes_longest,
    }
    body, condition = (
        count_launches(rounds[0].inner_of(part), **settings) for part in ("body", "condition")
    )
    return body + condition + Launches(num_predicates=1)


def _trip_counts(hlo: Hlo, text: CompiledText) -> dict[int, int | None]:
    """Trip counts of loops by the number of their thunk."""
    known = {loop.name: loop.trip_count for loop in hlo.loops()}
    names = loop_numbers(text.thunk_metadata)
    return {number: known.get(name) for number, name in names.items()}


def _caches(state: DecodeState) -> list[jax.ShapeDtypeStruct]:
    return jax.tree.leaves((state.cache.layers, state.drafter.cache.layers))


def _weight_moves(hlo: Hlo, params: PyTree) -> list[str]:
    """Copies, transpositions and conversions of weights, without fetches into a TPU core's memory.
    Vectors are left out: results of other kinds have their shapes."""
    shapes = {_shape_of(leaf) for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    moves = hlo.moves_of(shapes, with_entry=True)
    return [move for move in moves if not move.endswith(": copy-start")]


def _shape_of(leaf: jax.ShapeDtypeStruct) -> str:
    """As HLO writes it: `u16[32,2,128,128]`."""
    kinds = {"uint16": "u16", "bfloat16": "bf16", "float16": "f16", "float32": "f32"}
    return f"{kinds[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]"


def _cut(config: ModelConfig, num_layers: int | None) -> ModelConfig:
    """The architecture with at most this many layers; None keeps all."""
    return config if num_layers is None else shortened(config, num_layers)


RESULTS: Columns = {
    "device": "{device}",
    "kernels": "{kernels}",
    "rows": "{rows}",
    "graphs": "{launches[num_graphs]}",
    "in graphs": "{launches[num_nodes]}",
    "one by one": "{launches[num_kernels]}",
    "predicates": "{launches[num_predicates]}",
    "per layer": "{launches_per_layer}",
}


@case(
    "program",
    {"results": ("a round, a prefill call and its halves, by what was compiled", RESULTS)},
)
def program(
    target: str = "qwen3-8b",
    draft: str = "qwen3-0.6b",
    devices: tuple[Literal["h100", "h200", "a100", "rtx4090", "b200", "t4", "v5e"], ...] = (
        "h100",
    ),
    kernels: tuple[KernelsName, ...] = (),
    num_layers: int | None = None,
    context: int = 1024,
) -> dict[str, Any]:
    """Show what a decode round and a prefill call compile to for a GPU or TPU that need not be
    present (extra `deviceless`).

    Args:
      target: A preset.
      draft: A preset for its draft model.
      devices: Devices to compile for.
      kernels: Kernels of both models; default: those made for the device.
      num_layers: Use at most this many layers of both models; fewer compile faster.
      context: Committed tokens per row.
    """
    for name in (target, draft):
        if name not in PRESETS:
            raise SettingError(f"There is no preset {name!r}; choose {', '.join(PRESETS)}.")
    results = []
    for device in devices:
        with as_if_on(device):
            for each in kernels or (default_kernels(),):
                shape = Shape(
                    target=_cut(PRESETS[target], num_layers),
                    draft=_cut(PRESETS[draft], num_layers),
                    kernels=each,
                    batch_size=BATCH_SIZE,
                    context=context,
                    draft_length=DRAFT_LENGTH,
                    dtype="float16" if lacks_bfloat16() else "bfloat16",
                )
                results += _compile(device, shape, PRESETS[target])
                results += _compile_prefill(device, shape)
    problems = dict.fromkeys(
        f"{found['device']}, {found['kernels']}: {problem}."
        for found in results
        for problem in found["problems"]
    )
    notes = [*problems, "Loops over KV are counted at the given context; nothing was run."]
    return {"results": results, "notes": notes}


def _compile(device: str, shape: Shape, target: ModelConfig) -> list[dict[str, Any]]:
    """A result for each kind of rows and, on GPUs, for rounds without draft steps. Launches are
    counted in layers of `target`, the architecture with all of them."""
    results = _compile_rounds(device, shape)
    if ABSENT_DEVICES[device].platform == "gpu":
        resting = _compile_rounds(device, dataclasses.replace(shape, is_resting=True))
        results.append({**resting[0], "rows": "greedy, resting"})
        per_layer = launches_per_layer(device, dataclasses.replace(shape, target=target))
        for found in results:
            found["launches_per_layer"] = per_layer
            found["problems"] = found["problems"] + launch_problems(shape, per_layer)
    return results


def _compile_rounds(device: str, shape: Shape) -> list[dict[str, Any]]:
    compiled = compile_run(device, shape)
    found = {
        "device": device,
        "kernels": shape.kernels,
        "problems": compiled.problems(draft_length=0 if shape.is_resting else DRAFT_LENGTH),
        **{
            field.name: getattr(compiled, field.name)
            for field in dataclasses.fields(Program)
            if field.name not in ("greedy", "sampled")
        },
    }
    if ABSENT_DEVICES[device].platform != "gpu":
        return [{**found, "rows": "any"}]
    return [
        {**found, "rows": rows, "launches": dataclasses.asdict(launches)}
        for rows, launches in (("greedy", compiled.greedy), ("sampled", compiled.sampled))
        if launches is not None
    ]


def _compile_prefill(device: str, shape: Shape) -> list[dict[str, Any]]:
    """A result for a prefill call and for each half of it."""
    results = []
    for name in PREFILL:
        compiled = compile_prefill(device, shape, name)
        found = {
            "device": device,
            "kernels": shape.kernels,
            "rows": name,
            "problems": compiled.problems(),
            **dataclasses.asdict(compiled),
        }
        if found["launches"] is None:
            del found["launches"]
        results.append(found)
    return results
