"""Settings of the whole suite: strict promotion, and a cache directory of its own."""

import os

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Converted models of the suite go to a temporary cache, not the user's."""
    if "JAXSPEC_CACHE" not in os.environ:
        os.environ["JAXSPEC_CACHE"] = str(tmp_path_factory.mktemp("cache"))
