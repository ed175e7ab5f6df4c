"""Benches of one part each: a function measures, and its parameters are the options.

To add one, add a function (docs/adding-a-bench.md). What is compared runs in alternation
(`runtime.turns`): times are medians over the turns, and speed-ups medians of the turns' ratios.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.trees import best_static_tree
from jaxspec.engine.engine import Engine
from jaxspec.engine.sessions import Session
from jaxspec.errors import SettingError
from jaxspec.kernels.registry import default_kernels
from jaxspec.lab.bench.measure import case, over_outputs, random_prompts, tiny_config
from jaxspec.lab.bench.roofline import forward_pass, measure_ceilings
from jaxspec.lab.bench.stages import forward_runs
from jaxspec.lab.cost import model as cost
from jaxspec.lab.cost.devices import read_device
from jaxspec.lab.cost.passes import Pass
from jaxspec.lab.plan.request import describe
from jaxspec.load.drafters import make_drafter
from jaxspec.load.models import load_packed
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel, with_kv_dtype
from jaxspec.models.registry import random_model
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import sample_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.report import Columns
from jaxspec.runtime.turns import take_turns, time_loops
from jaxspec.telemetry.counters import Acceptance
from jaxspec.verifiers import Block, Coupled, Rejection, Typical, Verifier

REPEATS = 9  # timed turns of each contender
DRAFT_LENGTH = 4
DTYPES = ("float32", "bfloat16")

# ---- predictions

PREDICTIONS: Columns = {
    "batch": "{batch_size}",
    "acceptance": lambda found: (
        "measured" if found["acceptance"] is None else f"{found['acceptance']:g}"
    ),
    "plain\nms": "{plain_ms:.2f}",
    "plain\ntokens/s": "{plain_tokens_per_s:.0f}",
    "draft\nlength": "{draft_length}",
    "tokens/s": "{tokens_per_s:.0f}",
    "speed-up": "{speedup:.2f}x",
}


@case("predict", {"predictions": ("predicted", PREDICTIONS)})
def predict(
    target: str = "qwen3-8b",
    draft: str = "qwen3-0.6b",
    device: str = "h200",
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
    context: int = 1024,
    acceptance: tuple[float, ...] = (0.6, 0.7, 0.8),
    per_position: tuple[float, ...] = (),
) -> dict[str, Any]:
    """Predict a pair's best draft length and speed-up by batch size, with a cost model.

    Args:
      target: A preset such as `qwen3-8b`, or any model that `load_model` takes; in 2 bytes per
        parameter and per number in the KV cache.
      draft: Its draft model, named in the same way.
      device: `a100`, `h100`, `h200`, `l40s`, `l4` or `titan-rtx` (datasheet values: inferred, not
        measured), or a JSON document of `jaxspec doctor --json` or `jaxspec bench decode --json`,
        which have measured and fitted constants.
      batch_sizes: Rows decoded together.
      context: Tokens in the cache per row.
      acceptance: Probabilities that a drafted token is accepted; each applies to all positions.
      per_position: Instead of --acceptance: measured probabilities that at least 1, 2, ... drafted
        tokens are accepted.
    """
    if not all(0 <= value < 1 for value in (*acceptance, *per_position)):
        raise SettingError(
            "Acceptances were given outside of [0, 1); they are probabilities, and a drafter that "
            "is always right has no best draft length."
        )
    if list(per_position) != sorted(per_position, reverse=True):
        raise SettingError(
            "--per-position was given rising values; they are cumulative (the probability that at "
            "least this many tokens are accepted), so each is at most the one before."
        )
    find_devices = read_device(device)
    of_target, of_draft = (describe(name).config for name in (target, draft))
    target_device, draft_device, block = find_devices(of_target, of_draft)
    pair = cost.Pair(
        target=of_target,
        target_device=target_device,
        draft=of_draft,
        draft_device=draft_device,
        block=block,
    )
    predictions = []
    chosen = (per_position,) if per_position else acceptance
    for size, chances in itertools.product(batch_sizes, chosen):
        where = {"batch": size, "context": context}
        chance = None if isinstance(chances, tuple) else chances
        length, gain = pair.best_draft_length(**where, acceptance=chances)
        plain_s = pair.plain_s(**where)
        predictions.append(
            {
                "batch_size": size,
                "acceptance": chance,
                "plain_ms": 1e3 * plain_s,
                "plain_tokens_per_s": size / plain_s,
                "draft_length": length,
                "tokens_per_s": gain * size / plain_s,
                "speedup": gain,
            }
        )
    return {
        "target_device": dataclasses.asdict(target_device),
        "draft_device": dataclasses.asdict(draft_device),
        "predictions": predictions,
        "notes": [f"{target_device.name}: {target_device.source}."],
    }


# ---- forward passes

PASS: Columns = {"window": "{window}", "context": "{context}", "batch": "{batch_size}"}
CONTEXTS = (80, 1000)  # committed tokens of each row
WINDOWS = (1, 5)  # tokens of each row
TREE_WINDOWS = (5, 9, 17, 33)  # the first is the root of the tree
# Fractions of tokens that were the draft model's likeliest, second likeliest, ... in
# docs/results/trees-cpu.json, for trees of a usual shape.
BY_RANK = (0.73, 0.12, 0.05, 0.023, 0.015, 0.012, 0.006, 0.006)


def time_passes(
    variants: Mapping[str, LanguageModel],
    batch_sizes: Sequence[int],
    windows: Sequence[int],
    parents: Callable[[str, int], np.ndarray | None] = lambda name, window: None,
) -> Iterator[tuple[dict[str, Any], Pass]]:
    """Times forward passes in two variants, in alternation.

    Args:
      variants: models by name.
      batch_sizes: rows of a pass.
      windows: tokens of each row.
      parents: from a variant and a window to the tree of its tokens, see `forward_runs`.

    Yields:
      For each pass `batch_size`, `window`, `context`, milliseconds of the variants as `NAME_ms`,
      and `ratio`, the first one's time over the second one's; and the work of the second.
    """
    first, second = variants
    for batch, window in itertools.product(batch_sizes, windows):
        passes = {
            name: forward_runs(
                model,
                batch=batch,
                window=window,
                contexts=CONTEXTS,
                max_length=max(CONTEXTS) + window,
                parents=parents(name, window),
            )
            for name, model in variants.items()
        }
        for index, context in enumerate(CONTEXTS):
            turns = time_loops({name: passes[name][index][1] for name in variants}, REPEATS)
            found = {
                "batch_size": batch,
                "window": window,
                "context": context,
                **{f"{name}_ms": 1e3 * turns.median_s(name) for name in variants},
                "ratio": turns.speedup(second, over=first),
                "ratios": turns.ratios(second, over=first),
            }
            yield found, passes[second][index][0]


KERNELS: Columns = {
    "dtype": "{dtype}",
    **PASS,
    "XLA ms": "{xla_ms:.3f}",
    "ours ms": "{native_ms:.3f}",
    "XLA /\nours": "{ratio:.2f}",
    "of the\nroofline": "{native_fraction_of_roofline:.0%}",
}


@case("kernels", {"results": ("forward passes", KERNELS)})
def kernels(target: str = "demo-target", batch_sizes: tuple[int, ...] = (1, 8)) -> dict[str, Any]:
    """Time forward passes with XLA's kernels and with the C++ kernels.

    Args:
      target: Any model that `load_model` takes.
      batch_sizes: Rows decoded together.
    """
    default_kernels()  # the document names them, and their family of instructions
    results = []
    for dtype in DTYPES:
        xla, native = (load_packed(target, dtype=dtype, kernels=name) for name in ("xla", "native"))
        weight_bytes = forward_pass(xla, batch=1, window=1, context=1).weight_bytes
        ceilings = measure_ceilings(weight_bytes, xla.dtype)
        models = {"xla": xla, "native": native}
        for found, work in time_passes(models, batch_sizes, WINDOWS):
            fraction = 1e3 * ceilings.pass_s(work) / found["native_ms"]
            results.append({"dtype": dtype, **found, "native_fraction_of_roofline": fraction})
    return {"results": results}


# int8 KV has half the bytes of bfloat16's, or a quarter of float32's; attention has to widen and
# scale them.
KV: Columns = {
    "dtype": "{dtype}",
    **PASS,
    "int8 ms": "{int8_ms:.3f}",
    "own ms": "{own_ms:.3f}",
    "int8 / own": "{ratio:.3f}",
}


@case("kv", {"results": ("forward passes, KV in int8 and in the model's own dtype", KV)})
def kv(target: str = "demo-target", batch_sizes: tuple[int, ...] = (8,)) -> dict[str, Any]:
    """Time forward passes with KV in int8 and in the model's own dtype.

    Args:
      target: Any model that `load_model` takes.
      batch_sizes: Rows decoded together.
    """
    results = []
    for dtype in DTYPES:
        own = load_packed(target, dtype=dtype)
        models = {"int8": with_kv_dtype(own, "int8"), "own": own}
        for found, _ in time_passes(models, batch_sizes, WINDOWS):
            results.append({"dtype": dtype, "kernels": own.kernels, **found})
    return {"results": results}


FORWARD: Columns = {
    "kernels": "{kernels}",
    **PASS,
    "tree ms": "{tree_ms:.3f}",
    "chain ms": "{chain_ms:.3f}",
    "tree / chain": "{ratio:.2f}",
}


@case("forward", {"results": ("forward passes over trees and chains", FORWARD)})
def forward(
    target: str = "demo-target", batch_sizes: tuple[int, ...] = (1, 4, 8)
) -> dict[str, Any]:
    """Time forward passes over a tree and over a chain of as many tokens, with the C++ kernels and
    with XLA's.

    Args:
      target: Any model that `load_model` takes.
      batch_sizes: Rows decoded together.
    """
    default_kernels()  # the document names them, and their family of instructions

    def parents(name: str, window: int) -> np.ndarray | None:
        if name == "chain" or window == 1:
            return None
        return best_static_tree(np.tile(BY_RANK, (len(BY_RANK), 1)), window - 1).parents

    results = []
    for name in ("native", "xla"):
        model = load_packed(target, kernels=name)
        models = {"tree": model, "chain": model}
        for found, _ in time_passes(models, batch_sizes, TREE_WINDOWS, parents):
            results.append({"kernels": name, **found})
    return {"results": results}


# ---- an engine's prompts and sessions

# Between two chunks of a prompt the engine runs a few rounds, so a stream waits for at most one
# chunk, however long the prompt is that arrives meanwhile.
PREFILL: Columns = {
    "prompt": "{prompt_tokens}",
    "usual gap ms": "{usual_gap_ms:.1f}",
    "longest gap ms": "{longest_gap_ms:.1f}",
    "ratio": "{longest_over_usual:.1f}",
    "first token ms": "{first_token_ms:.1f}",
    "first token of a\nshort one ms": "{short_first_token_ms:.1f}",
    "alone\nms": "{short_alone_ms:.1f}",
}


@case("prefill", {"results": ("prefill interference", PREFILL)})
def prefill(
    target: str = "demo-target",
    draft: str = "demo-draft",
    prompt_tokens: tuple[int, ...] = (128, 384, 896),
) -> dict[str, Any]:
    """Time how long a stream, and a short request that comes just after, wait while a prompt is
    prefilled, by the prompt's length.

    Args:
      target: Any model that `load_model` takes.
      draft: Its draft model, named in the same way, or `ngram`.
      prompt_tokens: Tokens of the prompt that arrives.
    """
    model = load_packed(target)
    engine = Engine(
        model,
        make_drafter(draft, model),
        draft_length=DRAFT_LENGTH,
        batch_size=3,
        max_length=max(prompt_tokens) + 128,
    )
    engine.warm_up()
    results = []
    for length in prompt_tokens:
        runs = [_arrival(engine, length) for _ in range(REPEATS + 1)][1:]
        found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        ratio = found["longest_gap_ms"] / found["usual_gap_ms"]
        results.append({"prompt_tokens": length, **found, "longest_over_usual": ratio})
    return {"results": results}


def _arrival(engine: Engine, num_tokens: int) -> dict[str, float]:
    """Gaps between pieces of a stream before a prompt is submitted, and from then until its
    request has ended; and the first token of a short request beside the stream, without and just
    after such a prompt."""
    random = np.random.default_rng(0)
    long_prompt = random.integers(2, engine.target.vocab_size, num_tokens).tolist()
    stream = engine.stream(
        [2, 3, 5, 7], SamplingParams(max_tokens=engine.longest_prompt - 8, ignore_eos=True)
    )

    def gap_ms() -> float:
        started_s = time.perf_counter()
        next(stream)
        return 1e3 * (time.perf_counter() - started_s)

    def short_ms() -> float:
        started_s = time.perf_counter()
        short = engine.stream([2, 9, 4], SamplingParams(max_tokens=8, ignore_eos=True))
        next(short)
        first_s = time.perf_counter() - started_s
        short.close()
        return 1e3 * first_s

    next(stream)
    before = [gap_ms() for _ in range(8)]
    alone_ms = short_ms()
    num_ended = engine.metrics()["num_requests"]
    started_s = time.perf_counter()
    engine.submit(long_prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    after = []
    while engine.metrics()["num_requests"] == num_ended:
        after.append(gap_ms())
    first_token_s = time.perf_counter() - started_s
    engine.submit(long_prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    beside_ms = short_ms()
    stream.close()
    while engine.has_unfinished:
        engine.step()
    return {
        "usual_gap_ms": statistics.median(before),
        "longest_gap_ms": max(after),
        "first_token_ms": 1e3 * first_token_s,
        "short_first_token_ms": beside_ms,
        "short_alone_ms": alone_ms,
    }


NUM_STREAMS, STREAM_TOKENS = 24, 64
STREAMS: Columns = {
    "who steps": "{who}",
    "rounds\nper piece": "{rounds_per_piece}",
    "lag p50\nms": "{lag_p50_ms:.1f}",
    "lag p99\nms": "{lag_p99_ms:.1f}",
    "lag max\nms": "{lag_max_ms:.1f}",
    "gap p50\nms": "{gap_p50_ms:.1f}",
    "gap p99\nms": "{gap_p99_ms:.1f}",
    "first token\np50 ms": "{first_p50_ms:.0f}",
    "tokens/s": "{tokens_per_s:.0f}",
}


@case("streams", {"results": ("an event loop with 24 streams", STREAMS)})
def streams(
    target: str = "demo-target", draft: str = "demo-draft", repeats: int = 5
) -> dict[str, Any]:
    """Time how late an event loop with 24 streams is, and the gaps between their pieces, by who
    steps the engine and by the rounds per piece.

    Args:
      target: Any model that `load_model` takes.
      draft: Its draft model, named in the same way.
      repeats: Turns of each setting; the figures are their medians.
    """
    model, drafter = load_packed(target), DraftModel(load_packed(draft))
    engines = {
        setting: Engine(
            model, drafter, draft_length="auto", max_length=1024, rounds_per_piece=setting[1]
        )
        for setting in (("callers", 4), ("a driver", 4), ("a driver", 2), ("a driver", 1))
    }
    found: dict[tuple[str, int], list[dict[str, float]]] = {setting: [] for setting in engines}
    for engine in engines.values():
        engine.warm_up()
    for turn in range(repeats + 1):
        for (who, rounds), engine in engines.items():
            with engine.driven() if who == "a driver" else contextlib.nullcontext():
                seen = asyncio.run(_many_streams(engine))
            if turn:
                found[who, rounds].append(seen)
    return {
        "results": [
            {"who": who, "rounds_per_piece": rounds}
            | {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
            for (who, rounds), turns in found.items()
        ]
    }


async def _many_streams(engine: Engine) -> dict[str, float]:
    """What an event loop sees of streams that begin one after another."""
    lags: list[float] = []
    gaps: list[float] = []
    firsts: list[float] = []
    params = SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True)

    async def tick() -> None:
        while True:
            started_s = time.perf_counter()
            await asyncio.sleep(0.002)
            lags.append(time.perf_counter() - started_s - 0.002)

    async def read(index: int, prompt: list[int]) -> None:
        await asyncio.sleep(0.02 * index)
        begun_s, last_s = time.perf_counter(), 0.0
        async for _ in engine.astream(prompt, params):
            now_s = time.perf_counter()
            (gaps if last_s else firsts).append(now_s - (last_s or begun_s))
            last_s = now_s

    prompts = random_prompts(engine.target, NUM_STREAMS, 200)
    ticking, started_s = asyncio.ensure_future(tick()), time.perf_counter()
    await asyncio.gather(*(read(index, prompt) for index, prompt in enumerate(prompts)))
    whole_s = time.perf_counter() - started_s
    ticking.cancel()
    figures = {"lag": lags, "gap": gaps, "first": firsts}
    return {
        f"{name}_p{q}_ms" if q < 100 else f"{name}_max_ms": 1e3 * float(np.percentile(each, q))
        for name, each in figures.items()
        for q in (50, 99, 100)
    } | {"tokens_per_s": NUM_STREAMS * STREAM_TOKENS / whole_s}


# The whole history as a new prompt; a session whose KV is still in its row; and a session whose row
# another request has taken, so that its KV comes back from the host.
WITHOUT, IN_ROW, ON_HOST = "no session", "session in its row", "session on the host"
ANSWER_TOKENS, ADDED_TOKENS = 64, 16  # of the first turn, and added by the second
SESSIONS: Columns = {
    "history": "{history}",
    "way": "{name}",
    "prefilled": "{num_prefilled}",
    "first token ms": "{first_token_ms:.2f}",
    "speed-up": "{speedup:.2f}",
}


@case("sessions", {"results": ("the first token of a second turn", SESSIONS)})
def sessions(
    target: str = "demo-target",
    draft: str = "demo-draft",
    histories: tuple[int, ...] = (200, 400, 800),
) -> dict[str, Any]:
    """Time the first token of a chat's second turn, with and without a session.

    Args:
      target: Any model that `load_model` takes.
      draft: Its draft model, named in the same way.
      histories: Tokens of the first turn, prompt and answer together.
    """
    if min(histories) <= ANSWER_TOKENS:
        raise SettingError(
            f"--histories {min(histories)} was given with an answer of {ANSWER_TOKENS} tokens; "
            "give histories that are longer than the answer."
        )
    engine = Engine(
        load_packed(target),
        DraftModel(load_packed(draft)),
        draft_length=DRAFT_LENGTH,
        batch_size=1,
        scheduler="static",  # one row: another request has to take that of the session
        max_length=max(histories) + ADDED_TOKENS + DRAFT_LENGTH + 2,
    )
    engine.warm_up()
    results = [found for history in histories for found in _second_turns(engine, history)]
    with engine.session() as session:
        exactness = session.exactness
    is_equal = all(found["is_equal"] for found in results)
    return {
        "results": results,
        "exactness": exactness,
        "holds": is_equal or exactness != "bitwise",
    }


def _second_turns(engine: Engine, history: int) -> Iterator[dict[str, Any]]:
    """The second turn after one history, in each way."""
    first_prompt, added, other = (
        random_prompts(engine.target, 3, history)[index][:length]
        for index, length in enumerate((history - ANSWER_TOKENS, ADDED_TOKENS, 8))
    )
    opened: dict[str, Session] = {}
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    answer = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    [done] = engine.generate([first_prompt], answer)
    second_prompt = [*first_prompt, *done.token_ids, *added]

    def prepare(name: str) -> None:
        """The first turn, in its own session; no other session holds a row, which would otherwise
        be copied to the host during the timed turn."""
        for session in opened.values():
            session.close()
        if name != WITHOUT:
            opened[name] = engine.session()
            opened[name].generate(first_prompt, answer)
        if name == ON_HOST:
            engine.generate([other], one)
        engine.executor.wait()

    turns = take_turns(
        {
            WITHOUT: lambda: engine.generate([second_prompt], one)[0],
            IN_ROW: lambda: opened[IN_ROW].generate(second_prompt, one),
            ON_HOST: lambda: opened[ON_HOST].generate(second_prompt, one),
        },
        REPEATS,
        num_warm_ups=1,
        prepare=prepare,
    )
    for session in opened.values():
        session.close()
    for name, done in turns.results.items():
        num_reused = done.num_reused_tokens or 0
        yield {
            "history": history,
            "name": name,
            "prompt_tokens": len(second_prompt),
            "num_reused": num_reused,
            "num_reread": done.num_reread_tokens or 0,
            "num_prefilled": len(second_prompt) - num_reused,
            "first_token_ms": 1e3 * turns.median_s(name),
            "speedup": turns.speedup(name, over=WITHOUT),
            "speedups": turns.ratios(name, over=WITHOUT),
            "is_equal": done.token_ids == turns.results[WITHOUT].token_ids,
        }


# ---- verifiers and sampling

VERIFIERS: tuple[Verifier, ...] = (
    Coupled(),
    Coupled(is_noise_shared=False),
    Rejection(),
    Block(),
    Typical(),
)
TEMPERATURE = 0.8  # of target and draft
NUM_OUTPUTS = 4  # of each prompt
MAX_TOKENS = 64  # of an output
# Accepted draft tokens per draft token that was judged stand beside the mean of sum(min(p, q)) over
# the positions of plain sampled outputs: the probability that `rejection` accepts a drafted token
# there (Leviathan et al., 2211.17192, corollary 3.6).
ACCEPTANCE: Columns = {
    "verifier": "{verifier}",
    "domain": "{domain}",
    "emitted\n/round": "{emitted_per_round:.2f}",
    "accepted\n/judged": "{accepted_per_tested:.2f}",
    "sum of\nmin(p, q)": "{sum_min_p_q:.2f}",
}
SAMPLING: Columns = {
    "sampling": "{sampling}",
    "ms per round": "{ms_per_round:.2f}",
    "of greedy": "{ratio_to_greedy:.2f}",
}


@case(
    "verifiers",
    {"results": ("acceptance", ACCEPTANCE), "round_cost": ("cost of sampling", SAMPLING)},
)
def verifiers(target: str = "demo-target", draft: str = "demo-draft") -> dict[str, Any]:
    """Compare verifiers on the sample prompts, and the cost of sampling.

    Args:
      target: Any model that `load_model` takes.
      draft: Its draft model, named in the same way.
    """
    model, draft_model = load_packed(target), load_packed(draft)
    drafter, lines = DraftModel(draft_model), sample_prompts()
    prompts = [line.prompt for line in lines]
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=TEMPERATURE,
            n=NUM_OUTPUTS,
            seed=index * NUM_OUTPUTS,
            ignore_eos=True,
        )
        for index in range(len(lines))
    ]
    domains = [line.fields["domain"] for line in lines for _ in range(NUM_OUTPUTS)]
    shape: dict[str, Any] = {"batch_size": 8, "max_length": 512}
    plain = Engine(model, **shape).generate(prompts, params)
    overlap = overlaps(model, draft_model, plain, TEMPERATURE)
    results = []
    for verifier in VERIFIERS:
        engine = Engine(model, drafter, verifier=verifier, draft_length=DRAFT_LENGTH, **shape)
        completions = engine.generate(prompts, params)
        for domain in [*dict.fromkeys(domains), "all"]:
            chosen = [i for i, of in enumerate(domains) if domain in (of, "all")]
            total = Acceptance.total([completions[i].acceptance for i in chosen])
            results.append(
                {
                    "verifier": verifier.name,
                    "domain": domain,
                    "num_outputs": len(chosen),
                    "emitted_per_round": total.emitted_per_round,
                    "accepted_per_tested": accepted_per_tested(total),
                    "sum_min_p_q": float(np.mean([overlap[i] for i in chosen])),
                }
            )
    engine = Engine(model, drafter, draft_length=DRAFT_LENGTH, **shape)
    return {"results": results, "round_cost": _sampling_cost(engine, prompts[:8])}


def _sampling_cost(engine: Engine, prompts: Sequence[Any]) -> list[dict[str, Any]]:
    """Milliseconds per speculative round with several sampling parameters, in alternation."""
    sampled = {"temperature": TEMPERATURE}
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature": sampled,
        "temperature, min_p": {**sampled, "min_p": 0.05},
        "temperature, top_p": {**sampled, "top_p": 0.9},
        "temperature, top_k, top_p": {**sampled, "top_k": 50, "top_p": 0.9},
        "temperature, repetition_penalty": {**sampled, "repetition_penalty": 1.1},
    }
    num_compiled = engine.executor.compile_counts()["run"]

    def decode(fields: dict[str, Any]) -> int:
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=0, **fields)
        completions = engine.generate(prompts, params)
        return max(completion.acceptance.num_rounds for completion in completions)

    turns = take_turns(
        {kind: functools.partial(decode, fields) for kind, fields in kinds.items()},
        REPEATS,
        num_warm_ups=1,
    )
    num_compiled = engine.executor.compile_counts()["run"] - num_compiled
    assert num_compiled == 1, "sampling parameters compiled anew"
    return [
        {
            "sampling": kind,
            "ms_per_round": 1e3 * turns.median_s(kind) / turns.results[kind],
            "ratio_to_greedy": turns.speedup("greedy", over=kind),
        }
        for kind in kinds
    ]


def overlaps(
    target: LanguageModel,
    draft: LanguageModel,
    completions: Sequence[Completion],
    temperature: float,
) -> list[float]:
    """sum(min(p, q)) of each completion, the mean over its positions."""

    def of_row(params, tokens):
        p, q = (
            jax.nn.softmax(
                decoder.training_logits(model.config, own, tokens, jnp.zeros_like(tokens))
                / temperature
            )
            for model, own in zip((target, draft), params, strict=True)
        )
        return jnp.sum(jnp.minimum(p, q), axis=-1)[0]

    what = f"the overlap of {target.name} and {draft.name}"
    found = over_outputs(of_row, (target.params, draft.params), completions, what)
    return [float(np.mean(each)) for each in found]


def accepted_per_tested(total: Acceptance) -> float:
    """Accepted draft tokens per draft token that was judged (all tokens before it had been
    accepted)."""
    reached = [total.num_drafts, *total.num_accepted_tokens_per_pos[:-1]]
    tested = sum(
        min(before, drafted)
        for before, drafted in zip(reached, total.num_drafts_per_pos, strict=True)
    )
    return total.num_accepted_tokens / tested if tested else 0.0


# ---- compile times

# Layers are unrolled in every program, so compile time that grew with the square of their number
# would make a deep model unusable.
COMPILE_REPEATS = 3
COMPILE_TIME: Columns = {
    "layers": "{num_layers}",
    "CPU s": "{cpu_s:.1f}",
    "s": "{wall_s:.1f}",
    "exponent": "{exponent:.2f}",
}


@case("compile-time", {"results": ("compiling an engine", COMPILE_TIME)})
def compile_time(layers: tuple[int, ...] = (2, 4, 8, 16, 36)) -> dict[str, Any]:
    """Time compiling an engine by the target's number of layers, without the persistent cache.

    Args:
      layers: Numbers of layers of the target, in ascending order; the draft model has two.
    """
    if len(layers) < 2 or list(layers) != sorted(set(layers)):
        raise SettingError(f"--layers {layers} was given; give two or more numbers, rising.")
    draft, *targets = (
        random_model(tiny_config(num_layers), dtype="float32") for num_layers in (2, *layers)
    )
    is_cached = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        _compile_engine(targets[0], draft)  # what is loaded at the first compile
        times = [
            [_compile_engine(target, draft) for target in targets] for _ in range(COMPILE_REPEATS)
        ]
    finally:
        jax.config.update("jax_enable_compilation_cache", is_cached)
    results: list[dict[str, Any]] = []
    for num_layers, runs in zip(layers, zip(*times, strict=True), strict=True):
        cpu_s, wall_s = map(statistics.median, zip(*runs, strict=True))
        result = {"num_layers": num_layers, "cpu_s": cpu_s, "wall_s": wall_s}
        if results:
            before = results[-1]
            added_s = result["cpu_s"] - before["cpu_s"]
            result["cpu_s_per_added_layer"] = added_s / (num_layers - before["num_layers"])
            ratio = math.log(num_layers / before["num_layers"])
            result["exponent"] = math.log(result["cpu_s"] / before["cpu_s"]) / ratio
        results.append(result)
    return {"results": results}


def _compile_engine(target: LanguageModel, draft: LanguageModel) -> tuple[float, float]:
    """CPU seconds and seconds to compile a new engine's programs."""
    engine = Engine(target, DraftModel(draft), draft_length=DRAFT_LENGTH, batch_size=8)
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    engine.warm_up()
    return time.process_time() - cpu_started_s, time.perf_counter() - started_s
