"""`jaxspec convert`, and `python -m convert` in a checkout."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro
from rich.console import Console

from jaxspec.commands.options import DtypeName, JsonOption
from jaxspec.convert import convert
from jaxspec.runtime.documents import as_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertCommand(JsonOption):
    """Convert a Hugging Face checkpoint or a GGUF file to a jaxspec directory."""

    src: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A Hugging Face directory, a GGUF file, or a hub id."""
    dst: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """Directory to write."""
    dtype: DtypeName | None = None
    """Dtype of the stored parameters; default: the checkpoint's own (quantized: bfloat16)."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    overwrite: bool = False
    """Replace the destination if it exists."""
    verify: bool = False
    """Compare logits with torch's before the destination appears (needs the `parity` extra)."""

    def run(self, console: Console) -> dict[str, Any]:
        """Converts and prints the summary; returns the JSON document."""
        summary = convert(
            self.src,
            self.dst,
            dtype=self.dtype,
            revision=self.revision,
            overwrite=self.overwrite,
            verify=self.verify,
        )
        console.print(str(summary), markup=False, highlight=False, soft_wrap=True)
        return {"command": "convert", **as_json(dataclasses.asdict(summary))}
