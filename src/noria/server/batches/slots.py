"""How many lines of batches may be in the engine at once: what interactive traffic leaves, and never all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from noria.types import EngineStats

POLL_S = 0.05  # between two looks, while lines wait
SHARE = 0.75  # of the rows, at most: a request that arrives finds a free one


class Slots:
    """Shared by all batches. A line that waits holds the turn, so batches take turns line by line.

    `interactive` counts the open requests of clients: they are known here before the engine's figures show them.
    """

    def __init__(self, max_num_seqs: int, stats: Callable[[], EngineStats], interactive: Callable[[], int]) -> None:
        self._most = max(1, int(max_num_seqs * SHARE))
        self._stats = stats
        self._interactive = interactive
        self._taken = 0
        self._turn = asyncio.Lock()  # first come, first served

    async def take(self) -> None:
        """Wait for room. `give` must follow."""
        async with self._turn:
            while not self._room():
                await asyncio.sleep(POLL_S)
            self._taken += 1

    def give(self) -> None:
        """A line has ended."""
        self._taken -= 1

    def _room(self) -> bool:
        """Nobody waits for admission, and the rows of others and ours leave some."""
        stats = self._stats()
        others = max(self._interactive(), stats.running - self._taken)  # one request may have several rows
        return stats.waiting == 0 and self._taken + others < self._most
