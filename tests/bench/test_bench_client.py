"""The load generator: HTTP as servers really write it, sessions, arrivals."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from noria.bench.client import ServerTarget, drive
from noria.bench.http import HttpClient, HttpError
from noria.bench.report import RequestTimes
from noria.bench.workload import Session, Turn
from noria.types import ConfigError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def sse(*events: Any) -> bytes:
    return b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in (*events, b"[DONE]"))


def completion(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": None}]}


def usage(prompt: int, output: int) -> dict[str, Any]:
    details = {"cached_tokens": 3}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}}


async def read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return json.loads(await reader.readexactly(length)) if length else {}


async def with_server(handler: Handler, use: Callable[[str], Awaitable[Any]]) -> Any:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server:
        return await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def send(handler: Handler, turns: list[Turn], *, endpoint: str = "/v1/completions") -> list[RequestTimes]:
    async def use(url: str) -> list[RequestTimes]:
        client = HttpClient(url)
        try:
            target = ServerTarget(client, model="m", endpoint=endpoint, ignore_eos=True)
            times, _ = await drive(target, [Session(tuple(turns))], open_loop=False)
            return times
        finally:
            client.close()

    result: list[RequestTimes] = asyncio.run(with_server(handler, use))
    return result


async def chunked(writer: asyncio.StreamWriter, body: bytes, piece: int) -> None:
    """The body in chunks of `piece` bytes, each sent by itself: events are cut anywhere."""
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    for at in range(0, len(body), piece):
        part = body[at : at + piece]
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n")


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_events_may_be_cut_anywhere(piece: int) -> None:
    """Red if a chunk's head is read as text, or an event across two chunks is lost."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await chunked(writer, sse(completion("one"), completion(" two"), usage(11, 5)), piece)
        writer.close()

    (times,) = send(handler, [Turn((1, 2), 5)])
    assert times.error is None
    assert len(times.token_times) == 2
    assert (times.input_tokens, times.output_tokens, times.cached_tokens) == (11, 5, 3)
    assert times.answer == "one two"


def test_a_connection_is_used_again_and_replaced_when_it_was_closed() -> None:
    """Red if each request pays for a new connection, or an idle one that the server closed fails the next request."""
    connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(2):
            await read_request(reader)
            body = sse(completion("x"), usage(1, 1))
            writer.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
        writer.close()

    times = send(handler, [Turn("a", 1)] * 5)
    assert [t.error for t in times] == [None] * 5
    assert connections == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'HTTP/1.1 404 Not Found\r\nContent-Length: 17\r\n\r\n{"error": "none"}', "HTTP 404: .*none"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\ndata:", "connection"),
        (b"SMTP hello\r\n\r\n", "not HTTP"),
        (HEAD + b"Content-Length: 24\r\n\r\ndata: " + b'{"error": "broken"}', "broken"),
        (HEAD + b"Content-Length: 15\r\n\r\ndata: not json\n", "not JSON"),
        (HEAD + b"Content-Length: 14\r\n\r\ndata: [DONE]\n\n", "no tokens"),
        (HEAD + b"Content-Length: 0\r\n\r\n", r"before \[DONE\]"),
    ],
)
def test_a_bad_answer_fails_its_request_and_says_why(answer: bytes, message: str) -> None:
    """Red if a broken answer hangs, counts as good, or stops the benchmark."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        writer.close()

    (times,) = send(handler, [Turn("a", 1), Turn("b", 1)])  # the failure ends the session
    assert times.error is not None
    assert re.search(message, times.error), times.error


def test_a_chat_turn_carries_what_was_said() -> None:
    """Red if a multi-turn session forgets the answers, or counts chat deltas by another field."""
    bodies: list[dict[str, Any]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            bodies.append(await read_request(reader))
            role, text = (
                {"choices": [{"delta": {"role": "assistant"}}]},
                {"choices": [{"delta": {"content": f"re {len(bodies)}"}}]},
            )
            await chunked(writer, sse(role, text, {"choices": [{"delta": {}, "finish_reason": "stop"}]}), 50)

    times = send(handler, [Turn("first", 4), Turn("second", 4)], endpoint="/v1/chat/completions")
    assert [len(t.token_times) for t in times] == [1, 1]
    assert bodies[1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "re 1"},
        {"role": "user", "content": "second"},
    ]
    assert bodies[0]["ignore_eos"] is True


class Slow:
    """Answers one request at a time, each in 20 ms."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def send(self, turn: Turn, said: Any, times: RequestTimes) -> None:
        async with self._lock:
            await asyncio.sleep(0.02)
        times.token_times.append(time.perf_counter())


@pytest.mark.parametrize(("open_loop", "waits"), [(True, True), (False, False)])
def test_an_open_loop_charges_the_wait_for_a_slot(open_loop: bool, waits: bool) -> None:
    """Red if a bound on concurrency hides the queue in an open loop, or counts it in a closed one."""
    sessions = [Session((Turn("a", 1),)) for _ in range(5)]

    async def main() -> list[RequestTimes]:
        return (await drive(Slow(), sessions, open_loop=open_loop, max_concurrency=1))[0]

    times = asyncio.run(main())
    assert (max(t.sent - t.scheduled for t in times) >= 0.06) is waits
    assert (max(t.ttft for t in times) >= 0.08) or not waits


def test_sessions_are_sent_when_they_are_due() -> None:
    """Red if arrivals are ignored or bunched."""
    sessions = [Session((Turn("a", 1),), arrival) for arrival in (0.0, 0.05, 0.1)]

    async def main() -> list[RequestTimes]:
        return (await drive(Slow(), sessions, open_loop=True))[0]

    times = asyncio.run(main())
    assert [round(t.scheduled - times[0].scheduled, 3) for t in times] == [0.0, 0.05, 0.1]
    assert all(t.sent >= t.scheduled for t in times)


@pytest.mark.parametrize("url", ["localhost:80", "ftp://x", "http://"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    """Red if a mistyped URL becomes a connection error later."""
    with pytest.raises(ConfigError, match="--base-url"):
        HttpClient(url)


def test_nobody_there_is_one_line() -> None:
    """Red if a refused connection is a traceback."""

    async def main() -> None:
        await HttpClient("http://127.0.0.1:1").get("/v1/models")

    with pytest.raises(HttpError, match="cannot connect"):
        asyncio.run(main())
