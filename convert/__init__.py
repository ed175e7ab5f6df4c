"""Hugging Face checkpoints to jaxspec's: `jaxspec convert SRC DST`, `python -m convert SRC DST`.

`convert` reads config, tokenizer and tensors of a local directory or a hub id and writes one
converted directory (see `jaxspec.checkpoint`). Tensors are mapped, not read: whatever the model's
size, no more than a batch of them is held at once.
"""

from convert.conversion import ConversionSummary, convert, convert_directory

__all__ = ["ConversionSummary", "convert", "convert_directory"]
