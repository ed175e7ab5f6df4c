"""`python -m convert SRC DST`: `jaxspec convert` in a checkout."""

import sys

from jaxspec.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
