"""Small vocabularies, and the masks of a constraint as sets of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from noria.core.constraint import Constraint
from noria.text.constraint import GrammarConstraint, RunGuard
from noria.text.forced import Foresight
from noria.text.grammar import Compiler, Vocabulary
from noria.types import StructuredOutput

BYTES = [bytes([byte]) for byte in range(256)]


def vocabulary(*words: str | bytes, ends: int = 1) -> Vocabulary:
    """All bytes, then `words` (a repeated one is another token of the same text), then `ends` end tokens."""
    tokens = BYTES + [word.encode() if isinstance(word, str) else word for word in words]
    first = len(tokens)
    return Vocabulary((*tokens, *(f"<end{i}>".encode() for i in range(ends))), tuple(range(first, first + ends)), (first,))


def masks(constraint: Constraint, size: int, drafts: Sequence[int] = ()) -> list[set[int]]:
    """What `fill` writes, as sets of tokens below `size`."""
    words = np.zeros((1 + len(drafts), -(-size // 32)), np.uint32)
    constraint.fill(words.ctypes.data, words.strides[0], drafts)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :size]
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def constraint(words: Vocabulary, kind: str, value: str = "", *, extra_ends: int = 0, guard: bool = False) -> GrammarConstraint:
    """A constraint before its first token, without the engine around it."""
    matcher = Compiler(words).compile(StructuredOutput(kind=kind, value=value))  # type: ignore[arg-type]
    return GrammarConstraint(matcher, extra_ends, RunGuard(words) if guard else None, Foresight(words))


def accepts(words: Vocabulary, kind: str, value: str, text: str) -> bool:
    """Whether a grammar takes `text` as a whole, byte by byte."""
    one = constraint(words, kind, value)
    for byte in text.encode():
        if one.ended or byte not in masks(one, len(words.tokens))[0]:
            return False
        one.accept(byte)
    return one.ended or words.ends[0] in masks(one, len(words.tokens))[0]
