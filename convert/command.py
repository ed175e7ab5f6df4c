"""The command line of the conversion, for `python -m convert` and for `jaxspec convert`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from jaxspec.errors import JaxspecError

from .conversion import convert


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertCommand:
    """Convert a Hugging Face checkpoint to a jaxspec directory (config, parameters, tokenizer)."""

    src: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """Local Hugging Face directory, or a hub id."""
    dst: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """Directory to write."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the stored parameters; the checkpoint's own if not given."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace the destination if it exists."""
    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compare logits with torch before the destination appears (needs the `parity` extra)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """End with one line of JSON on standard output."""

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
        return {"command": "convert", **summary.to_json()}


def main(args: Sequence[str] | None = None) -> int:
    """Runs `python -m convert`; returns the exit status, 1 after a mistake of the user."""
    command = tyro.cli(ConvertCommand, prog="python -m convert", args=args)
    try:
        document = command.run(Console())
    except JaxspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if command.json:
        print(json.dumps(document))
    return 0
