"""Writes `heads/clover2.npz` beside this file from Clover-2's release (needs torch, transformers):

    python tests/golden/make_clover2.py CHECKOUT

CHECKOUT is a git clone of https://github.com/XiaoBin1992/clover. The classes that its `forward`
needs are compiled from `clover/model/clover2.py` as it stands there; the modules are constructed
here, because theirs are filled from a target's files. Nothing of the code is stored: only the
weights, in float16, the hidden states and tokens, the logits, and where they came from.
"""

from __future__ import annotations

import ast
import math
import sys
import types
import typing
from pathlib import Path

import numpy as np
import release

SOURCE, MODEL = "clover/model/clover2.py", "Clover2Model"
WIDTH, FEED_FORWARD, VOCAB_SIZE, NUM_HEADS, NUM_TOKENS, SEED = 32, 48, 61, 3, 9, 13
FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": FEED_FORWARD,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "clover": {"num_heads": NUM_HEADS, "num_layers": 2, "heads_coefficient": 1.0},
}


def release_names(checkout: Path) -> dict[str, typing.Any]:
    """The classes and functions of the release, compiled without the modules that it imports."""
    import torch
    import torch.utils.checkpoint
    from transformers.activations import ACT2FN

    names: dict[str, typing.Any] = {name: getattr(typing, name) for name in typing.__all__}
    names |= {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "math": math}
    names |= {"ACT2FN": ACT2FN, "np": np}
    keeps = lambda node: isinstance(node, ast.ClassDef | ast.FunctionDef)  # noqa: E731
    return release.compiled((checkout / SOURCE).read_text(), SOURCE, keeps, names)


def make(checkout: Path) -> dict[str, np.ndarray]:
    """Weights under the release's names, hidden states, tokens, and the logits of every head."""
    import torch

    theirs = release_names(checkout)
    given = {name: value for name, value in FIELDS.items() if name != "clover"}
    config = types.SimpleNamespace(
        **given, hidden_act="silu", pretraining_tp=1, rope_scaling=None, pad_token_id=None
    )
    norm = lambda: theirs["LlamaRMSNorm"](WIDTH, eps=config.rms_norm_eps)  # noqa: E731
    connection = lambda: theirs["ResAttentionBlock"](WIDTH, 4, config.rms_norm_eps)  # noqa: E731
    model = theirs[MODEL].__new__(theirs[MODEL])
    torch.nn.Module.__init__(model)
    model.config_clover = types.SimpleNamespace(num_heads=NUM_HEADS, num_layers=2)
    model.gradient_checkpointing = False
    model.clover_embed_tokens = torch.nn.Embedding(VOCAB_SIZE, WIDTH)
    model.layers = torch.nn.ModuleList(
        theirs["LlamaDecoderLayer"](config, 1 + index) for index in range(2)
    )
    model.clover_norm, model.clover_head_norm = norm(), norm()
    model.clover_head_mlp = torch.nn.Linear(WIDTH, WIDTH)
    model.clover_head_mlp2 = torch.nn.Linear(2 * WIDTH, WIDTH)
    model.clover_head_mlp_rnn, model.clover_head_mlp_rnn2 = connection(), connection()
    model.lm_head = torch.nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            drawn = torch.randn(parameter.shape).mul(0.2) + float(is_norm)
            parameter.copy_(drawn.half())
        model.clover_embed_tokens.weight.copy_(model.lm_head.weight)
        hidden = torch.randn(1, NUM_TOKENS, WIDTH)
        tokens = torch.randint(VOCAB_SIZE, (1, NUM_TOKENS))  # each after its hidden state
        made = model.eval()(hidden, tokens)  # [heads, 1, tokens, E]
        logits = model.forward_lm_head(made)
    tensors = {
        f"tensor/{name}": tensor.numpy().astype(np.float16)
        for name, tensor in model.state_dict().items()
    }
    return {
        "hidden": hidden[0].numpy(),
        "tokens": tokens[0].numpy(),
        "logits": logits[:, 0].numpy(),
        **tensors,
    }


def main(checkout: Path) -> None:
    """Writes the file."""
    repository = "https://github.com/XiaoBin1992/clover"
    commit = release.commit_of(checkout)
    release.write("clover2", repository, commit, SOURCE, SEED, make(checkout))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
