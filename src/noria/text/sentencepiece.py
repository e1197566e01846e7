"""SentencePiece BPE: reading `tokenizer.model`, and writing its scores as merges.

SentencePiece's BPE joins, again and again, the adjacent pair whose concatenation is the piece with the best score (the leftmost
of equals). Merge-list BPE joins the adjacent pair that stands first in a list. The two are equal when the list holds every
way to cut a piece into two pieces, ordered by the score of the whole: whichever cut is reached, it has the rank of its piece.

The order among the cuts of one piece does not matter, because at most one of them is ever reached. When two symbols L and R
are adjacent, all joins so far inside L + R were best among all joins in the text, hence best among those inside L + R, so that
L + R alone would have come to the same two symbols; and what L + R alone comes to is one cut.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from noria.text.source import TokenizerSource, TokenType
from noria.types import LoadError

Merge = tuple[str, str]

_BPE = 2  # TrainerSpec.ModelType


def merges_from_scores(source: TokenizerSource) -> list[Merge]:
    """The merges of a SentencePiece vocabulary, best first. About a second for 262,144 pieces."""
    rank = {
        text: -score
        for text, score, kind in zip(source.tokens, source.scores, source.types, strict=True)
        if kind == TokenType.NORMAL
    }
    cuts = []
    for piece, order in rank.items():
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in rank:
                right = piece[cut:]
                if right in rank:
                    cuts.append((order, cut, left, right))
    cuts.sort()
    return [(left, right) for _, _, left, right in cuts]


def read_sentencepiece(path: Path) -> TokenizerSource:
    """The tokenizer in a `tokenizer.model` file (a protocol buffer, sentencepiece_model.proto).

    Raises LoadError if the file is damaged or holds another algorithm than BPE. Whether a start token is added is not in the
    file; it is what Llama's tokenizers do by default.
    """
    try:
        return _source(path, path.read_bytes())
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from None
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise LoadError(f"{path} is not a SentencePiece model, or is damaged: {error}") from None


def _source(path: Path, data: bytes) -> TokenizerSource:
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:  # ModelProto.pieces
            piece = dict(_fields(_message(value)))
            tokens.append(_message(piece.get(1, b"")).decode())
            scores.append(struct.unpack("<f", _message(piece[2]))[0] if 2 in piece else 0.0)
            types.append(int(piece.get(3, TokenType.NORMAL)))
        elif number == 2:  # trainer_spec
            trainer = dict(_fields(_message(value)))
        elif number == 3:  # normalizer_spec
            normalizer = dict(_fields(_message(value)))
    if not tokens:
        raise ValueError("it has no pieces")
    if trainer.get(3, 1) != _BPE:
        raise LoadError(
            f"{path} is a SentencePiece model of another kind than BPE; Noria reads BPE: convert it to tokenizer.json"
        )
    special = {name: _signed(trainer.get(number, default)) for name, number, default in _SPECIAL_IDS}
    ids = {name: i if 0 <= i < len(tokens) else None for name, i in special.items()}
    return TokenizerSource(
        kind="spm",
        tokens=tokens,
        types=types,
        scores=scores,
        add_bos=ids["bos"] is not None,
        add_space_prefix=bool(normalizer.get(3, 1)),
        charsmap=_message(normalizer.get(2, b"")),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unk_id=ids["unk"],
        pad_id=ids["pad"],
    )


# TrainerSpec's special ids: name, field number, default.
_SPECIAL_IDS = (("unk", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("pad", 43, -1))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol buffer message: (number, integer or bytes). Fixed-width values come as their bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire} at byte {position}")
        if position + length > len(data):
            raise ValueError(f"it ends inside a field, at byte {len(data)}")
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """An integer in base 128, low digits first, and the position behind it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError(f"a number is too long at byte {position}")


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field that must be a message is a number")
    return value


def _signed(value: int) -> int:
    """An int32 as protocol buffers write it: negative numbers as 64-bit two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value
