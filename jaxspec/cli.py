"""The command line. Commands are in `jaxspec.commands`; a mistake of the user ends in one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import tyro
from rich.console import Console

from convert.command import ConvertCommand
from jaxspec.commands.cache import CacheCommand
from jaxspec.commands.demo import DemoCommand
from jaxspec.commands.environment import EnvCommand
from jaxspec.commands.generate import GenerateCommand
from jaxspec.commands.train import TrainCommand
from jaxspec.errors import JaxspecError

COMMANDS = {
    "demo": DemoCommand,
    "generate": GenerateCommand,
    "convert": ConvertCommand,
    "cache": CacheCommand,
    "train": TrainCommand,
    "env": EnvCommand,
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 for a mistake, 130 if interrupted."""
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="jaxspec",
        description="Batched speculative decoding whose output is the target model's own.",
        args=args,
    )
    console = Console()
    try:
        document = command.run(console)
    except JaxspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if command.json:
        print(json.dumps(document, default=str))
    return 0
