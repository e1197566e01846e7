"""Constraints: masks with drafts and rollback, ends, runs that are cut short, forks, and compiling off the engine's thread."""

from __future__ import annotations

import json
import random

import pytest
from grammar_helpers import constraint, masks, vocabulary

from noria.text.constraint import LONGEST_RUN, AllowedTokens, GrammarConstraints, RunGuard
from noria.types import EngineRequest, RequestError, SamplingParams, StructuredOutput

WORDS = vocabulary("ab", "1234567", "  ", "        ", "\n\n", "8 8", ends=3)
SIZE = len(WORDS.tokens)
END, SECOND, THIRD = range(SIZE - 3, SIZE)


def tokens(text: str) -> list[int]:
    return list(text.encode())


def test_masks_behind_drafts_are_those_of_a_matcher_that_took_them() -> None:
    """Red if a draft is not rolled back, is skipped, or shifts the masks: for k samples of a row, k masks in order."""
    expression = "(ab|ac)(1|2)x"
    stepwise = constraint(WORDS, "regex", expression)
    expected = []
    for token in tokens("ac2"):
        expected += masks(stepwise, SIZE)
        stepwise.accept(token)
    expected += masks(stepwise, SIZE)
    drafted = constraint(WORDS, "regex", expression)
    for _ in range(2):
        assert masks(drafted, SIZE, tokens("ac2")) == expected
    drafted.accept(ord("a"))
    assert masks(drafted, SIZE, tokens("c")) == expected[1:3]


def test_behind_a_draft_that_may_not_come_everything_passes() -> None:
    """Red if a wrong draft ends the matcher, or leaves a mask unwritten."""
    one = constraint(WORDS, "regex", "abc")
    everything = set(range(SIZE))
    assert masks(one, SIZE, tokens("axc")) == [{ord("a"), WORDS.tokens.index(b"ab")}, {ord("b")}, everything, everything]
    assert masks(one, SIZE, [*tokens("abc"), END])[3:] == [{END}, everything]
    assert one.failure is None
    for token in tokens("abc"):
        one.accept(token)
    assert one.ended


def test_a_clients_end_tokens_are_allowed_where_the_grammar_may_end() -> None:
    """Red if a stop id may come in the middle, or only the model's own end may come at the end."""
    one = constraint(WORDS, "regex", "a+", extra_ends=1 << SECOND)
    assert masks(one, SIZE) == [{ord("a")}]
    one.accept(ord("a"))
    assert masks(one, SIZE) == [{ord("a"), END, SECOND}]


def test_the_choice_has_ended_when_nothing_may_follow() -> None:
    """Red if the end is told a token late, or a grammar that may go on is ended."""
    one = constraint(WORDS, "regex", "ab?")
    one.accept(ord("a"))
    assert not one.ended
    fork = one.fork()
    one.accept(ord("b"))
    assert one.ended
    assert not fork.ended
    assert masks(fork, SIZE) == [{ord("b"), END}]
    assert masks(one, SIZE) == [set(range(SIZE))]


def test_a_token_that_the_mask_forbids_is_a_failure_of_that_choice() -> None:
    """Red if a wrong token is taken, or raises where the engine would die of it."""
    one = constraint(WORDS, "regex", "ab")
    one.accept(ord("x"))
    assert one.failure is not None
    assert "\n" not in one.failure
    assert masks(one, SIZE, [1]) == [set(range(SIZE))] * 2


@pytest.mark.parametrize("schema", [{}, {"type": "number"}, {"type": "string"}])
@pytest.mark.parametrize("greed", ["0123456789", " \n"])
def test_runs_of_digits_and_of_white_space_are_bounded(schema: object, greed: str) -> None:
    """A model that only wants digits, or blanks: red if a run of more than LONGEST_RUN comes while anything else may."""
    one = constraint(WORDS, "json_schema", json.dumps(schema), guard=True)
    wanted = {t for t, data in enumerate(WORDS.tokens) if data and set(data.decode("latin-1")) <= set(greed)}
    rng = random.Random(0)
    text = b""
    for _ in range(400):
        allowed = masks(one, SIZE)[0]
        token = rng.choice(sorted(allowed & wanted or allowed - {END} or allowed))
        one.accept(token)
        text += WORDS.tokens[token]
        if one.ended or token == END:
            break
    longest = max((sum(1 for _ in run) for run in _runs(text.decode("latin-1"), greed)), default=0)
    assert longest <= LONGEST_RUN
    if schema != {"type": "string"} and greed[0] == "0":
        assert longest > LONGEST_RUN - 8


def _runs(text: str, members: str) -> list[str]:
    return "".join(c if c in members else "\0" for c in text).split("\0")


def test_a_run_is_not_cut_where_nothing_else_may_come() -> None:
    """Red if the guard makes a text that its pattern demands impossible."""
    one = constraint(WORDS, "json_schema", json.dumps({"type": "string", "pattern": "^[0-9]{90}$"}), guard=True)
    for token in tokens('"' + "7" * 90 + '"'):
        assert token in masks(one, SIZE)[0]
        one.accept(token)
    assert one.ended


def test_runs_are_counted_over_tokens() -> None:
    """Red if a run that begins or ends inside a token is counted wrongly."""
    guard = RunGuard(WORDS)
    place = WORDS.tokens.index
    runs = (0, 0)
    for token, expected in (
        (ord("a"), (0, 0)),
        (place(b"8 8"), (1, 0)),
        (place(b"1234567"), (8, 0)),
        (32, (0, 1)),
        (place(b"\n\n"), (0, 3)),
    ):
        runs = guard.after(runs, token)
        assert runs == expected
    assert guard.banned((0, 0)) == 0
    assert guard.banned((LONGEST_RUN - 6, 0)) == 1 << place(b"1234567")
    assert guard.banned((0, LONGEST_RUN)) == sum(
        1 << place(w) for w in (b" ", b"\t", b"\n", b"\r", b"  ", b"        ", b"\n\n")
    )


def test_allowed_tokens_are_one_mask_for_ever() -> None:
    """Red if a listed token is lost, another passes, or a draw outside of the list is taken."""
    one = AllowedTokens([3, 3, SIZE - 1])
    assert masks(one, SIZE, [5]) == [{3, SIZE - 1}] * 2
    one.accept(3)
    assert one.failure is None
    one.accept(0)
    assert one.failure


def request(output: StructuredOutput | None, **params: object) -> EngineRequest:
    return EngineRequest(
        request_id=1,
        prompt=(1,),
        params=SamplingParams(structured_output=output, **params),  # type: ignore[arg-type]
        stop_ids=(END, THIRD),
    )


def test_constraints_are_made_on_a_thread_and_at_once_when_known() -> None:
    """Red if the engine's thread compiles, a known grammar waits, a stop id of the request is lost, or an error vanishes."""
    constraints = GrammarConstraints(WORDS)
    output = StructuredOutput(kind="regex", value="a+")
    first = constraints.prepare(request(output)).result(10)
    future = constraints.prepare(request(output))
    assert future.done()
    for one in (first, future.result()):
        one.accept(ord("a"))
        assert masks(one, SIZE) == [{ord("a"), END, THIRD}]
    with pytest.raises(RequestError, match="regular expression"):
        constraints.prepare(request(StructuredOutput(kind="regex", value="("))).result(10)
    assert masks(constraints.prepare(request(None, allowed_token_ids=(7,))).result(), SIZE) == [{7}]
    constraints.close()


def test_json_of_the_engine_is_guarded() -> None:
    """Red if GrammarConstraints forgets the guard of JSON kinds, or gives one to expressions, which say what they mean."""
    constraints = GrammarConstraints(WORDS)
    longest = {}
    for kind, value in (("json_schema", '{"type":"number"}'), ("regex", "[1-9][0-9]*")):
        one = constraints.prepare(request(StructuredOutput(kind=kind, value=value))).result(10)  # type: ignore[arg-type]
        for token in tokens("7" * LONGEST_RUN):
            one.accept(token)
        longest[kind] = ord("7") in masks(one, SIZE)[0]
    constraints.close()
    assert longest == {"json_schema": False, "regex": True}
