"""BlockPool: who owns each block of the KV memory, and which blocks can be found again by key.

Every block but the null block is in exactly one of three conditions:

    free        no references, no key
    referenced  in the tables of `refs` sequences (with or without a key)
    cached      no references, a key: can be found, and can be evicted

Eviction takes the cached block that was released first, and begins when an eighth of the blocks is left free: sequences whose
blocks are neighbours are faster to read, which is worth more than so many cached blocks (`kv/free.py`). Callers release the
blocks of a full-attention group from the tail to the head, and those of a window group from the oldest position on. A holder
of a full-attention block holds all blocks before it, so a block is always released (again) after its children, and least
recently used first is also leaves first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from noria.core.plan import NULL_BLOCK
from noria.kv.free import FreeBlocks
from noria.kv.misses import Misses

_RESERVE = 8  # one block in so many is kept free of cached ones, so that runs of neighbours are free (`kv/free.py`)

ABSENT = 0  # outcomes of `find` that are not a block
COLLISION = -1


class BlockPool:
    """The blocks [1, num_blocks) and the index (group, key) -> block. Raises nothing: callers ask `available` first."""

    __slots__ = ("_free", "_group", "_index", "_key", "_packed", "_parent", "_reserve", "cached", "misses", "refs", "size")

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.size = num_blocks - 1  # without the null block
        self.refs = [0] * num_blocks
        self.cached: OrderedDict[int, None] = OrderedDict()  # next to be evicted first
        self.misses = Misses()
        self._free = FreeBlocks(num_blocks)
        self._reserve = self.size // _RESERVE
        self._index: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._key: list[bytes] = [b""] * num_blocks  # b"": none
        self._parent: list[bytes] = [b""] * num_blocks
        self._packed: list[bytes] = [b""] * num_blocks
        self._group = [0] * num_blocks

    @property
    def available(self) -> int:
        """Blocks that `take` can give: free ones, and cached ones to evict."""
        return len(self._free) + len(self.cached)

    @property
    def referenced(self) -> int:
        """Blocks that sequences hold."""
        return self.size - self.available

    def take(self, count: int, after: int = NULL_BLOCK) -> list[int]:
        """`count` blocks with one reference each and no key, to follow block `after` in a table; at most `available`."""
        free = self._free
        lacking = count + self._reserve - len(free)
        if lacking > 0:
            self._evict(lacking)
        taken = []
        for _ in range(count):
            after = free.take(after)
            self.refs[after] = 1
            taken.append(after)
        return taken

    def _evict(self, count: int) -> None:
        """Free `count` cached blocks, or as many as there are."""
        for _ in range(min(count, len(self.cached))):
            block, _ = self.cached.popitem(last=False)
            self.misses.evicted(self._key[block], self._parent[block])
            self._forget(block)
            self._free.add(block)

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each block, which is referenced or cached; null blocks are passed over."""
        refs, cached = self.refs, self.cached
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if refs[block] == 0:
                del cached[block]
            refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each block, in the order in which they should be evicted; null blocks are passed over."""
        refs = self.refs
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            refs[block] -= 1
            if refs[block] == 0:
                if self._key[block]:
                    self.cached[block] = None
                else:
                    self._free.add(block)

    def find(self, group: int, key: bytes, parent: bytes, packed: bytes) -> int:
        """The block of (group, key), verified: ABSENT, or COLLISION if the block under this key holds other tokens."""
        block = self._index[group].get(key, ABSENT)
        if block and (self._packed[block] != packed or self._parent[block] != parent):
            return COLLISION
        return block

    def register(self, block: int, group: int, key: bytes, parent: bytes, packed: bytes) -> None:
        """Make a referenced block findable; (group, key) is ABSENT."""
        self._index[group][key] = block
        self._key[block], self._parent[block], self._packed[block], self._group[block] = key, parent, packed, group

    def forget_all(self) -> None:
        """Drop the whole index: cached blocks become free, referenced blocks can no longer be found."""
        self._free.extend(self.cached)
        self.cached.clear()
        self.misses.forget()
        for index in self._index:
            for block in list(index.values()):
                self._forget(block)

    def _forget(self, block: int) -> None:
        del self._index[self._group[block]][self._key[block]]
        self._key[block] = self._parent[block] = self._packed[block] = b""

    def check(self, full_groups: Iterable[int]) -> list[str]:
        """What is wrong with the pool itself; nothing, unless there is a fault in this package."""
        faults = self._free.check()
        free = set(self._free)
        if free & self.cached.keys():
            faults.append(f"free and cached at once: {sorted(free & self.cached.keys())}")
        held = {block for block, refs in enumerate(self.refs) if refs}
        if len(free) + len(self.cached) + len(held) != self.size or held & (free | self.cached.keys()):
            faults.append(f"free {len(free)} + cached {len(self.cached)} + referenced {len(held)} != {self.size} blocks")
        if NULL_BLOCK in free | held | self.cached.keys() or min(self.refs) < 0:
            faults.append("the null block is in use, or a count is negative")
        for group, index in enumerate(self._index):
            faults += [
                f"index of group {group} names block {block}, whose key or group is another"
                for key, block in index.items()
                if self._key[block] != key or self._group[block] != group or block in free
            ]
        named = sum(map(len, self._index))
        if named != sum(1 for key in self._key if key) or any(not self._key[block] for block in self.cached):
            faults.append("a block has a key that the index lacks, or is cached without a key")
        return faults + [fault for group in full_groups for fault in self._check_leaves_first(group)]

    def _check_leaves_first(self, group: int) -> list[str]:
        """In a full-attention group a cached child goes before its parent, so no block outlives its parent."""
        index = self._index[group]
        order = {block: place for place, block in enumerate(self.cached)}
        faults = []
        for block in index.values():
            parent = index.get(self._parent[block])
            if parent is None:
                continue
            if block in order and parent in order and order[parent] < order[block]:
                faults.append(f"block {parent} of group {group} would be evicted before its child {block}")
            if block not in order and parent in order:
                faults.append(f"block {block} of group {group} is referenced, its parent {parent} is not")
        return faults
