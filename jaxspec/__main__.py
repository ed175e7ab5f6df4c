"""`python -m jaxspec`."""

from jaxspec.cli import program

if __name__ == "__main__":
    program()
