"""Block keys: what they depend on, and that they never change by accident."""

from __future__ import annotations

import pytest

from noria.kv.keys import BLOCK_SIZE, block_key, pack_tokens, root_key


def test_keys_are_the_same_in_every_process_and_version() -> None:
    """Red when the bytes that are hashed change without a new FORMAT_VERSION: keys live on disk."""
    root = root_key(b"model", salt="tenant", adapter=b"a", media=b"m")
    key = block_key(root, pack_tokens(*range(BLOCK_SIZE)))
    assert (root.hex(), key.hex()) == ("3197af0692fd5adf8ee366cb6614de48", "89ca31f15a6eb5a2404f7370b3379670")


def test_tokens_are_little_endian_words() -> None:
    """Red when tokens are packed in the machine's own order or width."""
    assert pack_tokens(1, 262143, *[0] * 14) == bytes([1, 0, 0, 0, 255, 255, 3, 0]) + bytes(56)


@pytest.mark.parametrize(
    "other",
    [
        root_key(b"model2", salt="s"),
        root_key(b"model", salt="t"),
        root_key(b"model"),
        root_key(b"model", salt="s", adapter=b"x"),
        root_key(b"model", salt="s", media=b"x"),
        root_key(b"models"),
        root_key(b"model", adapter=b"s"),
    ],
)
def test_every_field_of_the_root_separates(other: bytes) -> None:
    """Red when a field of the root is left out, or when fields are joined without their lengths."""
    assert other != root_key(b"model", salt="s")


def test_a_key_depends_on_the_parent_and_on_each_token() -> None:
    """Red when a key forgets its parent, or a token."""
    root = root_key(b"model")
    tokens = list(range(BLOCK_SIZE))
    keys = {block_key(root, pack_tokens(*tokens)), block_key(root_key(b"other"), pack_tokens(*tokens))}
    for place in range(BLOCK_SIZE):
        changed = tokens.copy()
        changed[place] += 1
        keys.add(block_key(root, pack_tokens(*changed)))
    assert len(keys) == 2 + BLOCK_SIZE
