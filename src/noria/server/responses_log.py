"""The events of a response, numbered, for its stream and for whoever reads them later or joins while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from typing import Any

from noria.server.responses_items import Told, retold
from noria.server.sse import named_event


class EventLog:
    """What was told so far, ready to be sent; `sequence_number` is the place in it."""

    def __init__(self) -> None:
        self.size = 0  # bytes
        self.ended = False
        self._events: list[bytes] = []
        self._news: asyncio.Future[None] | None = None  # somebody waits for more

    def add(self, told: Iterable[Told]) -> bytes:
        """Number events and keep them: what is to be sent of them."""
        added = [named_event({**one, "sequence_number": number}) for number, one in enumerate(told, len(self._events))]
        self._events += added
        sent = b"".join(added)
        self.size += len(sent)
        self.wake()
        return sent

    def end(self) -> None:
        """Nothing more will come."""
        self.ended = True
        self.wake()

    async def wait(self, known: int) -> bytes:
        """The events behind the first `known`, as soon as there are some or somebody wakes all; b"" for none."""
        if known >= len(self._events) and not self.ended:
            if self._news is None:
                self._news = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._news)
        return b"".join(self._events[known:])

    def wake(self) -> None:
        """Have all who wait look again."""
        news, self._news = self._news, None
        if news is not None:
            news.set_result(None)

    def __len__(self) -> int:
        return len(self._events)


class Follower:
    """Reads a log from behind the event of number `after` to its end, or until it leaves."""

    def __init__(self, log: EventLog, after: int = -1) -> None:
        self._log = log
        self._known = after + 1
        self._left = False

    def leave(self) -> None:
        """Read no more."""
        self._left = True
        self._log.wake()

    async def events(self) -> AsyncGenerator[bytes]:
        """The events, those to come included."""
        while not self._left and not (self._log.ended and self._known >= len(self._log)):
            new = await self._log.wait(self._known)
            if new:
                self._known = len(self._log)
                yield new


def opening(response: Mapping[str, Any]) -> list[Told]:
    """What every stream begins with."""
    return [{"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress")]


def closing(response: Mapping[str, Any]) -> Told:
    """What every stream ends with. One that was cancelled is told as incomplete: the API has no event for it."""
    status = response["status"]
    return {"type": f"response.{'incomplete' if status == 'cancelled' else status}", "response": response}


def log_of(response: Mapping[str, Any]) -> EventLog:
    """The events of an ended response that was not streamed: each text in one piece."""
    log = EventLog()
    log.add(_events(response))
    log.end()
    return log


def _events(response: Mapping[str, Any]) -> Iterator[Told]:
    blank: dict[str, Any] = {"status": "in_progress", "output": [], "usage": None, "error": None, "incomplete_details": None}
    yield from opening({key: value for key, value in response.items() if key != "completed_at"} | blank)
    for index, item in enumerate(response["output"]):
        yield from retold(index, item)
    yield closing(response)
