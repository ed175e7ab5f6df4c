"""A Hugging Face directory with the shapes of `random:llama-635m`, random weights, and a tokenizer:
for measuring servers, whose requests are texts.

    python docs/recipes/random_weights.py TOKENIZER DIRECTORY

TOKENIZER is a directory with one, such as a checkpoint. Needs torch and transformers.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from jaxspec.models.registry import PRESETS


def main(source: str, out: str):
    """Writes the directory."""
    tokenizer, shapes = AutoTokenizer.from_pretrained(source), PRESETS["llama-635m"]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shapes.width,
        intermediate_size=shapes.feed_forward_width,
        num_hidden_layers=shapes.num_layers,
        num_attention_heads=shapes.num_query_heads,
        num_key_value_heads=shapes.num_kv_heads,
        head_dim=shapes.head_size,
        max_position_embeddings=shapes.max_length,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
