"""Imports run downward: records know nothing of models, models nothing of drafters, and so on."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# From the bottom up. A module imports from its own line or a line above it.
LAYERS = [
    ("errors", "types", "directories"),
    ("sampling", "cache"),
    ("attention", "layouts"),
    ("attention_pallas", "native"),
    ("models",),
    ("checkpoint", "prefill"),
    ("drafters", "verifiers", "schedulers"),
    ("telemetry",),
    ("decoding",),
    ("plain", "adaptive"),
    ("ladder", "sharding"),
    ("requests", "environment", "compilation"),
    ("loops",),
    ("memory", "serving"),
    ("engine", "prompts"),
    ("training", "bench", "audit", "testing", "analysis"),
    ("commands",),
    ("cli",),
    ("__main__", "__init__"),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# The command line offers the conversion; load_model converts what it is handed, lazily.
CONVERT_USERS = {"cli", "checkpoint"}
LAZY_CONVERT_USERS = {"checkpoint"}


def modules():
    for path in sorted((ROOT / "jaxspec").rglob("*.py")):
        parts = path.relative_to(ROOT / "jaxspec").with_suffix("").parts
        yield parts[0], path


def imports(tree):
    """(module, whether at top level) of every import statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "jaxspec":
                names = [f"jaxspec.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, node in tree.body


def violations(room, tree):
    for name, is_top in imports(tree):
        head, *rest = name.split(".")
        if head == "convert":
            if room not in CONVERT_USERS or (room in LAZY_CONVERT_USERS and is_top):
                yield f"{room} imports convert"
        elif head == "jaxspec" and rest and RANK[rest[0]] > RANK[room]:
            yield f"{room} imports {rest[0]}"


@pytest.mark.parametrize(("room", "path"), list(modules()), ids=lambda value: str(value)[-40:])
def test_imports_run_downward(room, path):
    assert not list(violations(room, ast.parse(path.read_text())))


def test_the_check_sees_an_arrow_upward():
    bad = ast.parse(
        "from jaxspec import engine\nfrom jaxspec.models import decoder\nimport convert"
    )
    assert list(violations("cache", bad)) == [
        "cache imports engine",
        "cache imports models",
        "cache imports convert",
    ]


def test_importing_the_package_touches_no_device_and_no_tokenizer_library():
    code = (
        "import sys, jaxspec, jax\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized(), 'a device was touched'\n"
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules\n"
        "assert 'convert' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
