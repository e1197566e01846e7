"""Requests beside the measured ones: so many at once, each followed by another, until the measurement ends.

    plain      a chat whose answer goes on for 256 tokens
    grammar    the same under a JSON schema, of which there are a few
    flood      a prompt of thousands of tokens, and one token out

They show what one kind of traffic does to another: run the same load with `plain:16` and with `grammar:16`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from noria.bench.workload import Prompt, random_words
from noria.types import ConfigError

if TYPE_CHECKING:
    from noria.bench.http import HttpClient

KINDS = ("plain", "grammar", "flood")
Beside = tuple[tuple[str, int], ...]  # kind and how many at once
Flood = Callable[[random.Random], Prompt]  # makes the prompts of a flood

ANSWER_TOKENS = 256
PROMPT_WORDS = 48
# Texts that do not end by themselves: the answer runs to its limit under the grammar.
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["glad", "sad", "calm", "cross"]},
        "email": {"type": "string", "pattern": r"^[a-z]{2,12}@[a-z]{2,12}\.org$"},
    },
    "required": ["name", "age", "mood", "email"],
    "additionalProperties": False,
}
_NODE = {
    "type": "object",
    "properties": {
        "label": {"type": "string", "maxLength": 20},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "number"}]},
    },
    "required": ["label", "next"],
    "additionalProperties": False,
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "array", "items": _PERSON, "minItems": 50},
    {"type": "array", "items": {"type": "number"}, "minItems": 400},
    {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 50, "$defs": {"node": _NODE}},
    {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 40}, "minItems": 100},
)


def parse_beside(texts: list[str]) -> Beside:
    """`["grammar:16"]` -> (("grammar", 16),). ConfigError for anything else."""
    found = []
    for text in texts:
        kind, _, count = text.partition(":")
        if kind not in KINDS or not count.isdecimal() or int(count) < 1:
            raise ConfigError(f"--beside {text}: write KIND:N, with a kind of {', '.join(KINDS)}")
        found.append((kind, int(count)))
    return tuple(found)


@asynccontextmanager
async def running_beside(client: HttpClient, model: str, beside: Beside, flood: Flood) -> AsyncGenerator[None]:
    """Keep these requests running inside the block; at its end they are cut off. Raises NoriaError then if one failed."""
    kinds = [kind for kind, count in beside for _ in range(count)]
    tasks = [asyncio.create_task(_repeat(client, model, kind, flood, number)) for number, kind in enumerate(kinds)]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _repeat(client: HttpClient, model: str, kind: str, flood: Flood, number: int) -> None:
    import orjson

    rng = random.Random(number)
    while True:  # until it is cancelled, or fails
        path, body = _request(kind, rng, flood)
        await client.post(path, orjson.dumps({"model": model, "stream": True, **body}), _read)


def _request(kind: str, rng: random.Random, flood: Flood) -> tuple[str, dict[str, Any]]:
    """(path, body without the model) of another request of a kind."""
    if kind == "flood":
        return "/v1/completions", {"prompt": flood(rng), "max_tokens": 1}
    messages = [{"role": "user", "content": random_words(rng, PROMPT_WORDS)}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0.8}
    if kind == "plain":
        return "/v1/chat/completions", body | {"ignore_eos": True}
    return "/v1/chat/completions", body | {"response_format": random_schema(rng)}


def random_schema(rng: random.Random) -> dict[str, Any]:
    """A `response_format` with one of the schemas."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": rng.choice(SCHEMAS)}}


def _read(line: bytes) -> None:
    """Nothing of the answer is needed."""
