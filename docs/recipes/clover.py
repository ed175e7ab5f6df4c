"""Clover's heads for SmolLM2-135M-Instruct, as small as they can be drafted from at batch 1.

    python docs/recipes/prompts.py DATA prompts.jsonl
    jaxspec train texts --target MODEL --prompts prompts.jsonl --chat --tokens 2500000 \
--drafter none --out texts.jsonl
    python docs/recipes/clover.py MODEL texts.jsonl RUN

Four heads behind a block of attention, 8,192 tokens, an MLP as the connection. The same command
goes on with an interrupted run, and with more `tokens` with a finished one.
"""

import pathlib
import sys

from jaxspec.training.heads import HeadsTrainConfig, train_heads


def main(target: str, texts: str, out: str):
    """Trains them."""
    run = pathlib.Path(out)
    config = HeadsTrainConfig(
        kind="clover",
        num_heads=4,
        parts={"block_part": "attention", "connection": "mlp", "has_normed_inputs": True},
        draft_vocab_size=8192,
        target=target,
        dtype="float32",  # as the packaged heads were trained
        texts=pathlib.Path(texts),
        target_states=run.with_name(f"{run.name}-states"),
        out=run,
        tokens=(3_072_000,),
        learning_rate=1.5e-3,
        checkpoint_every=250,
        resume=run.exists(),
    )
    print(train_heads(config))


if __name__ == "__main__":
    main(*sys.argv[1:])
