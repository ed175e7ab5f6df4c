"""Devices of the cost model: constants from a datasheet, or fitted to measured passes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from scipy import optimize

from jaxspec.errors import SettingError
from jaxspec.lab.cost.passes import Pass
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.documents import as_json
from jaxspec.runtime.files import decode_text, read_input
from jaxspec.runtime.options import LARGEST_COUNT, check_between


class Timed(Protocol):
    """A device, or a bound of one, that predicts how long passes take."""

    @property
    def round_s(self) -> float:
        """Seconds of a round other than its passes."""
        ...

    def pass_s(self, work: Pass, /) -> float:
        """Seconds of a pass."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """The cost model's constants of a device.

    Attributes:
      name: for reports.
      bytes_per_s: rate at which weights and logits stream.
      kv_bytes_per_s: rate at which attention reads live KV.
      flops_per_s: rate of products in the model's dtype.
      step_s: seconds of each sequential step, whatever it computes: launches, small kernels,
        synchronisation.
      round_s: seconds of a round other than its forward passes: verify, commit, the loop.
      source: where the constants come from, in words.
    """

    name: str
    bytes_per_s: float
    kv_bytes_per_s: float
    flops_per_s: float
    step_s: float
    round_s: float
    source: str

    def pass_s(self, work: Pass) -> float:
        """Seconds of a forward pass."""
        rates = self.bytes_per_s, self.bytes_per_s, self.kv_bytes_per_s
        kernels_s = sum(
            max(num_bytes / bytes_per_s, num_flops / self.flops_per_s)
            for (num_bytes, num_flops), bytes_per_s in zip(work.kernels(), rates, strict=True)
        )
        return kernels_s + work.num_steps * self.step_s

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Device:
        """The device whose fields these are.

        Raises:
          SettingError: a constant is missing, or is not a possible number.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in fields]
        if missing:
            raise SettingError(
                f"The device lacks {', '.join(missing)}; give a document of `jaxspec doctor "
                "--json` or `jaxspec bench decode --json`."
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


# From the architectures of target and draft model to their devices, and the block of KV.
FindDevices: TypeAlias = Callable[
    [ModelConfig, ModelConfig | None], tuple[Device, Device, int | None]
]


def split(device: Device, num_shards: int) -> Device:
    """Several devices that split a model evenly, as one device: their rates add up, sequential
    steps do not get shorter, and communication is not counted."""
    return dataclasses.replace(
        device,
        bytes_per_s=num_shards * device.bytes_per_s,
        kv_bytes_per_s=num_shards * device.kv_bytes_per_s,
        flops_per_s=num_shards * device.flops_per_s,
    )


def read_device(name: str) -> FindDevices:
    """A function that finds the devices for the passes of target and draft model, from a datasheet
    or fitted, and the block of KV that attention reads there at a time (None: one kernel reads all,
    as assumed for datasheets). Its arguments are the architectures of target and draft model, of
    which the second may be None.

    If a document is for that pair, the constants that were fitted to each model are used; for
    another pair, those that were fitted to both. The document is read now, once.

    Args:
      name: a key of `DEVICES`, or the file of a document of `jaxspec doctor` or `jaxspec bench
        decode`.

    Raises:
      SettingError: there is no such device or document.
    """
    if name in DEVICES:
        return lambda target, draft: (DEVICES[name], DEVICES[name], None)
    try:
        document = read_document(decode_text(read_input(pathlib.Path(name))))
        if "measured_device" in document:
            measured = Device.from_json(document["measured_device"])
            return lambda target, draft: (measured, measured, None)
        model = document["cost_model"]
        fitted_pair, block = [model["target"], model["draft"]], model["block"]
        if block is not None:
            check_between("block", block, 1, LARGEST_COUNT)
        fits = {kind: Device.from_json(fit["device"]) for kind, fit in model["fits"].items()}
        of_both = fits["all"]
    except SettingError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SettingError(
            f"--device {name} is neither one of {', '.join(DEVICES)} nor a document that "
            "`jaxspec doctor --json` or `jaxspec bench decode --json` printed; name one of these."
        ) from error

    def find(target: ModelConfig, draft: ModelConfig | None) -> tuple[Device, Device, int | None]:
        pair = [None if each is None else as_json(each.to_json()) for each in (target, draft)]
        if pair != fitted_pair:
            return of_both, of_both, block
        return fits.get("target", of_both), fits.get("draft", of_both), block

    return find


def read_document(text: str) -> Any:
    """The JSON document in a file that `--out` wrote, or in output that ends with one line of JSON.

    Raises:
      ValueError: the text is neither.
    """
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(text.strip().split("\n")[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """A device fitted to measurements.

    Attributes:
      device: the constants.
      errors: relative error of each fitted measurement, |predicted / measured - 1|.
      held_out_errors: those of the measurements that were not fitted.
    """

    device: Device
    errors: tuple[float, ...]
    held_out_errors: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Constants, and median and worst errors."""
        return {
            "device": dataclasses.asdict(self.device),
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
    kind of work that the measurements do not constrain gets the ceiling instead of infinity.

    Args:
      measured: at least 6 passes and the seconds that each took; several batches, windows and
        contexts are needed to separate the constants.
      name: the device's.
      source: where the measurements come from, in words.
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
    # Logarithms of the seconds per byte, KV byte, FLOP and step. Rates have a lower bound, and a
    # step takes at most the smallest time per step of any pass.
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
    """Which of this many measurements a fit holds out: a third, drawn independently of their
    order."""
    drawn = np.random.default_rng(0).permutation(num_points)
    return np.isin(np.arange(num_points), drawn[: num_points // 3]).tolist()
