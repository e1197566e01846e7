"""Why a block was not in the prefix cache, as far as a bounded memory can tell.

Three things are remembered beside the index: the keys that were evicted last, the text that followed each cached block last,
and the root under which each first block was seen last. All are of the index's own size or have a limit.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

NEVER_SEEN: Final = "never seen"
EVICTED: Final = "evicted"
OTHER_ROOT: Final = "other salt"  # the same tokens are known under another tenant's salt, or another adapter
SHORT: Final = "first block incomplete"
SCORED: Final = "prompt logprobs"  # what has to be scored has to be computed
OFF: Final = "prefix caching is off"

_EVICTED_KEPT = 16_384  # keys: about 4 MiB
_FIRST_KEPT = 1_024


def diverged(position: int) -> str:
    """The tokens were those of cached text up to `position`, where another one follows."""
    return f"diverged at token {position}"


class Misses:
    """Notes what the index gains and loses, and explains a miss with it."""

    def __init__(self) -> None:
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._next: dict[bytes, tuple[bytes, bytes]] = {}  # key or root -> (key, tokens) of the block last cached behind it
        self._first: OrderedDict[bytes, bytes] = OrderedDict()  # tokens of a first block -> root

    def cached(self, key: bytes, parent: bytes, packed: bytes, first: bool) -> None:
        """A block became findable behind `parent`, which is the root if it is the `first`."""
        self._next[parent] = (key, packed)
        if first:
            self._first[packed] = parent
            self._first.move_to_end(packed)
            if len(self._first) > _FIRST_KEPT:
                self._first.popitem(last=False)

    def evicted(self, key: bytes, parent: bytes) -> None:
        """A block can no longer be found."""
        self._evicted[key] = None
        self._evicted.move_to_end(key)
        if len(self._evicted) > _EVICTED_KEPT:
            self._evicted.popitem(last=False)
        following = self._next.get(parent)
        if following is not None and following[0] == key:
            del self._next[parent]

    def forget(self) -> None:
        """The cache was reset: nothing was ever seen."""
        self._evicted.clear()
        self._next.clear()
        self._first.clear()

    def explain(self, key: bytes, parent: bytes, packed: bytes, index: int) -> str:
        """Why block `index`, the first that a lookup lacked, is not cached. `parent` is the root for index 0."""
        if key in self._evicted:
            return EVICTED
        following = self._next.get(parent)
        if following is not None and following[0] == key:
            return EVICTED  # it is cached, but not in every layer group whose window needs it
        if index == 0 and self._first.get(packed, parent) != parent:
            return OTHER_ROOT
        if following is not None:
            same = _common_tokens(following[1], packed)
            if index or same:
                return diverged(index * (len(packed) // 4) + same)
        return NEVER_SEEN


def _common_tokens(a: bytes, b: bytes) -> int:
    """How many 4-byte ids two blocks have in common before the first that differs."""
    return next((i for i in range(0, len(a), 4) if a[i : i + 4] != b[i : i + 4]), len(a)) // 4
