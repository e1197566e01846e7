"""What an answer's text turns out to be, piece by piece: content, reasoning, tool calls.

The parser of a format (see `noria.text.parsing`) turns text into these events; every API dialect draws them in its own shape.
Joined by kind (and by call), the events of one choice do not depend on how its text was cut into pieces.
"""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True, tag=True):
    """More of the answer proper."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, tag=True):
    """More of the text that the model thinks aloud before the answer."""

    text: str


class CallStart(msgspec.Struct, frozen=True, tag=True):
    """A tool call begins. `index` counts the calls of one choice from 0."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True, tag=True):
    """More of a call's arguments: joined, they are one JSON object."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments
