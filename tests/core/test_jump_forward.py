"""Drafts from a grammar: jump-forward."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from fakes import FULL, ConstantRunner, make_engine, make_request, run
from noria.core.constraint import Constraint
from noria.core.drafter import Drafter
from noria.core.forced import Forced
from noria.core.lookup import NOWHERE
from noria.core.prices import Prices
from noria.types import EngineRequest

NEARLY_FREE = Prices(start=1e-2, tokens=1e-6, pairs=1e-9, context=1e-9, logits=1e-6)


class Script:
    """A constraint that says what comes next: `runs` by the number of tokens accepted so far."""

    ended = False
    failure = None

    def __init__(self, runs: dict[int, tuple[int, ...]]) -> None:
        self.runs = runs
        self.accepted = 0

    @property
    def forced(self) -> tuple[int, ...]:
        return self.runs.get(self.accepted, ())

    def fill(self, address: int, stride: int, drafts: object) -> None:
        """The fake runner has no masks."""

    def accept(self, token: int) -> None:
        self.accepted += 1

    def fork(self) -> Script:
        return Script(self.runs)


class Scripts:
    """Gives every constrained request the same script."""

    def __init__(self, runs: dict[int, tuple[int, ...]]) -> None:
        self.runs = runs

    def prepare(self, request: EngineRequest) -> Future[Constraint]:
        future: Future[Constraint] = Future()
        future.set_result(Script(self.runs))
        return future


def test_a_run_is_followed_and_begun_again() -> None:
    """Red when the guess does not move along with the tokens, or a wrong one goes on from the old run."""
    script = Script({1: (5, 6, 7), 4: (8,), 6: (9, 9)})
    source = Forced(script, 1)
    tokens = [0]
    guesses = []
    for token in (4, 5, 6, 7, 1, 1):
        guesses.append(source.guess)
        tokens.append(token)
        script.accept(token)
        source.advance(tokens, len(tokens))
    assert guesses == [NOWHERE, 5, 6, 7, 8, NOWHERE]
    assert source.read(5) == [9, 9]


def test_several_tokens_at_once_are_judged_by_what_was_known_before() -> None:
    """Red when accepted drafts are compared with a guess of what comes behind them all."""
    script = Script({1: (5, 6, 7), 4: (1, 2)})
    drafter = Drafter([Forced(script, 1)], tallies := {}, 1)
    tokens = [0, 4]
    script.accept(4)
    drafter.follow(tokens)
    for token in (5, 6, 7):
        tokens.append(token)
        script.accept(token)
    drafter.follow(tokens)
    assert drafter.propose(4)[0] == [1, 2]
    assert tallies["grammar"].hits == tallies["grammar"].trials
    assert sum(tallies["grammar"].hits) == 3


@pytest.mark.parametrize("depth", [0, 1])
def test_forced_text_is_drafted_without_any_setting(depth: int) -> None:
    """Red when jump-forward needs a setting, or never drafts while steps overlap."""
    engine, _ = make_engine(runner=ConstantRunner((FULL,), 65), async_depth=depth)
    engine.constraints = Scripts({n: (7,) * (31 - n) for n in range(1, 31)})
    request = make_request(20, max_tokens=40, allowed_token_ids=(7,))
    choice = run(engine, request).of(request)
    assert choice.tokens == (7,) * 40
    assert engine.stats().spec_accepted_tokens > 20
    assert engine.stats().spec_accepted_tokens == engine.stats().spec_draft_tokens


@pytest.mark.parametrize("depth", [0, 1])
def test_a_wrong_guess_of_forced_text_changes_nothing(depth: int) -> None:
    """Red when a forced token is taken without being drawn."""
    engine, _ = make_engine(runner=ConstantRunner((FULL,), 65), async_depth=depth)
    engine.constraints = Scripts(dict.fromkeys(range(1, 31), (7, 3, 7)))
    request = make_request(20, max_tokens=40, allowed_token_ids=(7,))
    assert run(engine, request).of(request).tokens == (7,) * 40
    assert 0 < engine.stats().spec_accepted_tokens < engine.stats().spec_draft_tokens


def test_a_sequence_without_a_grammar_has_no_drafter() -> None:
    """Red when a neighbour's grammar makes drafts for everybody."""
    engine, _ = make_engine(runner=ConstantRunner((FULL,), 65), prices=NEARLY_FREE)
    engine.constraints = Scripts(dict.fromkeys(range(1, 31), (7,) * 4))
    bound = make_request(20, max_tokens=40, allowed_token_ids=(7,))
    free = make_request(range(100, 120), max_tokens=40)
    seen: dict[int, Any] = {}
    original = engine.speculator.drafts_for

    def drafts_for(rows: Any, bargain: Any) -> list[tuple[int, ...]]:
        drafts = original(rows, bargain)
        for (sequence, _), chosen in zip(rows, drafts, strict=True):
            seen.setdefault(sequence.request.request_id, []).append((sequence.drafter is None, chosen))
        return drafts

    engine.speculator.drafts_for = drafts_for  # type: ignore[method-assign]
    run(engine, bound, free)
    assert any(drafts for _, drafts in seen[bound.request_id])
    assert set(seen[free.request_id]) == {(True, ())}
