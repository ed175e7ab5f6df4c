"""The drawing of the house: what is imported in no circle, and what is never imported at all."""

from __future__ import annotations

import ast
import graphlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# The rooms, which docs/design.md shows as they stand here: folders and modules of jaxspec, as they
# are best read. `convert` is the package at the top of the repository, installed as
# jaxspec.convert.
ROOMS = [
    ("errors, types, runtime", "records, messages, directories, compiled programs"),
    ("cache", "pages of KV"),
    ("kernels", "products, attention and sums: XLA's, C++ for CPUs, Pallas"),
    ("sampling", "from logits to distributions"),
    ("models", "one decoder, and what varies between families as data"),
    ("checkpoint", "what a directory of a model or a drafter holds"),
    ("convert", "Hugging Face checkpoints to ours, one table per family"),
    ("drafters, verifiers, schedulers", "the parts that a user chooses or writes"),
    ("load", "what the name of a model or a drafter means"),
    ("telemetry", "what rounds did: counts, traces, frames"),
    ("decode", "the round and the loop"),
    ("requests", "prompts and sampling parameters in, completions out"),
    ("engine", "the executor, and a queue and a clock over it"),
    ("serving", "prefill, insert, generate, free; a server"),
    ("interop", "engines in the actors of Ray"),
    ("training, audit, conformance, testing", "draft models; proofs, also of a user's own parts"),
    ("lab", "costs, plans, comparisons, plots, measurements, studies"),
    ("planning, trees", "names of `lab` and `drafters` for users"),
    ("commands", "one module per command"),
    ("cli", "the command line"),
    ("__init__, __main__, convert.__main__", ""),
]
ROOM_NAMES = {name for names, _ in ROOMS for name in names.split(", ")}
CORE = (
    "errors types runtime cache kernels sampling models checkpoint convert drafters load "
    "verifiers schedulers telemetry decode requests engine serving interop"
).split()
# Rooms that never import others, and why. Imports for type checkers count.
NEVERS = [
    (
        CORE,
        ["audit", "conformance", "lab", "training", "commands"],
        "what decodes is read, tested and changed without what proves, trains or measures it",
    ),
    (["audit", "conformance"], ["lab"], "a proof does not rest on what it may be used to measure"),
    (
        ["runtime"],
        [*CORE[3:], "audit", "conformance", "lab", "training", "commands"],
        "it is about the process, and knows no model, no request and no result",
    ),
]
MOST_ARROWS = 196  # between first-level rooms; what connects everything is understood by nobody
# The package root is lazy: what imports it gets the version, and nothing else.
FROM_THE_ROOT = {"__version__"}


def modules() -> dict[str, pathlib.Path]:
    """Every module of the package by its dotted name without `jaxspec.`."""
    found = {}
    for folder, prefix in ((ROOT / "jaxspec", ()), (ROOT / "convert", ("convert",))):
        for path in sorted(folder.rglob("*.py")):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            if prefix or parts[0] != "convert":  # jaxspec/convert is a link to convert
                found[".".join(parts)] = path
    return found


MODULES = modules()


def room(name: str) -> str:
    """The room that a module stands in."""
    parts = name.split(".")
    names = (".".join(parts[:length]) for length in (2, 1))
    return next((name for name in names if name in ROOM_NAMES), parts[0])


def imports(name: str, tree: ast.AST) -> Iterator[str]:
    """The package's modules that a module imports anywhere, also inside functions and for type
    checkers only."""
    here = name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            start = ["jaxspec", *here[: len(here) - node.level + 1]] if node.level else []
            dotted = [".".join([*start, *module, alias.name]) for alias in node.names]
        else:
            continue
        for full in dotted:
            head, *parts = full.split(".")
            if head == "jaxspec" and parts and parts[0] not in FROM_THE_ROOT:
                yield resolved(parts)
            elif head == "convert":
                yield resolved([head, *parts])


def resolved(parts: list[str]) -> str:
    """The longest beginning of a dotted name that is a module (the rest are names in it)."""
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in MODULES:
            return name
        if f"{name}.__init__" in MODULES:
            return f"{name}.__init__"
    return ".".join(parts)


GRAPH = {name: set(imports(name, ast.parse(path.read_text()))) for name, path in MODULES.items()}


def violations(graph: dict[str, set[str]]) -> list[str]:
    """A sentence for each import that `NEVERS` forbids."""
    return [
        f"{name} imports {imported}, and {reason}"
        for rooms, forbidden, reason in NEVERS
        for name in graph
        if name.split(".")[0] in rooms
        for imported in sorted(graph[name])
        if imported.split(".")[0] in forbidden
    ]


def between(graph: dict[str, set[str]], room_of: Callable[[str], str]) -> dict[str, set[str]]:
    """For each room, the others that its modules import."""
    found: dict[str, set[str]] = {}
    for name, imported in graph.items():
        here = room_of(name)
        found.setdefault(here, set()).update({room_of(each) for each in imported} - {here})
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A group of modules that import each other in a circle, if there is one."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return sorted(set(error.args[1]))
    return []


def test_every_module_stands_in_a_room():
    assert {room(name) for name in MODULES} == ROOM_NAMES


def test_what_is_never_imported():
    assert violations(GRAPH) == []


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("cache.pages", "from jaxspec.lab import compare", "what decodes"),
        ("audit.judge", "from jaxspec.lab.bench.measure import Run", "a proof"),
        ("runtime.locks", "from jaxspec import sampling", "it is about the process"),
        ("decode.plain", "if TYPE_CHECKING:\n    import jaxspec.training.trainer", "what decodes"),
    ],
)
def test_the_check_sees_what_is_never_imported(name, line, reason):
    [found] = violations({name: set(imports(name, ast.parse(line)))})
    assert found.startswith(f"{name} imports ")
    assert f", and {reason}" in found


def test_neither_modules_nor_rooms_import_each_other_in_a_circle():
    assert circle(GRAPH) == []
    assert circle(between(GRAPH, room)) == []


def test_the_arrows_between_first_level_rooms_are_few():
    arrows = between(GRAPH, lambda name: name.split(".")[0])
    num_arrows = sum(map(len, arrows.values()))
    print(f"{num_arrows} arrows between {len(arrows)} first-level rooms, at most {MOST_ARROWS}")
    assert num_arrows <= MOST_ARROWS


def test_the_check_sees_a_circle():
    """Of modules, also by imports for types, and of rooms."""
    lines = {
        "decode.loop": "from jaxspec.decode.plain import plain_round",
        "decode.plain": "if TYPE_CHECKING:\n    from jaxspec.decode import loop",
    }
    graph = {name: set(imports(name, ast.parse(line))) for name, line in lines.items()}
    assert circle(graph | {"engine.core": {"decode.loop"}}) == ["decode.loop", "decode.plain"]
    graph = {"cache.pages": {"models.base"}, "models.base": {"cache.layouts"}}
    assert circle(graph) == []
    assert circle(between(graph, room)) == ["cache", "models"]


def run(code: str) -> None:
    """Runs `code` in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr


def test_the_package_decodes_without_optional_libraries():
    """Pallas, pandas, matplotlib and torch are blocked, and what only commands and the server
    need."""
    run("""
import sys

BLOCKED = (
    "jax.experimental.pallas", "pandas", "matplotlib", "torch", "tyro", "IPython",
    "fastapi", "starlette", "uvicorn", "prometheus_client", "ray", "pyarrow",
)

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in BLOCKED):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
import jaxspec

assert "jax" not in sys.modules
jaxspec.Engine, jaxspec.load_model, jaxspec.compare
assert "transformers" not in sys.modules
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a device was touched"

import toy
engine = jaxspec.Engine(toy.model(num_layers=1), jaxspec.NGram(), batch_size=1, max_length=128)
[done] = engine.generate([[1, 2]], jaxspec.SamplingParams(max_tokens=5, ignore_eos=True))
assert len(done.token_ids) == 5

from jaxspec.kernels.registry import check_kernels
try:
    check_kernels("pallas")
except jaxspec.errors.SettingError as error:
    assert "choose 'xla'" in str(error)
else:
    raise AssertionError("Pallas was not blocked")
""")


def test_importing_and_decoding_change_nothing_of_the_process():
    """No log handler or level, no warning, environment variable or setting of JAX."""
    run("""
import logging, os, warnings
import jax

def settings():
    ours = [name for name in logging.root.manager.loggerDict if name.startswith("jaxspec")]
    loggers = [logging.root, *map(logging.getLogger, ours)]
    return {
        "handlers": [handler for logger in loggers for handler in logger.handlers],
        "levels": {logger.name for logger in loggers if logger.level not in (0, logging.WARNING)},
        "silenced": {logger.name for logger in loggers if not logger.propagate},
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "jax": dict(jax.config.values),
    }

with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    before = settings()
    import jaxspec
    assert settings() == before, "import"
    import toy
    engine = jaxspec.Engine(toy.model(num_layers=1), batch_size=1, max_length=128)
    engine.generate([[1, 2]], jaxspec.SamplingParams(max_tokens=3))
    assert settings() == before, "Engine"
    model = jaxspec.load_model("demo-draft")
    assert settings() == before, "load_model"
assert not [str(each.message) for each in heard if "jaxspec" in each.filename], heard
""")


def test_what_is_exported_is_there():
    import jaxspec

    tree = ast.parse((ROOT / "jaxspec" / "__init__.py").read_text())
    for_type_checkers = {
        alias.asname: node.module.removeprefix("jaxspec").removeprefix(".")
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in block.body
        for alias in node.names
    }
    assert for_type_checkers == {**jaxspec._MODULE_OF, "errors": "", "types": ""}
    assert set(jaxspec.__all__) <= set(dir(jaxspec))
    for name in jaxspec.__all__:
        assert getattr(jaxspec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'engines'"):
        jaxspec.engines  # noqa: B018
