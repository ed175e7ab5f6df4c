"""Writes `heads/vllm.npz` beside this file from vLLM's own Medusa (needs torch):

    python tests/golden/make_vllm.py FILE COMMIT

FILE is `vllm/model_executor/models/medusa.py` of https://github.com/vllm-project/vllm as it stands
at COMMIT. Its classes are compiled from it, and it loads the weights itself. The layers of vLLM
that they are built of, which need a device, are replaced: a head by its matrix, the logits
processor by the product with it. Nothing of the code is stored: only the weights, in float16, the
hidden states, the logits, and where they came from.
"""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import release

SOURCE = "vllm/model_executor/models/medusa.py"
CLASSES = ("ResidualBlock", "Medusa")
WIDTH, VOCAB_SIZE, NUM_HEADS, NUM_TOKENS, SEED = 32, 61, 3, 5, 11
# Fields of `config.json`. `truncated` has a bias, one head for all, and logits of some tokens,
# which are picked from the rows of all.
FORMS = {
    "own": {"num_hidden_layers": 2, "truncated_vocab_size": VOCAB_SIZE},
    "truncated": {
        "num_hidden_layers": 1,
        "truncated_vocab_size": 20,
        "medusa_fc_bias": True,
        "original_lm_head": True,
    },
}


def release_classes(source: str) -> dict[str, type]:
    """The classes, compiled without the modules that theirs imports."""
    import torch

    class Head(torch.nn.Module):
        """A matrix of logits, constructed as vLLM's that is divided over devices."""

        def __init__(self, num_rows, width, **layout):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(num_rows, width))

    def logits_processor(num_rows, num_tokens, scale):
        assert (num_rows, scale) == (num_tokens, 1.0)
        return lambda head, hidden: hidden @ head.weight.T

    def load(parameter, loaded):
        assert parameter.shape == loaded.shape
        parameter.data.copy_(loaded)

    names = {
        "torch": torch,
        "nn": torch.nn,
        "Iterable": Iterable,
        "VllmConfig": object,
        "ParallelLMHead": Head,
        "LogitsProcessor": logits_processor,
        "DEFAULT_VOCAB_PADDING_SIZE": 64,
        "default_weight_loader": load,
        "maybe_prefix": lambda prefix, name: name,
    }
    keeps = lambda node: getattr(node, "name", None) in CLASSES  # noqa: E731
    return release.compiled(source, SOURCE, keeps, names)


def make(source: str, fields: dict[str, int | bool]) -> dict[str, np.ndarray]:
    """Weights under the release's names, hidden states, and the logits that it makes of them."""
    import torch

    config = types.SimpleNamespace(
        hidden_size=WIDTH, vocab_size=VOCAB_SIZE, num_heads=NUM_HEADS, **fields
    )
    draft = types.SimpleNamespace(hf_config=config)
    speculative = types.SimpleNamespace(draft_model_config=draft)
    model = release_classes(source)["Medusa"](
        vllm_config=types.SimpleNamespace(speculative_config=speculative)
    )
    torch.manual_seed(SEED)
    has_one_head, has_bias = "original_lm_head" in fields, "medusa_fc_bias" in fields
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(NUM_HEADS):
        for j in range(config.num_hidden_layers):
            shapes[f"blocks.{k}.layers.{j}.weight"] = (WIDTH, WIDTH)
            if has_bias:
                shapes[f"blocks.{k}.layers.{j}.bias"] = (WIDTH,)
        if k == 0 or not has_one_head:
            shapes[f"lm_heads.{k}.weight"] = (VOCAB_SIZE, WIDTH)
    tensors = {name: torch.randn(shape).mul(0.3).half() for name, shape in shapes.items()}
    if config.truncated_vocab_size < VOCAB_SIZE:
        tensors["token_map"] = torch.randperm(VOCAB_SIZE)[: config.truncated_vocab_size]
    hidden = torch.randn(NUM_TOKENS, WIDTH)
    with torch.no_grad():
        given = [(name, t if name == "token_map" else t.float()) for name, t in tensors.items()]
        loaded = model.load_weights(iter(given))
        assert len(loaded) == len(dict(model.named_parameters())) - (model.token_map is not None)
        logits = torch.stack(model.compute_logits(model(hidden)))  # [heads, tokens, V]
    arrays = {f"tensor/{name}": tensor.numpy() for name, tensor in tensors.items()}
    return {"hidden": hidden.numpy(), "logits": logits.numpy(), **arrays}


def main(path: Path, commit: str) -> None:
    """Writes the file."""
    content = path.read_bytes()
    # As `git rev-parse COMMIT:SOURCE` gives it.
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    arrays = {"blob": np.array(blob)}
    for name, fields in FORMS.items():
        arrays |= {f"{name}/{key}": array for key, array in make(content.decode(), fields).items()}
    repository = "https://github.com/vllm-project/vllm"
    release.write("vllm", repository, commit, SOURCE, SEED, arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
