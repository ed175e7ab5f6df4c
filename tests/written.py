"""Texts that tests train drafters on."""

from __future__ import annotations

import json

from jaxspec.checkpoint.format import weights_digest
from jaxspec.load.models import load_model


def write_texts(path, writer, *, num_texts=60, num_output=12, **header):
    """Texts as `jaxspec train texts` writes them, of tokens that are easy to learn: each is the one
    before plus 3."""
    model = load_model(writer)
    header = {
        "kind": "texts",
        "target": model.name,
        "weights": weights_digest(model.params),
        "vocab_size": model.vocab_size,
        "temperature": 0.0,
        "split": "train",
    } | header
    lines = [header]
    for index in range(num_texts):
        tokens = [2 + (7 * index + 3 * i) % 40 for i in range(6 + num_output)]
        domain = "tales" if index % 3 else "sums"
        lines.append(
            {"domain": domain, "source": "book", "prompt": tokens[:6], "output": tokens[6:]}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
