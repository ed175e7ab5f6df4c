"""What `jaxspec doctor` tries and measures: kernels, costs of the device, the engine itself.

Kernels are tried in a process of their own, because one that reads where it must not ends CUDA for
the whole process, and one that hangs can only be killed.

    python -m jaxspec.lab.doctor mosaic

tries those of one name and prints one line of JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.pages import KvDtype
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.engine.executor import make_executor
from jaxspec.errors import SettingError
from jaxspec.kernels.registry import LEAST_CAPABILITY, KernelsName, check_kernels, default_kernels
from jaxspec.lab.bench.measure import fill, prompt_chunks, random_prompts, run_rounds
from jaxspec.lab.bench.roofline import measure_ceilings
from jaxspec.lab.cost.devices import Device
from jaxspec.lab.cost.model import Pair
from jaxspec.lab.cost.passes import Pass
from jaxspec.lab.cost.programs import LAUNCHES_PER_LAYER
from jaxspec.load.models import load_packed
from jaxspec.models.base import LanguageModel
from jaxspec.models.kernel_probe import WindowSize, problem
from jaxspec.models.registry import PRESETS, random_model
from jaxspec.requests.prompts import sample_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime import environment
from jaxspec.runtime.processes import run_child
from jaxspec.runtime.turns import take_turns

# ---- kernels

# Compared with XLA's; and what they are made for.
MADE_FOR: dict[KernelsName, str] = {
    "native": "for CPUs",
    "mosaic": "for Hopper GPUs",
    "pallas": "for GPUs from Ampere on",
}
CHILD = (sys.executable, "-m", "jaxspec.lab.doctor")
Outcome: TypeAlias = Literal["works", "fails", "crashes", "hangs", "not for this device"]

_CHAIN = WindowSize(num_rows=3, num_tokens=5, capacity=2560)
_WINDOWS = (
    dataclasses.replace(_CHAIN, num_tokens=1),
    _CHAIN,
    dataclasses.replace(_CHAIN, num_tokens=9, tree_depth=4),
    dataclasses.replace(_CHAIN, num_rows=4, num_tokens=128),
)
# Architecture, dtype, dtype of the KV, windows.
CASES: tuple[tuple[str, str, KvDtype | None, tuple[WindowSize, ...]], ...] = (
    ("qwen3-8b", "bfloat16", None, _WINDOWS),
    ("qwen3-8b", "bfloat16", "int8", (_CHAIN,)),
    ("qwen3-8b", "float32", None, (_CHAIN,)),
    ("glm-4-9b", "bfloat16", None, (_CHAIN,)),
    ("vicuna-7b", "bfloat16", None, (_CHAIN,)),
)


def try_kernels(
    name: KernelsName, *, timeout_s: float, command: Sequence[str] = CHILD
) -> dict[str, Any]:
    """Whether the kernels of one name compute what XLA's do, found in a child process.

    Args:
      name: that of the kernels.
      timeout_s: seconds after which the child is killed.
      command: the child's, without the name.

    Returns:
      `kernels`, `outcome` (see `Outcome`), `why` (None if they work) and `seconds`.
    """
    started_s = time.perf_counter()
    outcome: Outcome
    why: str | None
    try:
        done = run_child([*command, name], timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        outcome, why = "hangs", f"no result after {timeout_s:g} s"
    else:
        lines = done.stdout.strip().splitlines()
        try:
            found = json.loads(lines[-1])
            outcome, why = found["outcome"], found["why"]
        except (IndexError, ValueError, KeyError, TypeError):
            said = done.stderr.strip().splitlines()
            outcome = "crashes"
            why = f"its process ended with {done.returncode}: {said[-1][:200] if said else ''}"
    seconds = time.perf_counter() - started_s
    return {"kernels": name, "outcome": outcome, "why": why, "seconds": seconds}


def why_not_here(name: KernelsName) -> str | None:
    """Why these kernels are not for this device, or None if they are."""
    platform = jax.default_backend()
    capability = environment.compute_capability()
    is_here = {
        "native": platform == "cpu",
        "mosaic": environment.is_hopper(),
        "pallas": platform == "gpu" and (capability is None or capability >= LEAST_CAPABILITY),
    }
    return None if is_here[name] else MADE_FOR[name]


def small_model(
    preset: str, dtype: str, kernels: KernelsName, kv_dtype: KvDtype | None
) -> LanguageModel:
    """A model with the heads of a preset's, and small in everything else."""
    config = dataclasses.replace(
        PRESETS[preset], num_layers=1, vocab_size=256, width=256, feed_forward_width=256
    )
    return random_model(config, dtype=jnp.dtype(dtype), kernels=kernels, kv_dtype=kv_dtype)


def tried(name: KernelsName) -> dict[str, str | None]:
    """The outcome of all cases in this process."""
    why = why_not_here(name)
    if why is not None:
        return {"outcome": "not for this device", "why": why}
    try:
        check_kernels(name)
    except SettingError as error:
        return {"outcome": "fails", "why": str(error)}
    for preset, dtype, kv_dtype, windows in CASES:
        why = problem(small_model(preset, dtype, name, kv_dtype), windows)
        if why is not None:
            kv = "" if kv_dtype is None else f" with KV in {kv_dtype}"
            return {"outcome": "fails", "why": f"{preset} in {dtype}{kv}: {why}"}
    return {"outcome": "works", "why": None}


# ---- costs

_READ_BYTES = {"cpu": 1 << 28}  # of the bandwidth's working set; elsewhere 4 GiB
REPEATS = 5


def _median_s(run: Callable[[], Any]) -> float:
    """The median of some calls that wait for their results, after one that compiles."""
    calls = {"it": lambda: jax.block_until_ready(run())}
    return take_turns(calls, 4 * REPEATS, num_warm_ups=2).median_s("it")


def usual_dtype() -> str:
    """The dtype in which this device is measured: float32 on a CPU, float16 on a GPU that only
    emulates bfloat16."""
    if jax.default_backend() == "cpu":
        return "float32"
    return "float16" if environment.lacks_bfloat16() else "bfloat16"


def measure_costs(dtype: str) -> dict[str, float]:
    """What this device costs: seconds of a call, of a kernel within a program, of a trip of a loop
    whose end the device decides, of reading a result; bytes and FLOPs per second."""
    x = jnp.ones((8, 128), dtype)
    weight = jnp.ones((128, 128), dtype)

    @functools.partial(jax.jit, static_argnums=1)
    def kernels(x: jax.Array, number: int) -> jax.Array:
        for _ in range(number):
            x = jnp.tanh(x @ weight)
        return x

    @jax.jit
    def trips(x: jax.Array, number: jax.Array) -> jax.Array:
        # The end depends on what the loop computes, as a round's does.
        def goes_on(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            return (carry[0] < number) & (carry[1][0, 0] > -2)

        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return carry[0] + 1, jnp.tanh(carry[1] @ weight)

        return lax.while_loop(goes_on, body, (jnp.int32(0), x))[1]

    few, many = (_median_s(functools.partial(kernels, x, n)) for n in (32, 160))
    short, long = (_median_s(functools.partial(trips, x, jnp.int32(n))) for n in (2, 66))
    kernel_s = max(many - few, 0.0) / 128
    add = jax.jit(lambda x: x + 1)
    read_s = _median_s(lambda: np.asarray(add(x)))
    num_bytes = _READ_BYTES.get(jax.default_backend(), 1 << 32)
    ceilings = measure_ceilings(num_bytes, dtype, repeats=REPEATS)
    return {
        "call_s": _median_s(lambda: add(x)),
        "kernel_s": kernel_s,
        "trip_s": max(long - short, 0.0) / 64,
        "read_result_s": read_s,
        "bytes_per_s": ceilings.bytes_per_s,
        "flops_per_s": ceilings.matmul_flops_per_s,
    }


def device_of(costs: dict[str, float]) -> Device:
    """The cost model's device with the measured constants."""
    kind = jax.local_devices()[0].device_kind
    commit = environment.commit() or "an installed package"
    kernels = default_kernels()
    num_launches = LAUNCHES_PER_LAYER[kernels]
    return Device(
        name=kind,
        bytes_per_s=costs["bytes_per_s"],
        kv_bytes_per_s=costs["bytes_per_s"],
        flops_per_s=costs["flops_per_s"],
        step_s=num_launches * costs["kernel_s"],
        round_s=costs["read_result_s"],
        source=f"measured by jaxspec doctor at commit {commit[:12]}; {num_launches} launches a "
        f"layer of the {kernels} kernels",
    )


# ---- the engine

_PARAMS = SamplingParams(max_tokens=48, ignore_eos=True)


def compare_with_plain(dtype: str) -> dict[str, Any]:
    """The embedded pair with its draft model against plain decoding: how many of the sample
    prompts' outputs are equal, in a batch and alone."""
    target, draft = (load_packed(name, dtype=dtype) for name in ("demo-target", "demo-draft"))
    engine = Engine(target, DraftModel(draft), draft_length=4, batch_size=4, max_length=512)
    prompts = [line.prompt for line in sample_prompts()[:8]]
    speculative = engine.generate(prompts, _PARAMS)
    plain = engine.generate(prompts, _PARAMS, speculate=False)
    alone = [engine.generate([prompt], _PARAMS)[0] for prompt in prompts]
    pairs = list(zip(speculative, plain, alone, strict=True))
    described = engine.describe()
    return {
        "num_prompts": len(prompts),
        "num_equal": sum(a.token_ids == b.token_ids for a, b, _ in pairs),
        "num_equal_alone": sum(a.token_ids == c.token_ids for a, _, c in pairs),
        "num_accepted_tokens": sum(a.acceptance.num_accepted_tokens for a in speculative),
        "exactness": described["exactness"],
        "kernels": described["kernels"],
        "kernels_fallback": described["kernels_fallback"],
    }


def measure_cells(device: Device) -> list[dict[str, Any]]:
    """Plain decoding and prefill, measured, beside what the cost model predicts for `device`."""
    batch, context = 8, 1024
    if jax.default_backend() == "cpu":
        model, context = load_packed("demo-target"), 256
    else:  # layers of a usual size, few of them because each takes seconds to compile
        config = dataclasses.replace(PRESETS["qwen3-8b"], num_layers=4)
        model = random_model(config, dtype=jnp.dtype(usual_dtype()))
    executor = make_executor(model, None, batch_size=batch, max_length=context + 128)
    prompts = random_prompts(model, batch, context)
    where = {"model": model.name, "batch_size": batch, "context": context}
    pair = Pair(
        target=model.config,
        target_device=device,
        draft=None,
        draft_device=device,
        itemsize=jnp.dtype(model.dtype).itemsize,
    )
    prefill_work = Pass(
        config=model.config,
        batch=executor.shape.chunks_per_call,
        window=executor.shape.prefill_chunk,
        context=context / 2,
        itemsize=jnp.dtype(model.dtype).itemsize,
        has_head=False,
    )
    num_steps = 16
    chunks = prompt_chunks(executor, map(len, prompts))
    num_calls = len(list(executor.prefill_calls(chunks)))

    def admit(_: str) -> None:
        params = SamplingParams(max_tokens=2 * num_steps, ignore_eos=True)
        fill(executor, prompts, params, draft_length=0, reads=False)

    def decode() -> None:
        run_rounds(executor, num_steps)

    def prefill() -> None:
        executor.prefill(chunks)
        jax.block_until_ready(executor.state)

    plain_s, prefill_s = pair.plain_s(batch=batch, context=context), device.pass_s(prefill_work)
    found = []
    for what, run, number, predicted_s in (
        ("decode, ms per step", decode, num_steps, plain_s),
        ("prefill, ms per call", prefill, num_calls, prefill_s),
    ):
        turns = take_turns({what: run}, REPEATS, num_warm_ups=1, prepare=admit)
        measured_ms = 1e3 * turns.median_s(what) / number
        found.append(
            {
                "what": what,
                **where,
                "measured_ms": measured_ms,
                "predicted_ms": 1e3 * predicted_s,
                "measured_over_predicted": measured_ms / (1e3 * predicted_s),
            }
        )
    return found


if __name__ == "__main__":
    print(json.dumps(tried(sys.argv[1])))  # pyright: ignore[reportArgumentType]
