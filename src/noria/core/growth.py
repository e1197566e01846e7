"""How much memory the running sequences are going to need: the watermark of admission.

The length of an output is not known, but its mean is observed. With each running sequence's expected remaining length, the
memory in use at the moment when the shortest of them ends, then the next, and so on, is a sum; its highest value above
what is in use now is what admission has to leave free. (The idea of the past-future scheduler, Gong et al., ASPLOS 2025.)
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from noria.core.sequence import Sequence
from noria.kv.keys import BLOCK_SIZE

_START = 64.0  # tokens, before anything is observed
_SMOOTHING = 1 / 16
_AFTER_PREEMPTION = 1.25  # the estimate was too low, or nothing would have been preempted
_LEAST_SHARE = 0.25  # an output that outgrew the mean is expected to go on for this share of it


class Growth:
    """Observes output lengths; `full_groups` is how many blocks 16 further tokens take (a window only slides)."""

    def __init__(self, full_groups: int, max_len: int) -> None:
        self.mean = min(_START, float(max_len))
        self._full_groups = full_groups
        self._max_len = max_len

    def finished(self, output_tokens: int) -> None:
        """An output ended by itself or by its limit."""
        self.mean += (output_tokens - self.mean) * _SMOOTHING

    def preempted(self) -> None:
        """Memory ran out."""
        self.mean = min(self.mean * _AFTER_PREEMPTION, float(self._max_len))

    def remaining(self, sequence: Sequence) -> float:
        """Expected further tokens of a sequence."""
        known = len(sequence.tokens)
        expected = max(self.mean - (known - sequence.prompt_length), self.mean * _LEAST_SHARE)
        return min(expected, sequence.limit - known)

    def bound(self, count: int) -> int:
        """No less than `peak` of `count` sequences, without looking at them."""
        return count * self._blocks(self.mean)

    def peak(self, running: Iterable[Sequence]) -> int:
        """Blocks that `running` are expected to need at their worst moment, above what they hold now."""
        futures = sorted(((self.remaining(s), s.kv.held - s.kv.borrowed) for s in running), reverse=True)
        held_by_longest = accumulate(held for _, held in futures)
        in_use = sum(held for _, held in futures)
        moments = (
            held + count * self._blocks(remaining)
            for count, ((remaining, _), held) in enumerate(zip(futures, held_by_longest, strict=True), 1)
        )
        return max(0, max(moments, default=0) - in_use)

    def _blocks(self, tokens: float) -> int:
        return -int(-tokens // BLOCK_SIZE) * self._full_groups
