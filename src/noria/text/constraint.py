"""Constraints: which token a choice may take next, from a grammar or from a list. Implements `noria.core.constraint`.

A `GrammarConstraint` is a matcher and what is known of its end:

    drawn so far        the grammar            the mask of the next token
    no full sentence    goes on                what can go on
    a full sentence     may go on              what can go on, and the end tokens
    a full sentence     cannot go on           the choice has ended: nothing more is drawn

In JSON, white space and digits may follow one another without an end (a string of blanks, a number): a model that has begun to
repeat itself would do so up to its limit. A run of more than `LONGEST_RUN` of them is drawn only where nothing else may come.

What a grammar forces (`text/forced.py`) is looked for when a token is accepted, and known until it has been said: between
steps, when nobody fills a mask.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from noria.core.constraint import Constraint
from noria.text.forced import Foresight
from noria.text.grammar import Compiler, Vocabulary
from noria.types import EngineRequest, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher

LONGEST_RUN = 64  # bytes of digits, or of white space, in JSON
_REPEATED = 16  # times that the only token of a list is foreseen
COMPILE_NICENESS = 10  # of the thread that compiles: the step's threads go first

_RUNS = (frozenset(b"0123456789"), frozenset(b" \t\n\r"))


class RunGuard:
    """Finds the tokens that would make a run too long. Shared by all sequences of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        control = frozenset(vocabulary.control)
        self._starts: list[list[tuple[int, int]]] = [[], []]  # by kind of run: (bytes of it a token begins with, token)
        for token, data in enumerate(vocabulary.tokens):
            if data and token not in control:
                for kind, members in enumerate(_RUNS):
                    if data[0] in members:
                        self._starts[kind].append((_leading(data, members), token))
        self._bans: dict[tuple[int, int], int] = {}

    def after(self, runs: tuple[int, int], token: int) -> tuple[int, int]:
        """The runs of each kind that a text ends with, after one more token."""
        data = self._tokens[token]
        lengths = []
        for run, members in zip(runs, _RUNS, strict=True):
            trailing = _leading(data[::-1], members)
            lengths.append(run + trailing if trailing == len(data) else trailing)
        return lengths[0], lengths[1]

    def banned(self, runs: tuple[int, int]) -> int:
        """A bit mask, as a number, of the tokens that would make one of the runs longer than it may be; 0: none would."""
        return self._banned(0, runs[0]) | self._banned(1, runs[1])

    def _banned(self, kind: int, run: int) -> int:
        run = min(run, LONGEST_RUN)
        known = self._bans.get((kind, run))
        if known is None:
            known = _bits([token for length, token in self._starts[kind] if run + length > LONGEST_RUN])
            self._bans[kind, run] = known
        return known


def _bits(tokens: Iterable[int]) -> int:
    """A number whose bit t is 1 for each token t: a mask, written in little-endian words."""
    data = bytearray()
    for token in sorted(tokens, reverse=True):
        if not data:
            data = bytearray(token // 8 + 1)
        data[token // 8] |= 1 << token % 8
    return int.from_bytes(data, "little")


def _leading(data: bytes, members: frozenset[int]) -> int:
    return next((i for i, byte in enumerate(data) if byte not in members), len(data))


class GrammarConstraint:
    """A grammar, and where one choice is in it. See `noria.core.constraint.Constraint`."""

    def __init__(
        self, matcher: LLMatcher, ends: int, guard: RunGuard | None, foresight: Foresight, runs: tuple[int, int] = (0, 0)
    ) -> None:
        """`ends`: a bit mask of the tokens that may end a text which the grammar accepts, besides the vocabulary's."""
        self.ended = False
        self.failure: str | None = None
        self._matcher = matcher
        self._ends = ends
        self._guard = guard
        self._foresight = foresight
        self._runs = runs
        self._ahead = b""  # text that is forced from here on

    @property
    def forced(self) -> tuple[int, ...]:
        """See the protocol."""
        return self._foresight.spell(self._ahead)

    def fill(self, address: int, stride: int, drafts: Sequence[int]) -> None:
        """See the protocol. The matcher is as before when this returns."""
        if self.ended or self.failure:
            _allow_all(address, stride * (1 + len(drafts)))
            return
        self._write(address, stride, self._runs)
        runs, consumed = self._runs, 0
        for number, token in enumerate(drafts, 1):
            if self._matcher.is_stopped() or self._matcher.try_consume_tokens([token]) != 1:
                _allow_all(address + number * stride, stride * (len(drafts) + 1 - number))
                break
            consumed += 1
            runs = self._guard.after(runs, token) if self._guard else runs
            self._write(address + number * stride, stride, runs)
        if consumed:
            self._matcher.rollback(consumed)

    def _write(self, address: int, stride: int, runs: tuple[int, int]) -> None:
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(address, stride)
        if matcher.is_error():
            self._fail(matcher.get_error())
            return
        banned = self._guard.banned(runs) if self._guard else 0
        ends = self._ends if self._ends and matcher.is_accepting() else 0
        if banned or ends:
            allowed = int.from_bytes(ctypes.string_at(address, stride), "little")
            allowed = ((allowed & ~banned) or allowed) | ends
            ctypes.memmove(address, allowed.to_bytes(stride, "little"), stride)

    def accept(self, token: int) -> None:
        """See the protocol."""
        if self.ended or self.failure:
            return
        matcher = self._matcher
        if not matcher.consume_token(token):
            self._fail(matcher.get_error())
            return
        if self._guard:
            self._runs = self._guard.after(self._runs, token)
        self.ended = matcher.is_stopped()
        self._ahead = self._foresight.behind(token, self._ahead) or self._foresight.text(matcher)

    def fork(self) -> GrammarConstraint:
        """See the protocol."""
        return GrammarConstraint(self._matcher.deep_copy(), self._ends, self._guard, self._foresight, self._runs)

    def _fail(self, error: str) -> None:
        self.failure = "the grammar cannot go on: " + (error.strip().splitlines() or ["no token may follow"])[0][:200]


class AllowedTokens:
    """The same tokens at each step. See `noria.core.constraint.Constraint`."""

    ended = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self.failure: str | None = None
        self.forced = tuple(tokens) * _REPEATED if len(set(tokens)) == 1 else ()
        self._tokens = frozenset(tokens)
        self._mask = _bits(tokens)
        self._bytes = b""

    def fill(self, address: int, stride: int, drafts: Sequence[int]) -> None:
        """See the protocol."""
        if len(self._bytes) != stride:
            self._bytes = self._mask.to_bytes(stride, "little")
        for number in range(1 + len(drafts)):
            ctypes.memmove(address + number * stride, self._bytes, stride)

    def accept(self, token: int) -> None:
        """See the protocol."""
        if token not in self._tokens:  # min_tokens bans end ids; nothing was left to draw
            self.failure = "none of allowed_token_ids may be drawn here"

    def fork(self) -> AllowedTokens:
        """See the protocol."""
        return AllowedTokens(tuple(self._tokens))


def _allow_all(address: int, size: int) -> None:
    ctypes.memset(address, 0xFF, size)


class GrammarConstraints:
    """Makes the constraints of one engine: grammars that are not known yet are compiled on a thread of lower priority.

    Implements `noria.core.constraint.Constraints`. llguidance is loaded, and its tables are built, when a first grammar comes.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiler: Compiler | None = None
        self._foresight: Foresight | None = None
        self._guard: RunGuard | None = None
        self._lock = threading.Lock()  # of the compiler: a cached grammar is looked up on the engine's thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="noria-grammar", initializer=_be_nice)

    def prepare(self, request: EngineRequest) -> Future[Constraint]:
        """See the protocol."""
        output = request.params.structured_output
        if output is None:
            return _done(AllowedTokens(request.params.allowed_token_ids))
        ends = _bits(set(request.stop_ids) - set(self._vocabulary.ends))
        if self._compiler is not None and self._lock.acquire(blocking=False):
            try:
                matcher = self._compiler.cached(output)
            finally:
                self._lock.release()
            if matcher is not None:
                return _done(self._constraint(output, matcher, ends))
        return self._thread.submit(self._compile, output, ends)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, output: StructuredOutput, ends: int) -> Constraint:
        with self._lock:
            if self._compiler is None:
                self._compiler = Compiler(self._vocabulary)
            return self._constraint(output, self._compiler.compile(output), ends)

    def _constraint(self, output: StructuredOutput, matcher: LLMatcher, ends: int) -> GrammarConstraint:
        guard = None
        if output.kind in ("json_object", "json_schema"):
            guard = self._guard = self._guard or RunGuard(self._vocabulary)
        foresight = self._foresight = self._foresight or Foresight(self._vocabulary)
        return GrammarConstraint(matcher, ends, guard, foresight)


def _done(constraint: Constraint) -> Future[Constraint]:
    future: Future[Constraint] = Future()
    future.set_result(constraint)
    return future


def _be_nice() -> None:
    if sys.platform == "linux":  # where priorities belong to threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)
