"""Anonymous memory: pages appear when they are first touched, in huge pages where the kernel gives them."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt


def anonymous(nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` of zero pages, page aligned; they cost nothing until they are written."""
    size = max(nbytes, mmap.PAGESIZE)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages: small pages do
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:nbytes]


def address(array: npt.NDArray[np.generic]) -> int:
    """Where an array's first element lies."""
    return int(array.__array_interface__["data"][0])
