"""A real server as a child process of a benchmark: started, listened to, stopped.

Its log is read on a thread as long as it lives: a pipe that nobody empties would stop the server.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec
import orjson

from noria.config import EngineConfig
from noria.types import LoadError

LIMIT_S = 600.0  # of the whole start: a large model may have to be packed
LEAVE_S = 10.0
LAST_LINES = 5  # of its log, when it does not start
SERVE = ("noria.cli.main", "serve")  # module, then its arguments
_STAGE = re.compile(r"noria: \[ *[\d.]+ s\] (.*)")
_SERVED = re.compile(r"(\S+) is served at (http://\S+)")


@dataclass(frozen=True)
class Stage:
    """Something that was done at `at` seconds after the process was made."""

    text: str
    at: float


class ServerChild:
    """A server with these settings on a free port. Use as a context manager: entering waits until it serves.

    `command` is the module to run and its first arguments; `on_stage` is told the stages of the start. Entering raises
    LoadError if the server does not start.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: tuple[str, ...] = SERVE,
        environment: Mapping[str, str] | None = None,
        on_stage: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.stages: list[Stage] = []  # of the start
        self.model = ""  # the name that it answers to
        self.url = ""
        self.began = 0.0  # time.monotonic() when the process was made
        self._config = config
        self._command = command
        self._environment = environment or {}
        self._on_stage = on_stage
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._told = threading.Event()  # it serves, or its log has ended

    def __enter__(self) -> ServerChild:
        with tempfile.TemporaryDirectory(prefix="noria-") as folder:
            file = Path(folder) / "settings.json"
            given = {name: value for name, value in msgspec.to_builtins(self._config).items() if value is not None}
            file.write_bytes(orjson.dumps(given))
            self.began = time.monotonic()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *self._command, "--config", str(file), "--port", "0"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(p for p in sys.path if os.path.isabs(p)),
                    **self._environment,
                },
            )
            threading.Thread(target=self._read, name="server-log", daemon=True).start()
            self._told.wait(LIMIT_S)
        if not self.url:
            self.__exit__(None, None, None)
            raise LoadError("; ".join(self._last) or "the server ended without a word")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            now = time.monotonic() - self.began
            found = _STAGE.match(line)
            if found is None:
                self._last.append(line.rstrip().removeprefix("noria: "))
            elif "  " not in found[1]:  # a line of the memory ledger's table is no stage
                self.stages.append(Stage(found[1], now))
                self._on_stage(found[1])
            served = _SERVED.search(line)
            if served:
                self.model, self.url = served[1], served[2]
                self._told.set()
        self._told.set()
