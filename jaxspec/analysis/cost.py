"""What a round costs, and what speculation gains: a roofline with four constants of a device.

A forward pass of a model with L layers over B rows, a window of T tokens and S live slots takes

    max(W / bandwidth, 2 P B T / rate)                  products of the layers, weights read once
    + max((W_head + 8 B T V) / bandwidth, ... / rate)   head, logits written and read in fp32
    + max(KV / kv_bandwidth, 4 B T S Q H L / rate)      attention over the live slots
    + (L (1 + S / block) + 1) step_s                    what runs one after the other: the layers,
                                                        their blocks of KV, the head

and a speculative round N draft passes, the first of two tokens and the others of one (of a tree one
pass per level, of the tokens that it expands), a target pass of N + 1, and `round_s` for verifying
and committing. A sum of maxima per kind of kernel is tighter than one maximum of sums (Williams et
al. 2009 for the roofline; Yuan et al., 2402.16363, for its use on decoding). The constants come
from a measured grid of passes (`fit_device`) or from a datasheet (`DEVICES`).

Speed-ups follow Leviathan et al., 2211.17192: with a the chance that a drafted token is accepted, a
round of N drafts emits (1 - a^(N + 1)) / (1 - a). Measured acceptance by position takes its place
where there is one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from scipy import optimize

from jaxspec.drafters.flexdraft.config import FlexConfig
from jaxspec.drafters.growth import Tree
from jaxspec.errors import SettingError
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.documents import as_json

LOGITS_PASSES = 2  # fp32 logits are written once and read once
LONGEST_DRAFT = 16  # searched for the best draft length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass of a model, head included.

    Attributes:
      config: the model's.
      batch: B, rows.
      window: T, tokens of each row.
      context: S, live slots of each row, the window's own included.
      itemsize: bytes of a parameter and of a component of the KV cache.
      block: slots that attention reads at a time, one block after the other, so that partly filled
        ones are counted whole; None where one kernel reads them all.
      kv_itemsize: bytes of a component of the KV cache, scales included, where it is not
        `itemsize`.
    """

    config: ModelConfig
    batch: int
    window: int
    context: float
    itemsize: int = 2
    block: int | None = None
    kv_itemsize: float | None = None

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return self.batch * self.window

    @property
    def layer_params(self) -> int:
        """Parameters of the products of all layers."""
        c = self.config
        attention = c.width * (2 * c.num_query_heads + 2 * c.num_kv_heads) * c.head_size
        return c.num_layers * (attention + 3 * c.width * c.feed_forward_width)

    @property
    def head_params(self) -> int:
        """Parameters of the product with the head."""
        return self.config.width * self.config.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Weights that the pass reads; of the embedding only B T rows, which are not counted."""
        return (self.layer_params + self.head_params) * self.itemsize

    @property
    def kv_bytes(self) -> float:
        """Live KV that the pass reads, and the window's that it writes."""
        c = self.config
        itemsize = self.itemsize if self.kv_itemsize is None else self.kv_itemsize
        per_slot = 2 * c.num_layers * c.num_kv_heads * c.head_size * itemsize
        return per_slot * (self.batch * self._slots + self.num_tokens)

    @property
    def num_bytes(self) -> float:
        """Weights and live KV: what must be read."""
        return self.weight_bytes + self.kv_bytes

    @property
    def num_flops(self) -> float:
        """FLOPs of all products, two per multiply-add."""
        return sum(flops for _, flops in self.kernels())

    @property
    def num_blocks(self) -> int:
        """Blocks of KV that attention reads one after the other; 0 where one kernel reads all."""
        return math.ceil(self.context / self.block) if self.block else 0

    @property
    def num_steps(self) -> int:
        """What runs one after the other: layers, the blocks of each, the head."""
        return self.config.num_layers * (1 + self.num_blocks) + 1

    @property
    def _slots(self) -> float:
        return self.num_blocks * self.block if self.block else self.context

    def kernels(self) -> tuple[tuple[float, float], ...]:
        """Bytes and FLOPs of the layers' products, of the head, and of attention."""
        c, num_tokens = self.config, self.num_tokens
        logits_bytes = LOGITS_PASSES * 4 * num_tokens * c.vocab_size
        head_bytes = self.head_params * self.itemsize + logits_bytes
        attention_flops = 4 * num_tokens * self._slots * c.num_query_heads * c.head_size
        return (
            (self.layer_params * self.itemsize, 2.0 * self.layer_params * num_tokens),
            (head_bytes, 2.0 * self.head_params * num_tokens),
            (self.kv_bytes, attention_flops * c.num_layers),
        )


class Work(Protocol):
    """What a device takes time for; a `Pass`, or another sequence of kernels."""

    @property
    def num_steps(self) -> int:
        """What runs one after the other."""
        ...

    def kernels(self) -> tuple[tuple[float, float], ...]:
        """Bytes and FLOPs of the layers' products, of the head, and of attention."""
        ...


class Timed(Protocol):
    """A device, or a bound of one: what says how long passes take."""

    @property
    def round_s(self) -> float:
        """Seconds of a round besides its passes."""
        ...

    def pass_s(self, work: Pass, /) -> float:
        """Seconds of a pass."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What the cost model knows of a device.

    Attributes:
      name: for reports.
      bytes_per_s: at which weights and logits stream.
      kv_bytes_per_s: at which attention reads live KV.
      flops_per_s: of products in the model's dtype.
      step_s: of everything that waits for what came before it, whatever it computes: launches,
        small kernels, synchronisation.
      round_s: of a round besides its forward passes: verify, commit, the loop.
      source: where the constants come from, in words.
    """

    name: str
    bytes_per_s: float
    kv_bytes_per_s: float
    flops_per_s: float
    step_s: float
    round_s: float
    source: str

    def pass_s(self, work: Work) -> float:
        """Seconds of a forward pass, or of other kernels."""
        rates = self.bytes_per_s, self.bytes_per_s, self.kv_bytes_per_s
        kernels_s = sum(
            max(num_bytes / bytes_per_s, num_flops / self.flops_per_s)
            for (num_bytes, num_flops), bytes_per_s in zip(work.kernels(), rates, strict=True)
        )
        return kernels_s + work.num_steps * self.step_s

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Device:
        """The device that `to_json` wrote.

        Raises:
          SettingError: a constant is missing, or is not a number it can be.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in fields]
        if missing:
            raise SettingError(
                f"The device lacks {', '.join(missing)}; give a document of `jaxspec bench decode "
                "--json`."
            )
        for name in set(names) - {"name", "source"}:
            value = fields[name]
            is_rate = name.endswith("per_s")
            is_number = isinstance(value, (int, float)) and 0 <= value < math.inf
            if not is_number or (is_rate and value == 0):
                raise SettingError(
                    f"The device has {name} {value!r}; it must be a finite number, "
                    f"{'above' if is_rate else 'at least'} 0."
                )
        return cls(**{name: fields[name] for name in names})


# Memory bandwidth and dense bf16 tensor rate of NVIDIA's datasheets; fp16 of the Titan RTX, which
# has no bf16.
_PEAKS = {
    "a100": (2.039e12, 312e12),
    "h100": (3.35e12, 989e12),
    "h200": (4.8e12, 989e12),
    "l40s": (0.864e12, 362e12),
    "l4": (0.3e12, 121e12),
    "titan-rtx": (0.672e12, 130e12),
}
DEVICES: dict[str, Device] = {
    name: Device(
        name=name,
        bytes_per_s=0.75 * bytes_per_s,
        kv_bytes_per_s=0.75 * bytes_per_s,
        flops_per_s=0.65 * flops_per_s,
        step_s=8e-6,
        round_s=40e-6,
        source="datasheet peaks (dense bf16), 75 % of the bandwidth and 65 % of the rate, 8 us per "
        "layer, 40 us per round: inferred, not measured",
    )
    for name, (bytes_per_s, flops_per_s) in _PEAKS.items()
}


def split(device: Device, num_shards: int) -> Device:
    """Devices that split a model evenly, as one: their rates add up, what waits does not get
    shorter, and what they exchange is not counted."""
    return dataclasses.replace(
        device,
        bytes_per_s=num_shards * device.bytes_per_s,
        kv_bytes_per_s=num_shards * device.kv_bytes_per_s,
        flops_per_s=num_shards * device.flops_per_s,
    )


def find_devices(
    name: str, target: ModelConfig, draft: ModelConfig | None
) -> tuple[Device, Device, int | None]:
    """Devices for the passes of target and draft, of a datasheet or fitted, and the block of KV
    that attention reads there at a time (None: as one kernel, which datasheets are taken to run).

    A document whose pair is the one asked for lends the constants that were fitted to each model;
    for another pair those that were fitted to both are used.

    Args:
      name: a key of `DEVICES`, or the file of a document of `jaxspec bench decode`.
      target: architecture of the target.
      draft: of the draft model, if there is one.

    Raises:
      SettingError: there is no such device or document.
    """
    if name in DEVICES:
        return DEVICES[name], DEVICES[name], None
    try:
        text = pathlib.Path(name).read_text(encoding="utf-8")
        model = read_document(text)["cost_model"]
        block = model["block"]
        pair = [None if each is None else as_json(each.to_json()) for each in (target, draft)]
        kinds = ("target", "draft") if [model["target"], model["draft"]] == pair else ("all", "all")
        of_target, of_draft = (model["fits"][kind]["device"] for kind in kinds)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(
            f"--device {name} is neither one of {', '.join(DEVICES)} nor a document that "
            "`jaxspec bench decode --json` printed; name one of these."
        ) from error
    return Device.from_json(of_target), Device.from_json(of_draft), block


def read_document(text: str) -> Any:
    """The JSON document of a file that `--out` wrote, or of output that ends with one line of it.

    Raises:
      ValueError: neither.
    """
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(text.strip().split("\n")[-1])


def ceiling(device: Device) -> Device:
    """A device of `DEVICES` at its datasheet's peaks, without any overhead: nothing can beat it."""
    bytes_per_s, flops_per_s = _PEAKS[device.name]
    return Device(
        name=device.name,
        bytes_per_s=bytes_per_s,
        kv_bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        step_s=0.0,
        round_s=0.0,
        source="datasheet peaks without overheads: a ceiling",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """A device fitted to measurements.

    Attributes:
      device: the constants.
      errors: relative error of each fitted measurement, |predicted / measured - 1|.
      held_out_errors: of the measurements that were not fitted.
    """

    device: Device
    errors: tuple[float, ...]
    held_out_errors: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Constants, and median and worst errors."""
        return {
            "device": self.device.to_json(),
            "num_fitted": len(self.errors),
            "error_median": statistics.median(self.errors),
            "error_worst": max(self.errors),
            "num_held_out": len(self.held_out_errors),
            "held_out_error_median": statistics.median(self.held_out_errors),
            "held_out_error_worst": max(self.held_out_errors),
        }


def fit_device(
    measured: Sequence[tuple[Pass, float]],
    *,
    name: str,
    source: str,
    most_bytes_per_s: float,
    most_flops_per_s: float,
    round_s: float = 0.0,
) -> Fit:
    """A device whose predicted passes fit the measured ones, by least squares on relative errors.

    A third of the measurements is held out (`is_held_out`). Rates cannot exceed the ceilings, so a
    kind of work that the measurements say nothing about gets the ceiling instead of infinity.

    Args:
      measured: at least 6 passes and the seconds that each took; several batches, windows and
        contexts tell the constants apart.
      name: of the device.
      source: of the measurements, in words.
      most_bytes_per_s: measured ceiling of the bandwidth.
      most_flops_per_s: measured ceiling of the rate of products.
      round_s: passed on.

    Raises:
      SettingError: too few measurements.
    """
    if len(measured) < 6:
        raise SettingError(
            f"{len(measured)} measured passes were given; fitting four constants and holding out a "
            "third takes at least 6, so measure more batch sizes or draft lengths."
        )
    pairs = list(zip(measured, is_held_out(len(measured)), strict=True))
    fitted, held_out = ([point for point, out in pairs if out == which] for which in (False, True))
    # Logarithms of the seconds per byte, KV byte, FLOP and step. Rates have a least value, and a
    # step takes at most what the quickest pass leaves for each of its own.
    quickest = min(seconds / work.num_steps for work, seconds in fitted)
    lowest = np.log([1 / most_bytes_per_s, 1 / most_bytes_per_s, 1 / most_flops_per_s, 1e-9])
    highest = np.append(lowest[:3] + np.log(1e4), max(np.log(quickest), lowest[3] + 1))

    def device_of(logs: np.ndarray) -> Device:
        weights, kv, product, step = (float(value) for value in np.exp(logs))
        return Device(
            name=name,
            bytes_per_s=1 / weights,
            kv_bytes_per_s=1 / kv,
            flops_per_s=1 / product,
            step_s=step,
            round_s=round_s,
            source=source,
        )

    def errors(device: Device, points: Sequence[tuple[Pass, float]]) -> np.ndarray:
        return np.array([device.pass_s(work) / seconds - 1 for work, seconds in points])

    # A sum of maxima has kinks, where a search may end: several starts, each rate below its ceiling
    # by one of these factors, each with expensive and with cheap steps.
    starts = [
        np.append(lowest[:3] + np.log(factors), highest[3] + np.log(share))
        for factors in itertools.product((1.5, 6.0), repeat=3)
        for share in (0.03, 0.5)
    ]
    solutions = [
        optimize.least_squares(
            lambda logs: errors(device_of(logs), fitted),
            np.clip(start, lowest + 1e-6, highest - 1e-6),
            bounds=(lowest, highest),
        )
        for start in starts
    ]
    device = device_of(min(solutions, key=lambda solution: solution.cost).x)
    of_fitted, of_held_out = (
        tuple(np.abs(errors(device, points)).tolist()) for points in (fitted, held_out)
    )
    return Fit(device=device, errors=of_fitted, held_out_errors=of_held_out)


def is_held_out(num_points: int) -> list[bool]:
    """Which of so many measurements a fit leaves out: a third, drawn without regard to order."""
    drawn = np.random.default_rng(0).permutation(num_points)
    return np.isin(np.arange(num_points), drawn[: num_points // 3]).tolist()


def geometric(acceptance: float, draft_length: int) -> tuple[float, ...]:
    """Cumulative acceptance by position if each drafted token is accepted with one probability."""
    return tuple(acceptance ** (index + 1) for index in range(draft_length))


def emitted_per_round(cumulative: Sequence[float]) -> float:
    """Tokens that a round emits, the target's own included: 1 + sum of the cumulative acceptance.

    Args:
      cumulative: chance that at least n + 1 drafted tokens are accepted, for each position n.
    """
    return 1.0 + sum(cumulative)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A target with its drafter on devices of their own constants.

    On a CPU whose caches hold one model and not the other, constants fitted to each of them say
    more than one device for both.

    Attributes:
      target: architecture of the target.
      target_device: constants for its passes, and `round_s`.
      draft: architecture of a draft model; None if the drafter runs no model (n-gram).
      draft_device: constants for its passes.
      itemsize: bytes of a parameter.
      block: see `Pass`.
      drafter_s: seconds per round of a drafter that runs no model.
      draft_itemsize: bytes of a parameter of the draft model, where it is not `itemsize`.
      kv_itemsize: of the target, see `Pass`.
      draft_kv_itemsize: of the draft model, likewise.
      draft_context: slots that the draft model keeps at most; None keeps all.
      tree: what the draft model drafts, level by level; None for chains.
    """

    target: ModelConfig
    target_device: Timed
    draft: ModelConfig | None
    draft_device: Timed
    itemsize: int = 2
    block: int | None = None
    drafter_s: float = 0.0
    draft_itemsize: int | None = None
    kv_itemsize: float | None = None
    draft_kv_itemsize: float | None = None
    draft_context: int | None = None
    tree: Tree | None = None

    def target_s(self, *, batch: int, window: int, context: float) -> float:
        """Seconds of a target pass over `window` tokens after `context` slots."""
        scored = self._pass(self.target, batch, window, context + window)
        return self.target_device.pass_s(dataclasses.replace(scored, kv_itemsize=self.kv_itemsize))

    def draft_step_s(self, *, batch: int, context: float, window: int = 1) -> float:
        """Seconds of one draft step, over `window` tokens."""
        if self.draft is None:
            return 0.0
        kept = context + 1 if self.draft_context is None else min(context + 1, self.draft_context)
        step = dataclasses.replace(
            self._pass(self.draft, batch, window, kept),
            itemsize=self.draft_itemsize or self.itemsize,
            kv_itemsize=self.draft_kv_itemsize,
        )
        return self.draft_device.pass_s(step)

    def plain_s(self, *, batch: int, context: float) -> float:
        """Seconds of a step of window-1 plain decoding."""
        step_s = self.target_s(batch=batch, window=1, context=context)
        return step_s + self.target_device.round_s

    def round_s(self, *, batch: int, draft_length: int, context: float) -> float:
        """Seconds of a speculative round of `draft_length` drafts, of a tree its nodes."""
        target_s = self.target_s(batch=batch, window=draft_length + 1, context=context)
        draft_s = self.drafter_s + sum(
            self.draft_step_s(batch=batch, context=context, window=num_tokens)
            for num_tokens in self.draft_windows(draft_length)
        )
        return draft_s + target_s + self.target_device.round_s

    def draft_windows(self, draft_length: int) -> tuple[int, ...]:
        """Tokens per row that each draft step of a round reads. The first reads two: the newest,
        and the one before it, which a fully accepted draft leaves unread. The others read the
        token before, or the tokens that a level of the tree expands."""
        if not draft_length:
            return ()
        if self.tree is None:
            return (2, *(draft_length - 1) * (1,))
        within = self.tree.within(draft_length)
        num_levels = min(within.max_depth, draft_length)
        return (2, *(num_levels - 1) * (within.num_expanded,))

    def speed_up(self, *, batch: int, context: float, cumulative: Sequence[float]) -> float:
        """Over window-1 plain decoding, at the draft length `len(cumulative)`."""
        return self.speed_up_of(
            emitted_per_round(cumulative),
            batch=batch,
            context=context,
            draft_length=len(cumulative),
        )

    def speed_up_of(self, emitted: float, *, batch: int, context: float, **of_round: Any) -> float:
        """Over window-1 plain decoding, of rounds that emit so many tokens; see `round_s`."""
        round_s = self.round_s(batch=batch, context=context, **of_round)
        return emitted * self.plain_s(batch=batch, context=context) / round_s

    def best_draft_length(
        self, *, batch: int, context: float, acceptance: float | Sequence[float]
    ) -> tuple[int, float]:
        """Draft length with the largest predicted speed-up, by search, and that speed-up; (0, 1.0)
        where plain decoding is predicted to be fastest.

        Args:
          acceptance: of each token alike, searched up to `LONGEST_DRAFT`; or measured cumulative
            acceptance by position, searched up to its length.
        """
        if isinstance(acceptance, (int, float)):
            acceptance = geometric(acceptance, LONGEST_DRAFT)
        best = (0, 1.0)
        for length in range(1, len(acceptance) + 1):
            gain = self.speed_up(batch=batch, context=context, cumulative=acceptance[:length])
            best = max(best, (length, gain), key=lambda pair: pair[1])
        return best

    def cost_ratio(self, *, batch: int, context: float) -> float:
        """c of Leviathan et al.: a draft step over a target step."""
        step_s = self.draft_step_s(batch=batch, context=context)
        return step_s / self.plain_s(batch=batch, context=context)

    def _pass(self, config: ModelConfig, batch: int, window: int, context: float) -> Pass:
        return Pass(
            config=config,
            batch=batch,
            window=window,
            context=context,
            itemsize=self.itemsize,
            block=self.block,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexPass:
    """A pass of FlexDraft: a window of the target, mask rows in its deep layers, or both at once,
    with weights that both use read once.

    Attributes:
      config: of the weights; D deep layers of L.
      batch: B, rows.
      window: T, tokens of each row that the target scores; 0 of a pass of mask rows alone.
      num_masks: M, mask rows of each row.
      num_drafts: mask rows of each row whose calibrated logits are computed.
      context: S, live slots of each row.
      itemsize: bytes of a parameter and of a component of the KV cache.
      block: see `Pass`.
      kv_itemsize: see `Pass`.
    """

    config: FlexConfig
    batch: int
    window: int = 0
    num_masks: int = 0
    num_drafts: int = 0
    context: float
    itemsize: int = 2
    block: int | None = None
    kv_itemsize: float | None = None

    @property
    def layer_rows(self) -> int:
        """Layers that each row of the batch runs, times the tokens and mask rows in them."""
        layers = self.config.target.num_layers
        return self.window * layers + self.num_masks * self.config.num_deep_layers

    @property
    def num_steps(self) -> int:
        """What runs one after the other: of mask rows beside a window only their attention does."""
        deep = self.config.num_deep_layers if self.num_masks else 0
        num_steps = self._pass.num_steps if self.window else 0
        num_heads = 2 * (self.num_drafts > 0)  # the head and the calibrator
        return num_steps + deep * (1 + self._pass.num_blocks) + num_heads

    def kernels(self) -> tuple[tuple[float, float], ...]:
        """Bytes and FLOPs of the layers' products, of the heads, and of attention."""
        c, deep = self.config.target, self.config.num_deep_layers if self.num_masks else 0
        products, head, attention = self._pass.kernels() if self.window else ((0.0, 0.0),) * 3
        of_layer = self._pass.layer_params / c.num_layers
        feed_forward = 3 * c.width * c.feed_forward_width
        masks = self.batch * self.num_masks
        # Beside a window the feed-forward has been read; the draft projectors never have.
        new_params = deep * (of_layer - feed_forward * (self.window > 0))
        calibrator = (2 * c.width + c.vocab_size) * self.config.rank
        heads = (self._pass.head_params + calibrator) * (self.num_drafts > 0)
        drafts = self.batch * self.num_drafts
        kv_itemsize = self.itemsize if self.kv_itemsize is None else self.kv_itemsize
        per_slot = 2 * c.num_kv_heads * c.head_size * kv_itemsize
        num_slots = self._pass.num_blocks * self.block if self.block else self.context
        return (
            (
                products[0] + new_params * self.itemsize,
                products[1] + 2.0 * deep * of_layer * masks,
            ),
            (
                head[0] + heads * self.itemsize + LOGITS_PASSES * 4 * drafts * c.vocab_size,
                head[1] + 2.0 * heads * drafts,
            ),
            (
                attention[0] + deep * per_slot * (self.batch * num_slots + masks),
                attention[1] + 4.0 * deep * masks * num_slots * c.num_query_heads * c.head_size,
            ),
        )

    @property
    def _pass(self) -> Pass:
        return Pass(
            config=self.config.target,
            batch=self.batch,
            window=self.window,
            context=self.context,
            itemsize=self.itemsize,
            block=self.block,
            kv_itemsize=self.kv_itemsize,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexPair:
    """A target that drafts for itself (FlexDraft, 2605.20022), in one of two modes.

    Attributes:
      config: of the weights, with blocks of K mask rows.
      device: constants for all passes, and `round_s`.
      itemsize: bytes of a parameter.
      block: see `Pass`.
      kv_itemsize: see `Pass`.
    """

    config: FlexConfig
    device: Device
    itemsize: int = 2
    block: int | None = None
    kv_itemsize: float | None = None

    def passes(
        self, mode: str, *, batch: int, draft_length: int, context: float
    ) -> tuple[FlexPass, ...]:
        """The passes of a round that scores T = `draft_length` + 1 tokens.

        `parallel`: the target's, in which T groups of K mask rows ride. `sequential`: one group of
        K mask rows, then the target's. The drafts' logits are computed between rounds or passes
        either way.
        """
        window, block_size = draft_length + 1, self.config.block_size
        shared: dict[str, Any] = {
            "config": self.config,
            "batch": batch,
            "context": context + window,
            "itemsize": self.itemsize,
            "block": self.block,
            "kv_itemsize": self.kv_itemsize,
        }
        scored = FlexPass(window=window, **shared)
        if mode == "parallel":
            num_groups = min(window, block_size)
            return (
                FlexPass(num_drafts=draft_length, **shared),
                dataclasses.replace(scored, num_masks=num_groups * block_size),
            )
        return FlexPass(num_masks=block_size, num_drafts=draft_length, **shared), scored

    def round_s(self, mode: str, *, batch: int, draft_length: int, context: float) -> float:
        """Seconds of a round; see `passes`."""
        works = self.passes(mode, batch=batch, draft_length=draft_length, context=context)
        return sum(self.device.pass_s(work) for work in works) + self.device.round_s

    def plain_s(self, *, batch: int, context: float) -> float:
        """Seconds of a step of window-1 plain decoding."""
        step = FlexPass(
            config=self.config,
            batch=batch,
            window=1,
            context=context + 1,
            itemsize=self.itemsize,
            block=self.block,
            kv_itemsize=self.kv_itemsize,
        )
        return self.device.pass_s(step) + self.device.round_s

    def crossing_batch(
        self, *, draft_length: int, context: float, largest: int = 256
    ) -> int | None:
        """The smallest batch at which the sequential mode is the faster one; None if it is at none
        up to the `largest`. The drafts are the same, so acceptance does not matter."""
        where: dict[str, Any] = {"draft_length": draft_length, "context": context}
        for batch in range(1, largest + 1):
            parallel_s = self.round_s("parallel", batch=batch, **where)
            if self.round_s("sequential", batch=batch, **where) < parallel_s:
                return batch
        return None


def closed_form_speed_up(acceptance: float, draft_length: int, cost_ratio: float) -> float:
    """Theorem 3.8 of Leviathan et al.: (1 - a^(N+1)) / ((1 - a) (N c + 1)).

    It takes a target pass to cost the same whatever its window.
    """
    emitted = emitted_per_round(geometric(acceptance, draft_length))
    return emitted / (draft_length * cost_ratio + 1.0)


def closed_form_draft_length(acceptance: float, cost_ratio: float) -> int:
    """The draft length that maximises `closed_form_speed_up`; 0 where none gains.

    One more token gains while what it emits, a^(N+1), is to what N tokens emit as what it costs, c,
    is to what they cost. It gains ever less, so the first that does not gain ends the search.

    Args:
      acceptance: a, in [0, 1).
      cost_ratio: c, above 0.

    Raises:
      SettingError: out of these ranges (a drafter that is free or always right has no best length).
    """
    if not 0.0 <= acceptance < 1.0 or not cost_ratio > 0.0:
        raise SettingError(
            f"An acceptance of {acceptance:g} and a cost ratio of {cost_ratio:g} were given; the "
            "first must be from 0 up to, not including, 1, and the second above 0."
        )
    length, emitted, more = 0, 1.0, acceptance
    while more * (length * cost_ratio + 1.0) > emitted * cost_ratio:
        length, emitted, more = length + 1, emitted + more, more * acceptance
    return length
