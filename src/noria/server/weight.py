"""How much a JSON body holds, weighed before it is decoded.

A decoder makes its values in one go, and no other thread of the process runs meanwhile, the event loop neither: 16 MB of empty
lists hold up every stream for two seconds. What decoding costs is told by commas, colons and brackets. They are counted piece
by piece, between which other threads have their turn, and a body that weighs too much is never decoded.

    piece                       {"a\\"b": "c,d", "e": [1, 2]}
    without what is escaped     {"ab": "c,d", "e": [1, 2]}
    every other part by quotes  {    :     ,     : [1, 2]}

A text that is no JSON is weighed right as far as a decoder gets.
"""

from __future__ import annotations

from collections.abc import Iterator

from noria.types import RequestError

MAX_WEIGHT = 1 << 19  # at most some 20 ms of decoding
NODE_WEIGHT = 8  # of a list, an object, or a member of one: some 300 ns, of which the garbage collector takes most
PIECE_BYTES = 1 << 16
ESCAPE = b"\\"


def check_weight(data: bytes) -> None:
    """Raise RequestError for a JSON text that takes too long to decode, whatever its length."""
    if len(data) * NODE_WEIGHT <= MAX_WEIGHT:
        return
    weight = 0
    for part in outside_strings(data):
        weight += part.count(b",") + NODE_WEIGHT * (part.count(b"[") + part.count(b"{") + part.count(b":"))
        if weight > MAX_WEIGHT:
            raise RequestError(
                f"the request body holds too much to be decoded at once: at most {MAX_WEIGHT} values, where a list, an object "
                f"and each member of an object count as {NODE_WEIGHT}",
                code="body_too_complex",
            )


def outside_strings(data: bytes, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """What stands between the strings of a JSON text, from pieces of at most `piece_bytes` + 1 bytes."""
    start, inside = 0, 0
    while start < len(data):
        piece = data[start : start + piece_bytes]
        if (len(piece) - len(piece.rstrip(ESCAPE))) % 2:  # it ends within an escape
            piece = data[start : start + piece_bytes + 1]
        parts = piece.replace(ESCAPE * 2, b"").replace(ESCAPE + b'"', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside = (inside + len(parts) - 1) % 2
        start += len(piece)
