"""Bodies that would hold up the event loop: weighed in pieces beside it, and refused before they are decoded."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import msgspec
import pytest
from harness import RunningServer
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from noria.server import intake, openai
from noria.server.context import ServerContext
from noria.server.intake import Intake
from noria.server.openai import OpenAI
from noria.server.requests import ChatBody, CompletionBody, parse_body
from noria.server.systemone import DecisionBody
from noria.server.weight import MAX_WEIGHT, NODE_WEIGHT, check_weight, outside_strings
from noria.types import RequestError

SPECIAL = st.text(alphabet='\\"[]{},:a\n漢', max_size=12)
VALUES = st.recursive(
    st.one_of(st.integers(), st.booleans(), st.none(), SPECIAL),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(SPECIAL, inner, max_size=5),
    max_leaves=25,
)


@given(VALUES, st.integers(1, 40), st.booleans())
def test_only_what_stands_outside_of_strings_is_weighed(value: Any, piece: int, ascii_only: bool) -> None:
    """Red when a quote, a backslash or a cut at any place makes text count as structure, or structure as text."""
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    wanted = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", data)
    assert b"".join(outside_strings(data, piece)) == wanted


@pytest.mark.parametrize("run", [1, 2, 3, 7, 8])
def test_runs_of_backslashes_on_a_cut(run: int) -> None:
    """Red when an escape is cut in two: its second half would end the string, or open one."""
    data = json.dumps(["\\" * run, ',"' * run, 1]).encode()
    for piece in range(1, len(data) + 1):
        assert b"".join(outside_strings(data, piece)) == b"[, , 1]"


MANY = MAX_WEIGHT // NODE_WEIGHT
HEAVY = {
    "numbers": "[" + "1," * MAX_WEIGHT + "1]",
    "strings": "[" + '"",' * MAX_WEIGHT + '""]',
    "lists": "[" + "[]," * MANY + "[]]",
    "objects": "[" + "{}," * MANY + "{}]",
    "members": "{" + ",".join(f'"{i}":1' for i in range(MANY)) + "}",
    "levels": "[" * MANY,
}


@pytest.mark.parametrize("kind", HEAVY)
def test_a_heavy_body_is_refused_before_it_is_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when one of these is made into values first: every stream of the server would wait for it."""

    def decode(*args: Any, **options: Any) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr(msgspec.json, "decode", decode)
    with pytest.raises(RequestError) as told:
        parse_body(f'{{"model":"m","x":{HEAVY[kind]}}}'.encode(), ChatBody)
    assert (told.value.status, told.value.code) == (400, "body_too_complex")


def test_long_text_and_many_ids_are_not_heavy() -> None:
    """Red when what is in a string counts, or the bound is nearer than it is said to be."""
    check_weight(json.dumps({"prompt": '[1, {"a": "b"}], \\' * 200_000}).encode())
    check_weight(b'{"prompt":[' + b"1," * (MAX_WEIGHT - 3 * NODE_WEIGHT) + b"1]}")
    check_weight(b'{"x":[' + b"[]," * (MAX_WEIGHT // (NODE_WEIGHT + 1) - 4) + b"[]]}")


POSTS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank"),
    *("/v1/systemone", "/v1/batches", "/tokenize", "/detokenize"),
)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x" * 100_000}]}
PROMPT = {"model": "m", "prompt": "x" * 100_000}
STATE = {"model": "m", "state": "x" * 100_000, "questions": {"a": {"type": "noul", "instructions": "?"}}}


def request_of(body: Any) -> Request:
    data = json.dumps(body).encode()

    async def receive() -> Any:
        return {"type": "http.request", "body": data, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


@pytest.mark.parametrize(
    ("module", "read"),
    [
        (openai, lambda context: OpenAI(context).read(request_of(CHAT), ChatBody)),
        (openai, lambda context: OpenAI(context).prepare(json.dumps(PROMPT).encode(), CompletionBody)),
        (intake, lambda context: Intake(context).read(request_of(STATE), DecisionBody)),
    ],
    ids=["read", "prepare", "intake"],
)
def test_long_bodies_are_weighed_and_decoded_beside_the_loop(module: Any, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a body is parsed by the thread that writes the streams."""
    threads: list[threading.Thread] = []

    def recorded(data: bytes, kind: Any) -> Any:
        threads.append(threading.current_thread())
        raise RequestError("seen")

    monkeypatch.setattr(module, "parse_body", recorded)

    async def work() -> None:
        context: Any = object.__new__(ServerContext)
        context.config = msgspec.defstruct("Config", ["max_body_bytes"])(1 << 20)
        with pytest.raises(RequestError, match="seen"):
            await read(context)
        assert threads != [threading.current_thread()]

    asyncio.run(work())
    assert len(threads) == 1


@pytest.mark.slow
def test_every_endpoint_refuses_it(server: RunningServer) -> None:
    """Red when an endpoint decodes its body in another way."""
    data = f'{{"model":"fake","messages":{HEAVY["lists"]}}}'.encode()
    for path in POSTS:
        assert server.refused(path, raw=data)["code"] == "body_too_complex", path
    status, told = server.call("/v1/messages", raw=data)
    assert (status, told["error"]["type"]) == (400, "invalid_request_error")
    assert "too much to be decoded" in told["error"]["message"]
