"""The OpenAPI document, and what a fuzzer that reads it finds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from batch_client import upload
from harness import RunningServer, check_error, until

from noria.config import EngineConfig, ServeConfig
from noria.server import documented
from noria.server.app import make_app
from noria.server.batches.objects import FileObject
from noria.server.context import ServerContext
from noria.server.gate import Gate
from noria.server.openapi import ROUTES, document

KEY = "sk-fuzz"


def test_every_route_is_documented() -> None:
    """Red if a route has no line in the table, or the table has a route that is none."""
    app = make_app(ServerContext(EngineConfig(model="m"), ServeConfig()))
    assert isinstance(app, Gate)
    routes = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in app.app.routes  # type: ignore[attr-defined]
        for method in route.methods - {"HEAD"}
    }
    assert routes == {(entry.method, entry.path) for entry in ROUTES}


def test_the_document_is_whole() -> None:
    """Red if a reference leads nowhere, two operations share a name, or a path parameter is not declared."""
    made = document(("m",))
    schemas, responses = made["components"]["schemas"], made["components"]["responses"]
    for kind, name in re.findall(r"#/components/(\w+)/(\w+)", msgspec.json.encode(made).decode()):
        assert name in {"schemas": schemas, "responses": responses}[kind]
    operations = [(path, one) for path, methods in made["paths"].items() for one in methods.values()]
    assert len({one["operationId"] for _, one in operations}) == len(operations)
    for path, one in operations:
        declared = {parameter["name"] for parameter in one["parameters"] if parameter["in"] == "path"}
        assert declared == set(re.findall(r"{(\w+)}", path))
        assert {"200", "400", "401", "429", "503"} <= set(one["responses"])


def test_ranges_are_those_that_are_checked() -> None:
    """Red if the document promises other bounds than `validate` holds."""
    properties = document(("m",))["components"]["schemas"]["ChatBody"]["properties"]
    assert {"type": "number", "minimum": 0.0, "maximum": 2.0} in properties["temperature"]["anyOf"]
    assert {"type": "number", "exclusiveMinimum": 0.0, "maximum": 100.0} in properties["repetition_penalty"]["anyOf"]
    assert properties["model"] == {"type": "string", "enum": ["m"]}


@pytest.fixture(scope="module")
def fuzzed(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("fuzzed")
    serve = {"data_dir": str(folder / "data"), "api_key": (KEY,)}
    with RunningServer.fake(chat_folder, log=folder / "log", serve=serve) as running:
        yield running


@pytest.mark.slow
def test_real_answers_have_the_documented_shapes(fuzzed: RunningServer) -> None:
    """Red if an answer loses a field, or changes its type, while the document still promises it."""

    def shaped(kind: Any, answer: tuple[int, Any]) -> None:
        assert answer[0] == 200
        msgspec.convert(answer[1], kind)

    server = fuzzed
    shaped(documented.Status, server.call("/health"))
    shaped(documented.Version, server.call("/version"))
    shaped(documented.ModelList, server.call("/v1/models"))
    shaped(documented.Model, server.call("/v1/models/fake"))
    shaped(documented.Completion, server.call("/v1/completions", server.completion("x", n=2, logprobs=1)))
    shaped(documented.ChatCompletion, server.call("/v1/chat/completions", server.chat("x", logprobs=True)))
    shaped(documented.Tokens, server.call("/tokenize", {"prompt": "x", "return_token_strs": True}))
    shaped(documented.Text, server.call("/detokenize", {"tokens": [65]}))
    shaped(FileObject, upload(server, b"x", {"Authorization": f"Bearer {KEY}"}))
    msgspec.convert(server.call("/nope")[1], documented.Error)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["TRACE", "QUERY", "PUT", "PATCH", "DELETE", "OPTIONS", "LOCK"])
def test_other_methods_are_405(fuzzed: RunningServer, method: str) -> None:
    """Red if a strange method is a 500, has no error object, or Allow leaves out a method that works."""
    for path, allowed in (("/v1/completions", "POST"), ("/v1/files", "GET, HEAD, POST"), ("/health", "GET, HEAD")):
        with fuzzed.open(path, method=method) as response:
            assert response.status == 405
            assert response.headers["Allow"] == allowed
            check_error(msgspec.json.decode(response.read()))


@pytest.mark.slow
def test_fuzz(fuzzed: RunningServer, tmp_path: Path) -> None:
    """Requests made from the document: red on a 5xx that is not documented, an answer of another shape, a hang, a leak."""
    pytest.importorskip("schemathesis")
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{fuzzed.url}/openapi.json"]
    command += [
        "-H",
        f"Authorization: Bearer {KEY}",
        "--phases",
        "coverage,fuzzing",
        "--max-time",
        "8",
        "--request-timeout",
        "10",
    ]
    command += ["--seed", "1", "--no-shrink", "--continue-on-failure", "--warnings", "off", "--checks", "all"]
    # A schema cannot say all that is checked (a prompt that fits, a token of the vocabulary), so valid bodies may be refused.
    command += ["--exclude-checks", "positive_data_acceptance"]
    # An unknown header is no fault, and a request that has one may take longer than another header allows: 408.
    statuses = '["400", "401", "404", "405", "408", "409", "413", "429"]'
    (tmp_path / "schemathesis.toml").write_text(f"[checks.negative_data_rejection]\nexpected-statuses = {statuses}\n")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated
    assert int(generated[1]) > 300
    assert "Traceback" not in fuzzed.errors()
    assert fuzzed.metric("noria_http_requests_total", 'status="500"') == 0
    until(fuzzed.idle, 10)
    fuzzed.complete("alive", max_tokens=1)
