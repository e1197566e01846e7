"""KVCache: the block tables of sequences over all layer groups, and the prefix cache between them.

One pool serves every group. A sequence's table of a group is indexed by absolute block number:

    full-attention group    [ b  b  b  b  b ]         every block from 0 on
    window group            [ 0  0  0  b  b ]         null blocks where the window has passed, position by position:

    0          computed - window + 1      computed        computed + in flight
    |--- given back ---|------ held: keys in reach -------|--- being written ---|

A query at position p sees the keys in (p - window, p], so position p - window + 1 is the first that is still needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from noria.core.plan import NULL_BLOCK
from noria.kv.keys import BLOCK_SIZE, block_key, pack_tokens, root_key
from noria.kv.misses import OFF, SCORED, SHORT
from noria.kv.pool import ABSENT, COLLISION, BlockPool
from noria.models.spec import LayerGroup

Blocks = tuple[tuple[int, ...], ...]  # by layer group


class Hit(NamedTuple):
    """What a lookup found: the KV of the first `blocks` blocks, and the tables that hold it."""

    blocks: int
    tables: list[list[int]]  # by group, null blocks before the window
    shared: int  # how many of them are referenced already, so that taking them costs no memory


class Table:
    """One sequence's KV: block tables by group, and the keys of its full blocks.

    Keys outlive the blocks: a sequence that lost its blocks looks them up again without hashing.
    """

    __slots__ = (
        "blocks",
        "borrowed",
        "capacity",
        "committed",
        "copies",
        "due",
        "keyed",
        "keys",
        "nulls",
        "packed",
        "replaced",
        "root",
        "row",
        "told",
    )

    def __init__(self, root: bytes, num_groups: int) -> None:
        self.root = root
        self.keys: list[bytes] = []  # of full blocks, as far as they were asked for
        self.packed: list[bytes] = []  # their tokens
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.nulls = [0] * num_groups  # leading null blocks of each group's table
        self.capacity = 0  # positions [0, capacity) have a place in the tables
        self.committed = 0  # blocks handed to the index (or known not to be keyed)
        self.due = 0  # `commit` has nothing to do before so many positions are computed
        self.keyed = True  # False: what follows cannot be shared (a collision, or the cache was reset)
        self.borrowed = 0  # blocks that were shared when they were taken
        self.row = -1  # the runner's row; -1: none
        self.told = [0] * num_groups  # `nulls` as the runner knows them
        self.replaced: list[tuple[int, int, int]] = []  # (group, index, block) that the runner has yet to learn
        self.copies: list[tuple[int, int]] = []  # (source, destination) due before the first step; sources are held

    @property
    def held(self) -> int:
        """Blocks in the tables, all groups together."""
        return sum(map(len, self.blocks)) - sum(self.nulls)


class KVCache:
    """Hands out, shares, finds and takes back blocks. `max_chunk`: most tokens of one sequence in flight at once."""

    def __init__(
        self, groups: Sequence[LayerGroup], num_blocks: int, model_tag: bytes, *, prefix_caching: bool, max_chunk: int
    ) -> None:
        self.windows = tuple(group.window for group in groups)
        self.full_groups = tuple(g for g, window in enumerate(self.windows) if not window)
        self.window_groups = tuple(g for g, window in enumerate(self.windows) if window)
        self.pool = BlockPool(num_blocks, len(groups))
        self.prefix_caching = prefix_caching
        self.marks: dict[bytes, Table] = {}  # key -> the running sequence that is about to compute it
        self.dirty: dict[Table, None] = {}  # tables with edits that the runner has yet to learn
        self._model_tag = model_tag
        self._max_chunk = max_chunk

    def table(self, salt: str) -> Table:
        """An empty table for a sequence of the tenant named by `salt`."""
        return Table(root_key(self._model_tag, salt=salt), len(self.windows))

    # Sizes

    def peak_blocks(self, length: int) -> int:
        """The most blocks that a sequence of `length` tokens holds at once while it is computed."""
        total = -(-length // BLOCK_SIZE)
        return sum(min(total, _touched(w - 1 + self._max_chunk)) if w else total for w in self.windows)

    def longest(self, limit: int) -> int:
        """The length, at most `limit`, up to which a sequence alone in the pool always fits; 0 if none does."""
        if self.peak_blocks(limit) <= self.pool.size:
            return limit
        fits, fails = 0, -(-limit // BLOCK_SIZE)  # in blocks
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.peak_blocks(middle * BLOCK_SIZE) <= self.pool.size:
                fits = middle
            else:
                fails = middle
        return fits * BLOCK_SIZE

    def room(self, table: Table) -> int:
        """The number of positions that `allocate` could cover now."""
        return table.capacity + self.pool.available // len(self.windows) * BLOCK_SIZE

    def waste(self, table: Table, computed: int, in_flight: int) -> tuple[int, ...]:
        """By group, places in the held blocks that no token needs: less than 16 of a full group, 32 of a window group.

        Needed are the tokens in flight and the computed ones, of a window group those in reach of the next query.
        """
        return tuple(
            BLOCK_SIZE * (len(blocks) - nulls) - in_flight - (min(computed, window - 1) if window else computed)
            for blocks, nulls, window in zip(table.blocks, table.nulls, self.windows, strict=True)
        )

    # Prefix cache

    def lookup(self, table: Table, tokens: Sequence[int], limit: int) -> Hit:
        """The longest cached prefix of `tokens`, in whole blocks and at most `limit` of them. Takes nothing.

        Block i of a full-attention group must be there for every i below the hit, block i of a window group where a
        query behind the hit sees it. Every block is verified by its tokens and its parent's key; with a full-attention
        group the walk from the root thereby verifies the whole prefix.
        """
        if not self.prefix_caching or limit <= 0:
            return Hit(0, [[] for _ in self.windows], 0)
        self._extend_keys(table, tokens, limit)
        found: list[list[int]] = [[] for _ in self.windows]
        count = limit
        for group in self.full_groups:
            blocks = found[group]
            for index in range(count):
                block = self._find(table, group, index)
                if block <= ABSENT:
                    break
                blocks.append(block)
            count = len(blocks)
        count = self._within_windows(table, count, found)
        for group in self.full_groups:
            del found[group][count:]
        refs = self.pool.refs
        shared = sum(1 for blocks in found for block in blocks if block != NULL_BLOCK and refs[block])
        return Hit(count, found, shared)

    def _within_windows(self, table: Table, count: int, found: list[list[int]]) -> int:
        """The most blocks, at most `count`, behind which every window group's reach is cached; fills in their tables."""
        if not self.window_groups:
            return count
        index = count
        while index > 0:  # downwards from the candidate `count`; a block that is missing makes it the new candidate
            index -= 1
            missing = False
            for group in self.window_groups:
                if index >= self._first_needed(group, count * BLOCK_SIZE):
                    missing = missing or self._find(table, group, index) <= ABSENT
            if missing:
                count = index
            elif index < min(self._first_needed(g, count * BLOCK_SIZE) for g in self.window_groups):
                break
        for group in self.window_groups:
            first = min(self._first_needed(group, count * BLOCK_SIZE), count)
            found[group] = [NULL_BLOCK] * first + [self._find(table, group, i) for i in range(first, count)]
        return count

    def explain(self, table: Table, length: int, hit_blocks: int, limit: int) -> str:
        """Why a lookup of `length` tokens and at most `limit` blocks hit no more than it did; "" if more was not possible."""
        if not self.prefix_caching:
            return OFF
        most = (length - 1) // BLOCK_SIZE
        if hit_blocks >= most:
            return "" if most else SHORT
        if hit_blocks >= limit:
            return SCORED
        parent = table.keys[hit_blocks - 1] if hit_blocks else table.root
        return self.pool.misses.explain(table.keys[hit_blocks], parent, table.packed[hit_blocks], hit_blocks)

    def acquire(self, table: Table, hit: Hit) -> None:
        """Give the blocks of a lookup, made since the pool last changed, to an empty table."""
        for group, blocks in enumerate(hit.tables):
            self.pool.acquire(blocks)
            table.blocks[group] = blocks
        for group in self.window_groups:
            table.nulls[group] = min(self._first_needed(group, hit.blocks * BLOCK_SIZE), hit.blocks)
        table.committed = hit.blocks
        table.capacity = hit.blocks * BLOCK_SIZE
        table.borrowed = hit.shared

    def producing(self, table: Table, hit_blocks: int, limit: int) -> bytes | None:
        """The last key of those after a hit that a running sequence is about to compute; None: the next one is not."""
        marks, keys = self.marks, table.keys
        if not marks:
            return None
        end = hit_blocks
        while end < limit and keys[end] in marks:
            end += 1
        return keys[end - 1] if end > hit_blocks else None

    def mark(self, table: Table, tokens: Sequence[int]) -> None:
        """Announce the full blocks of `tokens` that this table is about to compute."""
        if self.prefix_caching:
            self._extend_keys(table, tokens, len(tokens) // BLOCK_SIZE)
            for key in table.keys[table.committed : len(tokens) // BLOCK_SIZE]:
                self.marks.setdefault(key, table)

    def reset(self, holders: Iterable[Table]) -> None:
        """Forget all cached prefixes. What the tables in use hold stays theirs, and is not shared from here on."""
        self.pool.forget_all()
        for table in holders:
            self._unkey(table)

    # A sequence's blocks

    def allocate(self, table: Table, upto: int) -> Blocks | None:
        """Cover positions [0, upto): the new blocks by group, () if none are needed, None (and no change) if short."""
        groups = len(table.blocks)
        count = -(-(upto - table.capacity) // BLOCK_SIZE)
        if count <= 0:
            return ()
        if count * groups > self.pool.available:
            return None
        new = []
        for blocks in table.blocks:
            taken = self.pool.take(count, blocks[-1] if blocks else NULL_BLOCK)
            blocks += taken
            new.append(tuple(taken))
        table.capacity += count * BLOCK_SIZE
        return tuple(new)

    def commit(self, table: Table, tokens: Sequence[int], computed: int) -> None:
        """The KV of `tokens[:computed]` is there: key its new full blocks, then give back what the windows have left.

        Where (group, key) exists already, the table is pointed to that block and its own is freed: the bits are equal.
        """
        full = computed // BLOCK_SIZE
        if self.prefix_caching and table.committed < full:
            self._extend_keys(table, tokens, full)
            for index in range(table.committed, full):
                if table.keyed:
                    self._commit_block(table, index)
        table.committed = full
        table.due = (full + 1) * BLOCK_SIZE
        for group in self.window_groups:
            self._release_window(table, group, computed)
            leaves = (table.nulls[group] + 1) * BLOCK_SIZE + self.windows[group] - 1  # `computed` that gives a block back
            table.due = min(table.due, leaves)

    def _commit_block(self, table: Table, index: int) -> None:
        key, packed = table.keys[index], table.packed[index]
        parent = table.keys[index - 1] if index else table.root
        pool = self.pool
        existing = [pool.find(group, key, parent, packed) for group in range(len(table.blocks))]
        if COLLISION in existing:
            self._unkey(table)  # keys derived from this one would name two prefixes
            return
        if self.marks.get(key) is table:
            del self.marks[key]
        if ABSENT in existing:
            pool.misses.cached(key, parent, packed, first=index == 0)
        for group, (block, blocks) in enumerate(zip(existing, table.blocks, strict=True)):
            own = blocks[index]
            if block == ABSENT:
                pool.register(own, group, key, parent, packed)
            elif block != own:
                pool.acquire((block,))
                pool.release((own,))
                blocks[index] = block
                table.borrowed += 1
                if table.row >= 0:
                    table.replaced.append((group, index, block))
                    self.dirty[table] = None

    def _release_window(self, table: Table, group: int, computed: int) -> None:
        blocks, nulls = table.blocks[group], table.nulls[group]
        first = min(self._first_needed(group, computed), len(blocks))
        if first > nulls:
            self.pool.release(blocks[nulls:first])  # the oldest position is evicted first
            blocks[nulls:first] = [NULL_BLOCK] * (first - nulls)
            table.nulls[group] = first
            if table.row >= 0:
                self.dirty[table] = None

    def fork(self, parent: Table, child: Table, computed: int) -> bool:
        """Give `child` the KV of the parent's first `computed` positions: full blocks shared, the partial one copied.

        False (and no change) if the pool has no block for the copies, which are due before the child's first step.
        """
        full, partial = divmod(computed, BLOCK_SIZE)
        copies = len(self.windows) if partial else 0
        if copies > self.pool.available:
            return False
        child.keys, child.packed = parent.keys[:full], parent.packed[:full]
        child.committed, child.keyed = full, parent.keyed
        child.nulls = list(parent.nulls)
        for group, blocks in enumerate(parent.blocks):
            child.blocks[group] = blocks[:full]
            self.pool.acquire(blocks[:full])
            if partial:
                source, (destination,) = blocks[full], self.pool.take(1)
                self.pool.acquire((source,))
                child.copies.append((source, destination))
                child.blocks[group].append(destination)
        child.capacity = BLOCK_SIZE * len(child.blocks[0])
        child.borrowed = child.held - copies
        return True

    def free(self, table: Table) -> None:
        """Take all blocks back. They stay cached where they have keys, until others need the memory."""
        self.unmark(table)
        self.drop_copies(table)
        for group in self.window_groups:
            self.pool.release(table.blocks[group])  # oldest position first
        for group in self.full_groups:
            self.pool.release(reversed(table.blocks[group]))  # leaves first
        table.blocks = [[] for _ in self.windows]
        table.nulls = [0] * len(self.windows)
        table.told = [0] * len(self.windows)
        table.capacity = table.committed = table.borrowed = table.due = 0
        table.keyed = True
        table.replaced.clear()
        table.row = -1
        self.dirty.pop(table, None)

    def drop_copies(self, table: Table) -> list[tuple[int, int]]:
        """The copies that `table` waits for, now in a plan or no longer wanted: their sources are let go."""
        copies = table.copies
        if copies:
            table.copies = []
            self.pool.release(source for source, _ in copies)
        return copies

    def unmark(self, table: Table) -> None:
        """Others need not wait for this table any more."""
        for key in table.keys[table.committed :]:
            if self.marks.get(key) is table:
                del self.marks[key]

    # Keys

    def _unkey(self, table: Table) -> None:
        table.keyed = False
        self.unmark(table)

    def _extend_keys(self, table: Table, tokens: Sequence[int], blocks: int) -> None:
        keys, packed = table.keys, table.packed
        for index in range(len(keys), blocks):
            packed.append(pack_tokens(*tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]))
            keys.append(block_key(keys[-1] if keys else table.root, packed[-1]))

    def _find(self, table: Table, group: int, index: int) -> int:
        parent = table.keys[index - 1] if index else table.root
        return self.pool.find(group, table.keys[index], parent, table.packed[index])

    def _first_needed(self, group: int, position: int) -> int:
        """The first block of a window group that a query at `position` can see."""
        return max(0, position - self.windows[group] + 1) // BLOCK_SIZE


def _touched(length: int) -> int:
    """The most blocks that `length` consecutive positions can lie in."""
    return 1 if length <= 1 else (length - 2) // BLOCK_SIZE + 2
