"""What the scripts share that run another project's own code without what it imports."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

DIRECTORY = Path(__file__).parent / "heads"


def compiled(
    source: str, file: str, keeps: Callable[[ast.stmt], bool], names: Mapping[str, Any]
) -> dict[str, Any]:
    """The statements of a source that are kept, compiled with these names in place of its
    imports."""
    parsed = ast.parse(source)
    parsed.body = [node for node in parsed.body if keeps(node)]
    made = dict(names)
    exec(compile(parsed, file, "exec"), made)
    return made


def commit_of(checkout: Path) -> str:
    """The commit of a clone."""
    told = ("git", "-C", str(checkout), "rev-parse", "HEAD")
    return subprocess.run(told, check=True, capture_output=True, text=True).stdout.strip()


def write(
    name: str, repository: str, commit: str, source: str, seed: int, arrays: Mapping[str, Any]
) -> None:
    """Writes `heads/NAME.npz`: arrays, and where they come from."""
    origin = {"repository": repository, "commit": commit, "source": source, "seed": seed}
    path = DIRECTORY / f"{name}.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **{key: np.array(value) for key, value in origin.items()}, **arrays)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
