"""The judge: whether a grammar may be used, found out in a process that can be killed (see `noria.server.judge_process`).

A verdict takes milliseconds, and is kept by content. Compiling that takes longer than `VERDICT_S` is ended with the process,
and the request that asked for it is refused. The process is started by the first question, and ended where none has come for a
while: it holds some 40 MB, and most servers see few different grammars.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from noria.server.judge_process import LENGTH, Verdict
from noria.text.grammar import MAX_CHARACTERS, Vocabulary, refusal
from noria.types import NoriaError, RequestError, StructuredOutput

VERDICT_S = 1.3  # of wall time, at low priority; a large schema takes 0.1
START_S = 60.0  # until the process has built its tables: less than 2 on a quiet machine
IDLE_S = 60.0  # without a question, after which the process is ended; the next one waits a third of a second for another
KEPT_VERDICTS = 1024
STDERR = 2


class Judge:
    """Verdicts on grammars for one vocabulary. Thread-safe; one grammar is judged at a time."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, idle_s: float = IDLE_S) -> None:
        """`vocabulary` is called once, when it is first needed."""
        self._idle_s = idle_s
        self._idle: threading.Timer | None = None  # that ends the process
        self._make = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[StructuredOutput, Verdict] = OrderedDict()
        self._lock = threading.Lock()  # of the process
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._closed = False

    @property
    def vocabulary(self) -> Vocabulary:
        """What grammars are compiled for. May take a second at first: not for an event loop."""
        if self._vocabulary is None:
            self._vocabulary = self._make()
        return self._vocabulary

    def check(self, output: StructuredOutput) -> None:
        """Raise RequestError unless the grammar may be used. Blocks."""
        if len(output.value) > MAX_CHARACTERS:
            raise refusal(output, f"it has more than {MAX_CHARACTERS} characters")
        with self._lock:
            verdict = self._kept.get(output)
            if verdict is None:
                verdict = self._kept[output] = self._ask(output)
                self._await_idleness()
                while len(self._kept) > KEPT_VERDICTS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(output)
        if verdict.error is not None:
            raise RequestError(verdict.error, param=verdict.param, code=verdict.code)

    async def checked(self, output: StructuredOutput | None) -> Vocabulary:
        """`check`, if there is a grammar, beside the event loop; the vocabulary, for whoever compiles it next."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="noria-judge")

        def work() -> Vocabulary:
            if output is not None:
                self.check(output)
            return self.vocabulary

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """End the process, also in the middle of a question."""
        self._closed = True
        if self._idle is not None:
            self._idle.cancel()
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self, output: StructuredOutput) -> Verdict:
        process = self._running()
        data = msgspec.msgpack.encode(output)
        try:
            assert process.stdin is not None
            process.stdin.write(LENGTH.pack(len(data)) + data)
            process.stdin.flush()
            answer = _answer(process, VERDICT_S)
        except (BrokenPipeError, EOFError):
            reason = "it takes too much memory to compile"
        except TimeoutError:
            reason = f"it takes more than {VERDICT_S:g} s to compile"
        else:
            return msgspec.msgpack.decode(answer, type=Verdict)
        self._end()
        threading.Thread(target=self._restart, name="noria-judge-start", daemon=True).start()  # ready before the next question
        error = refusal(output, reason)
        return Verdict(str(error), error.param, error.code)

    def _await_idleness(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = idle = threading.Timer(self._idle_s, lambda: self._end_if_idle(idle))
        idle.daemon = True
        idle.start()

    def _end_if_idle(self, idle: threading.Timer) -> None:
        with self._lock:
            if self._idle is idle:  # else a question came while this one was waiting for the lock
                self._end()

    def _restart(self) -> None:
        with self._lock, contextlib.suppress(NoriaError):
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, ready for a question."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._closed:
            raise RequestError("the server is shutting down", status=503, code="draining")
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "noria.server.judge_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=STDERR,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if os.path.isabs(p))},
        )
        data = msgspec.msgpack.encode(self.vocabulary)
        try:
            assert process.stdin is not None
            process.stdin.write(LENGTH.pack(len(data)) + data)
            process.stdin.flush()
            _answer(process, START_S)
        except (OSError, EOFError, TimeoutError):
            self._end()
            raise NoriaError("the process that judges grammars did not start") from None
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def _answer(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The next message of the process. TimeoutError, or EOFError if it has ended."""
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    data, wanted = b"", LENGTH.size
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while len(data) < wanted:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        more = os.read(process.stdout.fileno(), 65536)
        if not more:
            raise EOFError
        data += more
        if len(data) >= LENGTH.size:
            wanted = LENGTH.size + LENGTH.unpack(data[: LENGTH.size])[0]
    return data[LENGTH.size :]
