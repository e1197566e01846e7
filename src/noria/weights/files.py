"""Files that are read but not believed: mapping them, and JSON."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noria.types import LoadError

MAX_JSON_BYTES = 100_000_000
_LFS_POINTER = b"version https://git-lfs"


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only. LoadError if it is missing, empty, no regular file, or a Git LFS pointer."""
    try:
        if not path.is_file():
            raise LoadError(f"{path}: {'is not a regular file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
            if not start:
                raise LoadError(f"{path}: is empty; download it again")
            _refuse_pointer(path, start)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. LoadError if it cannot be read or is none."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise LoadError(f"{path}: is too large for what it should be")
        content = path.read_bytes()
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from None
    _refuse_pointer(path, content)
    return parse_object(path, content)


def parse_object(path: Path, content: bytes) -> dict[str, Any]:
    """A JSON object without duplicate keys; `path` is for the LoadError."""
    try:
        value = json.loads(content, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: is not valid JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: is no JSON object")
    return value


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first few names, for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(n) for n in names[:most]) + more


def _refuse_pointer(path: Path, content: bytes) -> None:
    if content.startswith(_LFS_POINTER):
        raise LoadError(f"{path}: is a Git LFS pointer, not the file itself; run `git lfs pull`")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result
