"""The command line: `jaxspec.commands`, and a user's mistake as one sentence."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence

import jax
import tyro
from rich.console import Console

from convert.command import ConvertCommand
from jaxspec.commands.audit import AuditCommand
from jaxspec.commands.bench import BenchCommand
from jaxspec.commands.cache import CacheCommand
from jaxspec.commands.compare import CompareCommand
from jaxspec.commands.demo import DemoCommand
from jaxspec.commands.environment import EnvCommand
from jaxspec.commands.generate import GenerateCommand
from jaxspec.commands.train import TrainCommand
from jaxspec.errors import JaxspecError

COMMANDS = {
    "demo": DemoCommand,
    "generate": GenerateCommand,
    "audit": AuditCommand,
    "bench": BenchCommand,
    "compare": CompareCommand,
    "convert": ConvertCommand,
    "cache": CacheCommand,
    "train": TrainCommand,
    "env": EnvCommand,
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status.

    0, 1 for a mistake of the user's, 3 for an audit that finds a promise broken, 130 if
    interrupted, 141 if whoever reads the output has gone; options that cannot be parsed exit with
    2.
    """
    try:
        status = run_command(args)
        sys.stdout.flush()
    except JaxspecError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).split("\n")[0]
        print(
            f"error: The memory does not suffice ({reason}); lower --batch-size or --max-length, "
            "or choose a smaller model or dtype.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Nothing more can be written, and Python would try once more when it ends.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def run_command(args: Sequence[str] | None) -> int:
    """Parses `args` and runs the command they name; raises what it raises."""
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="jaxspec",
        description="Batched speculative decoding whose output is the target model's own.",
        args=args,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
    )
    document = command.run(Console())
    if command.json:
        print(json.dumps(document))
    return 0 if document.get("holds", True) else 3
