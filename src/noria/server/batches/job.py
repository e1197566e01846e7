"""One batch from its validation to its results.

    validating ─► in_progress ─► finalizing ─► completed
         │             ├─ the window ends ──► expired
         ▼             └─ cancelling ───────► cancelled       both with the results there are
      failed

A line runs as an HTTP request would, in the background, and its result is committed once. What a crash or a shutdown broke off
is run again; a line that the process did not survive several times is given up, so that it cannot end every later start too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec

from noria.server.batches.lines import Checked, check_lines
from noria.server.batches.objects import BatchError, BatchErrors, FileObject, file_id, result_line
from noria.server.batches.rows import Line, Spent, StoredBatch
from noria.server.batches.slots import Slots
from noria.server.batches.store import MAX_STORED_BYTES, Store
from noria.server.exchange import Exchange
from noria.server.inprocess import Answered
from noria.server.keys import Caller

PAGE = 64  # lines read from the database at once
MAX_ATTEMPTS = 5  # that a crash ended
MAX_TIMEOUTS = 3  # runs of one line that reached --request-timeout-s
RETRY_S = 1.0

Send = Callable[[str, bytes, Exchange], Awaitable[Answered]]
log = logging.getLogger("noria")


class Job:
    """Runs one batch.

    `models` are the served names, `max_line` the largest body in bytes; `send` answers a request as the application does.
    """

    def __init__(
        self,
        store: Store,
        stored: StoredBatch,
        caller: Caller,
        models: tuple[str, ...],
        max_line: int,
        slots: Slots,
        send: Send,
    ) -> None:
        self._store = store
        self._stored = stored
        self._batch = stored.batch
        self._caller = caller
        self._models = models
        self._max_line = max_line
        self._slots = slots
        self._send = send
        self._work: asyncio.Task[None] | None = None  # the lines that run
        self._engine_died = False
        self._ending: str | None = "cancelled" if self._batch.status == "cancelling" else None

    async def run(self) -> None:
        """To the end, from wherever it was left."""
        if self._batch.status == "validating" and not await self._validate():
            return
        if self._batch.status == "in_progress" and self._ending is None:
            await self._run_lines()
        if self._ending is None and self._batch.status != "finalizing":
            self._batch.status, self._batch.finalizing_at = "finalizing", _now()
            await self._store.run(self._store.update, self._batch)
        await self._finish()

    async def cancel(self) -> None:
        """Start no more lines, end those that run, keep what is done. Only while validating or in progress."""
        self._batch.status, self._batch.cancelling_at = "cancelling", _now()
        self._end("cancelled")
        await self._store.run(self._store.update, self._batch)

    def _end(self, reason: str) -> None:
        if self._ending is None:
            self._ending = reason
            if self._work is not None:
                self._work.cancel()

    # Validation

    async def _validate(self) -> bool:
        """Check the file; then the batch is in progress, with its lines in the database, or has failed."""
        path = self._store.content(self._batch.input_file_id)
        try:
            checked = await asyncio.to_thread(check_lines, path, self._batch.endpoint, self._models, self._max_line)
        except OSError as error:
            checked = Checked()
            checked.errors.append(BatchError(code="file_not_found", message=f"the input file is gone: {error.strerror}"))
        self._batch.model = checked.model
        if checked.errors:
            self._batch.status, self._batch.failed_at = "failed", _now()
            self._batch.errors = BatchErrors(data=checked.errors)
            await self._store.run(self._store.update, self._batch, ended_at=_now())
            return False
        if self._ending is None:
            self._batch.status, self._batch.in_progress_at = "in_progress", _now()
        await self._store.run(self._store.begin, self._stored.seq, self._batch, checked.lines)
        return True

    # Lines

    async def _run_lines(self) -> None:
        left = self._batch.expires_at - time.time()
        if left <= 0:
            self._ending = "expired"
            return
        self._work = asyncio.create_task(self._all_lines())
        timer = asyncio.get_running_loop().call_later(left, self._end, "expired")
        try:
            await self._work
        except asyncio.CancelledError:
            if self._ending is None:  # not the batch is at its end, the server is
                self._work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._work
                raise
        finally:
            timer.cancel()
            self._work = None

    async def _all_lines(self) -> None:
        if self._batch.model not in self._models:  # another model is served now: wait for a start with this one, or the end
            await asyncio.Event().wait()
        after = 0
        async with asyncio.TaskGroup() as group:
            while lines := await self._store.run(self._store.next_lines, self._stored.seq, after, PAGE):
                for line in lines:
                    await self._slots.take()
                    group.create_task(self._line(line))
                after = lines[-1].number

    async def _line(self, line: Line) -> None:
        """Run a line and commit its result; gives its slot back."""
        seq, store = self._stored.seq, self._store
        try:
            await store.run(store.attempt, seq, line.number, 1)
            try:
                status, result, spent = await self._result(line)
            except asyncio.CancelledError:
                if not self._engine_died:
                    await asyncio.shield(store.run(store.attempt, seq, line.number, -1))
                raise
            await asyncio.shield(store.run(store.finish_line, seq, line.number, result, failed=status != 200, spent=spent))
        finally:
            self._slots.give()

    async def _result(self, line: Line) -> tuple[int, bytes, Spent]:
        """(status, line of the output or error file, tokens)."""
        ident = f"batch_req_{secrets.token_hex(12)}"
        if line.attempts >= MAX_ATTEMPTS:
            message = f"the server ended {line.attempts} times while it ran this request"
            return 500, result_line(ident, line.custom_id, None, {"code": "server_error", "message": message}), Spent()
        data = await self._store.run(self._store.read, self._batch.input_file_id, line.start, line.length)
        body = bytes(msgspec.json.decode(data, type=_Request).body)
        answered, exchange = await self._answer(body)
        response = {"status_code": answered.status, "request_id": exchange.request_id, "body": msgspec.Raw(answered.body)}
        result = result_line(ident, line.custom_id, response, None)
        if len(result) + await self._store.run(self._store.used_bytes) > MAX_STORED_BYTES:
            message = "the server has no room for more results; delete files"
            return 507, result_line(ident, line.custom_id, None, {"code": "storage_full", "message": message}), Spent()
        spent = Spent(exchange.prompt_tokens, exchange.cached_tokens, exchange.completion_tokens)
        return answered.status, result, spent

    async def _answer(self, body: bytes) -> tuple[Answered, Exchange]:
        """The answer to a body, asked for again while the server is only too busy for it."""
        timeouts = 0
        while True:
            while wait := self._caller.limits.token_wait(time.monotonic()):
                await asyncio.sleep(wait)
            exchange = Exchange(self._caller, f"req-{secrets.token_hex(12)}", background=True)
            answered = await self._send(self._batch.endpoint, body, exchange)
            code = _code(answered)
            timeouts += code == "timeout"
            self._engine_died |= code == "engine_dead"  # the server is about to end too
            busy = answered.status in (429, 503) or self._engine_died
            if not busy or timeouts == MAX_TIMEOUTS:
                return answered, exchange
            await asyncio.sleep(float(answered.headers.get(b"retry-after", RETRY_S)))

    # Results

    async def _finish(self) -> None:
        """Write the result files, then name them and end the batch in one transaction."""
        batch, now = self._batch, _now()
        reason = self._ending
        expires = now + self._stored.life
        output = FileObject(
            id=file_id(),
            bytes=0,
            created_at=now,
            expires_at=expires,
            filename=f"{batch.id}_output.jsonl",
            purpose="batch_output",
        )
        errors = msgspec.structs.replace(output, id=file_id(), filename=f"{batch.id}_error.jsonl")
        await self._store.run(self._store.barrier)  # commits of lines that were broken off while they were made
        undone = await asyncio.to_thread(self._write, output, errors, reason)
        files = [file for file in (output, errors) if file.bytes]
        batch.output_file_id = output.id if output.bytes else None
        batch.error_file_id = errors.id if errors.bytes else None
        if reason == "cancelled":
            batch.status, batch.cancelled_at = "cancelled", now
        elif reason == "expired":
            batch.status, batch.expired_at = "expired", now
        else:
            batch.status, batch.completed_at = "completed", now
        await self._store.run(self._store.end, self._stored, batch, files, undone, now)
        log.info("batch %s is %s", batch.id, batch.status)

    def _write(self, output: FileObject, errors: FileObject, reason: str | None) -> int:
        """Write both files from the database, in the order of the lines; how many lines have no result."""
        undone = 0
        code = "batch_expired" if reason == "expired" else "batch_cancelled"
        message = "the completion window ended" if reason == "expired" else "the batch was cancelled"
        error = {"code": code, "message": f"{message} before this request was run"}
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(self._store.content(file.id).open("wb")) for file in (output, errors)]
            for custom_id, failed, result in self._store.results(self._stored.seq):
                if result is None:
                    undone += 1
                    result = result_line(f"batch_req_{secrets.token_hex(12)}", custom_id, None, error)
                opened[failed is not False].write(result + b"\n")
            for file, written in zip((output, errors), opened, strict=True):
                file.bytes = written.tell()
                written.flush()
                os.fsync(written.fileno())
        for file in (output, errors):
            if not file.bytes:
                self._store.content(file.id).unlink()
        return undone


class _Request(msgspec.Struct):
    """A line, of which the body goes to the application as it is."""

    body: msgspec.Raw


class _Failure(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Failure | None = None


def _code(answered: Answered) -> str | None:
    """The error's code, if it has one."""
    if answered.status == 200:
        return None
    try:
        body = msgspec.json.decode(answered.body, type=_ErrorBody)
    except msgspec.DecodeError:
        return None
    return body.error.code if body.error is not None else None


def _now() -> int:
    return int(time.time())
