"""Settings of the whole suite: strict promotion, caches of its own, compiled programs shared."""

import atexit
import os
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

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Converted models of the suite go to a temporary cache, not the user's."""
    if "JAXSPEC_CACHE" not in os.environ:
        os.environ["JAXSPEC_CACHE"] = str(tmp_path_factory.mktemp("cache"))
