"""Files that somebody else made, and what stands in their place."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from jaxspec.errors import SettingError
from jaxspec.runtime.files import expand_user, why_unreadable


def test_what_cannot_be_read_as_a_file(tmp_path):
    path = tmp_path / "file"
    assert why_unreadable(path) == "No such file or directory"
    path.write_text("four")
    assert why_unreadable(path) is None
    assert why_unreadable(path, largest_bytes=4) is None
    assert why_unreadable(path, largest_bytes=3) == "it has 4 bytes, and such files have at most 3"
    (tmp_path / "link").symlink_to(path)
    assert why_unreadable(tmp_path / "link") is None
    path.unlink()
    assert why_unreadable(tmp_path / "link") == "it is a link to nothing"
    assert why_unreadable(tmp_path) == "it is a directory, not a file"
    assert why_unreadable(Path("/dev/zero")) == "it is a device, not a file"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert why_unreadable(tmp_path / "loop") == "Too many levels of symbolic links"
    assert why_unreadable(tmp_path / "a\0b") == "it is not a possible file name"
    assert why_unreadable(tmp_path / ("x" * 300)) == "File name too long"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        assert why_unreadable(tmp_path / "socket") == "it is a socket, not a file"


def test_a_pipe_is_read_where_a_user_names_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert why_unreadable(tmp_path / "pipe") == "it is a pipe, not a file"
    assert why_unreadable(tmp_path / "pipe", may_be_pipe=True) is None


def test_home_directories(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert expand_user("~/x") == Path("/home/somebody/x")
    assert expand_user("a/~") == Path("a/~")
    with pytest.raises(SettingError, match=r"~nouser/x begins with the home .*; write the dir"):
        expand_user("~nouser/x")
