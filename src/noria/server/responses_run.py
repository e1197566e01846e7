"""One response on its way: the deltas of its call as output items, events, and the state that is stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from noria.server.answer import Delta
from noria.server.calls import Call
from noria.server.context import Served
from noria.server.dialect import chat_logprobs
from noria.server.errors import error_object
from noria.server.responses_items import Items, Told
from noria.server.responses_log import EventLog, closing, opening
from noria.server.responses_store import ResponseStore, Stored
from noria.types import FinishReason, RequestError


class Run:
    """Runs a call to its end, once: `collect` it whole, or read its `events`."""

    def __init__(self, served: Served, call: Call, stored: Stored, *, top_logprobs: int, store: ResponseStore | None) -> None:
        """`store`: where the response is kept; None if it is not to be."""
        self.stored = stored
        self._served = served
        self._call = call
        self._top = top_logprobs
        self._store = store
        self._items = Items()
        self._log = EventLog()
        self._began = False  # the first events were told
        self._last: Delta | None = None

    def abort(self) -> None:
        """End it early: it is cancelled, with what it has."""
        if self.stored.response["status"] == "in_progress":
            self.stored.response["status"] = "cancelled"
            self._call.generation.abort()

    async def collect(self) -> dict[str, Any]:
        """Run to the end: the response object."""
        async for deltas in self._call.generation.steps():
            for _, delta in deltas:
                self._push(delta)
        self._end()
        if self._store is not None:
            self._store.put(self.stored)
        return self.stored.response

    async def events(self) -> AsyncGenerator[bytes]:
        """The same, told as it happens, and logged for others. Raises RequestError only before the first event."""
        response, log = self.stored.response, self._log
        try:
            async for deltas in self._call.generation.steps():
                told = self._begin()
                for _, delta in deltas:
                    told += self._push(delta)
                if told:
                    yield log.add(told)
            yield log.add([*self._begin(), *self._end(), closing(response)])
        except RequestError as error:
            if not self._began:
                raise
            yield log.add(self._failed(error))
        finally:
            if self._began and response["status"] == "in_progress":  # its reader has left
                self.abort()
                log.add([*self._end(), closing(response)])
            log.end()
            if self._store is not None:
                self._store.resize(self.stored)

    def in_background(self) -> dict[str, Any]:
        """Run in a task of its own: the response as it is now. Its events are in the log."""
        assert self._store is not None
        self.stored.abort = self.abort
        shown = dict(self.stored.response)
        self._log.add(self._begin())

        async def work() -> None:
            try:
                async for _ in self.events():
                    pass
            finally:
                self.stored.abort = self.stored.task = None

        self.stored.task = asyncio.create_task(work())
        return shown

    def _begin(self) -> list[Told]:
        """What the stream begins with, the first time; from then on it can be followed."""
        if self._began:
            return []
        self._began = True
        self.stored.log = self._log
        if self._store is not None:
            self._store.put(self.stored)
        return opening(self.stored.response)

    def _push(self, delta: Delta) -> list[Told]:
        self._last = delta
        logprobs: list[dict[str, Any]] = []
        if delta.logprobs:
            logprobs = chat_logprobs(self._served.text.tokenizer, delta.logprobs, self._top)["content"]
        return list(self._items.push(delta.events, logprobs))

    def _end(self) -> list[Told]:
        """Close what is open, and complete the response object."""
        cut = self._last is not None and self._last.finish_reason is FinishReason.LENGTH
        cancelled = self.stored.response["status"] == "cancelled"
        told = list(self._items.close(complete=not cut and not cancelled))
        if cancelled:
            self._finish("cancelled")
        elif cut:
            self._finish("incomplete", incomplete_details={"reason": "max_output_tokens"})
        else:
            self._finish("completed", completed_at=int(time.time()))
        return told

    def _failed(self, error: RequestError) -> list[Told]:
        """It ended by an error, which the response tells."""
        told = list(self._items.close(complete=False))
        inner = error_object(error)["error"]
        self._finish("failed", error={"code": inner["code"] or "server_error", "message": inner["message"]})
        return [*told, closing(self.stored.response)]

    def _finish(self, status: str, **fields: Any) -> None:
        self.stored.response |= {"status": status, "output": self._items.whole, "usage": self._usage(), **fields}

    def _usage(self) -> dict[str, Any]:
        generation = self._call.generation
        prompt, completion = generation.prompt_tokens, generation.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": sum(answer.reasoning_tokens for answer in self._call.answers)},
            "total_tokens": prompt + completion,
        }
