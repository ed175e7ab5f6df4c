"""Settings of the whole suite: its tiers, strict promotion, caches of its own, shared programs.

A test belongs to the tier of its file, which is a marker too (`pytest -m core`):

    core    functions and records; no engine is built
    engine  executors, engines and serving, on small models
    system  commands, conversions, notebooks, meshes, benches: other processes, whole programs

`pytest` alone runs the first two; `pytest -m system` and `pytest -m slow` the rest.
"""

import atexit
import os
import pathlib
import shutil
import tempfile

# One directory for all workers and the processes they start: many tests compile the same programs.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    directory = tempfile.mkdtemp(prefix="jaxspec-compiled-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = directory
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

# The workers share the cores; and bits do not depend on the number of threads.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("JAXSPEC_NUM_THREADS", "1")

import jax
import pytest
from jax._src import compiler

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Tests compile in a third of the time with these, but for files whose subject is what the compiler
# makes of a program (its bits, its HLO, its cost), and those that run for long.
COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
AS_SHIPPED = (
    "drafters/test_draft_model.py",
    "equivalence/test_equivalence.py",
    "equivalence/test_sampled.py",
    "golden",
    "property",
    "test_compilation.py",
    "test_layouts.py",
    "test_native.py",
    "test_programs.py",
    "test_soak.py",
    "training",
)


@pytest.fixture(scope="module", autouse=True)
def _compile_fast(request):
    """Sets `COMPILE_FAST` for one file, in this process; options of `jax.jit` come before it."""
    if is_under(request.path, AS_SHIPPED):
        yield
        return
    as_configured = compiler.get_compile_options

    def with_fast(*args, env_options_overrides=None, **kwargs):
        options = COMPILE_FAST | (env_options_overrides or {})
        return as_configured(*args, env_options_overrides=options, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if jax.default_backend() == "cpu":
            patch.setattr(compiler, "get_compile_options", with_fast)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Converted models of the suite go to a temporary cache, not the user's."""
    if "JAXSPEC_CACHE" not in os.environ:
        os.environ["JAXSPEC_CACHE"] = str(tmp_path_factory.mktemp("cache"))


# Tiers by path, the first that fits; everything else under tests/ is of the tier engine.
TIERS = {
    "core": (
        "analysis/test_cost.py",
        "audit/test_judge.py",
        "audit/test_outputs.py",
        "audit/test_report.py",
        "audit/test_snippets.py",
        "drafters/test_names.py",
        "golden",
        "models",
        "test_attention.py",
        "test_attention_pallas.py",
        "test_cache.py",
        "test_native.py",
        "test_prompts.py",
        "test_requests.py",
        "test_sampling.py",
        "test_turns.py",
        "verifiers/test_coupled.py",
        "verifiers/test_laws_exactly.py",
    ),
    "system": (
        "audit/test_controls.py",
        "bench",
        "commands",
        "conversion",
        "equivalence/test_hf_sampling.py",
        "notebooks",
        "serving/test_host_loop.py",
        "serving/test_two_devices.py",
        "sharding",
        "test_checkpoint.py",
        "test_devices.py",
        "test_documents.py",
        "test_environment.py",
        "test_imports.py",
        "test_soak.py",
        "training",
    ),
}


def tier_of(path: pathlib.Path) -> str:
    """The tier of a test file."""
    return next((tier for tier, places in TIERS.items() if is_under(path, places)), "engine")


def is_under(path: pathlib.Path, places: tuple[str, ...]) -> bool:
    """Whether a test file is one of these files or in one of these folders of tests/."""
    name = path.relative_to(pathlib.Path(__file__).parent)
    return any(name.is_relative_to(place) for place in places)


def pytest_collection_modifyitems(items):
    """Marks every test with its tier."""
    for item in items:
        item.add_marker(tier_of(item.path))
