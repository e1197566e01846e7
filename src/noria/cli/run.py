"""noria run: answer a file of requests, in OpenAI's batch line format.

in:   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
out:  {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

Answers stand in the order of the requests. A wrong request is answered with its error and does not stop the others.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noria.cli.flags import add_flags, settings
from noria.config import EngineConfig, ServeConfig
from noria.types import ConfigError, RequestError

if TYPE_CHECKING:
    from noria.server.openai import OpenAI

AHEAD = 2  # lines in work, as a multiple of the sequences that may run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the input file, -o, and the engine's settings."""
    add_flags(parser, EngineConfig)
    parser.add_argument("input", metavar="PROMPTS.jsonl", type=Path, help="requests, one JSON object a line")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="answers, one a line")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")


def run(arguments: argparse.Namespace) -> int:
    """0 if every request was answered, 1 if some have an error instead."""
    import asyncio

    (config,) = settings(arguments, EngineConfig)
    assert isinstance(config, EngineConfig)
    return asyncio.run(_run(config, arguments.input, arguments.output, arguments.chat_template))


async def _run(config: EngineConfig, source: Path, target: Path, chat_template: str | None) -> int:
    try:
        total = sum(1 for _ in _lines(source))
        out = target.open("wb")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    from noria.observe.metrics import Metrics
    from noria.server.client import EngineClient
    from noria.server.context import Served, ServerContext
    from noria.server.intake import Intake
    from noria.server.launch import EngineProcess
    from noria.server.loading import TextOptions, start
    from noria.server.openai import OpenAI
    from noria.weights.hub import cache_directory

    client = EngineClient(EngineProcess(config), on_stage=lambda text: print(f"noria: {text}", file=sys.stderr))
    try:
        facts, text = await start(client, cache_directory(config.cache_dir), TextOptions(chat_template=chat_template))
        context = ServerContext(config, ServeConfig())
        context.served = Served(
            client=client,
            facts=facts,
            text=text,
            metrics=Metrics(facts.model, lambda: client.stats),
            names=tuple(dict.fromkeys((facts.model, config.model))),
            model_defaults=False,
        )
        with out:
            failed = await _answer_all(OpenAI(context, Intake(context)), source, out, total, AHEAD * config.max_num_seqs)
    finally:
        client.close()
    if failed:
        print(f"noria: {failed} of {total} requests have an error; see {target}", file=sys.stderr)
    return 1 if failed else 0


def _lines(source: Path) -> Iterator[bytes]:
    with source.open("rb") as file:
        yield from (line for line in file if line.strip())


async def _answer_all(openai: OpenAI, source: Path, out: Any, total: int, ahead: int) -> int:
    """Answer every line, `ahead` of them at once, and write the answers in order. Returns how many failed."""
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    failed = 0
    working: deque[asyncio.Task[dict[str, Any]]] = deque()
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=total)

        async def write_first() -> None:
            nonlocal failed
            answer = await working.popleft()
            failed += answer["response"] is None or answer["response"]["status_code"] != 200
            out.write(_dumps(answer) + b"\n")
            progress.advance(task)

        for number, line in enumerate(_lines(source), 1):
            working.append(asyncio.create_task(_answer(openai, number, line)))
            if len(working) >= ahead:
                await write_first()
        while working:
            await write_first()
    return failed


async def _answer(openai: OpenAI, number: int, line: bytes) -> dict[str, Any]:
    """One line's answer, errors included."""
    import secrets

    from noria.server.errors import error_object
    from noria.server.openai import GENERATION_BODIES
    from noria.server.requests import parse_json

    answer: dict[str, Any] = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": None, "response": None, "error": None}
    request_id = f"req-{secrets.token_hex(12)}"
    try:
        item = parse_json(line)
        if not isinstance(item, dict) or not isinstance(item.get("body"), dict):
            raise RequestError("the line must be an object with custom_id, method, url and body", code="invalid_line")
        answer["custom_id"] = item.get("custom_id")
        kind = GENERATION_BODIES.get(item.get("url", ""))
        if kind is None or item.get("method", "POST") != "POST":
            raise RequestError(f"url must be one of {', '.join(GENERATION_BODIES)}, method POST", code="invalid_line")
    except RequestError as error:
        answer["error"] = {"code": error.code or "invalid_line", "message": f"line {number}: {error}"}
        return answer
    try:
        body = {"model": openai.default_model, **item["body"]}
        if body.get("stream"):
            raise RequestError("a batch cannot stream; leave stream out", param="stream")
        served, call = await openai.prepare(_dumps(body), kind)
        status, content = 200, await openai.collect(served, call)
    except RequestError as error:
        status, content = error.status, error_object(error)
    answer["response"] = {"status_code": status, "request_id": request_id, "body": content}
    return answer


def _dumps(value: Any) -> bytes:
    import orjson

    return orjson.dumps(value)
