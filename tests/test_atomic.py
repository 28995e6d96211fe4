"""Replacing files as a whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from frl.atomic import write_atomically


def test_a_file_is_made_and_replaced(tmp_path: Path):
    path = tmp_path / "a.bin"
    for content in (b"", b"first", b"second" * 1000):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]


def test_content_is_on_disk_before_it_takes_the_place_and_the_place_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(handle: int) -> None:
        seen.append("sync directory" if os.path.isdir(f"/proc/self/fd/{handle}") else "sync file")
        fsync(handle)

    def spy_replace(source: Any, target: Any) -> None:
        seen.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write_atomically(tmp_path / "a", b"x")
    if os.path.isdir("/proc/self/fd"):
        assert seen == ["sync file", "rename", "sync directory"]
    else:
        assert seen[:2] == ["sync file", "rename"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=["ENOSPC", "interrupt"])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_directory_that_cannot_be_synced_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags == os.O_RDONLY:
            raise OSError(errno.EINVAL, "not on this file system")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    write_atomically(tmp_path / "a", b"new")
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"new"
