"""Settings of the whole suite: its tiers, what JAX refuses in them, how they are compiled.

A test belongs to the tier of its file, which is a marker too (`pytest -m core`):

    core    functions and records; no engine is built
    engine  executors, engines and serving, on small models
    system  whole programs: commands, conversions, meshes, benches, programs as XLA compiles them
            for users
    slow    notebooks, statistics of samples, and the longest tests of the other tiers

`pytest` alone runs the first two; `pytest -m system` and `pytest -m slow` the rest.
"""

import atexit
import functools
import gc
import os
import pathlib
import shutil
import signal
import tempfile

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A background job of a shell's; the processes that tests interrupt would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores; and bits do not depend on the number of threads.
    os.environ.setdefault("JAXSPEC_NUM_THREADS", "1")
else:
    # Caches of the suite's own, for all workers and the processes they start: many tests compile
    # the same programs, and nothing of theirs goes to the user's.
    caches = tempfile.mkdtemp(prefix="jaxspec-tests-")
    atexit.register(shutil.rmtree, caches, ignore_errors=True)
    os.environ.setdefault("JAXSPEC_CACHE", os.path.join(caches, "jaxspec"))
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(caches, "compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import engines
import jax
import psutil
import pytest
from jax._src import compiler, pjit
from jax._src.interpreters import pxla

from jaxspec.engine import round_times
from jaxspec.models import prefill

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Tracing makes millions of objects, few of them in cycles: with Python's own thresholds the tests
# spend a tenth of their time on looking for these.
gc.set_threshold(100_000, 50, 100)

# Tests ask what engines do with the times that they measure, not how exact these are.
round_times.MEASURING_S = 0.3

SHIPPED_CHUNK, prefill.CHUNK = prefill.CHUNK, 16  # so that short prompts have several

# With these XLA compiles in a third of the time. Tests of what it makes of a program (its bits, its
# HLO, its cost), and those that run for long, are marked `as_shipped` and do without.
COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
    "xla_llvm_disable_expensive_passes": True,
}
_options: dict[str, bool | int] = {}
_as_configured = compiler.get_compile_options


def _with_options(*args, env_options_overrides=None, **kwargs):
    """`get_compile_options` with those of the running test; options of `jax.jit` come before."""
    options = _options | (env_options_overrides or {})
    return _as_configured(*args, env_options_overrides=options, **kwargs)


compiler.get_compile_options = _with_options


@functools.cache
def fast_options() -> dict[str, bool | int]:
    """Those of `COMPILE_FAST` that this version of XLA has."""

    def is_known(name: str) -> bool:
        try:
            jax.jit(lambda: 0, compiler_options={name: COMPILE_FAST[name]})()
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            return False
        return True

    return {name: value for name, value in COMPILE_FAST.items() if is_known(name)}


@pytest.fixture(scope="session")
def fast_environment() -> dict[str, str]:
    """Variables of a process whose programs are compiled fast, as those of the tests are."""
    flags = [f"--{name}={str(value).lower()}" for name, value in fast_options().items()]
    return {**os.environ, "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()}


def choose_options(*, is_fast: bool) -> None:
    """How everything is compiled from now on; `COMPILE_FAST` is for CPUs."""
    _options.clear()
    if is_fast and jax.default_backend() == "cpu":
        _options.update(fast_options())


def pytest_collection():
    """Compiles fast what draws the weights of models that files make when they are imported."""
    choose_options(is_fast=True)


def pytest_collection_finish():
    """Leaves what was imported out of all later searches for garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Chooses how a test and the fixtures made for it are compiled, the chunks in which their
    prompts are prefilled, and what JAX refuses."""
    is_fast = item.get_closest_marker("as_shipped") is None
    is_system = any(item.get_closest_marker(name) for name in ("system", "slow"))
    choose_options(is_fast=is_fast)
    prefill.CHUNK = 16 if is_fast else SHIPPED_CHUNK
    engines.compiled_for = (is_fast, is_system)
    jax.config.update("jax_numpy_rank_promotion", "allow" if is_system else "raise")
    jax.config.update("jax_debug_key_reuse", not is_system)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Frees what was lowered once it is compiled. JAX keeps each program's MLIR, over a megabyte of
    it even for a single addition, and lowering takes several times as long with thousands of them
    around. What was compiled stays."""
    pjit._pjit_lower.cache_clear()
    pxla._cached_lowering_to_hlo.cache_clear()


FORGETS_FROM_BYTES = 3 * 2**30
_compiled_otherwise: set[pathlib.Path] = set()  # files with tests that are marked `as_shipped`


@pytest.fixture(scope="module", autouse=True)
def _forget_programs(request):
    """Frees the engines of a file; once a worker is large, also what was compiled, with the engines
    that files share; and this around a file with tests that are compiled in another way, whose
    programs are no others'."""
    is_compiled_otherwise = request.path in _compiled_otherwise
    if is_compiled_otherwise:
        forget_programs()
    yield
    gc.collect()
    if is_compiled_otherwise or psutil.Process().memory_info().rss > FORGETS_FROM_BYTES:
        forget_programs()


def forget_programs():
    engines.forget()
    gc.collect()
    jax.clear_caches()


# Tiers by path, the first that fits; everything else under tests/ is of the tier engine.
TIERS = {
    "slow": (
        "audit/test_audited_files.py",
        "audit/test_judge.py",
        "audit/test_outputs.py",
        "audit/test_planted.py",
        "conformance/test_conformance.py",
        "equivalence/test_as_shipped.py",
        "lab/test_published.py",
        "notebooks",
        "property/test_decoding_properties.py",
        "sharding/test_processes.py",
        "training/test_training.py",
        "verifiers/test_laws_sampled.py",
    ),
    "core": (
        "lab/test_cost.py",
        "lab/test_compiled_programs.py",
        "cache/test_pages.py",
        "drafters/test_flexdraft_files.py",
        "drafters/test_drafter_files.py",
        "drafters/test_names.py",
        "golden",
        "kernels/test_attention.py",
        "kernels/test_attention_mosaic.py",
        "kernels/test_attention_pallas.py",
        "kernels/test_attention_sinks.py",
        "kernels/test_cpu.py",
        "kernels/test_sums.py",
        "models",
        "requests",
        "runtime/test_turns.py",
        "test_sampling.py",
        "training/test_dual_path.py",
        "training/test_teacher_forcing.py",
        "verifiers/test_coupled.py",
        "verifiers/test_laws_exactly.py",
        "verifiers/test_trees_exactly.py",
    ),
    "engine": (
        "training/test_texts.py",
        "training/test_train_drafters.py",
    ),
    "system": (
        "attack",
        "audit",
        "checkpoint",
        "commands",
        "conversion",
        "drafters/test_draft_model.py",
        "engine/test_compilation.py",
        "engine/test_devices.py",
        "engine/test_soak.py",
        "engine/test_timeouts.py",
        "equivalence/test_hf_sampling.py",
        "equivalence/test_laws.py",
        "kernels/test_cpu_build.py",
        "kernels/test_cpu_models.py",
        "lab/test_bench_drafters.py",
        "lab/test_bench_memory.py",
        "lab/test_cases.py",
        "lab/test_cells.py",
        "lab/test_compare.py",
        "lab/test_gpu_grid.py",
        "lab/test_doctor.py",
        "lab/test_hf.py",
        "lab/test_peers.py",
        "lab/test_program.py",
        "lab/test_replay.py",
        "lab/test_results.py",
        "lab/test_study.py",
        "interop",
        "property",
        "runtime/test_environment.py",
        "runtime/test_signals.py",
        "serving/test_host_loop.py",
        "serving/test_two_devices.py",
        "sharding",
        "test_documents.py",
        "test_imports.py",
        "training",
    ),
}


@functools.cache
def tier_of(path: pathlib.Path) -> str:
    """The tier of a test file."""
    return next((tier for tier, places in TIERS.items() if is_under(path, places)), "engine")


def is_under(path: pathlib.Path, places: tuple[str, ...]) -> bool:
    """Whether a test file is one of these files or in one of these folders of tests/."""
    name = path.relative_to(pathlib.Path(__file__).parent)
    return any(name.is_relative_to(place) for place in places)


def pytest_collection_modifyitems(items):
    """Marks every test with its tier; a long test may be marked `system` or `slow` in a file of
    another.
    Notes which files have tests that are compiled as users do."""
    for item in items:
        if item.get_closest_marker("system") is None:
            item.add_marker(tier_of(item.path))
        if item.get_closest_marker("as_shipped") is not None:
            _compiled_otherwise.add(item.path)


def pytest_terminal_summary(terminalreporter):
    """Prints what became of the attacks (tests/attack), those of all workers."""
    from attack import outcomes

    reports = [
        report
        for group in ("passed", "failed")
        for report in terminalreporter.getreports(group)
        if report.when == "call"
    ]
    rows = [row for r in reports for name, row in r.user_properties if name == outcomes.PROPERTY]
    if rows:
        terminalreporter.section("attacks")
        terminalreporter.write_line(outcomes.table(rows))


@pytest.fixture
def traced_anew():
    """For a test that replaces a function which others have traced, or will: JAX keeps the traces
    of jitted functions for the whole process."""
    jax.clear_caches()
    yield
    jax.clear_caches()
