"""Files and batches on disk: one SQLite database, and the files' contents beside it.

    DATA_DIR/lock             held by the one server that works here
    DATA_DIR/state.sqlite3    files, batches, and the lines of unfinished batches with their results
    DATA_DIR/files/ID         contents; ID.part while they are being written

Whatever moment the process is killed at, the database tells what has been done: a line's result and the counts change in one
transaction, at most once; contents are complete before the database names them, and those that it does not name are swept at
the next start. Everything here blocks: call it in the store's own thread (`run`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from noria.server.batches.objects import FILE_LIFE_S, OPEN_STATUSES, Batch, FileObject
from noria.server.batches.rows import BATCH_COLUMNS, Line, Spent, StoredBatch, stored_batch
from noria.types import RequestError

P = ParamSpec("P")
T = TypeVar("T")

SCHEMA_VERSION = 1
MAX_STORED_BYTES = 4 << 30  # uploads and results of one data folder
SCHEMA = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, expires_at INTEGER, record BLOB NOT NULL);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, owner TEXT NOT NULL,
    status TEXT NOT NULL, input TEXT NOT NULL, life INTEGER NOT NULL, ended_at INTEGER, record BLOB NOT NULL,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0, cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0, result_bytes INTEGER NOT NULL DEFAULT 0);
CREATE TABLE lines (
    batch INTEGER NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, failed INTEGER, result BLOB);
CREATE UNIQUE INDEX line_numbers ON lines (batch, number);
CREATE INDEX lines_left ON lines (batch, number) WHERE result IS NULL;
"""


class Unavailable(Exception):
    """The folder cannot be used. `str(error)` says why."""


class Store:
    """The database of one data folder. Raises Unavailable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents = folder / "files"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # prompts and answers: nobody else's business
            self.contents.mkdir(exist_ok=True)
            self._lock = (folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise Unavailable(f"{folder} is in use by another server; give this one a --data-dir of its own") from None
        except OSError as error:
            raise Unavailable(f"{folder}: {error.strerror}") from None
        try:
            self._db = self._connect()
            self._prepare()
        except sqlite3.Error as error:
            self._lock.close()
            raise Unavailable(f"{self.path}: {error}") from None

    @property
    def path(self) -> Path:
        """The database."""
        return self.folder / "state.sqlite3"

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether there is anything to go on with."""
        return (folder / "state.sqlite3").exists()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call one of the methods below in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Finish what is queued, then let go of the folder."""
        self._thread.shutdown(wait=True)
        self._db.close()
        self._lock.close()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        # A killed process loses nothing. A power cut may lose the last commits: their lines are run again.
        db.execute("PRAGMA synchronous = NORMAL")
        return db

    def _prepare(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise Unavailable(f"{self.path} was written by another version of Noria; give this one a --data-dir of its own")
        if version == 0:
            with self._transaction():
                for statement in SCHEMA.split(";\n"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        known = {row[0] for row in self._db.execute("SELECT id FROM files")}
        for path in self.contents.iterdir():
            if path.name not in known:
                path.unlink()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # Files

    def content(self, ident: str) -> Path:
        """Where a file's bytes are. `ident` comes from the database or from `file_id`, never from a client."""
        return self.contents / ident

    def add_file(self, file: FileObject, tenant: str) -> None:
        """Name a file whose contents are complete."""
        with self._transaction():
            self._insert_file(file, tenant)

    def _insert_file(self, file: FileObject, tenant: str) -> None:
        self._db.execute(
            "INSERT INTO files (id, tenant, purpose, bytes, expires_at, record) VALUES (?, ?, ?, ?, ?, ?)",
            (file.id, tenant, file.purpose, file.bytes, file.expires_at, msgspec.json.encode(file)),
        )

    def file(self, ident: str, tenant: str) -> FileObject:
        """Raises RequestError 404; another tenant's file is none."""
        now = int(time.time())
        row = self._db.execute(
            "SELECT record FROM files WHERE id = ? AND tenant = ? AND (expires_at IS NULL OR expires_at > ?)",
            (ident, tenant, now),
        ).fetchone()
        if row is None:
            raise RequestError("there is no such file", param="file_id", code="file_not_found", status=404)
        return msgspec.json.decode(row[0], type=FileObject)

    def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, ascending: bool
    ) -> tuple[list[FileObject], bool]:
        """(a page, whether there is more), newest first or oldest first."""
        rows = self._page(
            "files",
            tenant,
            after,
            limit,
            "AND purpose = ?" if purpose else "",
            [purpose] if purpose else [],
            ascending=ascending,
        )
        return [msgspec.json.decode(row[0], type=FileObject) for row in rows[:limit]], len(rows) > limit

    def delete_file(self, ident: str, tenant: str) -> None:
        """Raises RequestError: 404, or 409 while a batch reads the file."""
        self.file(ident, tenant)
        marks = ", ".join("?" for _ in OPEN_STATUSES)
        reader = self._db.execute(f"SELECT 1 FROM batches WHERE input = ? AND status IN ({marks})", (ident, *OPEN_STATUSES))
        if reader.fetchone():
            raise RequestError("a batch still reads this file; cancel it first", param="file_id", status=409)
        self._forget([ident])

    def _forget(self, idents: Iterable[str]) -> None:
        for ident in idents:
            with self._transaction():
                self._db.execute("DELETE FROM files WHERE id = ?", (ident,))
            self.content(ident).unlink(missing_ok=True)

    def used_bytes(self) -> int:
        """Of all contents, and of the results that are not files yet."""
        (files,) = self._db.execute("SELECT TOTAL(bytes) FROM files").fetchone()
        (results,) = self._db.execute("SELECT TOTAL(result_bytes) FROM batches").fetchone()
        return int(files + results)

    def expire(self, now: int) -> None:
        """Delete files past their time, and the records of batches that ended long ago."""
        marks = ", ".join("?" for _ in OPEN_STATUSES)
        rows = self._db.execute(
            f"SELECT id FROM files WHERE expires_at <= ? AND id NOT IN (SELECT input FROM batches WHERE status IN ({marks}))",
            (now, *OPEN_STATUSES),
        ).fetchall()
        self._forget(row[0] for row in rows)
        self._db.execute("DELETE FROM batches WHERE ended_at <= ?", (now - FILE_LIFE_S,))

    def _page(
        self, table: str, tenant: str, after: str | None, limit: int, where: str, values: list[Any], *, ascending: bool
    ) -> list[tuple[Any, ...]]:
        """`limit` rows and one more, if there is one. Raises RequestError if `after` names nothing."""
        order, than = ("ASC", ">") if ascending else ("DESC", "<")
        bound = ""
        if after is not None:
            row = self._db.execute(f"SELECT seq FROM {table} WHERE id = ? AND tenant = ?", (after, tenant)).fetchone()
            if row is None:
                raise RequestError("after does not name an object of this list", param="after")
            bound = f"AND seq {than} {row[0]}"
        columns = "record" if table == "files" else BATCH_COLUMNS
        query = f"SELECT {columns} FROM {table} WHERE tenant = ? {where} {bound} ORDER BY seq {order} LIMIT ?"
        return self._db.execute(query, (tenant, *values, limit + 1)).fetchall()

    # Batches

    def add_batch(self, batch: Batch, tenant: str, owner: str, life: int) -> StoredBatch:
        """A new batch, to be validated. `life` is that of its results, in seconds."""
        with self._transaction():
            done = self._db.execute(
                "INSERT INTO batches (id, tenant, owner, status, input, life, record) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (batch.id, tenant, owner, batch.status, batch.input_file_id, life, msgspec.json.encode(batch)),
            )
        return StoredBatch(done.lastrowid or 0, tenant, owner, life, batch)

    def batch(self, ident: str, tenant: str) -> StoredBatch:
        """Raises RequestError 404."""
        query = f"SELECT {BATCH_COLUMNS} FROM batches WHERE id = ? AND tenant = ?"
        row = self._db.execute(query, (ident, tenant)).fetchone()
        if row is None:
            raise RequestError("there is no such batch", param="batch_id", code="batch_not_found", status=404)
        return stored_batch(row)

    def batches(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """(a page, whether there is more), newest first."""
        rows = self._page("batches", tenant, after, limit, "", [], ascending=False)
        return [stored_batch(row).batch for row in rows[:limit]], len(rows) > limit

    def open_batches(self) -> list[StoredBatch]:
        """Batches that are not at their end, oldest first."""
        marks = ", ".join("?" for _ in OPEN_STATUSES)
        query = f"SELECT {BATCH_COLUMNS} FROM batches WHERE status IN ({marks}) ORDER BY seq"
        return [stored_batch(row) for row in self._db.execute(query, OPEN_STATUSES).fetchall()]

    def update(self, batch: Batch, *, ended_at: int | None = None) -> None:
        """Write the record and its status; counts and usage have columns of their own."""
        with self._transaction():
            self._update(batch, ended_at)

    def _update(self, batch: Batch, ended_at: int | None) -> None:
        self._db.execute(
            "UPDATE batches SET status = ?, record = ?, ended_at = ? WHERE id = ?",
            (batch.status, msgspec.json.encode(batch), ended_at, batch.id),
        )

    # Lines

    def begin(self, seq: int, batch: Batch, lines: Sequence[Line]) -> None:
        """The lines of a batch that was found valid, and its new status, at once."""
        with self._transaction():
            self._db.execute("DELETE FROM lines WHERE batch = ?", (seq,))
            self._db.executemany(
                "INSERT INTO lines (batch, number, custom_id, start, length) VALUES (?, ?, ?, ?, ?)",
                ((seq, line.number, line.custom_id, line.start, line.length) for line in lines),
            )
            self._db.execute("UPDATE batches SET total = ? WHERE seq = ?", (len(lines), seq))
            self._update(batch, None)

    def next_lines(self, seq: int, after: int, limit: int) -> list[Line]:
        """Lines without a result, with numbers above `after`."""
        query = "SELECT number, custom_id, start, length, attempts FROM lines WHERE batch = ? AND number > ? AND result IS NULL"
        rows = self._db.execute(f"{query} ORDER BY number LIMIT ?", (seq, after, limit)).fetchall()
        return [Line(*row) for row in rows]

    def attempt(self, seq: int, number: int, step: int) -> None:
        """Count an attempt (+1) before it begins, or take it back (-1) if it was broken off in order."""
        self._db.execute("UPDATE lines SET attempts = attempts + ? WHERE batch = ? AND number = ?", (step, seq, number))

    def finish_line(self, seq: int, number: int, result: bytes, *, failed: bool, spent: Spent) -> bool:
        """Keep a line's result, if it has none: then True, and the counts have changed with it."""
        with self._transaction():
            done = self._db.execute(
                "UPDATE lines SET result = ?, failed = ? WHERE batch = ? AND number = ? AND result IS NULL",
                (result, failed, seq, number),
            )
            if done.rowcount != 1:
                return False
            self._db.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ?, result_bytes = result_bytes + ?,"
                " input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?"
                " WHERE seq = ?",
                (not failed, failed, len(result), spent.prompt, spent.cached, spent.completion, seq),
            )
        return True

    def barrier(self) -> None:
        """Everything that was asked for before has been done."""

    def results(self, seq: int) -> Iterator[tuple[str, bool | None, bytes | None]]:
        """(custom_id, failed, result) of every line in order; (…, None, None) where there is no result.

        Reads on a connection of its own: may run in any thread, beside other batches' commits.
        """
        with contextlib.closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            query = "SELECT custom_id, failed, result FROM lines WHERE batch = ? ORDER BY number"
            for custom_id, failed, result in db.execute(query, (seq,)):
                yield custom_id, None if failed is None else bool(failed), result

    def end(self, stored: StoredBatch, batch: Batch, files: Sequence[FileObject], undone: int, ended_at: int) -> None:
        """The batch's end: its result files are named, its lines are forgotten, `undone` ones count as failed."""
        with self._transaction():
            for file in files:
                self._insert_file(file, stored.tenant)
            self._db.execute("DELETE FROM lines WHERE batch = ?", (stored.seq,))
            query = "UPDATE batches SET result_bytes = 0, failed = failed + ? WHERE seq = ?"
            self._db.execute(query, (undone, stored.seq))
            self._update(batch, ended_at)

    def read(self, ident: str, start: int, length: int) -> bytes:
        """A part of a file's contents."""
        descriptor = os.open(self.content(ident), os.O_RDONLY)
        try:
            return os.pread(descriptor, length, start)
        finally:
            os.close(descriptor)
