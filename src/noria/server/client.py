"""EngineClient: the engine process as seen from an event loop. Used by the HTTP server and by AsyncEngine.

A step's outputs come as one message and are dealt to the requests they belong to; a request's reader is woken once for a
step, however many tokens or choices the step made for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import zmq

from noria.server.launch import EngineProcess
from noria.server.wire import (
    VERSION,
    Abort,
    Add,
    EngineFacts,
    Failed,
    Located,
    Outputs,
    Ping,
    Pong,
    Ready,
    Refused,
    Stage,
    Stop,
    UseVocabulary,
    decode_from_engine,
    encode,
)
from noria.types import EngineRequest, EngineStats, LoadError, NoriaError, RequestError, SamplingParams, SequenceOutput

if TYPE_CHECKING:
    from noria.server.judge import Judge

START_TIMEOUT_S = 600.0  # without any sign of progress; a large model on a slow disk takes minutes a stage
LAST_WORDS_MS = 200


class EngineDead(NoriaError):
    """The engine process ended. Every open request fails with this, once; so does every later one."""


class Refusal(RequestError):
    """The engine did not take a request. `retry_after` (seconds) says when there may be room, if its queue is full."""

    def __init__(self, message: Refused) -> None:
        super().__init__(message.message, param=message.param, code=message.code, status=message.status)
        self.retry_after = message.retry_after


class RequestStream:
    """The outputs of one or more requests, a tuple for each step that made some: `async for outputs in stream`.

    Ends after the last choice of the last request has finished. Raises RequestError if the engine refused one of them,
    EngineDead if it died.
    """

    def __init__(self, requests: Sequence[EngineRequest]) -> None:
        self.request_ids = tuple(request.request_id for request in requests)
        self._open_choices = sum(request.params.n for request in requests)
        self._pending: deque[SequenceOutput] = deque()
        self._error: NoriaError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: SequenceOutput) -> None:
        """One choice's part of a step."""
        self._pending.append(output)
        if output.finish_reason is not None:
            self._open_choices -= 1
        self._wake()

    def fail(self, error: NoriaError) -> None:
        """End with an error, after what came before it."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[tuple[SequenceOutput, ...]]:
        return self

    async def __anext__(self) -> tuple[SequenceOutput, ...]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._open_choices == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs = tuple(self._pending)
        self._pending.clear()
        return outputs


class _OpenRequest:
    """A request the engine has not finished: its stream, and how many of its choices still run."""

    __slots__ = ("open_choices", "stream")

    def __init__(self, stream: RequestStream, choices: int) -> None:
        self.stream = stream
        self.open_choices = choices


class EngineClient:
    """Talks to one engine process. Made, used and closed on one running event loop."""

    def __init__(self, process: EngineProcess, *, on_stage: Callable[[str], None] = lambda text: None) -> None:
        self.stats = EngineStats()
        self.stamp: Callable[[EngineRequest], EngineRequest] | None = None  # what every request passes on its way out
        self._process = process
        self._on_stage = on_stage
        self._open: dict[int, _OpenRequest] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._next_ping = 0
        self._failure: str | None = None  # the engine's own last words
        self._dead: EngineDead | None = None
        self.judge: Judge | None = None  # of grammars; without it constrained requests are refused
        self._knows_vocabulary = False
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineFacts] = self._loop.create_future()
        self._progress = asyncio.Event()
        self.located: asyncio.Future[str] = self._loop.create_future()  # the model's path; cancelled if it is not found
        self.died: asyncio.Future[EngineDead] = self._loop.create_future()
        self._context = zmq.Context()
        self._socket: zmq.SyncSocket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(process.address)
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.add_reader(process.death_fd, self._on_death)

    async def start(self) -> EngineFacts:
        """Wait until the engine is ready. Raises LoadError with the engine's reason if it is not going to be."""
        self._read()
        while not self._ready.done():
            self._progress.clear()
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._progress.wait()
            except TimeoutError:
                raise LoadError(f"the engine showed no progress for {START_TIMEOUT_S:.0f} s; giving up") from None
        return self._ready.result()

    @property
    def dead(self) -> EngineDead | None:
        """Why the engine is gone, once it is."""
        return self._dead

    @property
    def open_requests(self) -> int:
        """Requests that the engine has not finished, aborted ones included until it says so."""
        return len(self._open)

    async def admit(self, params: SamplingParams) -> float:
        """Have what constrains the output judged, if something does: seconds that took. Raises RequestError.

        To be awaited before `generate` of a request with these parameters, and before anything of its answer is sent.
        """
        if params.structured_output is None and not params.allowed_token_ids:
            return 0.0
        if self.judge is None:
            raise RequestError(
                "this server cannot constrain its output: the model's tokens are not loaded", param="structured_output"
            )
        began = time.monotonic()
        vocabulary = await self.judge.checked(params.structured_output)
        if not self._knows_vocabulary and self._dead is None:
            self._knows_vocabulary = True
            self._send(UseVocabulary(vocabulary=vocabulary))
        return time.monotonic() - began

    def generate(self, *requests: EngineRequest) -> RequestStream:
        """Send requests that one reader waits for. Abandoning the stream needs an `abort` of each."""
        if self._dead is not None:
            raise self._dead
        stream = RequestStream(requests)
        for request in requests:
            self._open[request.request_id] = _OpenRequest(stream, request.params.n)
            self._send(Add(request=request if self.stamp is None else self.stamp(request)))
        return stream

    def abort(self, *request_ids: int) -> None:
        """End requests: their stream gets the last outputs of their choices. Harmless for one that has ended."""
        for request_id in request_ids:
            if request_id in self._open and self._dead is None:
                self._send(Abort(request_id=request_id))

    def abort_choice(self, request_id: int, index: int) -> None:
        """End one choice of a request; the others go on."""
        if request_id in self._open and self._dead is None:
            self._send(Abort(request_id=request_id, index=index))

    def abort_all(self) -> None:
        """End every request."""
        self.abort(*self._open)

    async def ping(self, timeout: float) -> None:
        """One round trip. Raises TimeoutError, or EngineDead."""
        if self._dead is not None:
            raise self._dead
        nonce = self._next_ping
        self._next_ping += 1
        answer = self._pings[nonce] = self._loop.create_future()
        self._send(Ping(nonce=nonce))
        try:
            async with asyncio.timeout(timeout):
                await answer
        finally:
            self._pings.pop(nonce, None)

    def close(self) -> None:
        """Tell the engine to leave and wait for it, at most two seconds."""
        if self.judge is not None:
            self.judge.close()
        if self._dead is None:
            self._send(Stop())
            self._socket.setsockopt(zmq.LINGER, 500)
            self._detach()
        self._socket.close()
        self._context.term()
        self._process.close()

    def _detach(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._process.death_fd)

    def _send(self, message: Add | Abort | Ping | UseVocabulary | Stop) -> None:
        self._socket.send(encode(message))
        # ZeroMQ's descriptor signals edges: a send may swallow the edge of a message that came meanwhile, so look again.
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Deal out every message that has come."""
        if self._socket.closed:
            return
        while True:
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._take(decode_from_engine(data))

    def _take(self, message: Stage | Located | Ready | Failed | Outputs | Refused | Pong) -> None:
        match message:
            case Outputs(outputs=outputs, stats=stats):
                self.stats = stats
                for output in outputs:
                    request = self._open[output.request_id]
                    request.stream.push(output)
                    if output.finish_reason is not None:
                        request.open_choices -= 1
                        if request.open_choices == 0:
                            del self._open[output.request_id]
            case Refused():
                refused = Refusal(message)
                self._open.pop(message.request_id).stream.fail(refused)
            case Pong(nonce=nonce, stats=stats):
                self.stats = stats
                answer = self._pings.get(nonce)
                if answer is not None and not answer.done():
                    answer.set_result(None)
            case Stage(text=text):
                self._on_stage(text)
                self._progress.set()
            case Located(path=path):
                if not self.located.done():
                    self.located.set_result(path)
                self._progress.set()
            case Ready(version=version, facts=facts, stats=stats):
                self._process.connected()
                self.stats = stats
                if version == VERSION:
                    self._ready.set_result(facts)
                else:
                    self._ready.set_exception(LoadError(f"engine speaks protocol {version}, we speak {VERSION}"))
                self._progress.set()
            case Failed(message=text):
                self._failure = text

    def _on_death(self) -> None:
        """The death pipe closed: read the last words, then fail everything that waits."""
        self._detach()
        self._read()
        epitaph = self._process.epitaph()
        if self._failure is None and self._process.process.returncode > 0 and self._socket.poll(LAST_WORDS_MS):
            self._read()  # ZeroMQ's thread was still reading them
        self._dead = EngineDead(self._failure or epitaph)
        self.stats = EngineStats()
        self.located.cancel()
        if not self._ready.done():
            self._ready.set_exception(LoadError(str(self._dead)))
            self._progress.set()
        for request in self._open.values():
            request.stream.fail(self._dead)
        self._open.clear()
        for answer in self._pings.values():
            if not answer.done():
                answer.set_exception(self._dead)
        self.died.set_result(self._dead)
