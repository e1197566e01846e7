"""What this machine can do at most, measured in the same run as what is compared with it.

    u8s8, bf16, f32    operations a second of dot products from registers, on all threads (native/limits.h)
    memory             bytes a second of a plain read of more than the caches hold
    cache              the same of a buffer that stays in them

A limit is the best of several short tries: on a shared machine the others say more about the neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from noria.backends.cpu import _native
from noria.backends.cpu.memory import address, anonymous

TRIES = 8
TRY_S = 0.02
MEMORY_BYTES = 256 << 20
CACHE_BYTES = 4 << 20
UNITS = ("u8s8", "bf16", "f32")
UNIT_OF_KIND = {"q4": "u8s8", "q8": "u8s8", "bf16": "bf16", "f32": "f32"}  # what a weight format's products are made by


@dataclass(frozen=True)
class Limits:
    """Operations (a multiply and its add are two) and bytes a second."""

    tier: str
    threads: int
    peaks: dict[str, float]
    memory: float
    cache: float

    def seconds(self, operations: float, moved: float, unit: str, *, cached: bool = False) -> float:
        """The least time that the roofline allows."""
        return max(operations / self.peaks[unit], moved / (self.cache if cached else self.memory))

    def lines(self) -> list[str]:
        """For people."""
        peaks = ", ".join(f"{unit} {rate / 1e9:.0f} GOP/s" for unit, rate in self.peaks.items())
        return [
            f"limits of {self.threads} threads, {self.tier}: {peaks}",
            f"reads: {self.memory / 1e9:.1f} GB/s from memory, {self.cache / 1e9:.0f} GB/s from cache",
        ]


class LimitProbe:
    """Measures limits on a pool of its own."""

    def __init__(self, threads: int, tier: str) -> None:
        self._pool = _native.Pool(threads)
        self._tier = tier
        self._buffer = anonymous(MEMORY_BYTES)
        self._buffer[:] = 1  # a page that was never written is the one zero page

    def peak(self, unit: str) -> float:
        """Operations a second, of the best try."""
        return max(self.peaks(unit))

    def read(self, nbytes: int = MEMORY_BYTES) -> float:
        """Bytes a second of reading the first `nbytes` of a buffer, again and again, of the best try."""
        return max(self.reads(nbytes))

    def peaks(self, unit: str) -> list[float]:
        """Of every try."""
        rounds = 64
        while True:
            operations, seconds = _native.peak(self._pool, self._tier, unit, rounds)
            if seconds >= TRY_S:
                break
            rounds *= 4 if seconds < TRY_S / 4 else 2
        tries = [_native.peak(self._pool, self._tier, unit, rounds) for _ in range(TRIES - 1)]
        return [operations / seconds for operations, seconds in [(operations, seconds), *tries]]

    def reads(self, nbytes: int) -> list[float]:
        """Of every try."""
        repeats = max(1, MEMORY_BYTES // nbytes)
        seconds = [_native.read(self._pool, self._tier, address(self._buffer), nbytes, repeats) for _ in range(TRIES)]
        return [nbytes * repeats / s for s in seconds]

    def measure(self) -> Limits:
        """All of them, in about a second."""
        return Limits(
            tier=self._tier,
            threads=self._pool.threads,
            peaks={unit: self.peak(unit) for unit in UNITS},
            memory=self.read(),
            cache=self.read(CACHE_BYTES),
        )


def better(first: Limits, second: Limits) -> Limits:
    """The higher of two measurements, limit by limit: before and after what is compared with them."""
    return Limits(
        tier=first.tier,
        threads=first.threads,
        peaks={unit: max(rate, second.peaks[unit]) for unit, rate in first.peaks.items()},
        memory=max(first.memory, second.memory),
        cache=max(first.cache, second.cache),
    )
