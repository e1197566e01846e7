"""What a process does once its part of the model is loaded."""

from __future__ import annotations

import ctypes
import gc
import sys


def settle() -> None:
    """What was loaded stays: no collection between two tokens need visit it. What loading took besides goes back.

    A vocabulary is read through lists and tables that are gone by now, but glibc keeps their pages for later; they are as many
    as the vocabulary takes itself.
    """
    gc.freeze()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)
