"""Tokenizers whose pipelines are SentencePiece's: `▁` for a space, and one put in front of text."""

from __future__ import annotations

import string

import tokenizers
import transformers
from tokenizers import decoders, normalizers, pre_tokenizers

from jaxspec.models.tokenizer import TextTokenizer

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]")
CHARACTERS = tuple(string.ascii_letters + string.digits + ".,:?")
KINDS = ("strip", "first", "metaspace")


def sentencepiece(
    kind: str, *, words: tuple[str, ...] = (), is_small: bool = False, chat: str | None = None
) -> TextTokenizer:
    """A tokenizer with `<s>` as its prefix.

    Args:
      kind: `strip` as of Llama 1 and 2, Vicuna and Mistral; `first` as transformers writes it for
        these today; `metaspace` as of T5.
      words: pieces besides `▁`, single characters and bytes.
      is_small: only lower-case letters, each with and without `▁` in front, so that a text can be
        written in one way only.
      chat: the chat template.
    """
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *CHARACTERS, *words]
    if is_small:
        letters = string.ascii_lowercase
        pieces = [*SPECIAL, *letters, *("▁" + letter for letter in letters)]
    pipeline = tokenizers.Tokenizer(
        tokenizers.models.Unigram(
            [(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=not is_small
        )
    )
    if kind == "strip":
        pipeline.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        scheme = "first" if kind == "first" else "always"
        pipeline.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme=scheme, split=False
        )
    if kind == "metaspace":
        pipeline.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="always")]
        )
    else:
        pipeline.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pipeline,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["[INST]"],
    )
    fast.chat_template = chat
    return TextTokenizer(fast, (SPECIAL.index("<s>"),))
