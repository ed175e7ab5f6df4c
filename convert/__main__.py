"""`python -m convert SRC DST`: `jaxspec convert` in a checkout."""

import sys

from jaxspec.cli import main
from jaxspec.runtime.signals import exit_with

if __name__ == "__main__":
    exit_with(lambda: main(["convert", *sys.argv[1:]]))
