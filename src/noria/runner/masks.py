"""Masks of a step: which draw reads which mask, and the thread on which they are filled beside the forward pass.

engine      launch ─────── mask ─── wait ───────────────────────────────────────────► result
step                 (depth 1: from launch on)   forward ............. | draw
masks                        `-- fill ........... ready ---------------'  the first masked draw waits for it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from noria.backends.base import Masks
from noria.core.plan import PlanRow
from noria.runner.draws import RowDraws

Fill = Callable[[int, int], None]  # (address of the first mask, bytes of a mask): write the masks of the step, in its order


def step_masks(rows: Sequence[PlanRow], places: Sequence[RowDraws], draws: int, vocab_size: int) -> Masks | None:
    """The masks of a step with `draws` draws, to be filled; None if no row is masked.

    Each sample has one; a row's further streams share that of its last sample.
    """
    if not any(planned.masked for planned in rows):
        return None
    index = np.full(draws, -1, np.int32)
    count = 0
    for planned, place in zip(rows, places, strict=True):
        if planned.masked and planned.samples:
            first = place.first + place.scored
            index[first : first + planned.samples] = np.arange(count, count + planned.samples)
            count += planned.samples
            index[first + planned.samples : first + place.sampled] = count - 1
    return Masks(index, np.empty((count, -(-vocab_size // 32)), np.uint32), np.zeros(1, np.int32))


class MaskThread:
    """Fills masks, one step's at a time. The thread is started by the first step that has some."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="noria-masks")
        self._waiting: Masks | None = None  # of a step whose masks nobody has begun to fill
        self._filling: Future[None] | None = None

    def expect(self, masks: Masks | None) -> None:
        """A step is launched. If it has masks, its draws now wait for `fill`."""
        self._waiting = masks

    def fill(self, fill: Fill) -> None:
        """Begin to fill the masks of the launched step."""
        masks = self._waiting
        assert masks is not None, "a step without masked rows has no masks to fill"
        self._waiting = None
        self._filling = self._thread.submit(_fill, masks, fill)

    def finished(self) -> None:
        """The step has run. Raises what `fill` raised: then its draws mean nothing."""
        if self._filling is not None:
            filling, self._filling = self._filling, None
            filling.result()

    def close(self) -> None:
        """Let a step go whose masks will not come any more, and stop the thread."""
        if self._waiting is not None:
            self._waiting.ready[0] = 1
        self._thread.shutdown()


def _fill(masks: Masks, fill: Fill) -> None:
    try:
        fill(masks.words.ctypes.data, masks.words.strides[0])
    finally:
        masks.ready[0] = 1  # also after a fault: the step must end to be told of it
