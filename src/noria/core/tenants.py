"""What each tenant had: the virtual token counters of the `fair` policy (VTC: Sheng et al., OSDI 2024).

A tenant's counter grows with the prompt tokens that are computed for it and, weighted, with its output tokens; the waiting
request of the tenant with the smallest counter is admitted next. So two tenants that both have requests waiting during an
interval get the same in it, up to a bound that does not grow with its length: twice the larger of the longest prompt and the
weighted output that all running sequences can still make (theorem 4.4 of the paper).

    counter   A ────────────┐ idle: keeps what it is ahead          A joins: at its own counter, or at B's if that is higher
              B ───────────────────────────────────────

A tenant that was away must not come back with credit, or it would shut the others out until it has spent it: whoever joins
starts at the minimum of those who wait, and at what the last admitted one had if nobody does.
"""

from __future__ import annotations

from collections.abc import Collection

OUTPUT_WEIGHT = 2.0  # a token of output takes about as long as two of a prompt, in a full batch
_KEPT = 1024  # counters of tenants that are away, before those that no longer matter are dropped


class Tenants:
    """The counters, in prompt tokens."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._floor = 0.0  # the counter of the last admitted tenant, before that was charged: nobody joins below it

    def served(self, tenant: str) -> float:
        """A tenant's counter."""
        return self._served.get(tenant, self._floor)

    def join(self, tenant: str, waiting: Collection[str]) -> None:
        """A tenant with nothing waiting gets a request that waits, beside those of the tenants `waiting`."""
        least = min(map(self.served, waiting), default=self._floor)
        self._served[tenant] = max(self.served(tenant), least)
        if len(self._served) > _KEPT:
            kept = {tenant, *waiting}
            self._served = {t: c for t, c in self._served.items() if c > self._floor or t in kept}

    def admit(self, tenant: str, tokens: float) -> None:
        """The first waiting tenant gets a prompt of `tokens` computed."""
        self._floor = max(self._floor, self.served(tenant))
        self.charge(tenant, tokens)

    def charge(self, tenant: str, tokens: float) -> None:
        """A tenant got the worth of `tokens`."""
        self._served[tenant] = self.served(tenant) + tokens
