"""POST /v1/files: a form whose file goes to disk as it comes, whatever its size, and is a file only when it is whole."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import BinaryIO

from noria.server.batches.multipart import Part, boundary_of, read_form
from noria.server.batches.objects import FILE_LIFE_S, MIN_LIFE_S, FileObject, file_id
from noria.server.batches.store import MAX_STORED_BYTES, Store
from noria.types import RequestError

MAX_FILE_BYTES = 200 << 20  # as OpenAI's batch files
MAX_FIELD_BYTES = 1024
MAX_FILENAME = 255  # characters
WRITE_BYTES = 1 << 20  # written at once, in a thread


async def receive_file(store: Store, content_type: str, chunks: AsyncIterator[bytes]) -> FileObject:
    """The uploaded file, complete on disk but not named in the database yet. Raises RequestError; nothing is left then."""
    boundary = boundary_of(content_type)
    ident = file_id()
    target = store.content(ident)
    partial = target.with_name(f"{ident}.part")
    fields: dict[str, str] = {}
    filename: str | None = None
    size = 0
    try:
        async for part in read_form(chunks, boundary):
            if part.name != "file":
                fields[part.name] = await part.text(MAX_FIELD_BYTES)
            elif filename is not None:
                raise RequestError("send one file", param="file")
            else:
                filename = (part.filename or "upload.jsonl").replace("\\", "/").rsplit("/", 1)[-1][:MAX_FILENAME]
                room = MAX_STORED_BYTES - await store.run(store.used_bytes)
                with partial.open("wb") as out:
                    size = await _save(part, out, min(MAX_FILE_BYTES, room))
        if filename is None:
            raise RequestError("file is required", param="file")
        life = _checked(fields, size)
        await asyncio.to_thread(partial.rename, target)
    except OSError as error:
        message = f"the file could not be written: {error.strerror}"
        raise RequestError(message, status=507, code="storage_full") from None
    finally:
        partial.unlink(missing_ok=True)
    now = int(time.time())
    return FileObject(id=ident, bytes=size, created_at=now, expires_at=now + life, filename=filename, purpose="batch")


async def _save(part: Part, out: BinaryIO, most: int) -> int:
    """Write a part's data, at most `most` bytes, through to the disk; its size."""
    size = 0
    held = bytearray()
    async for piece in part.data:
        size += len(piece)
        if size > most:
            message = f"a file may have at most {MAX_FILE_BYTES} bytes, and there is room for {max(0, most)}"
            raise RequestError(message, param="file", status=413, code="file_too_large")
        held += piece
        if len(held) >= WRITE_BYTES:
            await asyncio.to_thread(out.write, held)
            held = bytearray()

    def finish() -> None:
        out.write(held)
        out.flush()
        os.fsync(out.fileno())

    await asyncio.to_thread(finish)
    return size


def _checked(fields: dict[str, str], size: int) -> int:
    """Seconds that the file is to be kept. Raises RequestError for wrong fields and an empty file."""
    if fields.get("purpose") != "batch":
        raise RequestError("purpose must be batch: files are for batches here", param="purpose")
    if not size:
        raise RequestError("the file is empty", param="file")
    if unknown := fields.keys() - {"purpose", "expires_after[anchor]", "expires_after[seconds]"}:
        name = min(unknown)[:64]
        raise RequestError(f"{name} is not a field of an upload", param=name)
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise RequestError("expires_after.anchor must be created_at", param="expires_after")
    seconds = fields.get("expires_after[seconds]", str(FILE_LIFE_S))
    if not (seconds.isdecimal() and MIN_LIFE_S <= int(seconds) <= FILE_LIFE_S):
        raise RequestError(f"expires_after.seconds must be {MIN_LIFE_S} to {FILE_LIFE_S}", param="expires_after")
    return int(seconds)
