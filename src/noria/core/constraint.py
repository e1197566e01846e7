"""What the decision half knows of constrained output: who says which token may come next, and how it is asked.

    launch a step ── fill masks (beside the forward pass) ── draw ── accept the drawn tokens

A constraint belongs to one sequence and goes where that goes: it stays with a preempted one, and is forked with it. The
grammars themselves are the shell's to provide (`noria.text.constraint`); the engine sees these protocols.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from noria.types import EngineRequest


class Constraint(Protocol):
    """Which tokens one choice may take. `fill` runs on another thread than the rest, never at the same time."""

    @property
    def ended(self) -> bool:
        """Whether nothing but the end may follow."""

    @property
    def failure(self) -> str | None:
        """Why it cannot go on, if it cannot: one line for a person."""

    @property
    def forced(self) -> tuple[int, ...]:
        """A guess of the next tokens where their text is certain; () where several may follow. May be read at any time."""

    def fill(self, address: int, stride: int, drafts: Sequence[int]) -> None:
        """Write 1 + len(drafts) masks of `stride` bytes each from `address` on: for the next token, then behind each draft.

        Behind a draft that may not come, a mask lets everything pass: nothing that is drawn there is ever accepted.
        """

    def accept(self, token: int) -> None:
        """The next token of the choice."""

    def fork(self) -> Constraint:
        """Another one in the same state."""


class Constraints(Protocol):
    """Makes constraints, off the engine's thread."""

    def prepare(self, request: EngineRequest) -> Future[Constraint]:
        """The constraint of a request that has one, done at once if it is known. The future raises RequestError."""


def is_constrained(request: EngineRequest) -> bool:
    """Whether a request needs a constraint."""
    return request.params.structured_output is not None or bool(request.params.allowed_token_ids)


def fill_masks(parts: Sequence[tuple[Constraint, tuple[int, ...]]], address: int, stride: int) -> None:
    """The masks of a step, one part after the other: (constraint, drafts) of each masked row."""
    for constraint, drafts in parts:
        constraint.fill(address, stride, drafts)
        address += stride * (1 + len(drafts))
