"""Stop strings: found at the right place whatever the cut, with nothing shown too early or too late."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.text.stops import MAX_STOP_CHARACTERS, MAX_STOPS, StopMatcher, check_stops
from noria.types import RequestError

LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read one character at a time; the first stop string to be complete ends the text, the longest of several."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [True, False])
@settings(max_examples=500, deadline=None)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_every_cut_finds_the_same_end_and_holds_back_no_more_than_it_must(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """Red when a stop string across pieces is missed, a later one wins, or text is held that no stop string can begin."""
    expected, stop = reference(text, stops, include)
    matcher = StopMatcher(stops, include)
    shown, read, i = "", 0, 0
    while read < len(text):
        size = cuts[i % len(cuts)] if any(cuts) else 1
        piece, i = text[read : read + size], i + 1
        read += size
        delta, match = matcher.push(piece)
        shown += delta
        assert expected.startswith(shown), "text went past the place where the stop string begins"
        if match is not None:
            assert (shown, match) == (expected, stop)
            return
        so_far = text[:read]
        open_ends = [n for n in range(len(so_far) + 1) if any(s != so_far[n:] and s.startswith(so_far[n:]) for s in stops)]
        assert len(shown) == min(open_ends), "held back too much or too little"
    assert stop is None
    assert shown + matcher.flush() == text


def test_many_long_stop_strings_are_cheap() -> None:
    """Red when the cost of a token grows with the length of the stop strings, or with the text so far."""
    stops = ["a" * (1000 - i) + "b" for i in range(MAX_STOPS)]
    matcher = StopMatcher(stops)
    start = time.perf_counter()
    for _ in range(200):
        for piece in ("aaaa",) * 20 + ("c",):  # 80 characters that begin every stop string, then none does
            matcher.push(piece)
    assert (time.perf_counter() - start) / (200 * 21) < 100e-6


@pytest.mark.parametrize(
    ("stops", "message"),
    [(["x"] * (MAX_STOPS + 1), "33 strings"), ([""], "0 characters"), (["x" * (MAX_STOP_CHARACTERS + 1)], "1025 characters")],
)
def test_stop_strings_have_limits(stops: list[str], message: str) -> None:
    """Red when thousands of stop strings, or an empty one, are accepted; a 400 names the field."""
    with pytest.raises(RequestError, match=message) as refused:
        check_stops(stops)
    assert refused.value.param == "stop"
    with pytest.raises(RequestError):
        StopMatcher(stops)
    check_stops(["x" * MAX_STOP_CHARACTERS] * MAX_STOPS)
