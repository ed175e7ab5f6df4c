"""One writer at a time: locks that are released when the process that holds them ends."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from jaxspec.errors import SettingError
from jaxspec.runtime.signals import called_at_end, uninterrupted

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def only_writer(path: Path, *, during: str | None = None, wait: bool = False) -> Iterator[None]:
    """Makes this process the only writer of a file or directory while the block runs.

    The lock is on `.NAME.lock` beside `path`, which names the process that holds it. It is released
    when that process ends, however it ends; a leftover lock file locks nothing.

    Args:
      path: what is to be written; its parent exists.
      during: the name of a longer task, such as `run`, during which `path` is written under its own
        lock. Its lock is `.NAME.DURING.lock`, which only excludes others with the same task.
      wait: whether to wait until another writer has finished, instead of raising.

    Raises:
      SettingError: another process is writing `path`; the message names it.
      OSError: the lock file cannot be made.
    """
    name = path.name if during is None else f"{path.name}.{during}"
    with _acquired(path.with_name(f".{name}.lock"), path, wait=wait):
        yield


def _acquired(lock: Path, path: Path, *, wait: bool) -> contextlib.ExitStack:
    """Acquires the lock on the file `lock`, which is released when the result is closed."""
    while True:
        with contextlib.ExitStack() as stack:
            with uninterrupted:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                descriptor = os.open(lock, flags, 0o644)
                stack.callback(os.close, descriptor)
                is_free = _lock(descriptor)
                if is_free and _is_at(descriptor, lock):
                    stack.enter_context(
                        called_at_end(functools.partial(lock.unlink, missing_ok=True))
                    )
                    _note_holder(descriptor)
                    return stack.pop_all()
            if not is_free:
                _wait_for_holder(descriptor, path, wait=wait)


def _is_at(descriptor: int, lock: Path) -> bool:
    """Whether the open file is still the one with this name, because a holder removes it before it
    releases the lock."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(lock, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _lock(descriptor: int) -> bool:
    """Locks the open file, unless another has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _note_holder(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the note is for messages; a full disk has no room
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)


def _wait_for_holder(descriptor: int, path: Path, *, wait: bool) -> None:
    holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
    if not wait:
        raise SettingError(
            f"{path} is being written by {holder}; wait until it has finished, or name another."
        )
    _log.warning("waiting for %s, which is writing %s", holder, path)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
