"""`python -m convert SRC DST`."""

from convert.command import main

if __name__ == "__main__":
    main()
