"""`python -m jaxspec.training`: the same as `jaxspec train lm`."""

from __future__ import annotations

import json
import sys

import tyro

from jaxspec.errors import JaxspecError
from jaxspec.training.lm import TrainConfig, train_lm


def main() -> int:
    """Trains as the command line says and prints the results as JSON; returns the exit status."""
    try:
        print(json.dumps(train_lm(tyro.cli(TrainConfig)), indent=2))
    except JaxspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
