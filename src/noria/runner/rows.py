"""Rows: what the runner remembers about each running sequence, as tables indexed by row.

A sequence's tokens live here from the moment it takes a row, so that a plan carries only the ids the runner has not seen.

    tokens         [max_num_seqs, max_model_len]      ids by absolute position
    block_tables   [groups][max_num_seqs, max_blocks] block ids by absolute block index
    one number a row for each sampling parameter, sparse lists where a row has them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from noria.core.plan import NULL_BLOCK, NewRow, PlanRow

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


class History:
    """The distinct tokens of a sequence's first `covered` positions, and how often each is in the output.

    Kept only for rows with penalties, and grown by the new tokens of each step.
    """

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._covered = 0
        self._place: dict[int, int] = {}  # token -> index into the arrays below
        self._tokens = np.zeros(64, np.int32)
        self._counts = np.zeros(64, np.int32)

    def extend(self, tokens: Int32, length: int) -> None:
        """Cover positions [0, length) of `tokens`."""
        for position, token in enumerate(tokens[self._covered : length].tolist(), start=self._covered):
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._tokens):
                self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._tokens[place] = token
            self._counts[place] += position >= self._prompt_length
        self._covered = max(self._covered, length)

    def arrays(self) -> tuple[Int32, Int32]:
        """(tokens, counts in the output), copies."""
        size = len(self._place)
        return self._tokens[:size].copy(), self._counts[:size].copy()

    def copy(self) -> History:
        other = History(self._prompt_length)
        other._covered, other._place = self._covered, dict(self._place)
        other._tokens, other._counts = self._tokens.copy(), self._counts.copy()
        return other


@dataclass
class RowLists:
    """The parts of a row's sampling parameters that are not one number. Most rows have none."""

    bias_tokens: Int32
    bias_values: Float32
    stop_ids: Int32
    first_free: int  # the stop ids are banned before this position
    history: History | None

    @classmethod
    def of(cls, new: NewRow) -> RowLists | None:
        p = new.params
        penalised = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        if not (penalised or p.logit_bias or p.min_tokens):
            return None
        bias = sorted(p.logit_bias.items())
        return cls(
            bias_tokens=np.array([token for token, _ in bias], np.int32),
            bias_values=np.array([value for _, value in bias], np.float32),
            stop_ids=np.array(sorted(set(new.stop_ids)), np.int32),
            first_free=new.prompt_length + p.min_tokens,
            history=History(new.prompt_length) if penalised else None,
        )


class Mean:
    """The mean of vectors that come in pieces. It does not depend on the pieces: each vector is added to the float64 sums by
    itself, in the order of positions."""

    def __init__(self, width: int) -> None:
        self._sums = np.zeros(width, np.float64)
        self._count = 0

    def add(self, vectors: Float32) -> None:
        """[n, width]."""
        for vector in vectors:
            self._sums += vector
        self._count += len(vectors)

    def value(self) -> bytes:
        """Little-endian float32 [width]."""
        return (self._sums / self._count).astype("<f4").tobytes()


class Rows:
    """The tables. Rows are taken, appended to, and freed as the plans say."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, num_groups: int, max_blocks_per_row: int, *, vocab_size: int = 0
    ) -> None:
        """`vocab_size` is what masks are sized by: without it no row can be masked."""
        n = max_num_seqs
        self.version = 0  # raised when a row is taken: what is known of a row holds until then
        self.vocab_size = vocab_size
        self.tokens = np.zeros((n, max_model_len), np.int32)
        self.block_tables = tuple(np.full((n, max_blocks_per_row), NULL_BLOCK, np.int32) for _ in range(num_groups))
        self._num_blocks = np.zeros((n, num_groups), np.int64)
        self.prompt_length = np.zeros(n, np.int64)
        self.temperature = np.ones(n, np.float32)
        self.top_k = np.zeros(n, np.int32)
        self.top_p = np.ones(n, np.float32)
        self.min_p = np.zeros(n, np.float32)
        self.repetition = np.ones(n, np.float32)
        self.presence = np.zeros(n, np.float32)
        self.frequency = np.zeros(n, np.float32)
        self.seed = np.zeros(n, np.uint64)
        self.stream = np.zeros(n, np.int32)
        self.num_top = np.full(n, -1, np.int32)  # most likely tokens to report; -1: no logprobs
        self.num_prompt_top = np.full(n, -1, np.int32)
        self.lists: list[RowLists | None] = [None] * n
        self.named: list[tuple[int, ...]] = [()] * n  # tokens to score beside each sampled one
        self._means: list[Mean | None] = [None] * n
        self._taken = [False] * n

    def free(self, row: int) -> None:
        assert self._taken[row], f"row {row} is freed but not taken"
        self._taken[row] = False

    def take(self, new: NewRow) -> None:
        row, p = new.row, new.params
        assert not self._taken[row], f"row {row} is taken but not freed"
        self._taken[row] = True
        self.version += 1
        self.tokens[row, : len(new.tokens)] = new.tokens
        self._num_blocks[row] = 0
        for table in self.block_tables:
            table[row] = NULL_BLOCK
        self._append_blocks(row, new.blocks)
        self.prompt_length[row] = new.prompt_length
        self.temperature[row] = p.temperature
        self.top_k[row] = max(p.top_k, 0)
        self.top_p[row] = p.top_p
        self.min_p[row] = p.min_p
        self.repetition[row] = p.repetition_penalty
        self.presence[row] = p.presence_penalty
        self.frequency[row] = p.frequency_penalty
        self.seed[row] = new.seed
        self.stream[row] = new.stream
        self.num_top[row] = -1 if p.logprobs is None else p.logprobs
        self.num_prompt_top[row] = -1 if p.prompt_logprobs is None else p.prompt_logprobs
        self.lists[row] = RowLists.of(new)
        self.named[row] = p.logprob_token_ids if p.logprobs is not None else ()
        self._means[row] = None

    def pool(self, row: int, hidden: Float32, end: int) -> bytes:
        """Take in final hidden states [positions, width], the last of position `end` - 1. b"" until the prompt has ended."""
        mean = self._means[row] = self._means[row] or Mean(hidden.shape[1])
        mean.add(hidden)
        return mean.value() if end == self.prompt_length[row] else b""

    def release(self, row: int, group: int, blocks: int) -> None:
        """The window has left the first `blocks` blocks: their ids may now belong to others."""
        self.block_tables[group][row, :blocks] = NULL_BLOCK

    def replace(self, row: int, group: int, index: int, block: int) -> None:
        """Point one entry to another block that holds the same bits."""
        self.block_tables[group][row, index] = block

    def append(self, planned: PlanRow) -> None:
        """Add a step's new blocks and new ids: the ids are the last of the chunk."""
        assert self._taken[planned.row], f"row {planned.row} is planned but not taken"
        self._append_blocks(planned.row, planned.new_blocks)
        if planned.tokens:
            end = planned.start + planned.count
            self.tokens[planned.row, end - len(planned.tokens) : end] = planned.tokens

    def _append_blocks(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        for group, ids in enumerate(blocks):
            if ids:
                have = self._num_blocks[row, group]
                self.block_tables[group][row, have : have + len(ids)] = ids
                self._num_blocks[row, group] = have + len(ids)
