"""Where things are kept on this machine, and files that appear whole."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from jaxspec.errors import SettingError

COMPILED_DIRECTORY = ".compiled"  # XLA's programs, in the cache directory
KERNELS_DIRECTORY = ".kernels"  # the compiled `native` kernels, likewise


def cache_directory() -> Path:
    """Converted models and what has been compiled: `$JAXSPEC_CACHE`, or the user's cache
    directory."""
    import platformdirs

    chosen = os.environ.get("JAXSPEC_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("jaxspec"))


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that appears whole or not at all; its directory is made.

    Raises:
      SettingError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            try:
                file.write(content)
                file.close()
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise SettingError(
            f"The file {path} cannot be written ({error.strerror}); name another."
        ) from error
