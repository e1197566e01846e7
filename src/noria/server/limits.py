"""Limits of one API key: requests and tokens a minute, requests at once.

The two rates are token buckets that hold a minute's worth and refill steadily. A request is admitted while there is something
left and pays when the cost is known - the prompt when it is sent to the engine, each answer token as it is delivered - so the
balance may go below zero, and the next request waits until the debt is paid. Nothing is guessed, and over time the rate holds.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from noria.types import RequestError

MINUTE = 60.0
BUSY_RETRY_S = 1.0  # where too many requests are open: nobody knows when one ends


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """None is no limit."""

    requests_per_minute: Annotated[int, Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Meta(ge=1)] | None = None
    max_concurrency: Annotated[int, Meta(ge=1)] | None = None


class OverLimit(RequestError):
    """429: a limit of the key is reached. `retry_after` in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, code="rate_limit_exceeded", status=429)
        self.retry_after = retry_after


class Bucket:
    """`per_minute` units, refilled steadily up to that many. Times are of one monotonic clock, in seconds."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = per_minute
        self._rate = per_minute / MINUTE
        self._balance = float(per_minute)
        self._then = now

    def balance(self, now: float) -> float:
        """Units left now; negative is debt."""
        self._balance = min(self.capacity, self._balance + (now - self._then) * self._rate)
        self._then = now
        return self._balance

    def take(self, units: float, now: float) -> None:
        """Pay, into debt if need be."""
        self._balance = self.balance(now) - units

    def wait(self, least: float, now: float) -> float:
        """Seconds until the balance is at least `least`."""
        return max(0.0, (least - self.balance(now)) / self._rate)

    def headers(self, kind: str, now: float) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit headers of this bucket."""
        values = {
            "limit": str(self.capacity),
            "remaining": str(max(0, math.floor(self.balance(now)))),
            "reset": f"{self.wait(self.capacity, now):.3f}s",
        }
        return [(f"x-ratelimit-{name}-{kind}".encode(), value.encode()) for name, value in values.items()]


class CallerLimits:
    """The state of one key's limits."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.open = 0  # requests
        self._most = limits.max_concurrency
        self._requests = _bucket(limits.requests_per_minute, now)
        self._tokens = _bucket(limits.tokens_per_minute, now)

    def admit(self, now: float) -> None:
        """Count a new request in; `leave` must follow. Raises OverLimit, which costs nothing."""
        if self._most is not None and self.open >= self._most:
            raise OverLimit(f"this key may have {self._most} requests open at once", BUSY_RETRY_S)
        if self._requests is not None and (wait := self._requests.wait(1, now)):
            raise OverLimit(f"this key may send {self._requests.capacity} requests a minute", wait)
        if self._tokens is not None and (wait := self.token_wait(now)):
            raise OverLimit(f"this key may use {self._tokens.capacity} tokens a minute", wait)
        if self._requests is not None:
            self._requests.take(1, now)
        self.open += 1

    def leave(self) -> None:
        """An admitted request has ended."""
        self.open -= 1

    def spend(self, tokens: int, now: float) -> None:
        """Tokens that a request took."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def token_wait(self, now: float) -> float:
        """Seconds until tokens are left."""
        return 0.0 if self._tokens is None else self._tokens.wait(1, now)

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """Headers that tell a client where it stands; none without limits."""
        kinds = (("requests", self._requests), ("tokens", self._tokens))
        return [header for kind, bucket in kinds if bucket is not None for header in bucket.headers(kind, now)]


def _bucket(per_minute: int | None, now: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now)
