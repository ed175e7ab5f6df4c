"""`python -m convert SRC DST`."""

import sys

from convert.command import main

if __name__ == "__main__":
    sys.exit(main())
