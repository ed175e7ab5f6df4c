"""Where things are kept on this machine; files and directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from jaxspec.errors import CheckpointError, SettingError
from jaxspec.runtime.files import expand_user

COMPILED_DIRECTORY = ".compiled"  # in the cache directory: XLA's programs
KERNELS_DIRECTORY = ".kernels"  # likewise: the compiled `native` kernels


def cache_directory() -> Path:
    """Converted models and compiled programs: `$JAXSPEC_CACHE`, or the user's cache directory."""
    import platformdirs

    chosen = os.environ.get("JAXSPEC_CACHE")
    return expand_user(chosen) if chosen else Path(platformdirs.user_cache_dir("jaxspec"))


def sha256_of(path: str | os.PathLike) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_free_space(directory: str | os.PathLike, num_bytes: int, *, what: str) -> None:
    """Raises `CheckpointError` unless the disk of `directory` has room for `num_bytes` more."""
    existing = Path(directory).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise CheckpointError(
            f"{what} needs {num_bytes / 2**30:.2f} GiB below {directory}, where "
            f"{free / 2**30:.2f} GiB are free; free some space or use another disk."
        )


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file, whole or not at all, and makes its directory where needed.

    Raises:
      SettingError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise SettingError(
            f"The file {path} cannot be written ({error.strerror}); name another."
        ) from error


@contextlib.contextmanager
def atomic_directory(
    destination: str | os.PathLike,
    *,
    overwrite: bool = False,
    may_replace: Callable[[Path], bool] = lambda _: True,
) -> Iterator[Path]:
    """A temporary directory beside `destination`, renamed to it when the block ends without error.

    If the block raises, the directory is removed. If the process is killed, it stays behind as
    `.NAME.partial-HOST-PID-...` until the next write to the same destination. With `overwrite`, the
    old directory is moved aside first: between two renames the destination is absent, and it is
    never a mixture.

    Args:
      destination: of the finished directory.
      overwrite: replace it if it exists.
      may_replace: whether an existing destination is of a kind that may be overwritten.

    Raises:
      CheckpointError: the destination exists and may not be replaced, it cannot be created, or the
        disk is full.
    """
    destination = Path(destination).absolute()
    if destination.exists() and not overwrite:
        raise CheckpointError(
            f"{destination} exists already; name another destination, or allow it to be "
            "overwritten (--overwrite)."
        )
    is_empty = destination.is_dir() and not any(destination.iterdir())
    if destination.exists() and not is_empty and not may_replace(destination):
        raise CheckpointError(
            f"{destination} exists and is not a converted directory, so it is not overwritten; "
            "name another destination or remove it yourself."
        )
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(destination)
        working = _sibling(destination)
        working.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"{destination} cannot be created ({error.strerror or error}); "
            "name a directory that can be written."
        ) from error
    try:
        yield working
        _move_into_place(working, destination, overwrite=overwrite)
    except Exception as error:
        if _is_disk_full(error):
            raise CheckpointError(
                f"The disk of {destination.parent} filled up while {destination.name} was written; "
                "free some space or name a destination on another disk (nothing was left behind)."
            ) from error
        raise
    finally:
        shutil.rmtree(working, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Removes a directory, renamed first so that no reader finds half of it."""
    aside = _sibling(path)
    os.rename(path, aside)
    shutil.rmtree(aside)


def _sibling(destination: Path) -> Path:
    owner = f"{socket.gethostname()}-{os.getpid()}"
    return destination.with_name(f".{destination.name}.partial-{owner}-{secrets.token_hex(4)}")


def _remove_stale(destination: Path) -> None:
    """Removes what killed writers on this host left of `destination`."""
    prefix = f".{destination.name}.partial-{socket.gethostname()}-"
    for left in destination.parent.iterdir():
        pid = left.name.removeprefix(prefix).partition("-")[0]
        is_writers = left.name.startswith(prefix) and pid.isdecimal()
        if is_writers and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _move_into_place(working: Path, destination: Path, *, overwrite: bool) -> None:
    replaced = None
    if overwrite and destination.exists():
        replaced = _sibling(destination)
        os.rename(destination, replaced)
    try:
        os.rename(working, destination)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise CheckpointError(
            f"{destination} was created by another process meanwhile; use it, or name another "
            "destination."
        ) from error
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
