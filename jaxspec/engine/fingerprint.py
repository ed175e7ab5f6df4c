"""A digest of everything that decides an engine's outputs besides the request."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import xxhash

from jaxspec import __version__
from jaxspec.engine.engine import Engine
from jaxspec.models.base import LanguageModel
from jaxspec.runtime.environment import commit, devices, versions


def fingerprint(engine: Engine, more: Mapping[str, str] | None = None) -> str:
    """16 hexadecimal digits: processes with equal ones give equal outputs for equal requests.

    It covers the target's configuration, stop tokens and weights with their dtypes, the engine's
    shape, mesh and exactness, the kernels and their family of instructions, the log-probabilities
    that it gives, the tokenizer, the device and the versions. An engine that is not `bitwise` may
    emit other tokens with other drafts, so there it covers the drafter too.

    Args:
      engine: the engine; its weights are read once.
      more: what else decides the outputs.
    """
    described = engine.describe()
    names = ["target", "kv_dtype", "verifier", "layout", "exactness", "mesh", "autotuned"]
    names += ["kernels", "kernels_family"]
    found: dict[str, Any] = {name: described[name] for name in names}
    found["shape"] = engine.shape.decisive()
    found["logprobs"] = engine.config.logprobs_mode, engine.config.max_logprobs
    found["weights"] = _digest(engine.target.params)
    if engine.exactness != "bitwise":
        found["drafter"] = described["drafter"], described["draft_length"]
        found["draft_weights"] = _digest(getattr(engine.drafter, "params", ()))
    found["eos"] = tuple(engine.target.eos_token_ids)
    if isinstance(engine.target, LanguageModel):
        found["config"] = engine.target.config.to_json()
    if (tokenizer := engine.target.tokenizer) is not None:
        backend = getattr(tokenizer.hf, "backend_tokenizer", None)
        parts: dict[str, Any] = {"vocabulary": sorted(tokenizer.fingerprint().items())}
        if backend is not None:  # merges, normaliser and decoder too
            parts = json.loads(backend.to_str())
            # Of the last call, not of the tokenizer.
            parts |= {"truncation": None, "padding": None}
        parts["prefix"] = list(tokenizer.prefix_token_ids)
        found["tokenizer"] = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    where = devices()
    found["device"] = {name: where[name] for name in ("platform", "kinds", "cpu_model")}
    found["versions"] = {"jaxspec": __version__, "commit": commit(), **versions()}
    found["flags"] = os.environ.get("XLA_FLAGS", "")
    text = json.dumps({**found, **(more or {})}, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(params: Any) -> str:
    """A digest of arrays, with their paths, shapes and dtypes."""
    digest = xxhash.xxh3_128()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(jax.device_get(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()
