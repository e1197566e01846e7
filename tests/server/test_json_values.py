"""How many values a body holds: what must not stop the server's other streams is counted before it is parsed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from noria.server import json_values
from noria.server.json_values import check_values, count_values
from noria.types import RequestError


def marks(value: Any) -> tuple[int, int]:
    """(commas, opening brackets) of a value, by walking it."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [marks(one) for one in (value.values() if isinstance(value, dict) else value)]
    return max(0, len(value) - 1) + sum(commas for commas, _ in inner), 1 + sum(opened for _, opened in inner)


def some_json(rng: random.Random, depth: int) -> Any:
    match rng.randrange(4 if depth else 2):
        case 0:
            return "".join(rng.choices(',[{"\\\n日x', k=rng.randrange(8)))
        case 1:
            return rng.choice([0, -1.5, True, None])
        case 2:
            return [some_json(rng, depth - 1) for _ in range(rng.randrange(5))]
        case _:
            return {f'{i},["\\': some_json(rng, depth - 1) for i in range(rng.randrange(5))}


@pytest.mark.parametrize("piece", [3, 64, 1 << 20])
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
    monkeypatch.setattr(json_values, "MAX_CONTAINERS", 100)
    monkeypatch.setattr(json_values, "UNCOUNTED_BYTES", 3000)
    with pytest.raises(RequestError) as told:
        check_values(b'{"prompt": [' + b"1," * 2000 + b"1]}")
    assert (told.value.status, told.value.code) == (413, "body_too_large")
    with pytest.raises(RequestError, match="objects and lists"):
        check_values(b'{"prompt": [' + b"[]," * 900 + b" " * 3000 + b"1]}")
    check_values(b'{"prompt": "' + b"a, " * 5000 + b'"}')
    check_values(b'{"prompt": [' + b"1," * 900 + b" " * 3000 + b"1]}")
