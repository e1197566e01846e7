"""Forced text: what a grammar leaves no choice about, and the tokens that a model is likely to write it in.

    the grammar allows     only texts that begin with   shipping_address":"
    the mask has           s  sh  ship                  the tokens that can begin it
    the guess              sh ipping _ address ":"      what byte pair encoding makes of the whole

A mask seldom leaves one token. It leaves all tokenisations of one text, and the model chooses among them: so this is a guess of
what it will draw, to be verified as any other, and never what is drawn.

Byte pair encoders number tokens in the order in which they merged them, so a vocabulary is all that spelling needs (Sennrich et
al., 2016): of the neighbours that make a token, those whose token has the least id are joined first.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from noria.text.grammar import Vocabulary

_MOST_TOKENS = 32  # looked ahead at once
_MOST_CHOICES = 64  # tokens of a mask that can be the beginnings of one text
_PROBES = b'ae0",} '  # where two of these may come nothing is forced, and no mask is computed to find out
_SPELLINGS = 4096  # kept: keys come again and again


class Foresight:
    """Looks ahead in grammars of one vocabulary. Shared by all its sequences."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._control = frozenset(vocabulary.control)
        # Of two tokens with the same bytes the later one is the text's; the earlier one stands for a byte by itself.
        self._ids = {data: token for token, data in enumerate(vocabulary.tokens) if data and token not in self._control}
        self._probes = [self._ids[data] for probe in _PROBES if (data := bytes((probe,))) in self._ids]
        self.spell = lru_cache(_SPELLINGS)(self._spell)

    def text(self, matcher: LLMatcher) -> bytes:
        """The text that is forced from here on, as far as is looked; b"" if several may come. The matcher is not moved."""
        if self._is_free(matcher):
            return b""
        ahead, found = matcher.deep_copy(), b""
        for _ in range(_MOST_TOKENS):
            token = None if self._is_free(ahead) else self._longest(ahead)
            if token is None or not ahead.consume_token(token):
                break
            found += self._tokens[token]
        return found

    def behind(self, token: int, text: bytes) -> bytes:
        """What is left of a forced text behind its first token; b"" if it did not begin with that."""
        said = self._tokens[token]
        return text[len(said) :] if text.startswith(said) else b""

    def _is_free(self, matcher: LLMatcher) -> bool:
        """Whether two of the probes may come, or nothing: a quick yes for most states that are."""
        if matcher.is_stopped():
            return True
        found = 0
        for token in self._probes:
            found += matcher.validate_tokens([token])
            if found == 2:
                return True
        return False

    def _longest(self, matcher: LLMatcher) -> int | None:
        """The longest token that may come, if all that may come are its beginnings."""
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or not 0 < mask.bit_count() <= _MOST_CHOICES:
            return None
        allowed = []
        while mask:
            allowed.append(mask.bit_length() - 1)
            mask ^= 1 << allowed[-1]
        longest = max(allowed, key=lambda token: len(self._tokens[token]))
        text = self._tokens[longest]
        if any(token in self._control or not text.startswith(self._tokens[token]) for token in allowed):
            return None
        return longest

    def _spell(self, text: bytes) -> tuple[int, ...]:
        """Tokens whose bytes are `text`, or its beginning where the vocabulary lacks a byte."""
        parts: list[bytes] = []
        for character in text.decode("utf-8", "surrogateescape"):
            data = character.encode("utf-8", "surrogateescape")
            parts += [data] if data in self._ids else [bytes((byte,)) for byte in data]
        last = len(self._tokens)
        while len(parts) > 1:
            ranks = [self._ids.get(a + b, last) for a, b in pairwise(parts)]
            least = min(ranks)
            if least == last:
                break
            place = ranks.index(least)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        known = next((place for place, part in enumerate(parts) if part not in self._ids), len(parts))
        return tuple([self._ids[part] for part in parts[:known]])
