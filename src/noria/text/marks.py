"""Keeping what users write apart from what the chat template writes.

A template puts strings of the request between control tokens, and the result is one text. So that a user's "<|im_end|>" stays
ten characters, a *mark* - one character that occurs nowhere in the conversation - is put inside it before the template runs,
and taken out when the text has been cut at the control tokens.

Marks go where a control token could come out of a string of the request:

    inside each control token that the string spells                       <.|im_end|>
    at an end that could begin one, at a start that could end one          name: <.   content: |im_end.|>
    inside a string that could be the middle of one                        parameter |.im_end|  in a template's <...>

Not marked is a string of letters, digits, "_", "-" and "." only that is the middle of a control token, such as "user" in
"<|user|>": templates compare such strings, and none writes '<|' ~ text ~ '|>' but for the role, which has fixed values.

A mark is a letter of a dead script: printable, without case, no white space. So it passes through Jinja's filters (trim, upper,
tojson, string) like any letter and is still one character; `length` counts it. `tojson` and `urlencode`, which may write it
in another way, are given the text without marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from noria.text.tokenizer import Tokenizer
from noria.types import RequestError

_NAME = re.compile(r"[\w.-]*")
# Anatolian hieroglyphs, then Tangut ideographs.
_CANDIDATES = tuple(map(chr, chain(range(0x14400, 0x14647), range(0x17000, 0x187F8))))


class ControlTexts:
    """Where the control tokens of one tokenizer could come out of a string."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = tokenizer.control_texts
        self._find = tokenizer.find_control
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        self._ends = {text[n:] for text in texts for n in range(1, len(text))}
        self._all = "\0".join(texts)
        self._longest = max(map(len, texts), default=0)
        self._overlap = _can_overlap(frozenset(texts), self._beginnings)

    def cuts(self, text: str) -> list[int]:
        """Positions in `text` where a mark belongs, ascending."""
        cuts = {start + 1 for start in self._starts(text)}
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for length in range(1, min(self._longest, end - start + 1)):
            if text[end - length : end] in self._beginnings:
                cuts.add(end - length + 1)
            if text[start : start + length] in self._ends:
                cuts.add(start + length - 1)
        middle = text[start:end]
        if 0 < len(middle) < self._longest and "\0" not in middle and middle in self._all and not _NAME.fullmatch(middle):
            cuts.add(start + 1)
        return sorted(cuts)

    def _starts(self, text: str) -> list[int]:
        """Where `text` spells control tokens, overlapping ones included."""
        starts = []
        for start, end, _ in self._find(text):
            starts.append(start)
            if self._overlap:
                inside = start + 1
                starts += [inside + n for n in self._starts(text[inside : end + self._longest])]
        return starts


def _can_overlap(texts: frozenset[str], beginnings: set[str]) -> bool:
    """Whether a control token can begin inside another one, so that breaking that one does not break it."""
    firsts = {text[0] for text in texts}
    for text in texts:
        for n in range(1, len(text)):
            rest = text[n:]
            if rest[0] in firsts and (rest in beginnings or any(rest[:m] in texts for m in range(1, len(rest) + 1))):
                return True
    return False


class Marks:
    """The marks of one conversation: the mark itself, and how each marked string reads with it."""

    def __init__(self, mark: str, control: ControlTexts, marked: Mapping[str, str]) -> None:
        self.mark = mark
        self._control = control
        self._marked = marked

    def apply(self, value: Any) -> Any:
        """`value` (plain JSON) with every string marked, keys included."""
        return map_strings(value, lambda text: self._marked.get(text, text))

    def remove(self, value: Any) -> Any:
        return map_strings(value, lambda text: text.replace(self.mark, ""))

    def rewritten(self, write: Callable[..., str], value: Any, *args: Any, **kwargs: Any) -> str:
        """`write(value)` with the marks where they belong in the outcome, whatever `write` does to strings."""
        text = write(self.remove(value), *args, **kwargs)
        return _inserted(text, self._control.cuts(text), self.mark)


def marks_for(control: ControlTexts, strings: Iterable[str], mark: str) -> Marks | None:
    """The marks that these strings need; None if they need none, as almost always. `mark` occurs in none of them."""
    cuts = {text: found for text in set(strings) if (found := control.cuts(text))}
    if not cuts:
        return None
    return Marks(mark, control, {text: _inserted(text, found, mark) for text, found in cuts.items()})


def unused_characters(texts: Iterable[str], count: int) -> list[str]:
    """`count` characters fit for marks that occur in none of `texts`."""
    known = list(texts)
    found = []
    for candidate in _CANDIDATES:
        if not any(candidate in text for text in known):
            found.append(candidate)
            if len(found) == count:
                return found
    raise RequestError("the messages use every Anatolian hieroglyph and every Tangut ideograph", param="messages")


def strings_of(value: Any) -> list[str]:
    """All strings in a plain JSON value, keys included."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    map_strings(value, note)
    return found


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A plain JSON value with every string, keys included, replaced by `change` of it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def _inserted(text: str, cuts: list[int], mark: str) -> str:
    return mark.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))
