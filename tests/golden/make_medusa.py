"""Writes `heads/medusa.npz` beside this file from the Medusa release's own code (needs torch):

    python tests/golden/make_medusa.py CHECKOUT

CHECKOUT is a git clone of https://github.com/FasterDecoding/Medusa. Its two classes of heads are
compiled from `medusa/model/medusa_model.py` as it stands there. The decoder around them, for which
they need an old transformers, is replaced by one that returns given hidden states. Nothing of the
code is stored: only the weights, in float16, the hidden states, the logits, and where they came
from.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import release

SOURCE, CLASSES = "medusa/model/medusa_model.py", ("ResBlock", "MedusaModelABC")
WIDTH, VOCAB_SIZE, NUM_HEADS, NUM_TOKENS, SEED = 32, 61, 3, 5, 7


def release_classes(checkout: Path) -> dict[str, type]:
    """The classes of heads, compiled without the modules that theirs imports."""
    import torch

    tokenizers = types.SimpleNamespace(from_pretrained=lambda name: None)
    names = {"torch": torch, "nn": torch.nn, "AutoTokenizer": tokenizers}
    keeps = lambda node: getattr(node, "name", None) in CLASSES  # noqa: E731
    return release.compiled((checkout / SOURCE).read_text(), SOURCE, keeps, names)


def make(checkout: Path, num_layers: int) -> dict[str, np.ndarray]:
    """Weights under the release's names, hidden states, and the logits that its `forward` makes."""
    import torch

    heads_of_release = release_classes(checkout)["MedusaModelABC"]

    class Decoder(torch.nn.Module):
        """Returns hidden states that were made before; called as the release calls its own."""

        def __init__(self, config):
            super().__init__()
            self.hidden = torch.randn(1, NUM_TOKENS, WIDTH)

        def model(self, **inputs):
            return (self.hidden,)

    whole = type("Whole", (heads_of_release, Decoder), {})
    config = types.SimpleNamespace(
        medusa_num_heads=NUM_HEADS,
        medusa_num_layers=num_layers,
        hidden_size=WIDTH,
        vocab_size=VOCAB_SIZE,
        _name_or_path="",
    )
    torch.manual_seed(SEED)
    model = whole(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape).mul(0.3).half())
    logits = model(medusa_forward=True)  # [heads, 1, tokens, V]
    tensors = {
        f"tensor/{name}": tensor.detach().numpy().astype(np.float16)
        for name, tensor in model.medusa_head.state_dict().items()
    }
    return {"hidden": model.hidden[0].numpy(), "logits": logits[:, 0].detach().numpy(), **tensors}


def main(checkout: Path) -> None:
    """Writes the file."""
    arrays = {
        f"{num_layers}/{name}": array
        for num_layers in (1, 2)
        for name, array in make(checkout, num_layers).items()
    }
    repository = "https://github.com/FasterDecoding/Medusa"
    release.write("medusa", repository, release.commit_of(checkout), SOURCE, SEED, arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
