"""Incremental decoding: the text that new tokens add, in whole characters only."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from noria.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes, in UTF-8
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns the tokens of one choice into text, a few at a time.

    The deltas joined are `tokenizer.decode` of all ids at once, byte for byte, however the ids are cut. With a `prompt`, the
    ids continue it: they are read in its light (a space at their start stays, a character begun in the prompt is completed),
    and the deltas joined are what decoding prompt and ids together adds to the text of the prompt.

    Bytes that may still become a character are held back; `finish` gives U+FFFD for those that did not.
    """

    __slots__ = ("_at_start", "_pending", "_pending_is_prompt", "_table")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        """`shown`: control tokens that are not skipped."""
        self._table: dict[int, bytes] = tokenizer.visible_bytes_with(shown) if skip_special_tokens else tokenizer.bytes_of
        tail = self._last_bytes(prompt)
        self._at_start = tokenizer.strip_first_space and not tail
        self._pending = tail[_complete(tail) :]
        self._pending_is_prompt = bool(self._pending)

    def push(self, ids: Sequence[int]) -> str:
        """The characters that `ids` complete."""
        data = b"".join(map(self._table.__getitem__, ids))
        if self._at_start and data:
            self._at_start = False
            if data[0] == 0x20:
                data = data[1:]
        if not self._pending:
            text, used = utf_8_decode(data, "replace", False)
            if used != len(data):
                self._pending = data[used:]
            return text
        return self._continue(data)

    def finish(self) -> str:
        """What is left: U+FFFD for an incomplete character of these tokens (two for half a surrogate, ED A0), else nothing."""
        text = "" if self._pending_is_prompt else self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def _continue(self, data: bytes) -> str:
        """`push` where the bytes before `data` end inside a character."""
        if not data:
            return ""
        joined = self._pending + data
        text, used = utf_8_decode(joined, "replace", False)
        if self._pending_is_prompt:
            # If the prompt's incomplete character was not continued, its U+FFFD belongs to the prompt's text.
            abandoned = text.startswith(_REPLACEMENT) and not joined.startswith(_REPLACEMENT.encode())
            text = text[len(self._pending.decode("utf-8", "replace")) :] if abandoned else text
            self._pending_is_prompt = False
        self._pending = joined[used:]
        return text

    def _last_bytes(self, prompt: Sequence[int]) -> bytes:
        """The last bytes of the prompt's text: enough to hold its last character; empty if it has no text."""
        tail = b""
        for token in reversed(prompt):
            tail = self._table[token] + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        return tail


def _complete(data: bytes) -> int:
    """How many bytes of `data` come before an incomplete character at its end."""
    return utf_8_decode(data, "replace", False)[1]
