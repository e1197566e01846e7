"""Buffers of a tape in one piece of memory: two buffers share addresses if no op of the tape uses both."""

from __future__ import annotations

from dataclasses import dataclass

from noria.backends.cpu.memory import address, anonymous

ALIGNMENT = 64


@dataclass(eq=False)
class Buffer:
    """`nbytes` that are in use from tape op `first` to tape op `last`, both included: the rows of one op run in any order."""

    nbytes: int
    first: int
    last: int
    offset: int = 0
    address: int = 0


class Arena:
    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self.nbytes = 0

    def buffer(self, nbytes: int, op: int) -> Buffer:
        """A buffer that op `op` writes first."""
        made = Buffer(-(-nbytes // ALIGNMENT) * ALIGNMENT, op, op)
        self._buffers.append(made)
        return made

    def allocate(self) -> None:
        """Give every buffer an address: the largest first, each at the lowest place free for its whole life."""
        placed: list[Buffer] = []
        for buffer in sorted(self._buffers, key=lambda b: -b.nbytes):
            beside = [p for p in placed if p.first <= buffer.last and buffer.first <= p.last]
            buffer.offset = 0
            for other in sorted(beside, key=lambda b: b.offset):
                if buffer.offset + buffer.nbytes <= other.offset:
                    break
                buffer.offset = max(buffer.offset, other.offset + other.nbytes)
            placed.append(buffer)
        self.nbytes = max((b.offset + b.nbytes for b in placed), default=0)
        self.memory = anonymous(self.nbytes)
        for buffer in placed:
            buffer.address = address(self.memory) + buffer.offset
