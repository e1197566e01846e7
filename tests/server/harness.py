"""A server in its own process, and a client with strict parsing. Used by the tests of the server and of its cases."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import noria
from noria.config import EngineConfig, ServeConfig

HERE = Path(__file__).resolve().parent
PACKAGES = Path(noria.__file__).resolve().parents[1]  # where this process has noria from: the same one is served
START_S = 60.0
CONTEXT = 2048  # tokens, of the servers with a real engine


def strict_json(data: bytes | str) -> Any:
    """JSON without NaN and infinities."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"not JSON: {name}")

    return json.loads(data, parse_constant=refuse)


class RunningServer:
    """`noria serve`, or the same server before a fake engine. Use as a context manager."""

    def __init__(self, command: list[str], *, model: str, key: str | None = None, log: Path | None = None) -> None:
        self.model = model
        self.key = key
        path = os.pathsep.join([str(PACKAGES), str(HERE), os.environ.get("PYTHONPATH", "")])
        self._log = (log or Path(os.devnull)).open("wb") if log else subprocess.PIPE
        self.log_path = log
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, env={**os.environ, "PYTHONPATH": path}
        )
        self.url = ""

    @classmethod
    def fake(
        cls, folder: Path, factory: str = "fast", *, log: Path | None = None, serve: dict[str, Any] | None = None, **engine: Any
    ) -> RunningServer:
        """A server before the fake engine `factory`; `folder` holds the tokenizer; further keywords are EngineConfig's."""
        engine_config = msgspec.json.encode(EngineConfig(model=str(folder), **engine)).decode()
        serve_config = ServeConfig(**{"port": 0, "shutdown_timeout_s": 5.0, **(serve or {})})
        command = [
            sys.executable,
            str(HERE / "serve_fake.py"),
            f"fake_engine:{factory}",
            engine_config,
            msgspec.json.encode(serve_config).decode(),
        ]
        names = serve_config.served_model_name
        return cls(command, model=names[0] if names else "fake", key=next(iter(serve_config.api_key), None), log=log)

    @classmethod
    def real(cls, model: str, *flags: str, log: Path | None = None) -> RunningServer:
        """`noria serve MODEL FLAGS` on a free port, under the name "m"."""
        command = [sys.executable, "-m", "noria.cli.main", "serve", model, "--port", "0", "--served-model-name", "m"]
        return cls([*command, *flags], model="m", log=log)

    def wait_ready(self) -> RunningServer:
        """Read the announcement, which carries the port. AssertionError if the server ends instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        found = re.search(r"http://[\w.:\[\]]+", line)
        if found is None:
            self.process.wait(START_S)
            raise AssertionError(f"the server did not start: exit code {self.process.returncode}: {self.errors()}")
        self.announcement = line
        url = urllib.parse.urlsplit(found[0])
        self.url = f"http://{url.netloc}"
        self.host, self.port = url.hostname or "", url.port or 80
        return self

    def __enter__(self) -> RunningServer:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the server; nothing of it stays."""
        self.process.kill()
        self.process.wait()

    def errors(self) -> str:
        """What it wrote to stderr."""
        if self.log_path is not None:
            return self.log_path.read_text()
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def engine_pid(self) -> int:
        """The engine's process: the only child."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        children = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        assert len(children) == 1, children
        return children[0]

    # A strict client

    def open(
        self,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> Any:
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        if self.key and "Authorization" not in sent:
            sent["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url + path, data, sent, method=method or ("GET" if data is None else "POST"))
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            return error

    def call(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """(status, parsed JSON, or text for other types)."""
        with self.open(path, body, **options) as response:
            data = response.read()
            if "json" in response.headers.get("Content-Type", ""):
                return response.status, strict_json(data)
            return response.status, data.decode()

    def stream(self, path: str, body: dict[str, Any], **options: Any) -> tuple[int, list[Any], bool]:
        """(status, events, whether [DONE] came last); an error body counts as one event."""
        with self.open(path, {**body, "stream": True}, **options) as response:
            if "event-stream" not in response.headers.get("Content-Type", ""):
                return response.status, [strict_json(response.read())], False
            events, done = [], False
            for line in response:
                text = line.decode().strip()
                if text == "data: [DONE]":
                    done = True
                elif text.startswith("data:"):
                    assert not done, "an event after [DONE]"
                    events.append(strict_json(text[5:]))
            return response.status, events, done

    def ok(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        """The body of a 200."""
        status, out = self.call(path, body, **options)
        assert status == 200, (status, out)
        return out

    def complete(self, prompt: Any, **fields: Any) -> Any:
        """A greedy completion's whole response."""
        return self.ok("/v1/completions", self.completion(prompt, **fields))

    def completion(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A greedy completions body."""
        return {"model": self.model, "prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}

    def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        """A greedy chat body."""
        messages = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "max_tokens": 24, "temperature": 0, **fields}

    def refused(
        self, path: str, body: Any = None, *, status: int = 400, param: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """The error object of a request that must be refused, its shape checked."""
        got, out = self.call(path, body, **options)
        assert got == status, (got, out)
        return check_error(out, param=param)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples; with `label`, of those that have it."""
        _, text = self.call("/metrics")
        lines = [line for line in text.splitlines() if re.match(name + r"[ {]", line) and label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def hangup(self, path: str, body: dict[str, Any], *, after: int = 0, wait: float = 0.0) -> None:
        """Send a request, read `after` bytes of the reply, wait, and drop the connection."""
        data = json.dumps(body).encode()
        with socket.create_connection((self.host, self.port), 30) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            if after:
                connection.recv(after)
            time.sleep(wait)

    def idle(self) -> bool:
        """Whether nothing runs, waits or holds blocks."""
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(f"noria_{name}") == 0 for name in gauges)


def check_error(out: Any, *, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object, of bounded size; `param` must be named."""
    error: dict[str, Any] = out["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert len(json.dumps(out)) < 2000, "an error must not echo the request"
    if param is not None:
        assert error["param"] == param, error
    return error


def joined(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    parts = []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                parts.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return "".join(parts)


def text_of(out: Any, index: int = 0) -> str:
    """The text of one choice of a whole response."""
    choice = out["choices"][index]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def at_once(function: Any, values: Any, threads: int = 16) -> list[Any]:
    """`function` of each value, in threads; results in order."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, values))


def until(condition: Any, seconds: float = 20.0) -> None:
    """Wait until `condition()` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
