"""multipart/form-data (RFC 7578), read as it comes: nothing larger than a chunk and a delimiter is ever in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from email.message import Message

from noria.types import RequestError

MAX_HEADER_BYTES = 8192  # of one part
MAX_PARTS = 32


class Part:
    """One part: its field's name, the name of its file if it is one, and its data. Read `data` before the next part."""

    def __init__(self, name: str, filename: str | None, data: AsyncGenerator[bytes]) -> None:
        self.name = name
        self.filename = filename
        self.data = data

    async def text(self, most: int) -> str:
        """The whole value, of at most `most` bytes. Raises RequestError."""
        value = b""
        async for piece in self.data:
            value += piece
            if len(value) > most:
                raise RequestError(f"{self.name[:64]} may have at most {most} bytes", param=self.name[:64])
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise RequestError(f"{self.name[:64]} must be text in UTF-8", param=self.name[:64]) from None


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type header names. Raises RequestError if it is of another kind."""
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_boundary()
    if message.get_content_type() != "multipart/form-data" or not boundary or len(boundary) > 200 or not boundary.isascii():
        raise RequestError("send the file as multipart/form-data", param="file")
    return boundary.encode()


async def read_form(chunks: AsyncIterator[bytes], boundary: bytes) -> AsyncGenerator[Part]:
    """The parts of a form, in order. Raises RequestError for what is not one."""
    reader = _Reader(chunks, boundary)
    await reader.skip_preamble()
    for _ in range(MAX_PARTS):
        headers = await reader.headers()
        if headers is None:
            return
        name, filename = _disposition(headers)
        part = Part(name, filename, reader.data())
        yield part
        async for _piece in part.data:  # what the caller left
            pass
    raise RequestError(f"a form may have at most {MAX_PARTS} fields")


class _Reader:
    """The buffer between the chunks of a connection and the parts of a form."""

    def __init__(self, chunks: AsyncIterator[bytes], boundary: bytes) -> None:
        self._chunks = chunks
        self._delimiter = b"\r\n--" + boundary
        self._buffer = b"\r\n"  # the first delimiter may stand at the very start

    async def skip_preamble(self) -> None:
        async for _piece in self.data():
            pass

    async def headers(self) -> bytes | None:
        """The header block of the next part; None after the last."""
        while len(self._buffer) < 2:
            await self._more()
        if self._buffer.startswith(b"--"):
            return None
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEADER_BYTES:
                raise RequestError("the headers of a form field are too large")
            await self._more()
        block, self._buffer = self._buffer[:end], self._buffer[end + 2 :]  # the data may be empty: keep a line end before it
        return block

    async def data(self) -> AsyncGenerator[bytes]:
        """Bytes up to the next delimiter, which is consumed."""
        skip = 2  # the line end that ends the headers, or that was put before the form
        while True:
            at = self._buffer.find(self._delimiter)
            if at >= 0:
                if at > skip:
                    yield self._buffer[skip:at]
                self._buffer = self._buffer[at + len(self._delimiter) :]
                return
            safe = len(self._buffer) - len(self._delimiter)
            if safe > skip:
                piece, self._buffer = self._buffer[skip:safe], self._buffer[safe:]
                skip = 0
                yield piece
            await self._more()

    async def _more(self) -> None:
        try:
            self._buffer += await anext(self._chunks)
        except StopAsyncIteration:
            raise RequestError("the form ends in the middle") from None


def _disposition(headers: bytes) -> tuple[str, str | None]:
    """(name, filename) of a part's Content-Disposition."""
    for line in headers.decode("utf-8", "replace").split("\r\n"):
        field, _, value = line.partition(":")
        if field.strip().lower() == "content-disposition":
            message = Message()
            message["content-disposition"] = value.strip()
            name = message.get_param("name", header="content-disposition")
            filename = message.get_filename()
            if isinstance(name, str) and name:
                return name, filename
    raise RequestError("a form field has no name")
