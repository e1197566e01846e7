"""Forms, however the network cuts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from batch_client import form
from hypothesis import given
from hypothesis import strategies as st

from noria.server.batches.multipart import MAX_HEADER_BYTES, MAX_PARTS, boundary_of, read_form
from noria.types import RequestError


async def cut(data: bytes, sizes: list[int]) -> AsyncGenerator[bytes]:
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size
    yield data[at:]


def parse(data: bytes, boundary: bytes, sizes: list[int]) -> list[tuple[str, str | None, bytes]]:
    async def read() -> list[tuple[str, str | None, bytes]]:
        return [
            (part.name, part.filename, b"".join([piece async for piece in part.data]))
            async for part in read_form(cut(data, sizes), boundary)
        ]

    return asyncio.run(read())


@given(
    st.lists(
        st.one_of(st.binary(max_size=80), st.sampled_from([b"", b"\r\n", b"\r\n--", b"--b", b"\r\n--b", b"\r"])), max_size=5
    ),
    st.lists(st.integers(0, 20), max_size=40),
)
def test_parts_do_not_depend_on_how_they_were_cut(values: list[bytes], sizes: list[int]) -> None:
    """Red if a delimiter across two chunks is missed, or data that looks like one is eaten."""
    boundary = b"boundary77"
    body = b"".join(
        b'--%s\r\nContent-Disposition: form-data; name="f%d"; filename="x"\r\n\r\n%s\r\n' % (boundary, i, value)
        for i, value in enumerate(values)
    )
    body += b"--%s--\r\n" % boundary
    assert parse(body, boundary, sizes) == [(f"f{i}", "x", value) for i, value in enumerate(values)]


def test_a_clients_form() -> None:
    """Red if fields and files are confused, or the boundary is misread."""
    body, kind = form({"purpose": "batch"}, {"file": ('a "b".jsonl', b"data\r\n")})
    boundary = boundary_of(kind.replace("boundary=", 'boundary="') + '"')
    assert [part[0::2] for part in parse(body, boundary, [])] == [("purpose", b"batch"), ("file", b"data\r\n")]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no form at all",
        b"--b\r\nContent-Disposition: form-data; name=x\r\n\r\nnever ends",
        b"--b\r\nContent-Disposition: form-data\r\n\r\nno name\r\n--b--",
        b"--b\r\nX: " + b"y" * 2 * MAX_HEADER_BYTES,
        b"--b\r\nContent-Disposition: form-data; name=x\r\n\r\n\r\n" * (MAX_PARTS + 1) + b"--b--",
    ],
)
def test_what_is_no_form_is_refused(body: bytes) -> None:
    """Red if it hangs, is kept in memory, or passes."""
    with pytest.raises(RequestError):
        parse(body, b"b", [3] * 10)


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 300])
def test_other_content_types(kind: str) -> None:
    """Red if a body is read as a form that is none."""
    with pytest.raises(RequestError, match="multipart"):
        boundary_of(kind)


def test_a_large_part_is_never_held_whole() -> None:
    """Red if the parser collects what it should pass on."""
    chunk = b"z" * 65536

    async def chunks() -> AsyncGenerator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        for _ in range(100):
            yield chunk
        yield b"\r\n--b--\r\n"

    async def largest() -> tuple[int, int]:
        total = most = 0
        async for part in read_form(chunks(), b"b"):
            async for piece in part.data:
                total, most = total + len(piece), max(most, len(piece))
        return total, most

    total, most = asyncio.run(largest())
    assert total == 100 * len(chunk)
    assert most <= len(chunk) + 100
