"""Pages of the KV cache that are made before they are needed.

The cache costs no memory until it is written. But then the first write to each page waits for the kernel to find one and clear
it; on a virtual machine whose host has to do the same, that was a fifth of the time of a prompt. So a thread has pages made,
while nothing runs, for the blocks that come next: low ids are handed out first, and memory ascends with the ids.

    | written by steps         | made ahead: AHEAD bytes | costs nothing yet ...
    0                          reached                   target
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import numpy as np
import numpy.typing as npt

from noria.backends.cpu.memory import address

AHEAD = 256 << 20  # bytes
_PIECE = 2 << 20  # bytes made at once: a huge page
_START_S = 1.0  # after the start, which has better things to do
_IDLE_S = 0.003  # without a step: longer than between two steps of a request
_LONGEST_NAP_S = 0.05
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class PagesAhead:
    """Makes pages of one memory by a thread that lives while there are some to make.

    On a system that cannot, it does nothing: pages are made when they are written.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], ahead: int = AHEAD) -> None:
        """`memory` is page aligned."""
        self._memory = memory  # lives as long as the thread uses its address
        self._ahead = ahead
        self._made = 0
        self._target = min(ahead, len(memory))
        self._running = False
        self._idle_since = time.monotonic() + _START_S
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._able = sys.platform == "linux"
        self._start()

    def begin_step(self) -> None:
        """The cores have work: no pages are made until `end_step`."""
        self._running = True

    def end_step(self, reached: int) -> None:
        """A step has ended; steps have written below byte `reached`."""
        self._idle_since = time.monotonic()
        self._running = False
        self._target = min(reached + self._ahead, len(self._memory))
        if self._thread is None and self._target - max(self._made, reached) > self._ahead // 8:
            self._made = max(self._made, reached)
            self._start()

    def close(self) -> None:
        """Ends the thread."""
        self._able = False
        self._closing.set()
        if (thread := self._thread) is not None:
            thread.join()

    def _start(self) -> None:
        if self._able and self._made < self._target:
            self._thread = threading.Thread(target=self._work, name="pages-ahead", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        base, nap = address(self._memory), _IDLE_S
        while self._able and self._made < self._target:
            if self._running or time.monotonic() < self._idle_since + _IDLE_S:
                self._closing.wait(nap)
                nap = min(2 * nap, _LONGEST_NAP_S)
                continue
            nap = _IDLE_S
            at = self._made // _PIECE * _PIECE
            self._able = madvise(base + at, min(_PIECE, len(self._memory) - at), _POPULATE_WRITE) == 0
            self._made = at + _PIECE
        self._thread = None
