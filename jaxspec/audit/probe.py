"""The start-up probe: do bits depend on the row, its neighbours, or the position in the window?

Bitwise equality rests on one fact about the machine: a matrix product gives a row the same bits
wherever the row is and whatever the other rows hold. This holds on XLA:CPU, and usually on GPUs,
but nothing guarantees it, so it is tested with the engine's own compiled programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import pages as kv
from jaxspec.engine.engine import Engine
from jaxspec.models.base import Model
from jaxspec.models.prefill import chain_window
from jaxspec.requests.requests import Request, make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.values import check_kind
from jaxspec.types import PyTree

NUM_TOKENS = 6  # decoded per probed request


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """The results of the probe. Each field is True (equal bits), False, or None (not applicable).

    Attributes:
      rows: requests in other rows gave the same tokens and KV; None with one row.
      neighbours: a request gave the same with different neighbours; None with one row.
      window_positions: a token scored at every other position of the window got the same logits;
        None with a window of one.
    """

    rows: bool | None
    neighbours: bool | None
    window_positions: bool | None

    @property
    def holds(self) -> bool:
        """Whether no comparison failed."""
        return False not in (self.rows, self.neighbours, self.window_positions)

    @property
    def sentence(self) -> str:
        """The finding, in words."""
        broken = [name.replace("_", " ") for name, holds in vars(self).items() if holds is False]
        fine = [name.replace("_", " ") for name, holds in vars(self).items() if holds]
        if broken:
            return (
                f"Bits depend on {_listed(broken)} on this machine, so outputs are promised to be "
                "equal up to ties within rounding, not to the bit."
            )
        if not fine:
            return "One row and a window of one leave nothing to compare."
        return f"Bits do not depend on {_listed(fine)} on this machine: outputs are bit-exact."

    def to_json(self) -> dict:
        """Fields as JSON values."""
        return dataclasses.asdict(self) | {"holds": self.holds, "sentence": self.sentence}


def probe(engine: Engine) -> ProbeReport:
    """Permutes rows, neighbours and window positions through an engine, and compares bits.

    Rows and neighbours go through the engine's own compiled round, which must be idle: its rows are
    overwritten. The window is tested on the target's forward pass in the engine's shape, because
    the drafter decides what a round puts at each position of the window.

    Raises:
      SettingError: this is not an engine.
    """
    check_kind("engine", engine, Engine, "an Engine")
    shape = engine.shape
    length = max(1, min(shape.prefill_chunk // 2, engine.longest_prompt - NUM_TOKENS, 8))
    engine.reset()  # sessions may hold rows, and these requests are to get the first ones
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, shape.vocab_size, (2 * shape.batch_size, length)).tolist()
    first, others = prompts[: shape.batch_size], prompts[shape.batch_size + 1 :]
    rows = neighbours = window_positions = None
    if shape.batch_size > 1:
        together = _decode(engine, first)
        rows = all(map(_equal, together, _decode(engine, first[::-1])[::-1]))
        beside_others, alone = (_decode(engine, [first[0], *x])[0] for x in (others, []))
        neighbours = _equal(together[0], beside_others) and _equal(together[0], alone)
    if shape.verify_length > 1:
        window_positions = _window_positions_agree(engine, rng)
    return ProbeReport(rows=rows, neighbours=neighbours, window_positions=window_positions)


def _listed(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def rows_of(engine: Engine, requests: Sequence[Request]) -> list[int]:
    """The rows that an idle engine gives to these requests (at most as many as it has rows) if they
    arrive together."""
    order = engine.scheduler.order(
        [len(request.prompt_token_ids) for request in requests],
        [request.params.max_tokens for request in requests],
    )
    rows = dict(zip(order, engine.executor.free_rows(()), strict=False))
    return [rows[index] for index in range(len(requests))]


def _decode(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
    """Per request: tokens, then the KV of each layer's committed slots, as bits."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = make_requests(prompts, params, engine.target, longest=engine.longest_prompt)
    done = list(engine.run(requests))
    kept = [engine.executor.committed_kv(row) for row in rows_of(engine, requests)]
    return [[np.asarray(one.token_ids), *bits] for one, bits in zip(done, kept, strict=True)]


def _equal(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def _window_positions_agree(engine: Engine, rng: np.random.Generator) -> bool:
    """Whether tokens get the same logits at every position in the window.

    The same sequence is read in one window after the other; windows that begin earlier or later put
    each of its tokens at every position.
    """
    shape = engine.shape
    batch_size, window = shape.batch_size, shape.verify_length
    num_tokens = min(2 * window - 1, engine.longest_prompt)
    tokens = rng.integers(0, shape.vocab_size, (batch_size, num_tokens)).astype(np.int32)
    params = engine.target.params
    cache = engine.target.init_cache(batch_size, num_tokens)
    # Every token in turn is the first of its window, as in plain decoding.
    firsts = num_tokens - window + 1
    at_first = []
    # Compiled here for one use, because a cached function would keep the parameters alive.
    score = Program(
        jax.jit(functools.partial(_score_window, engine.target)),
        f"the probe of {engine.target.name}, batch {batch_size}, window {window}",
    )
    for start in range(firsts):
        logits, cache = score(params, cache, tokens[:, start : start + window], np.int32(start))
        at_first.append(np.asarray(logits[:, 0]))
        if start == 0:
            together = np.asarray(logits)
    return all(np.array_equal(together[:, i], at_first[i]) for i in range(min(window, firsts)))


def _score_window(
    target: Model, params: PyTree, cache: kv.KVCache, tokens: jax.Array, start
) -> tuple[jax.Array, kv.KVCache]:
    """Logits `[B, T, V]` of tokens `[B, T]` that stand at `start` in every row."""
    at = chain_window(jnp.broadcast_to(start, tokens.shape[:1]), tokens.shape[1])
    hidden, cache = target.forward(params, tokens, at, cache)
    return target.logits(params, hidden), cache
