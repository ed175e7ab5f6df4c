"""Checks of files before a byte of them is read, and what an error while reading them means."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxspec.errors import JaxspecError, SettingError, UnreadableError

LARGEST_TEXT_BYTES = 2**28  # largest file that is read whole: settings, tokenizers, templates
LARGEST_PIPE_BYTES = 2**30  # a pipe does not say how much it holds, and may have no end

# What the system says if there is no such file, if it is something else, or if its disk is broken.
# Every other answer says nothing about the file: permissions, too many open files, a lost network.
_NO_FILE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,
    errno.EIO,
)
# The error number in the messages of libraries in C++ and Rust.
_ERROR_NUMBER = re.compile(r"os[ _]error(?:_code)?[ =:']+(\d+)", re.IGNORECASE)


def why_unreadable(
    path: Path, *, largest_bytes: int | None = None, may_be_pipe: bool = False
) -> str | None:
    """Why `path` cannot be read as a file, or None if it can. Opening a pipe waits for its writer,
    and a device may have no end, so both are recognised first.

    Args:
      path: links are followed.
      largest_bytes: limit on the size of a file that is read whole.
      may_be_pipe: whether a pipe is allowed, such as `<(command)`.
    """
    try:
        status = path.stat()
    except OSError as error:
        is_dangling = isinstance(error, FileNotFoundError) and path.is_symlink()
        return "it is a link to nothing" if is_dangling else error.strerror or str(error)
    except ValueError:  # a NUL in the name
        return "it is not a possible file name"
    if may_be_pipe and stat.S_ISFIFO(status.st_mode):
        return None
    if not stat.S_ISREG(status.st_mode):
        return f"it is a {_kind(status.st_mode)}, not a file"
    if largest_bytes is not None and status.st_size > largest_bytes:
        return f"it has {status.st_size:,} bytes, and such files have at most {largest_bytes:,}"
    return None


def read_input(path: Path) -> bytes:
    """The content of a file or pipe that the user named. It is opened once, because what was read
    from a pipe cannot be read again.

    Raises:
      OSError: it cannot be read; `strerror` says why.
    """
    reason = why_unreadable(path, may_be_pipe=True)
    if reason is not None:
        raise OSError(errno.EINVAL, reason)
    with path.open("rb") as file:
        if not stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            return file.read()
        content = file.read(LARGEST_PIPE_BYTES + 1)
    if len(content) > LARGEST_PIPE_BYTES:
        limit = f"{LARGEST_PIPE_BYTES:,} bytes"
        raise OSError(errno.EFBIG, f"it is a pipe with more than {limit}; write them to a file")
    return content


def decode_text(content: bytes) -> str:
    """The text of a file: UTF-8, with or without a byte order mark; line ends become newlines.

    Raises:
      UnicodeDecodeError: it is not UTF-8.
    """
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()


def expand_user(path: str | os.PathLike) -> Path:
    """`path` with `~` and `~name` replaced by a home directory.

    Raises:
      SettingError: there is no such home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SettingError(
            f"{os.fspath(path)} begins with the home directory of a user that this machine does "
            "not know; write the directory out, or put ./ before a name that begins with ~."
        ) from error


def absolute(path: str | os.PathLike) -> Path:
    """`path` from the root, as Orbax wants it; links stay.

    Raises:
      SettingError: it is relative, and the current directory was removed.
    """
    try:
        return Path(os.path.abspath(path))
    except FileNotFoundError as error:
        raise SettingError(
            f"{os.fspath(path)} is relative to the current directory, which was removed; change to "
            "another, or write the whole path."
        ) from error


def is_there(path: str | os.PathLike) -> bool:
    """Whether there is something at `path`, if only a link to nothing.

    Raises:
      UnreadableError: the system does not say, because of a directory's permissions for example.
    """
    return _mode(path, os.lstat) is not None


def is_file(path: str | os.PathLike) -> bool:
    """Whether `path` is a file, or a link to one; raises as `is_there` does."""
    mode = _mode(path, os.stat)
    return mode is not None and stat.S_ISREG(mode)


def _mode(
    path: str | os.PathLike, status: Callable[[str | os.PathLike], os.stat_result]
) -> int | None:
    try:
        return status(path).st_mode
    except ValueError:  # a NUL in the name
        return None
    except OSError as error:
        if _refuses(error):
            raise _unreadable(error, path) from error
        return None


def check_access(path: str | os.PathLike) -> None:
    """Raises `UnreadableError` if `path` is a file that this process may not open; anything else
    that is wrong with it is for its reader to say."""
    if is_file(path):
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if _refuses(error):
                raise _unreadable(error, path) from error


def check_tree_access(directory: Path) -> None:
    """`check_access` of every file in a directory; and the directories in it can be listed."""

    def refuse(error: OSError) -> None:
        if _refuses(error):
            raise _unreadable(error, directory)

    for folder, _, names in os.walk(directory, onerror=refuse):
        for name in names:
            check_access(Path(folder, name))


@contextlib.contextmanager
def reading(
    path: str | os.PathLike, wrong: Callable[[str], JaxspecError] | None = None
) -> Iterator[None]:
    """A block that reads files, perhaps with a library that wraps whatever happens to it.

    Args:
      path: what is read, for messages.
      wrong: makes the error for everything that is not listed below, from the first line of the
        library's error. None: it is raised as it is.

    Raises:
      KeyboardInterrupt: the process was interrupted.
      MemoryError, RuntimeError: the memory of the host or of a device is used up.
      UnreadableError: the system refuses to read a file.
      JaxspecError: of the block itself.
    """
    outer = sys.exc_info()[1]
    try:
        yield
    except JaxspecError:
        raise
    except Exception as error:
        causes = _causes(error, outer)
        for cause in causes:
            if isinstance(cause, (KeyboardInterrupt, UnreadableError)):
                raise cause from None
            if _refuses(cause):
                raise _unreadable(cause, path) from error
            if isinstance(cause, MemoryError) or "RESOURCE_EXHAUSTED" in str(cause):
                raise cause from None
        if wrong is None:
            raise
        raise wrong(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to 200 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _causes(error: BaseException, outer: BaseException | None) -> list[BaseException]:
    """An error and what led to it, up to the one that was being handled before."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause is not outer and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return causes


def _refuses(error: BaseException) -> bool:
    """Whether the system refuses something, instead of saying that there is no such file."""
    number = _error_number(error)
    return bool(number) and number not in _NO_FILE


def _error_number(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = _ERROR_NUMBER.search(str(error))
    return int(found[1]) if found else None


def _unreadable(error: BaseException, path: str | os.PathLike) -> UnreadableError:
    """The error for what the system refuses; `path` if the error names no file."""
    named = getattr(error, "filename", None)
    number = _error_number(error)
    assert number is not None, "it refuses"
    shown = os.fspath(path) if named is None or isinstance(named, int) else os.fsdecode(named)
    return UnreadableError(os.fspath(shown), os.strerror(number))


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "directory", stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket"}
    return next((kind for is_kind, kind in kinds.items() if is_kind(mode)), "device")
