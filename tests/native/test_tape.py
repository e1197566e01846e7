"""The tape: sizes come from the step alone, logit rows are drawn tile by tile, errors leave it usable."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from steps import BEST, Row, inputs, results, same_bits

from noria.backends.base import StepInputs
from noria.backends.cpu import _native
from noria.backends.cpu.memory import address, anonymous
from noria.weights.formats import WeightFormat, panel_bytes

F32 = npt.NDArray[np.float32]
VOCAB, WIDTH, TOKENS = 70, 32, 40


class LogitsTape:
    """embed, gather, hidden states, logits, draw over f32 weights, `chunk_rows` logit rows at a time."""

    def __init__(self, chunk_rows: int, threads: int = 2, hidden: bool = True) -> None:
        values = np.random.default_rng(0).standard_normal((VOCAB, WIDTH)).astype(np.float32)
        padded = np.zeros((96, WIDTH), np.float32)
        padded[:VOCAB] = values
        self.weight = anonymous(3 * panel_bytes(WeightFormat(kind="f32"), WIDTH))
        self.weight.view(np.float32)[:] = padded.reshape(3, 32, WIDTH).transpose(0, 2, 1).reshape(-1)
        self.x, self.gathered = (np.empty((TOKENS, WIDTH), np.float32) for _ in range(2))
        self.chunk = np.empty((chunk_rows, VOCAB), np.float32)
        matrix: dict[str, Any] = {
            "data": address(self.weight),
            "kind": "f32",
            "group": 0,
            "half_scales": False,
            "has_minimum": False,
            "outputs": VOCAB,
            "inputs": WIDTH,
        }
        self.tape = tape = _native.Tape(_native.Pool(threads), BEST, TOKENS, 4, 4, 17, 64, VOCAB, [0])
        tape.begin_rows(logits=False)
        tape.embed(**matrix, scale=1.0, y=address(self.x))
        tape.begin_rows(logits=True)
        tape.gather(x=address(self.x), y=address(self.gathered), width=WIDTH)
        if hidden:
            tape.hidden(x=address(self.gathered), width=WIDTH)
        tape.begin_logits(chunk_rows)
        tape.begin_linear(
            logits=True,
            inputs=WIDTH,
            x=address(self.gathered),
            pairs=0,
            quantized=0,
            quantized_rows=0,
            bias=0,
            y=address(self.chunk),
            outputs=VOCAB,
        )
        tape.segment(**matrix, first_column=0)
        tape.draw(address(self.chunk))
        tape.finish()
        self.values = values
        self.expected = values.astype(np.float64) @ values.T.astype(np.float64)  # row: token

    def step(self, count: int, logit_rows: list[int], drawn: list[dict[str, Any]] | None = None) -> StepInputs:
        table = np.arange(1, 17, dtype=np.int32).reshape(4, 4)
        tokens = np.arange(count, dtype=np.int32) % VOCAB
        return inputs([Row(1, 0, count)], [table], logit_rows, drawn or (), tokens)

    def all_logits(self, step: StepInputs) -> F32:
        logits = np.full((len(step.logit_rows), VOCAB), np.nan, np.float32)
        self.tape.run(step, None, address(logits))
        return logits


@pytest.mark.parametrize("chunk_rows", [1, 3, 8, 40])
def test_tiles_of_logit_rows(chunk_rows: int) -> None:
    """Red when a tile reads the wrong rows of the input, or the short last tile is run at full length."""
    tape = LogitsTape(chunk_rows)
    for count, rows in ((40, list(range(40))), (5, [4]), (40, []), (17, [0, 3, 16]), (40, list(range(1, 40)))):
        logits = tape.all_logits(tape.step(count, rows))
        assert np.allclose(logits, tape.expected[rows], atol=1e-4)
        drawn = results(len(rows))
        tape.tape.run(tape.step(count, rows, [{"logit_row": i} for i in reversed(range(len(rows)))]), drawn, 0)
        assert drawn.token.tolist() == logits.argmax(axis=1).tolist()[::-1]


@pytest.mark.parametrize("chunk_rows", [3, 40])
@pytest.mark.parametrize(
    ("logit_rows", "hidden_rows"), [([], range(40)), ([7], [39, 0, 8]), (range(20), range(20, 40)), ([3, 4], [])]
)
def test_hidden_states_come_from_behind_the_logit_rows(
    chunk_rows: int, logit_rows: Sequence[int], hidden_rows: Sequence[int]
) -> None:
    """Red when a row that is only embedded gets logits, a logit row is taken for a hidden state, or either moves the other."""
    tape = LogitsTape(chunk_rows)
    step = tape.step(40, list(logit_rows), [{"logit_row": i} for i in range(len(logit_rows))])
    step.hidden_rows = np.array(hidden_rows, np.int32)
    drawn = results(len(logit_rows))
    drawn.hidden = np.full((len(hidden_rows), WIDTH), np.nan, np.float32)
    tape.tape.run(step, drawn, 0)
    assert same_bits(drawn.hidden, tape.values[list(hidden_rows)])
    assert drawn.token.tolist() == tape.expected[list(logit_rows)].argmax(axis=1).tolist()
    assert np.allclose(tape.all_logits(step), tape.expected[list(logit_rows)], atol=1e-4)


def test_hidden_states_that_have_no_place_are_refused() -> None:
    """Red when the kernel writes past what the caller made room for, or a pass without hidden states answers with garbage."""
    step = LogitsTape(8).step(40, [1])
    step.hidden_rows = np.array([2, 3], np.int32)
    drawn = results(0)
    for shape, message in (((2, WIDTH + 1), "another width"), ((1, WIDTH + 1), "hidden is not")):
        drawn.hidden = np.zeros(shape, np.float32)
        with pytest.raises((ValueError, TypeError), match=message):
            LogitsTape(8).tape.run(step, drawn, 0)
    drawn.hidden = np.zeros((2, WIDTH), np.float32)
    with pytest.raises(ValueError, match="no hidden states"):
        LogitsTape(8, hidden=False).tape.run(step, drawn, 0)


def test_many_draws_of_one_row_and_none_of_another() -> None:
    """Red when draws are matched to rows by their place."""
    tape = LogitsTape(2)
    wanted = [2, 0, 2, 2, 4]
    step = tape.step(10, [1, 3, 5, 7, 9], [{"logit_row": r, "num_top": 0} for r in wanted])
    drawn = results(5)
    tape.tape.run(step, drawn, 0)
    best = tape.expected.argmax(axis=1)
    assert drawn.token.tolist() == [best[[1, 3, 5, 7, 9][r]] for r in wanted]


def test_a_refused_step_leaves_the_tape_usable() -> None:
    """Red when an error leaves sizes or claims of the refused step behind."""
    tape = LogitsTape(8)
    good = tape.step(40, list(range(40)))
    expected = tape.all_logits(good)
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"tokens": np.full(40, VOCAB, np.int32)}, ValueError, "vocabulary"),
        ({"tokens": np.zeros(39, np.int32)}, TypeError, "positions"),
        ({"tokens": np.zeros(40, np.int64)}, TypeError, "element type"),
        ({"positions": np.zeros(40, np.float32)}, TypeError, "element type"),
        ({"positions": np.zeros(40, np.int32)}, ValueError, "ascend"),
        ({"row_offsets": np.array([0, 39], np.int32)}, ValueError, "cover"),
        ({"logit_rows": np.array([40], np.int32)}, ValueError, "logit_rows"),
        ({"hidden_rows": np.array([0], np.int32)}, ValueError, "more logit rows and hidden rows"),
        ({"logit_rows": np.array([0], np.int32), "hidden_rows": np.array([-1], np.int32)}, ValueError, "hidden_rows"),
        ({"block_tables": ()}, ValueError, "block tables"),
        ({"block_tables": (np.ones((4, 3), np.int32),)}, TypeError, "width"),
    ]
    for change, kind, message in bad:
        with pytest.raises(kind, match=message):
            tape.all_logits(dataclasses.replace(good, **change))
    with pytest.raises(ValueError, match="more tokens"):
        tape.all_logits(inputs([Row(1, 0, 41)], good.block_tables))
    assert same_bits(tape.all_logits(good), expected)


def test_the_profile_names_every_op() -> None:
    """Red when an op's time is not counted, or counted for another."""
    tape = LogitsTape(8)
    tape.tape.set_profiling(True)
    tape.all_logits(tape.step(40, list(range(40))))
    labels, seconds = tape.tape.labels(), tape.tape.seconds()
    assert labels == ["rows embed", "rows gather+hidden", "linear 32 > 70", "draw"]
    assert all(s > 0 for s in seconds)
