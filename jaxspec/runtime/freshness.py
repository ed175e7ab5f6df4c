"""Checks whether a committed result still belongs to the code that it measured.

A document names the modules and folders that it measures (`measures`, relative to the package) and
contains a digest of their code (`code_digest`). The result is stale if the digest has changed. It
is computed from syntax trees without docstrings, comments, imports and file names, so that moving,
reformatting or documenting a module makes nothing stale; C++ sources count without comments and
spaces. No git history is needed.

Code may change in a way that cannot change a figure, for example when a function is renamed. You
can then confirm the result, and the document keeps the reason beside the commit that it was
measured at:

    python -m jaxspec.runtime.freshness docs/results --confirm "renamed only"

Without `--confirm` it lists the stale results.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.runtime.directories import write_atomically
from jaxspec.runtime.environment import commit

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
SUFFIXES = (".py", ".cc", ".h")


def code_digest(measures: Sequence[str], *, root: pathlib.Path = PACKAGE) -> str:
    """A digest of the code of modules and folders (paths relative to `root`, such as `decode` or
    `models/decoder.py`); see the module's docstring.

    Raises:
      FileNotFoundError: there is no such module or folder.
    """
    digests = set()
    for name in measures:
        path = root / name
        if not path.exists():
            raise FileNotFoundError(f"{name} was to be measured, and is no part of the package")
        files = path.rglob("*") if path.is_dir() else [path]
        digests |= {_digest_of(file) for file in files if file.suffix in SUFFIXES}
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:16]


def _digest_of(file: pathlib.Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        text = ast.dump(_Bare().visit(ast.parse(text)))
    else:
        text = " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).split())
    return hashlib.sha256(text.encode()).hexdigest()


class _Bare(ast.NodeTransformer):
    """A syntax tree without docstrings and imports."""

    def visit_Import(self, node: ast.AST) -> None:
        """Left out."""

    visit_ImportFrom = visit_Import

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """A string on its own documents what is above it."""
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return node


def staleness(document: Mapping[str, Any], *, root: pathlib.Path = PACKAGE) -> str | None:
    """A sentence about why a result does not belong to today's code; None if it does."""
    measures = document.get("measures")
    if not measures:
        return "it does not say which code it measures"
    if not document.get("commit"):
        return "it does not say at which commit it was made"
    try:
        now = code_digest(measures, root=root)
    except FileNotFoundError as error:
        return str(error)
    *_, last = [document, *document.get("confirmed", ())]
    if last["code_digest"] != now:
        return f"the code of {', '.join(measures)} has changed since {document['commit'][:12]}"
    return None


def main(args: Sequence[str] | None = None) -> int:
    """Lists stale results, or confirms them; returns the number of those that stay stale."""
    parser = argparse.ArgumentParser(description="Are committed results of today's code?")
    parser.add_argument("results", type=pathlib.Path, help="a JSON file, or a directory of them")
    parser.add_argument("--confirm", metavar="REASON", help="why they still hold")
    options = parser.parse_args(args)
    path: pathlib.Path = options.results
    num_stale = 0
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        document = json.loads(file.read_text(encoding="utf-8"))
        reason = staleness(document)
        if reason is not None and options.confirm and document.get("measures"):
            note = {"commit": commit(), "code_digest": code_digest(document["measures"])}
            note["reason"] = options.confirm
            document["confirmed"] = [*document.get("confirmed", ()), note]
            write_atomically(file, json.dumps(document, indent=1).encode() + b"\n")
            reason = staleness(document)
        if reason is not None:
            num_stale += 1
            print(f"{file}: {reason}")
    return num_stale


if __name__ == "__main__":
    raise SystemExit(main())
