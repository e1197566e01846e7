"""A busy neighbour: another program that computes without end on one of our cores. It can be paused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import TracebackType

from noria.types import ConfigError


class Neighbour:
    """An endless loop in a process of its own, pinned to the last core that we may use. Use as a context manager.

    Entering leaves it paused; ConfigError where processes cannot be pinned.
    """

    def __enter__(self) -> Neighbour:
        if not hasattr(os, "sched_setaffinity"):
            raise ConfigError("--neighbour needs Linux, where a process can be pinned to a core")
        self._process = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        os.sched_setaffinity(self._process.pid, {max(os.sched_getaffinity(0))})
        self.pause()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)
