"""The merges of a scored vocabulary, kept on disk: working them out takes a second for Gemma's, reading them a tenth.

The file is named by a hash of the vocabulary, so that it can never be stale:

    "NORIAMRG" | pairs of uint32 (left id, right id), little-endian, best first | BLAKE2b-128 of all before it
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
from array import array
from pathlib import Path

from noria.text.sentencepiece import Merge, merges_from_scores
from noria.text.source import TokenizerSource

log = logging.getLogger(__name__)

_MAGIC = b"NORIAMRG"
_DIGEST_BYTES = 16


def cached_merges(source: TokenizerSource, cache_dir: Path | None) -> list[Merge]:
    """`merges_from_scores(source)`, from the cache if it is there. Without `cache_dir`, nothing is read or written."""
    if cache_dir is None:
        return merges_from_scores(source)
    path = cache_dir / "tokenizers" / f"{_vocabulary_key(source)}.merges"
    merges = _read(path, source)
    if merges is None:
        merges = merges_from_scores(source)
        try:
            _write(path, source, merges)
        except OSError as error:
            log.warning("cannot cache the tokenizer in %s: %s", path, error.strerror)
    return merges


def _vocabulary_key(source: TokenizerSource) -> str:
    digest = hashlib.blake2b(_MAGIC, digest_size=_DIGEST_BYTES)
    for text in ("\0".join(source.tokens), repr([len(t) for t in source.tokens if "\0" in t])):
        digest.update(text.encode())
    digest.update(array("b", source.types).tobytes())
    digest.update(array("d", source.scores).tobytes())
    return digest.hexdigest()


def _read(path: Path, source: TokenizerSource) -> list[Merge] | None:
    """The cached merges; None if there are none, or if the file is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not body.startswith(_MAGIC) or _digest(body) != digest:
        log.warning("the cached tokenizer %s is damaged and is made again", path)
        return None
    ids = array("I")
    ids.frombytes(body[len(_MAGIC) :])
    if sys.byteorder == "big":
        ids.byteswap()
    text = source.tokens.__getitem__
    return list(zip(map(text, ids[0::2]), map(text, ids[1::2]), strict=True))


def _write(path: Path, source: TokenizerSource, merges: list[Merge]) -> None:
    """Write the file aside and rename it, so that another process never sees half of it."""
    number = {text: i for i, text in enumerate(source.tokens)}
    ids = array("I", [number[text] for merge in merges for text in merge])
    if sys.byteorder == "big":
        ids.byteswap()
    body = _MAGIC + ids.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body + _digest(body))
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
