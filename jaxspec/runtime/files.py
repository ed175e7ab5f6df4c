"""Checks of foreign files before a byte of them is read."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

from jaxspec.errors import SettingError

LARGEST_TEXT_BYTES = 2**28  # largest file that is read whole: settings, tokenizers, templates
LARGEST_PIPE_BYTES = 2**30  # a pipe does not say how much it holds, and may have no end


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


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "directory", stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket"}
    return next((kind for is_kind, kind in kinds.items() if is_kind(mode)), "device")
