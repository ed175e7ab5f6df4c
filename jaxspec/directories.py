"""Where things are kept on this machine."""

from __future__ import annotations

import os
from pathlib import Path

COMPILED_DIRECTORY = ".compiled"  # XLA's programs, in the cache directory
KERNELS_DIRECTORY = ".kernels"  # the compiled `native` kernels, likewise


def cache_directory() -> Path:
    """Converted models and what has been compiled: `$JAXSPEC_CACHE`, or the user's cache
    directory."""
    import platformdirs

    chosen = os.environ.get("JAXSPEC_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("jaxspec"))
