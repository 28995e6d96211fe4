"""Files that are replaced as a whole: whoever looks, and whatever dies meanwhile, finds the old content or the new and never half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside the place, sync, rename, sync the directory. When it returns the new content survives a loss of power; when it raises the old one stands.

    Raises:
        OSError: nothing was replaced, and what had been written is removed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    # Unlike a file of tempfile's, readable as far as the umask allows.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make what was made or renamed in a directory durable; not every system and file system can."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
