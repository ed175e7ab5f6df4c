"""Writes the golden arrays beside this file: `python tests/golden/make_goldens.py` (needs torch).

Each file holds a tiny random checkpoint of a family (weights exact in float16), prompts of
different lengths, and the logits that transformers computed for them in float32.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
import hf_checkpoints

HERE = Path(__file__).parent

VARIANTS = {
    "llama": "llama3",
    "mistral": "mistral",
    "qwen2": "qwen2-yarn",
    "qwen3": "qwen3-tied",
    "glm4": "glm4",
}
PROMPT_LENGTHS = (1, 12, 40)


def make(family: str) -> Path:
    """Writes `FAMILY.npz` and returns its path."""
    import torch
    import transformers

    model = hf_checkpoints.build(VARIANTS[family], seed=7)
    with torch.no_grad():  # not model.half(), which would round the rotary frequencies too
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        config = json.loads((Path(directory) / "config.json").read_text())
    rng = np.random.default_rng(11)
    arrays = {"transformers_version": np.array(transformers.__version__)}
    for row, length in enumerate(PROMPT_LENGTHS):
        tokens = rng.integers(0, model.config.vocab_size, length, dtype=np.int32)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)[None].long()).logits[0]
        arrays |= {f"tokens/{row}": tokens, f"logits/{row}": logits.numpy()}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        arrays[f"tensor/{name}"] = tensor.numpy().astype(np.float16)
    path = HERE / f"{family}.npz"
    np.savez_compressed(path, config=np.array(json.dumps(config)), **arrays)
    return path


if __name__ == "__main__":
    for family in VARIANTS:
        path = make(family)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
