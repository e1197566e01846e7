"""The engine's own process: `python -m noria.server.engine_process`, started by `noria.server.launch`.

The loop is one thread: take the messages that have come, run one step, send everything the step made as one message.
With no work it blocks in poll and uses no processor time. The process ends when the parent says `Stop` or dies.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from noria.config import EngineConfig
from noria.core.constraint import Constraints
from noria.core.engine import EngineDead
from noria.core.queue import QueueFull
from noria.server.settle import settle
from noria.server.wire import (
    LAUNCH_LENGTH,
    VERSION,
    Abort,
    Add,
    EngineFacts,
    Failed,
    FromEngine,
    Launch,
    Located,
    Outputs,
    Ping,
    Pong,
    Ready,
    Refused,
    Stage,
    Stop,
    ToEngine,
    UseVocabulary,
    decode_launch,
    decode_to_engine,
    encode,
)
from noria.types import EngineRequest, EngineStats, NoriaError, RequestError, SequenceOutput

if TYPE_CHECKING:
    import zmq

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class ServedEngine(Protocol):
    """The part of `noria.core.engine.Engine` that a shell drives."""

    constraints: Constraints | None  # set before the first request that needs it

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError if it cannot be taken (429 with a full queue)."""

    def abort(self, request_id: int, index: int | None = None) -> Sequence[SequenceOutput]:
        """End a request, or one choice of it, now: the last outputs of what this ended. Nothing for an unknown id."""

    def step(self) -> Sequence[SequenceOutput]:
        """Plan and run one step."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def stats(self) -> EngineStats:
        """Gauges and counters now."""

    def close(self) -> None:
        """Stop the device's threads."""


class LoadedEngine(Protocol):
    """What a factory returns."""

    engine: ServedEngine
    facts: EngineFacts


Report = Callable[[Stage | Located], None]
Factory = Callable[[EngineConfig, Report], LoadedEngine]


def main() -> None:
    """Read the launch record from stdin, load the engine, serve it. Never returns normally: ends the process."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # sent to the whole group; the parent drains and then says Stop
    sys.setswitchinterval(0.0005)  # the loop comes back to the interpreter after each step; a grammar's thread may have it
    launch = _read_launch()
    if launch.die_with_parent:
        _die_with_parent()
    threading.Thread(target=_watch_parent, name="death-pipe", daemon=True).start()
    channel = Channel(launch.channel)
    code = 1
    try:
        loaded = _factory(launch.factory)(launch.config, channel.send)
        settle()
        channel.send(Ready(version=VERSION, facts=loaded.facts, stats=loaded.engine.stats()))
        serve(loaded.engine, channel)
        loaded.engine.close()
        code = 0
    except EngineDead as error:
        print(error.dump, file=sys.stderr)
        channel.send(Failed(message=str(error)))
    except NoriaError as error:
        channel.send(Failed(message=str(error)))
    except MemoryError:
        channel.send(Failed(message="not enough memory: lower --kv-cache-memory-bytes or --max-num-batched-tokens"))
    except Exception as error:
        # A broken invariant: the trace (and the audit's dump, if it is one) goes to the log, one line to the clients.
        traceback.print_exc()
        channel.send(Failed(message=f"the engine failed: {type(error).__name__}: {_first_line(error)}"))
    finally:
        channel.close()
        sys.stderr.flush()
        os._exit(code)  # interpreter shutdown would wait for threads that have nothing left to do


class Channel:
    """The child's end of the socket."""

    def __init__(self, address: str) -> None:
        import zmq

        self._again = zmq.Again
        self._dont_wait = zmq.DONTWAIT
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.SyncSocket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)  # bounded by max_num_queued_reqs, not by silently dropping messages
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)  # ms; the parent may bind a moment later than we connect
        self._socket.setsockopt(zmq.LINGER, 2000)  # ms to deliver the last message
        self._socket.connect(address)

    def send(self, message: FromEngine) -> None:
        """Queue a message; never blocks."""
        self._socket.send(encode(message), copy=True)

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """All messages that have come; with `wait`, at least one."""
        messages: list[ToEngine] = []
        if wait:
            messages.append(decode_to_engine(self._socket.recv()))
        while True:
            try:
                messages.append(decode_to_engine(self._socket.recv(self._dont_wait)))
            except self._again:
                return messages

    def close(self) -> None:
        """Deliver what is queued, then close."""
        self._socket.close()
        self._context.term()


def serve(engine: ServedEngine, channel: Channel) -> None:
    """Messages in, steps, outputs out, until `Stop`."""
    told = engine.stats()
    while True:
        outputs: list[SequenceOutput] = []
        for message in channel.receive(wait=not engine.has_work):
            match message:
                case Add(request=request):
                    try:
                        engine.add(request)
                    except RequestError as error:
                        channel.send(_refused(request, error))
                case Abort(request_id=request_id, index=index):
                    outputs.extend(engine.abort(request_id, index))
                case Ping(nonce=nonce):
                    channel.send(Pong(nonce=nonce, stats=engine.stats()))
                case UseVocabulary(vocabulary=vocabulary):
                    from noria.text.constraint import GrammarConstraints

                    engine.constraints = GrammarConstraints(vocabulary)
                case Stop():
                    return
        if engine.has_work:
            outputs.extend(engine.step())
        stats = engine.stats()
        if outputs or not stats == told:  # noqa: SIM201 - msgspec: x != x is True
            # Also without outputs: a step inside a long prompt makes none, and moves the gauges.
            channel.send(Outputs(outputs=tuple(outputs), stats=stats))
            told = stats


def _refused(request: EngineRequest, error: RequestError) -> Refused:
    return Refused(
        request_id=request.request_id,
        message=str(error),
        param=error.param,
        code=error.code,
        status=error.status,
        retry_after=error.retry_after if isinstance(error, QueueFull) else None,
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _factory(name: str) -> Factory:
    module, _, function = name.partition(":")
    factory: Factory = getattr(importlib.import_module(module), function)
    return factory


def _read_launch() -> Launch:
    """The record that the parent writes before anything else; stdin stays open after it."""
    (length,) = LAUNCH_LENGTH.unpack(_read_exactly(LAUNCH_LENGTH.size))
    return decode_launch(_read_exactly(length))


def _read_exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = os.read(0, count - len(data))
        if not more:
            os._exit(1)  # the parent died before it told us anything
        data += more
    return data


def _watch_parent() -> None:
    """The parent holds the other end of stdin and writes nothing more: end of file means that it is gone."""
    while os.read(0, 4096):
        pass
    time.sleep(0.5)  # a parent that leaves in order has sent Stop: let it work
    os._exit(1)


def _die_with_parent() -> None:
    """Ask Linux to kill us with the parent: covers a step that holds the interpreter when the pipe closes."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
