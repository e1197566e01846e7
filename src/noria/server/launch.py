"""Starting an engine in a child process. Imports little: the child should load while its parent is still importing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from noria.config import EngineConfig
from noria.server.wire import LAUNCH_LENGTH, Launch, encode

ENGINE_FACTORY = "noria.server.loading:load_engine"
STDERR = 2  # the descriptor: `sys.stderr` may be something else in a notebook or a test
MAX_SOCKET_PATH = 100  # bytes; sun_path of <sys/un.h> holds 104 on macOS, 108 on Linux


class EngineProcess:
    """A child process with an engine in it, the address of its channel, and a pipe that closes when it dies.

    The child inherits the only write end of `death_fd`'s pipe, and the only read end of our `stdin` to it: whichever side
    dies, by whatever signal, the kernel tells the other.
    """

    def __init__(self, config: EngineConfig, *, factory: str = ENGINE_FACTORY) -> None:
        self._directory = Path(_socket_directory())
        self.address = f"ipc://{self._directory / 'engine'}"
        self.death_fd, death_end = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "noria.server.engine_process"],
                stdin=subprocess.PIPE,
                stdout=STDERR,  # stdout is the user's: results only
                pass_fds=(death_end,),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if os.path.isabs(p))},
            )
        finally:
            os.close(death_end)
        launch = Launch(
            config=config,
            channel=self.address,
            factory=factory,
            # The signal follows the starting *thread*; another thread than the main one may end before the program.
            die_with_parent=threading.current_thread() is threading.main_thread(),
        )
        record = encode(launch)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # if the child died at once, `death_fd` reports it
            self.process.stdin.write(LAUNCH_LENGTH.pack(len(record)) + record)
            self.process.stdin.flush()

    def connected(self) -> None:
        """Remove the socket's file: nobody else needs it, and nothing is left behind if both sides are killed."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def epitaph(self) -> str:
        """How the child ended, for a person. Call once it has ended."""
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"the engine process was killed by {name}{hint}"
        return f"the engine process ended with exit code {code}"

    def close(self, timeout: float = 2.0) -> None:
        """Close the death pipe and wait; kill what does not leave in `timeout` seconds."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.death_fd >= 0:
            os.close(self.death_fd)
            self.death_fd = -1
        self.connected()


def _socket_directory() -> str:
    """A new directory that only we may enter, with a path short enough for a Unix socket."""
    directory = tempfile.mkdtemp(prefix="noria-")
    if len(directory.encode()) + len("/engine") > MAX_SOCKET_PATH:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="noria-", dir="/tmp")
    return directory
