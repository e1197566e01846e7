"""Where drafts come from: the sequence's own text, and a prediction."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from noria.core.lookup import NOWHERE, OwnText, Prediction


def longest_match(tokens: list[int], end: int) -> int:
    """The longest suffix of tokens[:end], at least 2 and at most 16 tokens, that ends somewhere before; 0 if none does."""
    for length in range(min(16, end - 1), 1, -1):
        if any(tokens[e - length : e] == tokens[end - length : end] for e in range(length, end)):
            return length
    return 0


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=2, max_size=20), known=st.integers(1, 5))
def test_own_text_finds_the_longest_match(tokens: list[int], known: int) -> None:
    """Red when a search misses a pair, looks past the end, or settles for a shorter match (few places: all are looked at)."""
    known = min(known, len(tokens))
    grown = tokens[:known]
    source = OwnText(grown, known)
    for end in range(known, len(tokens) + 1):
        if end > known:
            missed = source.guess != tokens[end - 1]
            grown.append(tokens[end - 1])
            source.advance(grown, end)
        else:
            missed = True
        places = sum(tokens[e - 2 : e] == tokens[end - 2 : end] for e in range(2, end))
        if missed and places <= 8:
            assert source.match == longest_match(tokens, end)
        if source.guess != NOWHERE and source.match <= 16:
            length = source.match
            assert any(tokens[e - length : e] == tokens[end - length : end] and tokens[e] == source.guess for e in range(end))


def test_the_last_of_equal_matches_is_taken() -> None:
    """Red when the first occurrence is preferred: text moves on."""
    tokens = [1, 2, 7, 1, 2, 8, 1, 2]
    assert OwnText(tokens, 8).read(3) == [8, 1, 2]


def test_a_loop_is_foreseen_beyond_the_end() -> None:
    """Red when drafts stop where the text does."""
    tokens = [5, 1, 2, 3, 1, 2, 3]
    assert OwnText(tokens, 7).read(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_text_longer_than_its_first_tables() -> None:
    """Red when growing the tables loses what was indexed."""
    text = list(range(1000))
    assert OwnText([*text, 3, 4], 1002).read(2) == [5, 6]


def feed(prediction: Prediction, *output: int) -> None:
    tokens = [99] * prediction._end
    for token in output:
        tokens.append(token)
        prediction.advance(tokens, len(tokens))


def test_a_prediction_is_read_from_its_beginning() -> None:
    """Red when it waits for a match first."""
    prediction = Prediction((1, 2, 3, 4), 1)
    assert prediction.read(9) == [1, 2, 3, 4]
    feed(prediction, 1, 2)
    assert (prediction.read(9), prediction.foreseen) == ([3, 4], 2)


def test_a_renamed_token_does_not_lose_the_place() -> None:
    """Red when a substitution needs a match before copying goes on."""
    prediction = Prediction(tuple(range(20)), 1)
    feed(prediction, 0, 1, 70)
    assert prediction.read(2) == [3, 4]


def test_an_insertion_and_a_deletion_are_found_again() -> None:
    """Red when the cursor is not put back where the text goes on."""
    prediction = Prediction(tuple(range(40)), 1)
    feed(prediction, 0, 1, 70, 71, 72, 2, 3)
    assert prediction.read(2) == [4, 5]
    feed(prediction, 20, 21)
    assert prediction.read(2) == [22, 23]
