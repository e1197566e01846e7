"""One request of a client as the server sees it: who asks, on what terms, and what it has cost so far.

The gate opens an exchange for each HTTP request, the batch runner one for each line of a batch. It travels in a context
variable, not in arguments, and every request is stamped with it where it leaves for the engine: an API dialect that is added
later cannot forget to pass the caller on, and so get around the tenants' separation, the limits or the log.
"""

from __future__ import annotations

import time
from contextvars import ContextVar

import msgspec

from noria.observe.timeline import timeline
from noria.server.keys import Caller, anonymous
from noria.types import EngineRequest


class Exchange:
    """Filled in as the request proceeds."""

    def __init__(self, caller: Caller, request_id: str, *, background: bool = False) -> None:
        self.caller = caller
        self.request_id = request_id
        self.background = background  # below interactive priority
        self.began = time.monotonic()
        self.deadline: float | None = None  # on the same clock
        self.status = 0
        self.aborted = False  # the client left before the end
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.cache_miss = ""  # why the block behind those was not in the cache
        self.prompts_counted = False  # what is sent from now on goes on from prompts that are counted already
        self._arrival: float | None = None  # of the engine's first request: its phases begin here
        self._first_token: float | None = None
        self._phases: tuple[float, ...] = ()

    def salt(self, salt: str) -> str:
        """The cache salt of a prompt: tenants never share, whatever salts their clients choose.

        No tenant's name holds a NUL, so the first one separates the two without ambiguity.
        """
        tenant = self.caller.tenant
        return f"{tenant}\0{salt}" if tenant or salt else ""

    def sent(self, arrival: float, prompt_tokens: int) -> None:
        """A prompt goes to the engine."""
        self._arrival = arrival if self._arrival is None else self._arrival
        if self.prompts_counted:
            return
        self.prompt_tokens += prompt_tokens
        self.caller.limits.spend(prompt_tokens, time.monotonic())

    def generated(self, tokens: int, now: float) -> None:
        """Tokens of an answer were delivered."""
        if self._first_token is None:
            self._first_token = now
        self.completion_tokens += tokens
        self.caller.limits.spend(tokens, now)

    def finished(self, phases: tuple[float, ...], cached_tokens: int, cache_miss: str) -> None:
        """The engine finished a request; `phases` in seconds."""
        self._phases = phases
        if not self.prompts_counted:
            self.cached_tokens += cached_tokens
            self.cache_miss = cache_miss

    def seconds(self) -> float:
        """From the first byte of the request until now."""
        return time.monotonic() - self.began

    def parts(self) -> dict[str, float]:
        """Where the time went until now: `receive` (reading the body), then the phases of the engine request that ended last.

        They sum to `seconds()`. Empty if nothing was sent to the engine.
        """
        if self._arrival is None:
            return {}
        receive = max(0.0, self._arrival - self.began)
        return {"receive": receive, **timeline(self._phases, self.seconds() - receive)}

    def first_token_seconds(self) -> float | None:
        """From the first byte of the request to the first token; None without one."""
        return None if self._first_token is None else self._first_token - self.began


_current: ContextVar[Exchange | None] = ContextVar("noria_exchange", default=None)


def enter(exchange: Exchange) -> None:
    """Make `exchange` the current one of this task and of those it starts."""
    _current.set(exchange)


def current_exchange() -> Exchange:
    """The exchange that this code works for; a new anonymous one where there is no server around it (`noria run`)."""
    return _current.get() or Exchange(anonymous(), "")


def stamped(request: EngineRequest) -> EngineRequest:
    """A request on its way to the engine, on the terms of the current exchange, which pays for its prompt."""
    exchange = current_exchange()
    exchange.sent(request.arrival, len(request.prompt))
    deadlines = [at for at in (request.deadline, exchange.deadline) if at is not None]
    return msgspec.structs.replace(
        request,
        cache_salt=exchange.salt(request.cache_salt),
        tenant=exchange.caller.tenant,
        background=exchange.background,
        deadline=min(deadlines, default=None),
    )
