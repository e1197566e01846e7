"""The loops that measure the machine's limits."""

from __future__ import annotations

import numpy as np
import pytest

from noria.backends.cpu import _native
from noria.backends.cpu.memory import address

PIECE = 256 << 10


@pytest.mark.parametrize("unit", ["u8s8", "bf16", "f32"])
def test_operations_are_those_of_the_rounds(tier: str, unit: str) -> None:
    """Red if the count is not proportional to the work: every rate would be wrong by that factor."""
    pool = _native.Pool(2)
    once, seconds = _native.peak(pool, tier, unit, 3)
    twice, _ = _native.peak(pool, tier, unit, 6)
    assert twice == 2 * once
    assert seconds > 0
    lanes = once // {"u8s8": 8, "bf16": 4, "f32": 2}[unit]
    assert lanes % (3 * 2 * 16) == 0  # rounds, threads, lanes


def test_peaks_differ_by_what_a_lane_holds(tier: str) -> None:
    """Red if bytes are counted like floats: a lane holds four bytes, two bfloat16 or one float."""
    pool = _native.Pool(1)
    counts = {unit: _native.peak(pool, tier, unit, 1)[0] for unit in ("u8s8", "bf16", "f32")}
    assert counts["u8s8"] == 2 * counts["bf16"] == 4 * counts["f32"]


def test_reads_are_of_whole_pieces(tier: str) -> None:
    """Red if a read goes past the end of a buffer that is no multiple of its pieces."""
    pool, data = _native.Pool(2), np.ones(2 * PIECE, np.uint8)
    assert _native.read(pool, tier, address(data), 2 * PIECE, 3) > 0
    for size, repeats in ((PIECE + 64, 1), (0, 1), (PIECE, 0)):
        with pytest.raises(ValueError, match="256 KiB"):
            _native.read(pool, tier, address(data), size, repeats)


def test_unknown_units_are_refused() -> None:
    """Red if a misspelt unit measures something else."""
    with pytest.raises(ValueError, match="unit"):
        _native.peak(_native.Pool(1), "auto", "f64", 1)
