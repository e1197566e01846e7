"""How many values a JSON text holds, counted while other threads run.

A parser holds the interpreter's lock from the first byte to the last. For text that is a copy (16 MiB in 10 to 30 ms); for
small values it is an object each, and 16 MiB of `[],[],` stop every stream of the server for more than a second. So a long body
is counted first, by numpy, which lets the lock go.
"""

from __future__ import annotations

from noria.types import RequestError

MAX_VALUES = 1 << 19  # of one body: as token ids, 64 contexts of 8,192
MAX_CONTAINERS = 1 << 16  # objects and lists among them: these cost the most, and the collector looks at each
UNCOUNTED_BYTES = 1 << 18  # a body of this size cannot hold many
PIECE = 1 << 20


def check_values(data: bytes) -> None:
    """Raise RequestError 413 for a body with more values than these. Anything may be passed; only JSON is counted right."""
    if len(data) <= UNCOUNTED_BYTES:
        return
    commas, containers = count_values(data)
    for found, most, what in ((commas, MAX_VALUES, "values"), (containers, MAX_CONTAINERS, "objects and lists")):
        if found > most:
            message = f"the request body holds more than {most} {what}: send several requests, or text instead of token ids"
            raise RequestError(message, status=413, code="body_too_large")


def count_values(data: bytes) -> tuple[int, int]:
    """(commas, opening brackets) outside of strings: as many values but one a container, and as many containers."""
    import numpy as np  # for long bodies only: it takes longer to load than a short one to parse

    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of quotes begins or ends a string
    commas, containers, inside = 0, 0, np.uint8(0)
    for at in range(0, len(data), PIECE):
        piece = np.frombuffer(data, np.uint8, min(PIECE, len(data) - at), at)
        strings = np.bitwise_xor.accumulate((piece == ord('"')).view(np.uint8)) ^ inside
        outside = strings == 0
        commas += int(np.count_nonzero((piece == ord(",")) & outside))
        containers += int(np.count_nonzero(((piece == ord("[")) | (piece == ord("{"))) & outside))
        inside = strings[-1]
    return commas, containers
