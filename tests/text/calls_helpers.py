"""Transcripts of tool calls and reasoning: the golden ones, and random ones made of their pieces."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from noria.text.call_formats import CALL_FORMATS, REASONING_FORMATS, CallFormat
from noria.text.events import CallArguments, CallStart, Content, Event, Reasoning
from noria.text.parsing import ParsePlan, Parser

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "calls").glob("*.json"))
KINDS = {kind.__name__: kind for kind in (Content, Reasoning, CallStart, CallArguments)}


@functools.cache
def golden(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def call_format_named(name: str) -> CallFormat:
    return next(f for f in CALL_FORMATS if name in f.names)


def plan_of(case: dict[str, Any], **options: Any) -> ParsePlan:
    reasoning = next((f for f in REASONING_FORMATS if case["reasoning"] in f.names), None)
    return ParsePlan(reasoning, call_format_named(case["calls"]), case["tools"], **options)


def expected(case: dict[str, Any]) -> list[Event]:
    return [KINDS[e["type"]](**{k: v for k, v in e.items() if k != "type"}) for e in case["events"]]


def parsed(plan: ParsePlan, pieces: Iterable[str]) -> list[Event]:
    """The joined events of a text that comes in pieces."""
    parser = Parser(plan)
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return joined(events + list(parser.finish()))


def joined(events: Sequence[Event]) -> list[Event]:
    """Neighbouring events of one kind (and call) as one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Content | Reasoning) and type(last) is type(event):
            out[-1] = type(event)(last.text + event.text)  # type: ignore[union-attr]
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            out[-1] = CallArguments(event.index, last.text + event.text)
        else:
            out.append(event)
    return out


def cut(text: str, rng: random.Random) -> list[str]:
    """The text in random pieces, single characters and long ones."""
    pieces = []
    while text:
        n = rng.choice((1, 1, 2, 3, 5, 8, 30))
        pieces.append(text[:n])
        text = text[n:]
    return pieces


def random_transcript(case: dict[str, Any], rng: random.Random) -> str:
    """Pieces of a golden transcript in disorder: calls, half calls, marks in the wrong places, plain text."""
    text = case["text"]
    calls = call_format_named(case["calls"])
    marks = [*calls.starts, *calls.hidden, *calls.ignored, "<think>", "</think>"]
    parts = []
    for _ in range(rng.randint(1, 6)):
        start = rng.randrange(len(text))
        match rng.randrange(5):
            case 0:
                parts.append(text)
            case 1:
                parts.append(text[start : start + rng.randint(1, 80)])
            case 2:
                parts.append(rng.choice(marks))
            case 3:
                parts.append(rng.choice(("Hello, world. ", "\n\n", " ", '{"name": ', "[1, 2]", "<", "é漢🙂", '"', "}", "]\n")))
            case 4:
                parts.append(text[:start])
    return "".join(parts)
