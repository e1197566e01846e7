"""How many values a body holds: what must not stop the server's other streams is counted before it is parsed."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import msgspec
import pytest

from noria.server import intake, json_values
from noria.server.intake import Intake
from noria.server.json_values import check_values, count_values
from noria.server.requests import ChatBody, parse_body
from noria.types import RequestError


def marks(value: Any) -> tuple[int, int]:
    """(commas, opening brackets and colons) of a value, by walking it."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [marks(one) for one in (value.values() if isinstance(value, dict) else value)]
    members = len(value) if isinstance(value, dict) else 0
    return max(0, len(value) - 1) + sum(commas for commas, _ in inner), 1 + members + sum(nodes for _, nodes in inner)


def some_json(rng: random.Random, depth: int) -> Any:
    match rng.randrange(4 if depth else 2):
        case 0:
            return "".join(rng.choices(',:[{"\\\n日x', k=rng.randrange(8)))
        case 1:
            return rng.choice([0, -1.5, True, None])
        case 2:
            return [some_json(rng, depth - 1) for _ in range(rng.randrange(5))]
        case _:
            return {f'{i},["\\': some_json(rng, depth - 1) for i in range(rng.randrange(5))}


@pytest.mark.parametrize("piece", [1, 2, 3, 64, 1 << 20])
def test_strings_hold_no_values(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Red when a comma in a string counts, an escaped quote ends one, or a string that is cut between two pieces does."""
    monkeypatch.setattr(json_values, "PIECE", piece)
    rng = random.Random(7)
    for _ in range(200):
        value = some_json(rng, 4)
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
            assert count_values(text.encode()) == marks(value)


def test_long_bodies_of_small_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a body that takes a second to parse is parsed, or a long text, or a short body, is refused."""
    monkeypatch.setattr(json_values, "MAX_VALUES", 1000)
    monkeypatch.setattr(json_values, "MAX_NODES", 100)
    monkeypatch.setattr(json_values, "UNCOUNTED_BYTES", 3000)
    with pytest.raises(RequestError) as told:
        check_values(b'{"prompt": [' + b"1," * 2000 + b"1]}")
    assert (told.value.status, told.value.code) == (413, "body_too_large")
    members = b",".join(b'"%d":1' % i for i in range(900))
    for many in (b"[]," * 900, b"{}," * 900, b"{" + members + b"},"):
        with pytest.raises(RequestError, match="objects, lists and members"):
            check_values(b'{"prompt": [' + many + b" " * 3000 + b"1]}")
    check_values(b'{"prompt": "' + b"a, " * 5000 + b'"}')
    check_values(b'{"prompt": [' + b"1," * 900 + b" " * 3000 + b"1]}")


def test_what_holds_too_much_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when it is made into values first: every stream of the server would wait for them."""

    def decode(*args: Any, **options: Any) -> Any:
        raise AssertionError("parsed")

    monkeypatch.setattr(msgspec.json, "decode", decode)
    with pytest.raises(RequestError) as told:
        parse_body(b'{"x": [' + b"[]," * json_values.MAX_NODES + b"1]}", ChatBody)
    assert told.value.status == 413


def test_a_long_body_is_counted_and_parsed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the thread that writes the streams does it."""
    threads: list[threading.Thread] = []

    def recorded(data: bytes, kind: Any) -> Any:
        threads.append(threading.current_thread())
        return None, []

    monkeypatch.setattr(intake, "parse_body", recorded)
    context: Any = None
    asyncio.run(Intake(context).decoded(b" " * 100_000, ChatBody))
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
