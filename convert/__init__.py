"""Converts Hugging Face checkpoints to jaxspec's: `jaxspec convert SRC DST`, `python -m convert SRC
DST`.

`convert` reads config, tokenizer and tensors of a local directory or a hub id and writes one
converted directory (see `jaxspec.checkpoint.format`). Tensors are memory-mapped, so a model of any
size is converted with one batch of them in memory.

The package is at the top of the repository and is installed as `jaxspec.convert`: `jaxspec/convert`
is a link to it. This is why its modules import each other relatively.
"""

from .conversion import ConversionSummary, convert, convert_directory

__all__ = ["ConversionSummary", "convert", "convert_directory"]
