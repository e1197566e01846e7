"""Files that several processes use: none is read half written, and none is removed while it is in use."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import IO


def lock(file: IO[bytes], operation: int) -> None:
    """Mark a file as in use. Where the file system has no locks, renaming alone still keeps files whole."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, operation)


def remove_unused(path: Path) -> bool:
    """Remove a file that no process holds a lock on."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        return True
    except OSError:
        return False


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.write_bytes(content)
    temporary.rename(path)


def sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
