"""A load client for any OpenAI-compatible server: streams /v1/completions over plain asyncio sockets, nothing else needed."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

import msgspec
import orjson

from noria.bench.report import RequestTimes
from noria.bench.workload import WorkItem
from noria.types import NoriaError


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where the load goes."""

    base_url: str
    model: str
    api_key: str | None = None
    max_concurrency: int | None = None


async def drive(target: Target, items: list[WorkItem]) -> tuple[list[RequestTimes], float]:
    """Send every item at its arrival time, greedy and with `ignore_eos`; returns the times and the wall time in seconds."""
    limit = asyncio.Semaphore(target.max_concurrency or len(items) or 1)
    began = time.perf_counter()

    async def one(item: WorkItem) -> RequestTimes:
        await asyncio.sleep(max(0.0, began + item.arrival - time.perf_counter()))
        async with limit:
            return await stream(target, item)

    times = await asyncio.gather(*(one(item) for item in items))
    return list(times), time.perf_counter() - began


async def stream(target: Target, item: WorkItem) -> RequestTimes:
    """One streamed completion. A failure is recorded in `error`, never raised: the others go on."""
    times = RequestTimes(sent=time.perf_counter(), input_tokens=len(item.prompt))
    try:
        await _stream(target, item, times)
    except (OSError, asyncio.IncompleteReadError, NoriaError, ValueError) as error:
        times.error = str(error) or type(error).__name__
    times.ended = time.perf_counter()
    return times


async def _stream(target: Target, item: WorkItem, times: RequestTimes) -> None:
    url = urlsplit(target.base_url)
    body = orjson.dumps(
        {
            "model": target.model,
            "prompt": list(item.prompt),
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = [
        f"POST {url.path.rstrip('/')}/v1/completions HTTP/1.1",
        f"Host: {url.netloc}",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(body)}",
    ]
    if target.api_key:
        head.append(f"Authorization: Bearer {target.api_key}")
    reader, writer = await asyncio.open_connection(url.hostname, url.port or 80)
    try:
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        if status != 200:
            answer = await reader.read(2000)
            raise NoriaError(f"HTTP {status}: {answer.decode(errors='replace')[-300:]}")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                _note(orjson.loads(line[6:]), times)
            elif line.startswith(b"data: [DONE]"):
                return
        raise NoriaError("the stream ended before [DONE]")
    finally:
        writer.close()


def _note(event: dict[str, object], times: RequestTimes) -> None:
    if event.get("error"):
        raise NoriaError(str(event["error"])[:300])
    usage, choices = event.get("usage"), event.get("choices")
    if isinstance(usage, dict):
        times.output_tokens = int(usage["completion_tokens"])
        times.input_tokens = int(usage["prompt_tokens"])
    if isinstance(choices, list) and choices and (choices[0].get("text") or not choices[0].get("finish_reason")):
        times.token_times.append(time.perf_counter())
