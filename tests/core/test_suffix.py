"""The suffix automaton, and drafts from this and earlier outputs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FULL, FakeRunner, Row, make_engine, make_request, run
from noria.core import outputs as module
from noria.core.lookup import NOWHERE
from noria.core.outputs import Outputs, SuffixLookup
from noria.core.suffix import ROOT, SuffixAutomaton
from noria.types import EngineRequest

TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), max_size=5)
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}


@settings(deadline=None)
@given(texts=TEXTS, sequence=st.lists(st.integers(0, 3), max_size=25))
def test_a_cursor_has_the_longest_match_and_a_place_behind_it(texts: list[list[int]], sequence: list[int]) -> None:
    """Red when a clone loses a transition, a match runs over the end of a text, or a place is not that of its string."""
    automaton = SuffixAutomaton()
    for text in texts:
        for token in text:
            automaton.extend(token)
        automaton.close()

    def occurs(part: list[int]) -> bool:
        return any(part == text[at : at + len(part)] for text in texts for at in range(len(text) - len(part) + 1))

    state, match = ROOT, 0
    for end, token in enumerate(sequence, 1):
        state, match = automaton.follow(state, match, token)
        assert match == max(length for length in range(end + 1) if not length or occurs(sequence[end - length : end]))
        if match:
            place = automaton.place[state]
            assert automaton.text[place - match : place].tolist() == sequence[end - match : end]


def taken_in(*said: tuple[str, list[int]], most: int = 1000) -> Outputs:
    outputs = Outputs(most)
    for salt, output in said:
        outputs.add(salt, output)
        outputs.take_in()
    return outputs


def guess_of(outputs: Outputs, *tokens: int, salt: str = "") -> list[int]:
    """What is read behind an output of `tokens`."""
    source = SuffixLookup(outputs, salt, 0)
    for end in range(1, len(tokens) + 1):
        source.advance(list(tokens), end)
    assert source.guess == (source.read(1) or [NOWHERE])[0]
    return source.read(9)


def test_the_longest_match_then_the_latest() -> None:
    """Red when a shorter match or an older occurrence is preferred, or drafts run on into another output."""
    outputs = taken_in(("", [1, 2, 3, 4, 5]), ("", [9, 2, 3, 6, 7]), ("", [8, 2, 3, 7]))
    assert guess_of(outputs, 1, 2, 3) == [4, 5]
    assert guess_of(outputs, 5, 2, 3) == [7]
    assert guess_of(outputs, 3) == []  # a single token is no match
    assert guess_of(outputs, 4, 5) == []  # the end of an output


def test_a_sequence_finds_its_own_output() -> None:
    """Red when an output is only found once it has ended."""
    assert guess_of(Outputs(10), 1, 2, 3, 4, 1, 2) == [3, 4, 1, 2]


def test_what_is_taken_in_later_is_found() -> None:
    """Red when a sequence that has begun does not see what ends beside it."""
    outputs = Outputs(1000)
    source = SuffixLookup(outputs, "", 0)
    tokens = [1, 2]
    source.advance(tokens, 1)
    source.advance(tokens, 2)
    outputs.add("", [1, 2, 3, 4])
    outputs.take_in()
    tokens.append(3)
    source.advance(tokens, 3)
    assert source.read(3) == [4]


def test_outputs_of_another_salt_are_never_read() -> None:
    """Red when what one tenant was told can be seen in the speed of another's answer."""
    outputs = taken_in(("a", [1, 2, 3, 4]), ("b", [1, 2, 7, 8]))
    assert guess_of(outputs, 1, 2, salt="a") == [3, 4]
    assert guess_of(outputs, 1, 2, salt="b") == [7, 8]
    assert guess_of(outputs, 1, 2, salt="") == []


def test_the_oldest_are_forgotten_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when memory grows without an end, or what was said last goes first."""
    said = [("", [10 * n, 10 * n + 1, 10 * n + 2]) for n in range(1, 12)]
    kept = [n for n in range(1, 12) if guess_of(taken_in(*said, most=8), 10 * n, 10 * n + 1)]
    assert kept == [5, 6, 7, 8, 9, 10, 11]
    assert not guess_of(taken_in(said[0], most=0), 10, 11)
    monkeypatch.setattr(module, "MOST_TOKENS", 64)
    outputs = Outputs(1000)
    for n in range(100):
        outputs.add("", [n] * 20)
        for _ in range(n % 3):
            outputs.take_in()
        assert outputs._waiting_tokens == sum(len(rest) for _, rest in outputs._waiting) <= 32
        assert sum(len(automaton.text) for automaton in outputs.of("") if automaton) < 64 + 2 * 20 + 8


class Counting(FakeRunner):
    """Says the same numbers in every choice, behind whatever prompt."""

    def _sample(self, row: Row, state: int, position: int, stream: int) -> int:
        return position - row.new.prompt_length


@pytest.mark.parametrize("depth", [0, 1])
def test_an_answer_that_was_given_before_is_drafted_but_not_to_others(depth: int) -> None:
    """Red when earlier outputs make no drafts, or make them for another salt."""
    engine, _ = make_engine(runner=Counting((FULL,), 65, late=depth > 0), speculative_config=SUFFIX, async_depth=depth)

    def accepted(request: EngineRequest) -> int:
        before = engine.stats().spec_accepted_tokens
        assert run(engine, request).of(request).tokens == tuple(range(40))
        return engine.stats().spec_accepted_tokens - before

    assert accepted(make_request(range(100, 120), max_tokens=40, salt="a")) == 0
    assert accepted(make_request(range(200, 230), max_tokens=40, salt="b")) == 0
    assert accepted(make_request(range(300, 310), max_tokens=40, salt="a")) > 20
    assert accepted(make_request(range(400, 410), max_tokens=40)) == 0
