"""How many values a JSON text holds, counted while other threads run.

A parser holds the interpreter's lock from the first byte to the last. For text that is a copy (16 MiB in 3 to 30 ms); for
small values it is an object each, and 16 MiB of `[],[],` stop every stream of the server for more than a second. So a long body
is counted first, in pieces, between which the lock changes hands.

    piece                       {"a\\"b": "c,d", "e": [1, 2]}
    without what is escaped     {"ab": "c,d", "e": [1, 2]}
    every other part by quotes  {    :     ,     : [1, 2]}
"""

from __future__ import annotations

from noria.types import RequestError

MAX_VALUES = 1 << 19  # of one body: as token ids, 64 contexts of 8,192
MAX_NODES = 1 << 16  # objects, lists and members of objects among them: these cost the most, and the collector looks at each
UNCOUNTED_BYTES = 1 << 17  # a body of this size cannot hold many
PIECE = 1 << 16
ESCAPE = b"\\"


def check_values(data: bytes) -> None:
    """Raise RequestError 413 for a body with more values than these. Anything may be passed; only JSON is counted right."""
    if len(data) <= UNCOUNTED_BYTES:
        return
    commas, nodes = count_values(data)
    for found, most, what in ((commas, MAX_VALUES, "values"), (nodes, MAX_NODES, "objects, lists and members of objects")):
        if found > most:
            message = f"the request body holds more than {most} {what}: send several requests, or text instead of token ids"
            raise RequestError(message, status=413, code="body_too_large")


def count_values(data: bytes) -> tuple[int, int]:
    """(commas, opening brackets and colons) outside of strings: as many values but one a container, and as many nodes."""
    commas = nodes = start = inside = 0
    while start < len(data):
        piece = data[start : start + PIECE]
        if (len(piece) - len(piece.rstrip(ESCAPE))) % 2:  # it ends within an escape
            piece = data[start : start + PIECE + 1]
        parts = piece.replace(ESCAPE * 2, b"").replace(ESCAPE + b'"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        commas += outside.count(b",")
        nodes += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
        inside = (inside + len(parts) - 1) % 2
        start += len(piece)
    return commas, nodes
