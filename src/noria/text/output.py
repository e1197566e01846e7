"""What one choice shows of its tokens - text, how many tokens, where each begins - and where it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from noria.text.detokenizer import Detokenizer
from noria.text.stops import StopMatcher
from noria.text.tokenizer import Tokenizer


class TextDelta(msgspec.Struct, frozen=True):
    """What may be sent now.

    `tokens` more tokens (and their logprobs) of those pushed so far belong to the text sent so far, this delta included. Over
    all deltas they sum up to the tokens that the choice returns: all, or those up to the one that completes a stop string.
    """

    text: str = ""
    tokens: int = 0
    offsets: tuple[int, ...] = ()  # of these tokens, if asked for: characters of the choice's text before each
    stop: str | None = None  # the stop string that ended the choice: abort the request, push no more


class Echo(msgspec.Struct, frozen=True):
    """A prompt as it is shown: its text, and for each of its tokens the characters before it."""

    text: str
    offsets: tuple[int, ...]


class ChoiceText:
    """Combines detokenizing and stop strings for one choice.

    `prompt` are the ids that the choice continues. With `echo`, offsets count its text, which the caller sends before the
    first delta. A stop token's text is left out, unless `include_stop`. Stop strings are looked for in the text after the
    first `min_tokens` tokens. Of skipped control tokens, those `shown` are text all the same. With `offsets`, each delta says
    where its tokens begin.

        text      sent so far      held back: may begin a stop string      not complete characters
        tokens    released         held: their text is not sent            released with the text before them
    """

    __slots__ = ("_detokenizer", "_held", "_include_stop", "_length", "_matcher", "_offsets", "_sent", "_unchecked")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        prompt: Sequence[int] = (),
        echo: Echo | None = None,
        offsets: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, shown=shown, prompt=prompt)
        self._matcher = StopMatcher(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._unchecked = min_tokens
        self._offsets = offsets
        self._held: deque[tuple[int, int]] = deque()  # of each token not released: characters before it, and after it
        # Characters of the whole text, the echo included: decoded so far, and sent so far.
        self._length = self._sent = len(echo.text) if echo else 0

    def push(self, ids: Sequence[int], *, finished: bool = False, stop_token: int | None = None) -> TextDelta:
        """The delta after `ids`. `finished`: they are the last ones; `stop_token`: the last of them ended the choice."""
        shown = len(ids) - 1 if stop_token is not None and not self._include_stop else len(ids)
        if self._matcher is None and not self._offsets:
            text = self._detokenizer.push(ids[:shown])
            return TextDelta(text + self._detokenizer.finish() if finished else text, len(ids))
        sent: list[str] = []
        for i in range(len(ids)):
            text = self._detokenizer.push(ids[i : i + 1] if i < shown else ())
            self._held.append((self._length, self._length + len(text)))
            stop = self._take(text, sent, check=self._unchecked <= 0)
            self._unchecked -= 1
            if stop is not None:
                return self._delta(sent, last=True, stop=stop)
        if finished:
            stop = self._take(self._detokenizer.finish(), sent, check=self._unchecked <= 0)
            if stop is None and self._matcher is not None:
                self._send(self._matcher.flush(), sent)
            return self._delta(sent, last=True, stop=stop)
        return self._delta(sent, last=False)

    def _take(self, text: str, sent: list[str], *, check: bool) -> str | None:
        """Pass new text on, through the stop strings; the one that ended the choice, if one did."""
        self._length += len(text)
        stop = None
        if self._matcher is not None and check:
            text, stop = self._matcher.push(text)
        self._send(text, sent)
        return stop

    def _send(self, text: str, sent: list[str]) -> None:
        if text:
            sent.append(text)
            self._sent += len(text)

    def _delta(self, sent: list[str], *, last: bool, stop: str | None = None) -> TextDelta:
        """The delta with the text `sent`, and the tokens whose text has all been sent; with the last delta, all of them."""
        offsets: list[int] = []
        while self._held and (last or self._held[0][1] <= self._sent):
            offsets.append(min(self._held.popleft()[0], self._sent))
        return TextDelta("".join(sent), len(offsets), tuple(offsets) if self._offsets else (), stop)


def prompt_echo(tokenizer: Tokenizer, ids: Sequence[int], *, text: str | None = None, skip_special_tokens: bool = True) -> Echo:
    """The prompt `ids` as `echo` shows it.

    A prompt that came as `text` is shown as it came, control tokens in it included; the tokens that the tokenizer put around
    it have no text. Where the tokenizer's normalisation changed it, offsets are those of the nearest characters. A prompt that
    came as ids is decoded; a character that it leaves incomplete belongs to the text after it.
    """
    first, last = (0, len(ids)) if text is None else _own_range(tokenizer, ids, text)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens and text is None)
    decoded: list[str] = []
    offsets: list[int] = []
    length = 0
    for i, token in enumerate(ids):
        offsets.append(length)
        if first <= i < last:
            decoded.append(detokenizer.push((token,)))
            length += len(decoded[-1])
    if text is None:
        return Echo("".join(decoded), tuple(offsets))
    return Echo(text, tuple(min(offset, len(text)) for offset in offsets))


def _own_range(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> tuple[int, int]:
    """Which of `ids` come from `text`: all but those that `add_special_tokens` put around it."""
    before, after = len(tokenizer.prefix), len(tokenizer.suffix)
    first, last = 0, len(ids)
    if before and tuple(ids[:before]) == tokenizer.prefix and not text.startswith(_name(tokenizer, tokenizer.prefix)):
        first = before
    if after and tuple(ids[-after:]) == tokenizer.suffix and not text.endswith(_name(tokenizer, tokenizer.suffix)):
        last -= after
    return first, last


def _name(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)
