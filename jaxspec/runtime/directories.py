"""Where files are kept on this machine, and writing of files and directories that appear whole or
not at all."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxspec.errors import CheckpointError, SettingError
from jaxspec.runtime.files import absolute, expand_user
from jaxspec.runtime.locks import only_writer
from jaxspec.runtime.signals import called_at_end, uninterrupted

COMPILED_DIRECTORY = ".compiled"  # in the cache directory: XLA's programs
KERNELS_DIRECTORY = ".kernels"  # likewise: the compiled `native` kernels
# Errors of a system that accepts no more bytes: full disks, quotas, limits on file size.
_REFUSED_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def cache_directory() -> Path:
    """The directory for converted models and compiled programs: `$JAXSPEC_CACHE`, or one in the
    user's cache directory. It is an absolute path.

    Raises:
      SettingError: its path is not UTF-8, begins with an unknown home directory, or is relative to
        a current directory that was removed; or the user has no home directory.
    """
    import platformdirs

    chosen = os.environ.get("JAXSPEC_CACHE")
    if chosen:
        path = absolute(expand_user(chosen))
    else:
        try:
            path = absolute(platformdirs.user_cache_dir("jaxspec"))
        except RuntimeError as error:
            raise SettingError(
                "This process has no home directory for the cache (HOME is not set to one, and "
                f"user {os.getuid()} has no entry in the system's list of users); name a cache "
                "directory with JAXSPEC_CACHE."
            ) from error
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise SettingError(
            f"The cache directory {str(path)!a} is not UTF-8; name another with JAXSPEC_CACHE."
        ) from error
    return path


def sha256_of(path: str | os.PathLike) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of_directory(directory: Path) -> int:
    """Bytes of the files in a directory; those in directories that cannot be listed are left
    out."""
    num_bytes = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                num_bytes += os.lstat(Path(folder, name)).st_size
    return num_bytes


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


def check_regular_file(path: Path) -> None:
    """Raises `OSError` if `path` exists but is a directory, a device or a pipe instead of a
    file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, and not a file")


def check_can_write(path: Path) -> None:
    """Checks, before the work that makes its content, that `write_atomically` can write a file.
    Nothing is made.

    Raises:
      SettingError: it cannot be written, or is not a regular file.
    """
    path = Path(os.path.realpath(path))
    try:
        check_regular_file(path)
        _check_can_create(_beside(path, "partial"))
    except OSError as error:
        raise _unwritten(path, error) from error


def check_can_write_into(directory: Path) -> None:
    """Checks, before the work that makes them, that files can be written into a directory, which
    need not exist yet. Nothing is made.

    Raises:
      SettingError: they cannot, or it is not a directory.
    """
    directory = Path(os.path.realpath(directory))
    try:
        _check_can_create(directory / "file")
        _check_can_create(_beside(directory, "partial"))
    except OSError as error:
        raise SettingError(
            f"Nothing can be written into {directory} ({error.strerror}); name another directory."
        ) from error


def _check_can_create(path: Path) -> None:
    """Raises `OSError` unless a file with this path can be created, together with its directory."""
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)  # refuses a name that is too long, and a parent that is a file
    existing = path.parent
    while not os.path.lexists(existing):
        existing = existing.parent
    tempfile.TemporaryFile(dir=existing).close()


def _unwritten(path: Path, error: OSError) -> SettingError:
    return SettingError(f"The file {path} cannot be written ({error.strerror}); name another.")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file, whole or not at all, and makes its directory if needed; the file is on the
    disk when this returns. If the process is killed, `.NAME.partial` may stay behind until the next
    write.

    Raises:
      SettingError: it cannot be written, or is not a regular file.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name}.partial")
    try:
        check_regular_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with only_writer(path, wait=True):
            partial.unlink(missing_ok=True)
            with contextlib.ExitStack() as stack:
                with uninterrupted:
                    remove = functools.partial(partial.unlink, missing_ok=True)
                    stack.enter_context(called_at_end(remove))
                    file = stack.enter_context(open(partial, "xb"))  # follows no planted link
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.replace(partial, path)
            _sync(path.parent)
    except OSError as error:
        raise _unwritten(path, error) from error


@contextlib.contextmanager
def atomic_directory(
    destination: str | os.PathLike,
    *,
    overwrite: bool = False,
    may_replace: Callable[[Path], bool] = lambda _: True,
) -> Iterator[Path]:
    """A directory beside `destination` to write to, which takes its place when the block ends
    without error and everything is on the disk.

    Beside a destination `out` there may be, for a time:

        .out.lock      held by the process that writes
        .out.partial   what is being written
        .out.complete  the same, complete
        .out.replaced  the old directory, until the new one is in its place

    If the block raises, none of these is left. If the process is killed, the next writer moves a
    complete directory into place and removes the rest: an existing destination is never lost. While
    it is being replaced it is absent for a moment, but it is never a mixture.

    Args:
      destination: the path of the finished directory.
      overwrite: replace it if it exists.
      may_replace: tells whether an existing destination is of a kind that may be overwritten.

    Raises:
      SettingError: another process is writing the destination.
      CheckpointError: the destination exists and may not be replaced, it cannot be created, or the
        disk is full.
    """
    destination = Path(os.path.realpath(destination))
    _check_replaceable(destination, overwrite=overwrite, may_replace=may_replace)
    partial = _beside(destination, "partial")
    with contextlib.ExitStack() as stack:
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_writer(destination))
            _finish_interrupted(destination)
            _check_replaceable(destination, overwrite=overwrite, may_replace=may_replace)
            with uninterrupted:
                stack.enter_context(called_at_end(functools.partial(_remove_written, partial)))
                partial.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"{destination} cannot be created ({error.strerror or error}); "
                "name a directory that can be written."
            ) from error
        try:
            yield partial
            _sync_tree(partial)
            _move_into_place(partial, destination)
        except Exception as error:
            if (reason := _why_unwritten(error)) is not None:
                raise CheckpointError(
                    f"{destination} cannot be written ({reason}); free some space or name a "
                    "destination on another disk (nothing was left behind)."
                ) from error
            raise


def _remove_written(partial: Path) -> None:
    """Removes what is left of `partial`. Threads of an interrupted writer (Orbax's) may continue
    for a moment and make the directory again, so it has to stay away for half a second."""
    if not partial.exists():
        return  # it was moved into place
    num_absent = 0
    for _ in range(40):
        if partial.exists():
            num_absent = 0
            shutil.rmtree(partial, ignore_errors=True)
        num_absent += 1
        if num_absent > 5:
            return
        time.sleep(0.1)


def _check_replaceable(
    destination: Path, *, overwrite: bool, may_replace: Callable[[Path], bool]
) -> None:
    if not os.path.exists(destination):
        return
    if not overwrite:
        raise CheckpointError(
            f"{destination} exists already; name another destination, or allow it to be "
            "overwritten (--overwrite)."
        )
    is_empty = destination.is_dir() and not any(destination.iterdir())
    if not is_empty and not may_replace(destination):
        raise CheckpointError(
            f"{destination} exists and was not written by jaxspec, so it is not overwritten; "
            "name another destination or remove it yourself."
        )


def finish_interrupted(destination: Path) -> None:
    """Moves a directory into place whose writer was killed after it had moved the old one aside;
    waits for a writer that is still running.

    Raises:
      CheckpointError: the directory cannot be written.
    """
    if os.path.exists(destination) or "\0" in str(destination):
        return
    destination = Path(os.path.realpath(destination))
    if not os.path.isdir(_beside(destination, "complete")):
        return
    try:
        with only_writer(destination, wait=True):
            _finish_interrupted(destination)
    except OSError as error:
        raise CheckpointError(
            f"{destination} was being replaced when its writer was killed, and "
            f"{_beside(destination, 'complete')} cannot be put in its place ({error.strerror}); "
            "rename it yourself."
        ) from error


def _finish_interrupted(destination: Path) -> None:
    """`finish_interrupted` while the lock is held; also removes what is no longer needed."""
    complete, replaced = _beside(destination, "complete"), _beside(destination, "replaced")
    with uninterrupted:
        if not destination.exists():
            for whole in (complete, replaced):
                if whole.exists():
                    os.rename(whole, destination)
                    _sync(destination.parent)
                    break
    for left in (complete, replaced, _beside(destination, "partial")):
        shutil.rmtree(left, ignore_errors=True)


def _move_into_place(partial: Path, destination: Path) -> None:
    """Gives a complete directory its name; `_finish_interrupted` can continue after every step."""
    complete, replaced = _beside(destination, "complete"), _beside(destination, "replaced")
    with uninterrupted:
        os.rename(partial, complete)
        if destination.exists():
            os.rename(destination, replaced)
        os.rename(complete, destination)
        _sync(destination.parent)
        shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """An empty directory that is removed after the block, also if a signal ends the process."""
    with contextlib.ExitStack() as stack:
        with uninterrupted:
            path = tempfile.mkdtemp(prefix="jaxspec-")
            remove = functools.partial(shutil.rmtree, path, ignore_errors=True)
            stack.enter_context(called_at_end(remove))
        yield Path(path)


def remove_directory(path: Path) -> None:
    """Removes a directory, renamed first so that no reader finds half of it."""
    replaced = _beside(path, "replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    os.rename(path, replaced)
    shutil.rmtree(replaced)


def _beside(destination: Path, kind: str) -> Path:
    return destination.with_name(f".{destination.name}.{kind}")


def _sync_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    """Flushes a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _why_unwritten(error: BaseException | None) -> str | None:
    """The system's reason for refusing a write, if an error (or its cause) is of that kind."""
    reasons = [os.strerror(code) for code in _REFUSED_WRITES]
    while error is not None:
        if isinstance(error, OSError) and error.errno in _REFUSED_WRITES:
            return error.strerror
        for reason in reasons:  # errors from C++ only have the message
            if reason in str(error):
                return reason
        error = error.__cause__ or error.__context__
    return None
