"""What each tenant had: the virtual token counters of the `fair` policy (VTC: Sheng et al., OSDI 2024).

A tenant's counter grows with the prompt tokens that are computed for it and, weighted, with its output tokens; the waiting
request of the tenant with the smallest counter is admitted next. So a tenant was at the minimum when its last request was
admitted, and has since had at most that prompt and the output of what it has running. Two tenants that both have requests
waiting during an interval therefore get the same in it, up to a bound that does not grow with the interval:

    2 * (the longest prompt + OUTPUT_WEIGHT * the output that all running sequences can still make)

A tenant that was away must not come back with credit, or it would shut the others out until it has spent it: whoever joins
starts at the minimum of those who wait, or at what the last admitted one has if nobody does, unless it is ahead of that
already. A tenant whose requests all wait for a prefix that a running sequence is computing is passed over for that while.
"""

from __future__ import annotations

from collections.abc import Collection

OUTPUT_WEIGHT = 2.0  # a token of output takes about as long as two of a prompt, in a full batch
_KEPT = 1024  # counters, before those that no longer matter are dropped


class Tenants:
    """The counters, in prompt tokens."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._last = 0.0  # the counter of the tenant that was admitted last
        self._most = _KEPT

    def served(self, tenant: str) -> float:
        """A tenant's counter."""
        return self._served.get(tenant, 0.0)

    def join(self, tenant: str, waiting: Collection[str]) -> None:
        """A tenant with nothing waiting gets a request that waits, beside those of the tenants `waiting`."""
        least = min(map(self.served, waiting), default=self._last)
        self._served[tenant] = max(self.served(tenant), least)
        if len(self._served) > self._most:
            # Nobody joins below `least`, and it only grows: what is at or under it need not be known any more.
            kept = {tenant, *waiting}
            self._served = {t: c for t, c in self._served.items() if c > least or t in kept}
            self._most = max(_KEPT, 2 * len(self._served))

    def admit(self, tenant: str, tokens: float) -> None:
        """The first waiting tenant gets a prompt of `tokens` computed."""
        self.charge(tenant, tokens)
        self._last = self.served(tenant)

    def charge(self, tenant: str, tokens: float) -> None:
        """A tenant got the worth of `tokens`."""
        self._served[tenant] = self.served(tenant) + tokens
