"""Where the time of a server's start goes: a real start, as a child process, whose stages are read from its log.

    HTTP process      python and imports ── accepting connections ── tokenizer ──────────┐
    engine process    python and imports ── resolve ── map or pack weights ── record ────┴─ served ── health ── first token

Stages are told in the order in which they are reached. Both processes are at work at once, so that a line's "took" is the time
since the line before it, not the work of one part.
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
from dataclasses import dataclass
from pathlib import Path

import msgspec
import orjson

from noria.bench.flags import columns
from noria.config import EngineConfig
from noria.types import LoadError

LIMIT_S = 600.0  # of the whole start: a large model may have to be packed
LEAVE_S = 10.0
LAST_LINES = 5  # of its log, when it does not start
_STAGE = re.compile(r"noria: \[ *[\d.]+ s\] (.*)")
_SERVED = re.compile(r"(\S+) is served at (http://\S+)")


@dataclass(frozen=True)
class Stage:
    """Something that was done at `at` seconds after the process was made."""

    text: str
    at: float


def measure_start(config: EngineConfig) -> list[Stage]:
    """Start a server with these settings, ask it for a token, stop it. LoadError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="noria-") as folder:
        file = Path(folder) / "settings.json"
        given = {name: value for name, value in msgspec.to_builtins(config).items() if value is not None}
        file.write_bytes(orjson.dumps(given))
        began = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "noria.cli.main", "serve", "--config", str(file), "--port", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if os.path.isabs(p))},
        )
        deadline = threading.Timer(LIMIT_S, child.kill)
        deadline.start()
        try:
            stages, model, url = _read_stages(child, began)
            stages.append(Stage("first /health", _ask(url, "/health", None, began)))
            body = orjson.dumps({"model": model, "prompt": "Once", "max_tokens": 1, "temperature": 0})
            stages.append(Stage("first token", _ask(url, "/v1/completions", body, began)))
            return stages
        finally:
            deadline.cancel()
            _stop(child)


def _read_stages(child: subprocess.Popen[str], began: float) -> tuple[list[Stage], str, str]:
    """The stages up to the one that names the model and the server's address, and these."""
    assert child.stderr is not None
    stages: list[Stage] = []
    last: deque[str] = deque(maxlen=LAST_LINES)
    for line in child.stderr:
        now = time.monotonic() - began
        found = _STAGE.match(line)
        if found is None:
            last.append(line.rstrip().removeprefix("noria: "))
        elif "  " not in found[1]:  # a line of the memory ledger's table is no stage
            stages.append(Stage(found[1], now))
        served = _SERVED.search(line)
        if served:
            return stages, served[1], served[2]
    raise LoadError("; ".join(last) or "the server ended without a word")


def _ask(url: str, path: str, body: bytes | None, began: float) -> float:
    """One request; when its answer was there."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
    except urllib.error.URLError as error:
        raise LoadError(f"{path} of the server that was started: {error}") from None
    return time.monotonic() - began


def _stop(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.communicate(timeout=LEAVE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()


def table(stages: list[Stage]) -> str:
    """When each stage was reached, and how long after the one before."""
    rows = [("stage", "at", "took")]
    before = 0.0
    for stage in stages:
        rows.append((stage.text, f"{stage.at:.3f}", f"{stage.at - before:.3f}"))
        before = stage.at
    return columns(rows)
