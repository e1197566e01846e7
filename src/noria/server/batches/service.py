"""The life of files and batches: the data folder, the jobs that run, and what is resumed at the next start.

The folder is made when the first file comes; where there is one already, unfinished batches go on when the server starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

from starlette.types import ASGIApp

from noria.server.batches.job import Job
from noria.server.batches.objects import BatchError, BatchErrors
from noria.server.batches.rows import StoredBatch
from noria.server.batches.slots import Slots
from noria.server.batches.store import Store, Unavailable
from noria.server.context import ServerContext
from noria.server.exchange import Exchange
from noria.server.inprocess import Answered, call
from noria.server.keys import Caller, anonymous
from noria.types import ConfigError, RequestError

SWEEP_S = 600.0  # between two looks for what has expired
log = logging.getLogger("noria")


class BatchService:
    """One a server. `app` answers the lines; it is set once it is made, for it holds our own endpoints too."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self.app: ASGIApp | None = None
        self._store: Store | None = None
        self._opening = asyncio.Lock()
        self._slots: Slots | None = None
        self._jobs: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def folder(self) -> Path:
        """--data-dir, or `data` in the cache directory."""
        from noria.weights.hub import cache_directory

        given = self._context.config.data_dir
        return Path(given).expanduser().absolute() if given else cache_directory(self._context.engine_config.cache_dir) / "data"

    async def start(self) -> None:
        """Go on with what an earlier run left. Raises ConfigError if --data-dir cannot be used."""
        given = self._context.config.data_dir
        if not given and not Store.exists(self.folder):
            return
        try:
            store = await self._open()
        except Unavailable as error:
            if given:
                raise ConfigError(f"--data-dir: {error}") from None
            log.warning("files and batches are off: %s", error)
            return
        await self._resume_all(store)

    async def close(self) -> None:
        """Break off what runs; it goes on at the next start."""
        tasks = [task for _, task in self._jobs.values()]
        if self._sweeper is not None:
            tasks.append(self._sweeper)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        if self._store is not None:
            store, self._store = self._store, None
            await asyncio.to_thread(store.close)

    async def store(self, *, create: bool = False) -> Store | None:
        """The store; None if nothing was ever kept here and it is not to be made. Raises RequestError if there can be none."""
        if self._store is not None:
            return self._store
        self._context.require(None)  # not while draining: the folder is closed then
        if not create and not Store.exists(self.folder):
            return None
        try:
            return await self._open()
        except Unavailable as error:
            raise RequestError(f"files and batches are off: {error}", code="batches_off", status=404) from None

    async def _open(self) -> Store:
        async with self._opening:
            if self._store is None:
                self._store = await asyncio.to_thread(Store, self.folder)
                self._sweeper = asyncio.create_task(self._sweep(self._store))
            return self._store

    async def _sweep(self, store: Store) -> None:
        """Delete what has expired, and try again what a fault (a full disk) has stopped."""
        while True:
            await store.run(store.expire, int(time.time()))
            await asyncio.sleep(SWEEP_S)
            await self._resume_all(store)

    # Jobs

    @property
    def running(self) -> int:
        """Batches that are not at their end."""
        return len(self._jobs)

    def run(self, store: Store, stored: StoredBatch, caller: Caller) -> None:
        """Start, or go on with, a batch."""
        served = self._context.served
        assert served is not None
        if self._slots is None:
            rows = self._context.engine_config.max_num_seqs
            self._slots = Slots(rows, lambda: served.client.stats, lambda: self._context.open_requests)
        job = Job(store, stored, caller, served.names, self._context.config.max_body_bytes, self._slots, self._send)
        task = asyncio.create_task(job.run())
        self._jobs[stored.batch.id] = (job, task)
        task.add_done_callback(lambda done: self._ended(stored.batch.id, done))

    async def cancel(self, store: Store, ident: str) -> None:
        """Ask a batch to end."""
        if ident not in self._jobs:  # a fault had stopped it
            await self._resume_all(store)
        if ident in self._jobs:
            await self._jobs[ident][0].cancel()

    async def _resume_all(self, store: Store) -> None:
        for stored in await store.run(store.open_batches):
            if stored.batch.id not in self._jobs:
                await self._resume(store, stored)

    async def _resume(self, store: Store, stored: StoredBatch) -> None:
        batch, served = stored.batch, self._context.served
        assert served is not None
        caller = self._caller(stored)
        if caller is None:
            batch.status, batch.failed_at = "failed", int(time.time())
            batch.errors = BatchErrors(data=[BatchError(code="key_revoked", message="the key that made this batch is gone")])
            await store.run(store.update, batch, ended_at=batch.failed_at)
            return
        if batch.status == "in_progress" and batch.model not in served.names:
            log.warning("batch %s waits until %s is served again", batch.id, batch.model)
        else:
            log.info("batch %s goes on: %d of %d requests are done", batch.id, *_progress(stored))
        self.run(store, stored, caller)

    def _caller(self, stored: StoredBatch) -> Caller | None:
        """Who made a batch, if still allowed in. Without keys everybody is."""
        if self._context.keys:
            return self._context.keys.named(stored.owner)
        caller = anonymous()
        caller.tenant = stored.tenant
        return caller

    def _ended(self, ident: str, task: asyncio.Task[None]) -> None:
        del self._jobs[ident]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("batch %s stopped; it is tried again in %g s", ident, SWEEP_S, exc_info=error)

    async def _send(self, path: str, body: bytes, exchange: Exchange) -> Answered:
        """In a task of its own, whose context is the exchange's; cancelled with us."""
        assert self.app is not None
        return await asyncio.create_task(call(self.app, path, body, exchange))


def _progress(stored: StoredBatch) -> tuple[int, int]:
    counts = stored.batch.request_counts
    return counts.completed + counts.failed, counts.total
