"""Where the time of a server's start goes: a real start, as a child process, whose stages are read from its log.

    HTTP process      python and imports ── accepting connections ── tokenizer ──────────┐
    engine process    python and imports ── resolve ── map or pack weights ── record ────┴─ served ── health ── first token

Stages are told in the order in which they are reached. Both processes are at work at once, so that a line's "took" is the time
since the line before it, not the work of one part.
"""

from __future__ import annotations

import time

import orjson

from noria.bench.flags import columns
from noria.bench.server_child import ServerChild, Stage
from noria.config import EngineConfig
from noria.types import LoadError


def measure_start(config: EngineConfig) -> list[Stage]:
    """Start a server with these settings, ask it for a token, stop it. LoadError if it does not start."""
    with ServerChild(config) as server:
        stages = list(server.stages)
        stages.append(Stage("first /health", _ask(server, "/health", None)))
        body = orjson.dumps({"model": server.model, "prompt": "Once", "max_tokens": 1, "temperature": 0})
        stages.append(Stage("first token", _ask(server, "/v1/completions", body)))
        return stages


def _ask(server: ServerChild, path: str, body: bytes | None) -> float:
    """One request; when its answer was there, in seconds since the process was made."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(server.url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
    except urllib.error.URLError as error:
        raise LoadError(f"{path} of the server that was started: {error}") from None
    return time.monotonic() - server.began


def table(stages: list[Stage]) -> str:
    """When each stage was reached, and how long after the one before."""
    rows = [("stage", "at", "took")]
    before = 0.0
    for stage in stages:
        rows.append((stage.text, f"{stage.at:.3f}", f"{stage.at - before:.3f}"))
        before = stage.at
    return columns(rows)
