"""Where a request's time went: the engine's stamps, and the delivery that only a shell can see."""

from __future__ import annotations

from collections.abc import Sequence

from noria.types import Phase


def timeline(phases: Sequence[float], elapsed: float) -> dict[str, float]:
    """Seconds by phase name. `phases` are the engine's, `elapsed` the whole time as the shell measured it.

    Both clocks are the machine's monotonic clock, and the engine's parts begin at the shell's arrival stamp; so what the
    engine did not account for is delivery: channels, detokenising, writing. The parts sum to `elapsed`.
    """
    parts = {phase.name.lower(): seconds for phase, seconds in zip(Phase, phases, strict=False)}
    parts[Phase.DELIVERY.name.lower()] = max(0.0, elapsed - sum(phases))
    return {phase.name.lower(): parts.get(phase.name.lower(), 0.0) for phase in Phase}
