"""FreeBlocks: the blocks that nobody holds and nothing is cached in, handed out in runs of neighbouring ids.

The CPU backend stores 16 neighbouring ids together (a shelf, `native/kv_layout.h`), so that a sequence whose blocks are
neighbours is read as a stream: a decode step over contexts of 1,500 tokens takes 1.2 to 1.35 times as long with scattered ids.

    shelf 3   48 49 50 51 52 .. 63      next behind 49 is 50; if that is taken, the next in the shelf
    shelf 4   64 65 66 .. 79            a run begins in the shelf that has most free blocks: others will not soon be in its way

All operations take constant time: at most 17 counts and 16 blocks are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from noria.core.plan import NULL_BLOCK

SHELF = 16


class FreeBlocks:
    """A set of block ids."""

    __slots__ = ("_blocks", "_in_shelf", "_shelves")

    def __init__(self, num_blocks: int) -> None:
        """All of [1, num_blocks)."""
        self._blocks: set[int] = set()
        self._in_shelf = [0] * (num_blocks // SHELF + 1)
        self._shelves: list[dict[int, None]] = [{} for _ in range(SHELF + 1)]  # by the number of their free blocks
        self._shelves[0] = dict.fromkeys(range(len(self._in_shelf)))
        self.extend(range(num_blocks - 1, NULL_BLOCK, -1))  # low ids are handed out first

    def add(self, block: int) -> None:
        """A block that is not in the set becomes free."""
        self._blocks.add(block)
        self._count(block // SHELF, 1)

    def extend(self, blocks: Iterable[int]) -> None:
        """Several blocks become free."""
        for block in blocks:
            self.add(block)

    def take(self, after: int) -> int:
        """The best block to follow block `after` in a table (NULL_BLOCK: to begin one). There is one."""
        block = after + 1
        if block not in self._blocks or block % SHELF == 0 or after == NULL_BLOCK:
            block = self._next(after)
        self._blocks.remove(block)
        self._count(block // SHELF, -1)
        return block

    def _next(self, after: int) -> int:
        """Where the next block is not free: one behind it in its shelf, or the first of the shelf that has most."""
        if after != NULL_BLOCK:
            for block in range(after + 2, (after // SHELF + 1) * SHELF):
                if block in self._blocks:
                    return block
        shelf = next(next(reversed(shelves)) for shelves in reversed(self._shelves) if shelves)
        return next(block for block in range(shelf * SHELF, (shelf + 1) * SHELF) if block in self._blocks)

    def _count(self, shelf: int, change: int) -> None:
        count = self._in_shelf[shelf]
        del self._shelves[count][shelf]
        self._shelves[count + change][shelf] = None
        self._in_shelf[shelf] = count + change

    def check(self) -> list[str]:
        """What is wrong with the counts; nothing, unless there is a fault here."""
        expected = [0] * len(self._in_shelf)
        for block in self._blocks:
            expected[block // SHELF] += 1
        listed = {shelf: count for count, shelves in enumerate(self._shelves) for shelf in shelves}
        if expected != self._in_shelf or any(listed[shelf] != count for shelf, count in enumerate(expected)):
            return ["the free blocks of a shelf are counted wrongly"]
        return []

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)
