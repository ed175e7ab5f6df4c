"""`--verify`: the converted model's logits against torch's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint import format as checkpoint
from jaxspec.checkpoint.manifest import read_manifest
from jaxspec.errors import CheckpointError
from jaxspec.models.base import Model, packed_model
from jaxspec.models.prefill import chain_window
from jaxspec.runtime.files import reading

_NUM_PROMPTS = 3
_PROMPT_LENGTH = 24
_TOLERANCE = 1e-3  # of the largest logit; both sides compute in float32


def compare_logits(directory: Path, converted: Path) -> str:
    """Runs both models in float32 on random prompts and says how far apart their logits are.

    The torch weights are first rounded to the stored dtype, so that only the conversion is judged.

    Raises:
      CheckpointError: they differ by more than rounding, or torch is not installed.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise CheckpointError(
            "The verification compares with torch, which is not installed; install the parity "
            "extra (pip install 'jaxspec-decoding[parity]') or convert without --verify."
        ) from error
    stored = read_manifest(converted).dtype
    model = checkpoint.load_converted(converted, dtype="float32")
    # To torch, the rows of a draft vocabulary are tokens.
    model = packed_model(dataclasses.replace(model, config=model.config.over_rows()))
    folder, file = (directory.parent, directory.name) if directory.is_file() else (directory, None)

    def unusable(reason: str) -> CheckpointError:
        return CheckpointError(
            f"transformers cannot load {directory} to compare with ({reason}); convert it without "
            "--verify."
        )

    with reading(directory, unusable):
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    for parameter in reference.parameters():
        parameter.data = parameter.data.to(getattr(torch, stored)).float()

    tokens = np.random.default_rng(0).integers(
        0, model.vocab_size, (_NUM_PROMPTS, _PROMPT_LENGTH), dtype=np.int32
    )
    ours = np.asarray(prompt_logits(model, tokens))
    with torch.no_grad():
        theirs = reference(torch.from_numpy(tokens).long()).logits.numpy()
    difference = float(np.abs(ours - theirs).max())
    allowed = _TOLERANCE * max(1.0, float(np.abs(theirs).max()))
    if not difference <= allowed:  # also if it is not a number
        raise CheckpointError(
            f"The converted model's logits differ from torch's by {difference:.3g}, where at most "
            f"{allowed:.3g} was expected; nothing was written, please report the model."
        )
    return f"logits within {difference:.2g} of torch's on {_NUM_PROMPTS} prompts"


def prompt_logits(model: Model, tokens: np.ndarray) -> jax.Array:
    """Logits `[B, T, V]` fp32 of whole prompts `[B, T]`, through the cache."""
    num_rows, length = tokens.shape
    window = chain_window(jnp.zeros((num_rows,), jnp.int32), length)
    hidden, _ = model.forward(
        model.params, jnp.asarray(tokens), window, model.init_cache(num_rows, length)
    )
    return model.logits(model.params, hidden)
