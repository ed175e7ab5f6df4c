"""The command line of the conversion, for `python -m convert` and for `jaxspec convert`."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated, Literal

import tyro

from convert.conversion import ConversionSummary, convert
from jaxspec.errors import JaxspecError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertCommand:
    """Convert a Hugging Face checkpoint to a jaxspec directory (config, parameters, tokenizer)."""

    src: Annotated[str, tyro.conf.Positional]
    """Local Hugging Face directory, or a hub id."""
    dst: Annotated[str, tyro.conf.Positional]
    """Directory to write."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the stored parameters; the checkpoint's own if not given."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    overwrite: bool = False
    """Replace the destination if it exists."""
    verify: bool = False
    """Compare logits with torch before the destination appears (needs the `parity` extra)."""

    def run(self) -> ConversionSummary:
        """Converts and prints the summary."""
        summary = convert(
            self.src,
            self.dst,
            dtype=self.dtype,
            revision=self.revision,
            overwrite=self.overwrite,
            verify=self.verify,
        )
        print(summary)
        return summary


def main(args: list[str] | None = None) -> None:
    """Runs `python -m convert`; a mistake of the user ends in one line and exit status 1."""
    command = tyro.cli(ConvertCommand, prog="python -m convert", args=args)
    try:
        command.run()
    except JaxspecError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
