"""Keys, limits, tenants, logs and origins of a running server."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from harness import RunningServer, check_error, until
from test_lifecycle import background
from tiny_text import write_tokenizer

from noria.config import EngineConfig, ServeConfig
from noria.server.app import make_app
from noria.server.context import ServerContext
from noria.server.gate import Gate

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ALICE, BOB, CAROL, SLIM = "sk-alice-11112222", "sk-bob-33334444", "sk-carol-55556666", "sk-slim-77778888"
KEYS = f"""
[[keys]]
key = "{ALICE}"
name = "alice"
[[keys]]
key = "{BOB}"
name = "bob"
tenant = "shared"
[[keys]]
key = "{CAROL}"
name = "carol"
tenant = "shared"
requests_per_minute = 3
[[keys]]
key = "{SLIM}"
name = "slim"
tokens_per_minute = 40
max_concurrency = 1
"""
PROMPT = "a prompt that no log may hold"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Guarded:
    """A server with a key file and every log on, and where it writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_tokenizer(folder / "model")
        self.keys = folder / "keys.toml"
        self.keys.write_text(KEYS)
        self.keys.chmod(0o600)
        self.access = folder / "access.jsonl"
        serve: dict[str, Any] = {
            "api_key_file": str(self.keys),
            "access_log": str(self.access),
            "slow_request_s": 0.2,
            "data_dir": str(folder / "data"),
            "allowed_origins": ("https://app.example",),
            "served_model_name": ("first", "second"),
            "vllm_metrics": True,
        }
        self.server = RunningServer.fake(self.folder, "recording", log=folder / "log", serve=serve)
        self.server.key = ALICE

    def requests(self) -> list[dict[str, Any]]:
        """What the engine was told."""
        return [json.loads(line) for line in (self.folder / "requests.jsonl").read_text().splitlines()]

    def logged(self, request_id: str) -> dict[str, Any]:
        """The access log's line of a request."""
        found: list[dict[str, Any]] = []

        def written() -> bool:
            rows = [json.loads(line) for line in self.access.read_text().splitlines()]
            found.extend(row for row in rows if row["request_id"] == request_id)
            return bool(found)

        until(written, 5)
        return found[0]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("guarded"))
    with made.server:
        yield made


# Keys


def test_every_route_is_guarded(guarded: Guarded) -> None:
    """Red if any path but the probes answers without a key, whether it exists or not, by any spelling or method."""
    app = make_app(ServerContext(EngineConfig(model="m"), ServeConfig()))
    assert isinstance(app, Gate)
    paths = [route.path.replace("{", "").replace("}", "").replace(":path", "") for route in app.app.routes]  # type: ignore[attr-defined]
    assert "/v1/batches" in paths
    paths += ["/", "/docs", "/invocations", "/slots", "//v1/completions", "/V1/completions", "/x/../v1/models", "/v1%2fmodels"]
    wrong = ["", "Bearer", "Bearer ", f"Bearer {ALICE[:-1]}", f"Bearer {ALICE}x", f"Basic {ALICE}", f"Bearer {ALICE.upper()}"]
    for path in {path for path in paths if path not in ("/health", "/ready")}:
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            for value in wrong if path == "/v1/models" else wrong[:4:3]:
                raw = b"{}" if method == "POST" else None
                status, out = guarded.server.call(path, raw=raw, method=method, headers={"Authorization": value})
                assert status == 401, (path, method, value)
                if path.startswith("/v1/messages"):
                    assert out["error"]["type"] == "authentication_error"
                else:
                    assert check_error(out)["code"] == "invalid_api_key"
    for path in ("/health", "/ready"):
        assert guarded.server.call(path, headers={"Authorization": ""})[0] == 200


def test_both_headers_carry_a_key(guarded: Guarded) -> None:
    """Red if Anthropic's header is not read, or a wrong bearer is saved by it."""
    assert guarded.server.call("/v1/models", headers={"Authorization": "", "X-Api-Key": BOB})[0] == 200
    assert guarded.server.call("/v1/models", headers={"Authorization": "", "X-Api-Key": "sk-wrong"})[0] == 401
    assert guarded.server.call("/v1/models", headers={"Authorization": "Bearer sk-wrong", "X-Api-Key": BOB})[0] == 401


def test_secrets_appear_nowhere(guarded: Guarded) -> None:
    """Red if a key is in an answer, a log, a command line or the engine's environment."""
    server = guarded.server
    seen = [str(server.call(path)) for path in ("/version", "/openapi.json", "/metrics", "/v1/models", "/nope")]
    seen.append(str(server.call(COMPLETIONS, {"model": "nope", "prompt": 5})))
    seen.append(str(server.call(COMPLETIONS, raw=b"{" + ALICE.encode())))
    seen += [server.errors(), guarded.access.read_text()]
    for pid in (server.process.pid, server.engine_pid()):
        seen += [Path(f"/proc/{pid}/{name}").read_bytes().decode("utf-8", "replace") for name in ("cmdline", "environ")]
    for key in (ALICE, BOB, CAROL, SLIM):
        assert not [text for text in seen if key in text]


# Limits


def test_requests_a_minute(guarded: Guarded) -> None:
    """Red if a fourth request gets in, its 429 does not say when, or another key pays for it."""
    statuses, headers = [], Message()
    for _ in range(4):
        with guarded.server.open(COMPLETIONS, guarded.server.completion("x", max_tokens=1), headers=bearer(CAROL)) as response:
            statuses.append(response.status)
            headers = response.headers
            out = json.loads(response.read())
    assert statuses == [200, 200, 200, 429]
    assert check_error(out)["type"] == "rate_limit_error"
    assert 1 <= int(headers["Retry-After"]) <= 20
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert guarded.server.call("/v1/models", headers=bearer(CAROL))[0] == 200, "only work is limited"
    assert guarded.server.call(COMPLETIONS, guarded.server.completion("x"), headers=bearer(BOB))[0] == 200


def test_tokens_a_minute(guarded: Guarded) -> None:
    """Red if prompt or answer tokens are not counted, in streams or out of them."""
    body = guarded.server.completion("0123456789", max_tokens=20)
    assert guarded.server.call(COMPLETIONS, body, headers=bearer(SLIM))[0] == 200
    status, _, _ = guarded.server.stream(COMPLETIONS, body, headers=bearer(SLIM))
    assert status == 200, "30 of 40 are used"
    with guarded.server.open(COMPLETIONS, body, headers=bearer(SLIM)) as response:
        assert response.status == 429
        assert 25 <= int(response.headers["Retry-After"]) <= 33  # 60 used: 20 of debt, and one, at 40 a minute
        assert response.headers["x-ratelimit-remaining-tokens"] == "0"


def test_requests_at_once(tmp_path: Path) -> None:
    """Red if a key's second open request is let in, or a slot is not given back when a stream or its client ends."""
    folder = write_tokenizer(tmp_path / "model")
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"key": "sk-1", "max_concurrency": 1}]}))
    with RunningServer.fake(folder, "slow", log=tmp_path / "log", serve={"api_key_file": str(keys)}) as server:
        server.key = "sk-1"
        first = background(server.stream, COMPLETIONS, server.completion("x", max_tokens=10))
        until(lambda: server.metric("noria_num_requests_running") == 1)
        error = server.refused(COMPLETIONS, server.completion("y"), status=429)
        assert "at once" in error["message"]
        until(lambda: first)
        server.complete("z", max_tokens=1)


# Tenants


def test_every_request_carries_its_tenant(guarded: Guarded) -> None:
    """Red if an endpoint forgets whom it works for, inline or in a thread, or two tenants can reach one salt."""
    server = guarded.server
    bias = {str(token): 0 for token in range(250)}  # a body of more than 4 KiB is parsed in a thread
    padding = "x" * 4096
    for path, body in (
        (COMPLETIONS, server.completion("x", max_tokens=1)),
        (COMPLETIONS, server.completion("x", max_tokens=1, logit_bias=bias, metadata={"padding": padding})),
        (COMPLETIONS, server.completion([65] * 400, max_tokens=1)),
        (CHAT, server.chat("x", max_tokens=1)),
        (CHAT, server.chat("x" * 300, max_tokens=1, metadata={"padding": padding})),
    ):
        for key, tenant in ((ALICE, "alice"), (BOB, "shared")):
            for salt in ("", "s", "alice\0s"):
                server.ok(path, {**body, "cache_salt": salt}, headers=bearer(key))
                told = guarded.requests()[-1]
                assert (told["tenant"], told["cache_salt"]) == (tenant, f"{tenant}\0{salt}")
                assert not told["background"]


def test_a_client_may_set_its_deadline(guarded: Guarded) -> None:
    """Red if X-Noria-Timeout is ignored, or anything but seconds is taken."""
    body = guarded.server.completion("x", max_tokens=400, ignore_eos=True)
    error = guarded.server.refused(COMPLETIONS, body, status=408, headers={"X-Noria-Timeout": "0.05"})
    assert error["code"] == "timeout"
    for wrong in ("0", "-1", "nan", "inf", "soon", "1e9", ""):
        guarded.server.refused(COMPLETIONS, body, param="X-Noria-Timeout", headers={"X-Noria-Timeout": wrong})


# Logs


@pytest.mark.parametrize("stream", [False, True])
def test_access_log_has_counts_and_no_text(guarded: Guarded, *, stream: bool) -> None:
    """Red if a line lacks what billing and debugging need, or holds what was said."""
    body = guarded.server.completion(PROMPT, max_tokens=7, stream=stream)
    ident = f"req-of-mine-{stream}"
    with guarded.server.open(COMPLETIONS + "?secret=query", body, headers={"X-Request-Id": ident}) as response:
        answer = response.read().decode()
    row = guarded.logged(ident)
    assert (row["key"], row["tenant"], row["method"], row["path"], row["status"]) == (
        "alice",
        "alice",
        "POST",
        COMPLETIONS,
        200,
    )
    assert (row["prompt_tokens"], row["completion_tokens"]) == (len(PROMPT), 7)
    assert 0 < row["first_token_seconds"] <= row["seconds"] < 5
    text = guarded.access.read_text() + guarded.server.errors()
    assert PROMPT not in text
    assert "query" not in text
    assert answer


def test_refused_and_dropped_requests_are_logged(guarded: Guarded) -> None:
    """Red if only successes leave a trace."""
    headers = {"Authorization": "Bearer sk-wrong", "X-Request-Id": "intruder"}
    guarded.server.call(COMPLETIONS, {}, headers=headers)
    assert guarded.logged("intruder")["status"] == 401
    assert guarded.logged("intruder")["key"] == ""
    body = guarded.server.completion("x", max_tokens=400, ignore_eos=True, stream=True)
    with guarded.server.open(COMPLETIONS, body, headers={"X-Request-Id": "leaver"}) as response:
        response.read(100)
    row = guarded.logged("leaver")
    assert row["aborted"]
    assert row["completion_tokens"] < 400


def test_slow_requests_say_where_the_time_went(guarded: Guarded) -> None:
    """Red if the parts of the log do not sum to the request's end-to-end time within 1 %, or a fast request is in it."""
    server = guarded.server
    server.ok(COMPLETIONS, server.completion("fast", max_tokens=1), headers={"X-Request-Id": "fast-one"})
    began = time.monotonic()
    out = server.ok(
        COMPLETIONS,
        server.completion("slow", max_tokens=480, ignore_eos=True, timing=True),
        headers={"X-Request-Id": "slow-one"},
    )
    elapsed = time.monotonic() - began

    def told() -> list[dict[str, Any]]:
        marked = [line.split("slow request: ", 1)[1] for line in server.errors().splitlines() if "slow request: " in line]
        return [json.loads(text) for text in marked]

    until(lambda: any(row["request_id"] == "slow-one" for row in told()), 5)
    row = next(row for row in told() if row["request_id"] == "slow-one")
    assert sum(row["parts"].values()) == pytest.approx(row["seconds"], rel=0.01)
    assert row["seconds"] == pytest.approx(elapsed, abs=0.1)
    phases = {name for name, value in out["timing"].items() if isinstance(value, float)}
    assert set(row["parts"]) == {"receive", *phases}
    assert row["parts"]["decode"] == pytest.approx(out["timing"]["decode"], abs=1e-5)
    assert not [row for row in told() if row["request_id"] == "fast-one"]


# Origins, names, metrics


def test_only_named_origins_may_call(guarded: Guarded, server: RunningServer) -> None:
    """Red if a foreign page may read answers, the preflight needs a key, or credentials are ever allowed."""
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}

    def preflight(running: RunningServer, origin: str) -> tuple[int, Any]:
        with running.open(COMPLETIONS, method="OPTIONS", headers={"Origin": origin, "Authorization": "", **ask}) as response:
            return response.status, response.headers

    status, headers = preflight(guarded.server, "https://app.example")
    assert status == 200
    assert headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert headers["Access-Control-Allow-Credentials"] is None
    assert preflight(guarded.server, "https://evil.example")[1]["Access-Control-Allow-Origin"] is None
    with guarded.server.open("/v1/models", headers={"Origin": "https://app.example"}) as response:
        assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
    status, headers = preflight(server, "https://app.example")
    assert status == 405
    assert headers["Access-Control-Allow-Origin"] is None, "off by default"


def test_every_served_name_works(guarded: Guarded) -> None:
    """Red if an alias is listed but not answered, or an answer does not repeat the name that was asked for."""
    _, listed = guarded.server.call("/v1/models")
    assert [model["id"] for model in listed["data"]] == ["first", "second"]
    for name in ("first", "second"):
        assert guarded.server.ok(COMPLETIONS, {"model": name, "prompt": "x", "max_tokens": 1})["model"] == name
        assert guarded.server.call(f"/v1/models/{name}")[0] == 200


def test_metrics_under_vllms_names(guarded: Guarded, server: RunningServer) -> None:
    """Red if a dashboard made for vLLM finds other numbers than ours, or the names appear unasked."""
    guarded.server.complete("x", max_tokens=2)
    _, text = guarded.server.call("/metrics")
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    ours = {name.removeprefix("noria_"): value for name, value in samples.items() if name.startswith("noria_")}
    theirs = {name.removeprefix("vllm:"): value for name, value in samples.items() if name.startswith("vllm:")}
    assert theirs.items() <= ours.items()
    for name in (
        "num_requests_running",
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "request_success_total",
    ):
        assert any(sample.startswith(name + "{") for sample in theirs), name
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
    assert "vllm:" not in server.call("/metrics")[1]


# Bodies


def test_a_client_that_leaves_within_its_body_is_no_fault(guarded: Guarded) -> None:
    """Red if it leaves a trace in the log, a file on disk, or a request that counts as open."""
    for path, kind in ((COMPLETIONS, "application/json"), ("/v1/files", "multipart/form-data; boundary=b")):
        part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * 200_000
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nX-Request-Id: gone{path}\r\n"
        with socket.create_connection((guarded.server.host, guarded.server.port), 10) as connection:
            connection.sendall(f"{head}Authorization: Bearer {ALICE}\r\nContent-Length: 999999\r\n\r\n".encode() + part)
        assert guarded.logged(f"gone{path}")["status"] == 400
    assert "Traceback" not in guarded.server.errors()
    assert not list((guarded.folder.parent / "data" / "files").glob("*.part"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize"])
def test_a_body_of_too_many_values_is_refused(server: RunningServer, path: str) -> None:
    """Red if an endpoint parses it all the same: everybody would wait for it. It is 400 where there are fewer."""
    for members, status in ((60_000, 400), (900_000, 413)):
        raw = b'{"model":"fake","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(members)) + b"}}"
        server.refused(path, raw=raw, status=status)
