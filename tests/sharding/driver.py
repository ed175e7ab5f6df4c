"""Rows on a mesh: an executor whose caller chooses the row of each request."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import toy

import jaxspec
from jaxspec.decode import sharded as sharding
from jaxspec.engine.admission import make_admission
from jaxspec.engine.config import EngineConfig, make_parts
from jaxspec.engine.executor import Executor
from jaxspec.requests.requests import Request, make_requests
from jaxspec.types import Finish

BATCH_SIZE = 2  # of a shard
WINDOW = 5


def mesh(**sizes: int) -> jax.sharding.Mesh:
    """A mesh of the first devices."""
    num_devices = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:num_devices]).reshape(*sizes.values())
    return sharding.check_mesh(jax.sharding.Mesh(devices, tuple(sizes)))


def target(**changes):
    return toy.model(**{"vocab_size": 64, "num_kv_heads": 4, "num_layers": 1} | changes)


def draft_model(**changes) -> jaxspec.DraftModel:
    return jaxspec.DraftModel(target(**{"seed": 1} | changes))


class Driver(Executor):
    """Decodes requests on rows of the caller's choice; a prefill call takes two chunks."""

    def __init__(self, mesh, drafter=None, *, model=None, max_length=256):
        config = EngineConfig(
            scheduler="static",
            batch_size=BATCH_SIZE,
            max_length=max_length,
            verify_length=None if drafter is None else WINDOW,
        )
        parts = make_parts(target() if model is None else model, drafter, config)
        shape = dataclasses.replace(parts.shape, chunks_per_call=2)
        super().__init__(dataclasses.replace(parts, shape=shape), mesh=mesh)

    @functools.cache  # noqa: B019
    def compiled(self, name: str):
        """One of the programs `admit`, `prefill` and `run`."""
        shards = np.zeros((self.num_shards,), np.int32)
        [chunks] = self.prefill_calls([(0, 0)])
        request = Request(
            request_id="0", prompt_token_ids=(1,), params=jaxspec.SamplingParams(seed=0)
        )
        arguments = {
            "admit": (np.int32(0), make_admission(request, self.parts, draft_length=4)),
            "prefill": chunks,
            "run": (np.int32(1), shards),
        }[name]
        return self.programs[name].lower(self.params, self.state, *arguments).compile()

    def put(self, requests, *, draft_length=WINDOW - 1) -> None:
        """Requests (prompt, params), by row, into their rows; their prompts are read."""
        chunks = []
        for row, (prompt, params) in requests.items():
            [request] = make_requests(
                [prompt], params, self.parts.target, longest=self.longest_prompt
            )
            self.admit(row, request, draft_length=draft_length)
            chunks += [
                (row, start) for start in range(0, len(prompt) - 1, self.shape.prefill_chunk)
            ]
        self.prefill(chunks)

    def generate(self, requests, *, draft_length=WINDOW - 1):
        """Output token ids of requests (prompt, params) by row."""
        self.put(requests, draft_length=draft_length)
        while np.any(np.asarray(self.state.finish) == Finish.RUNNING):
            self.run(7)
        state = self.fetch("tokens", "num_committed")
        return {
            row: state.tokens[row, len(prompt) : state.num_committed[row]].tolist()
            for row, (prompt, _) in requests.items()
        }
