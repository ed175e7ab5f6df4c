"""Tiny random models with a byte-level tokenizer, as converted directories."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import toy
import transformers

import jaxspec
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.models.tokenizer import TextTokenizer

BOS, EOS = 0, 1
NUM_SPECIAL = 2
VOCAB = NUM_SPECIAL + 256
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if mood is defined %} ({{ mood }}){% endif %}"
)


def tokenizer(*, is_reversed: bool = False, chat: str | None = CHAT_TEMPLATE) -> TextTokenizer:
    """One token per byte after `<s>` and `</s>`; `<s>` is the prefix of every prompt.

    Args:
      is_reversed: give the bytes their ids in the opposite order.
      chat: the chat template.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet(), reverse=is_reversed)
    vocab = {piece: index for index, piece in enumerate(["<s>", "</s>", *alphabet])}
    pipeline = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pipeline, bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = chat
    return TextTokenizer(fast, (BOS,))


def model(
    *,
    seed: int = 0,
    text: TextTokenizer | None = None,
    eos_token_ids: tuple[int, ...] = (EOS,),
    dtype=jnp.float32,
) -> LanguageModel:
    """A model of one layer over the bytes, made without compiling anything."""
    config = toy.config(vocab_size=VOCAB, num_layers=1)
    random = np.random.default_rng(seed)

    def make(shape):
        values = np.ones(shape) if len(shape) == 1 else random.normal(0, 0.4, shape)
        return jnp.asarray(values.astype(np.float32)).astype(dtype)

    shapes = decoder.param_shapes(config)
    params = jax.tree.map(
        make,
        shapes,
        is_leaf=lambda node: (
            isinstance(node, tuple) and (all(isinstance(size, int) for size in node))
        ),
    )
    return LanguageModel(
        name=f"tiny{seed}",
        config=config,
        params=params,
        eos_token_ids=eos_token_ids,
        tokenizer=text,
    )


def save(directory: pathlib.Path, name: str, **options) -> pathlib.Path:
    """Writes a model below `directory` and returns its path."""
    jaxspec.save_model(model(**options), directory / name)
    return directory / name
