"""Stop strings: where a text ends, found while it is written."""

from __future__ import annotations

from collections.abc import Sequence

from noria.types import RequestError

MAX_STOPS = 32
MAX_STOP_CHARACTERS = 1024


def check_stops(stops: Sequence[str]) -> None:
    """RequestError for too many stop strings, an empty one, or one that is too long."""
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"a stop string has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARACTERS}", param="stop"
            )


class StopMatcher:
    """Watches a growing text for the first stop string.

    The first is the one that ends first, and of those that end together the longest: what a reader who takes the text one
    character at a time would see, so that the outcome does not depend on how the text was cut. Text is released as soon as no
    stop string can begin in it: what is held back is exactly the longest end of the text that begins a stop string.

    Cost: a few comparisons with each stop string a push, and as many for each character that is released.
    """

    __slots__ = ("_firsts", "_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the stop string stays in the text. Raises RequestError as `check_stops`."""
        check_stops(stops)
        self._stops = tuple(dict.fromkeys(stops))
        self._firsts = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._include = include
        self._held = ""

    @property
    def held(self) -> str:
        """The text that a stop string may still swallow."""
        return self._held

    def push(self, text: str) -> tuple[str, str | None]:
        """(the text that may be shown now, the stop string that ended it or None). After a match, all is over."""
        text = self._held + text
        end, match = self._first_match(text)
        if match is not None:
            self._held = ""
            return text[: end if self._include else end - len(match)], match
        keep = self._open_start(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str | None]:
        best_end, best = len(text) + 1, None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                end = start + len(stop)
                if end < best_end or (end == best_end and best is not None and len(stop) > len(best)):
                    best_end, best = end, stop
        return best_end, best

    def _open_start(self, text: str) -> int:
        """Where the longest end of `text` that begins a stop string starts; its length if there is none.

        A start that fails here can never succeed later, so over a whole text each place is tried at most once more than it
        has pushes while it is the first place held.
        """
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                end = text[start:]
                if any(stop.startswith(end) for stop in self._stops):
                    return start
        return len(text)
