"""Block keys: the content address of 16 tokens and of everything that determines their KV.

    root ──► key 0 ──► key 1 ──► ...        key i = BLAKE2b-128(key i-1, tokens [16 i, 16 i + 16))

A key names no layer group: the pool and the cache address (key, group). Keys are the same in every process and on disk.
Hash: RFC 7693, keyed mode, so that our keys can never equal another program's digest of the same bytes.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

BLOCK_SIZE = 16  # tokens
FORMAT_VERSION = 1  # raise it when the meaning of a key changes
KEY_BYTES = 16

_DOMAIN = b"noria kv block"
_ROOT_DOMAIN = b"noria kv root"

pack_tokens = struct.Struct(f"<{BLOCK_SIZE}I").pack
"""A block's 16 token ids as little-endian uint32: what is hashed, and what a lookup compares."""


def root_key(model_tag: bytes, *, salt: str = "", adapter: bytes = b"", media: bytes = b"") -> bytes:
    """The parent of a sequence's first block.

    `model_tag` names the packed weights and config, the numerics revision and the KV dtype; `salt` separates tenants;
    `adapter` and `media` are content hashes. Every field is hashed with its length, so that none can pose as its neighbour.
    """
    digest = blake2b(struct.pack("<I", FORMAT_VERSION), digest_size=KEY_BYTES, key=_ROOT_DOMAIN)
    for field in (model_tag, adapter, salt.encode(), media):
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.digest()


def block_key(parent: bytes, packed: bytes) -> bytes:
    """The key of the block that holds `packed` (see `pack_tokens`) after the block, or root, named `parent`."""
    return blake2b(parent + packed, digest_size=KEY_BYTES, key=_DOMAIN).digest()
