"""The database of files and batches, and the check of input files, without a server."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from noria.server.batches.job import MAX_ATTEMPTS, MAX_TIMEOUTS, Job
from noria.server.batches.lines import MAX_ERRORS, MAX_LINES, check_lines
from noria.server.batches.objects import FILE_LIFE_S, Batch, FileObject, batch_id, file_id, window_seconds
from noria.server.batches.rows import Line, Spent, StoredBatch
from noria.server.batches.slots import Slots
from noria.server.batches.store import Store, Unavailable
from noria.server.exchange import Exchange
from noria.server.inprocess import Answered
from noria.server.keys import anonymous
from noria.types import EngineStats, RequestError

DAY = 86_400


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "data")
    yield made
    made.close()


def add_file(store: Store, tenant: str = "", content: bytes = b"x", life: int = DAY) -> FileObject:
    now = int(time.time())
    file = FileObject(
        id=file_id(), bytes=len(content), created_at=now, expires_at=now + life, filename="in.jsonl", purpose="batch"
    )
    store.content(file.id).write_bytes(content)
    store.add_file(file, tenant)
    return file


def add_batch(store: Store, items: list[Any], tenant: str = "", window: int = DAY) -> StoredBatch:
    data = b"".join(json.dumps(item).encode() + b"\n" for item in items)
    now = int(time.time())
    batch = Batch(
        id=batch_id(),
        endpoint="/v1/completions",
        input_file_id=add_file(store, tenant, data).id,
        completion_window="24h",
        created_at=now,
        expires_at=now + window,
    )
    return store.add_batch(batch, tenant, "", DAY)


def item(number: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": f"p{number}"}
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body, **fields}


# The store


def test_a_result_is_kept_once(store: Store) -> None:
    """Red if a line that was run twice counts, or stands, twice."""
    stored = add_batch(store, [])
    store.begin(stored.seq, stored.batch, [Line(1, "a", 0, 1), Line(2, "b", 1, 1)])
    assert store.finish_line(stored.seq, 1, b"first", failed=False, spent=Spent(3, 1, 2))
    assert not store.finish_line(stored.seq, 1, b"again", failed=True, spent=Spent(3, 1, 2))
    found = store.batch(stored.batch.id, "").batch
    assert (found.request_counts.total, found.request_counts.completed, found.request_counts.failed) == (2, 1, 0)
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (3, 2, 5)
    assert list(store.results(stored.seq)) == [("a", False, b"first"), ("b", None, None)]
    assert [line.number for line in store.next_lines(stored.seq, 0, 10)] == [2]


def test_one_server_a_folder(store: Store) -> None:
    """Red if two servers run the same batches."""
    with pytest.raises(Unavailable, match="in use by another server"):
        Store(store.folder)


def test_contents_without_a_name_are_swept(tmp_path: Path) -> None:
    """Red if what a killed upload or result file left stays for ever, or a named file goes with it."""
    store = Store(tmp_path / "data")
    kept = add_file(store)
    for name in (file_id(), f"{file_id()}.part"):
        (store.contents / name).write_bytes(b"half")
    store.close()
    again = Store(tmp_path / "data")
    assert [path.name for path in again.contents.iterdir()] == [kept.id]
    again.close()


@pytest.mark.parametrize("content", [b"no database", None])
def test_a_folder_of_another_kind_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """Red if a foreign or newer database is used, or the fault is a traceback."""
    store = Store(tmp_path / "data")
    path = store.path
    store.close()
    if content is None:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 99")
    else:
        for old in path.parent.glob("state*"):
            old.unlink()
        path.write_bytes(content * 1000)
    with pytest.raises(Unavailable, match=r"state\.sqlite3"):
        Store(tmp_path / "data")


def test_expired_files_go_unless_a_batch_reads_them(store: Store) -> None:
    """Red if the folder grows for ever, or a running batch loses its input."""
    gone, kept = add_file(store, life=DAY), add_file(store, life=3 * DAY)
    stored = add_batch(store, [item(1)])
    now = int(time.time())
    store.expire(now + 2 * DAY)
    left = {path.name for path in store.contents.iterdir()}
    assert left == {kept.id, stored.batch.input_file_id}
    with pytest.raises(RequestError):
        store.file(gone.id, "")
    stored.batch.status = "cancelled"
    store.update(stored.batch, ended_at=now)
    store.expire(now + FILE_LIFE_S)
    assert not list(store.contents.iterdir())
    assert store.batches("", after=None, limit=10) == ([], False)
    assert store.used_bytes() == 0


def test_a_file_in_use_is_not_deleted(store: Store) -> None:
    """Red if a batch loses its input under its feet."""
    stored = add_batch(store, [item(1)])
    with pytest.raises(RequestError) as raised:
        store.delete_file(stored.batch.input_file_id, "")
    assert raised.value.status == 409


def test_pages(store: Store) -> None:
    """Red if a page repeats or skips an object, or shows another tenant's."""
    mine = [add_file(store, "a").id for _ in range(5)]
    add_file(store, "b")
    for ascending, order in ((True, mine), (False, mine[::-1])):
        seen: list[str] = []
        more = True
        while more:
            after = seen[-1] if seen else None
            page, more = store.files("a", purpose="batch", after=after, limit=2, ascending=ascending)
            seen += [file.id for file in page]
        assert seen == order
    assert store.files("a", purpose="batch_output", after=None, limit=2, ascending=True) == ([], False)
    with pytest.raises(RequestError):
        store.files("b", purpose=None, after=mine[0], limit=2, ascending=True)


# The check of a file


def check(tmp_path: Path, data: bytes, most: int = 10_000) -> Any:
    path = tmp_path / "input"
    path.write_bytes(data)
    return check_lines(path, "/v1/completions", ("m", "alias"), most)


def test_good_lines_and_blank_ones(tmp_path: Path) -> None:
    """Red if offsets are wrong, blank lines count as requests, or a last line needs an end."""
    items = [item(0), item(1, body={"model": "alias"}), item(2)]
    texts = [json.dumps(one).encode() for one in items]
    data = texts[0] + b"\n\n  \r\n" + texts[1] + b"\r\n" + texts[2]
    checked = check(tmp_path, data)
    assert not checked.errors
    assert checked.model == "m"
    assert [(line.number, line.custom_id) for line in checked.lines] == [(1, "c0"), (4, "c1"), (5, "c2")]
    assert [json.loads(data[line.start : line.start + line.length]) for line in checked.lines] == items


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{nope", "invalid_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_line", None),
        (b"[" * 5000, "invalid_line", None),
        (json.dumps(item(1, custom_id=5)).encode(), "invalid_line", "custom_id"),
        (json.dumps(item(1, custom_id="")).encode(), "invalid_line", "custom_id"),
        (json.dumps(item(0)).encode(), "duplicate_custom_id", "custom_id"),
        (json.dumps(item(1, method="GET")).encode(), "invalid_method", "method"),
        (json.dumps(item(1, url="/v1/chat/completions")).encode(), "invalid_url", "url"),
        (json.dumps(item(1, body="x")).encode(), "invalid_line", "body"),
        (json.dumps(item(1, body={"model": "other"})).encode(), "model_not_found", "body.model"),
        (json.dumps(item(1, body={"model": ["m"]})).encode(), "model_not_found", "body.model"),
        (json.dumps(item(1, body={"model": "m", "stream": True})).encode(), "invalid_line", "body.stream"),
        (b'{"custom_id": "' + b"x" * 20_000 + b'"}', "line_too_long", None),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: bytes, code: str, param: str | None) -> None:
    """Red if a batch starts with a line that cannot be run, or the fault has no line number."""
    checked = check(tmp_path, json.dumps(item(0)).encode() + b"\n" + line + b"\n")
    assert [(error.line, error.code, error.param) for error in checked.errors] == [(2, code, param)]
    assert len(checked.errors[0].message) < 300


def test_bounds_of_a_file(tmp_path: Path) -> None:
    """Red if errors or lines are collected without end, or an empty file is a batch."""
    assert len(check(tmp_path, b"x\n" * 500).errors) == MAX_ERRORS
    assert check(tmp_path, b"\n \n").errors[0].code == "empty_file"
    many = b"".join(
        b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"model":"m"}}\n' % i for i in range(50_005)
    )
    checked = check(tmp_path, many)
    assert [(error.code, error.line) for error in checked.errors] == [("too_many_requests", MAX_LINES + 1)]


@pytest.mark.parametrize(("window", "seconds"), [("24h", DAY), ("90s", 90), ("5m", 300), ("7d", 7 * DAY)])
def test_windows(window: str, seconds: int) -> None:
    """Red if OpenAI's window, or a shorter one, is misread."""
    assert window_seconds(window) == seconds


@pytest.mark.parametrize("window", ["", "24", "h", "0h", "8d", "-1h", "1.5h", "24H", "24h ", "99999999h", "٣h"])
def test_other_windows_are_refused(window: str) -> None:
    """Red if a typo becomes a window."""
    with pytest.raises(RequestError):
        window_seconds(window)


# A job, with an application that answers as the test says


class App:
    """Answers by the prompt: a queue of (status, code) each, then 200."""

    def __init__(self, answers: dict[str, list[tuple[int, str]]] | None = None) -> None:
        self.answers = answers or {}
        self.calls: list[str] = []
        self.running = self.most = 0

    async def __call__(self, path: str, body: bytes, exchange: Exchange) -> Answered:
        assert exchange.background
        prompt = json.loads(body)["prompt"]
        self.calls.append(prompt)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.001)
        finally:
            self.running -= 1
        queue = self.answers.get(prompt)
        if queue:
            status, code = queue.pop(0)
            return Answered(status, {b"retry-after": b"0"}, json.dumps({"error": {"code": code}}).encode())
        return Answered(200, {}, json.dumps({"text": prompt}).encode())


def run_job(store: Store, stored: StoredBatch, app: App, rows: int = 8) -> Batch:
    slots = Slots(rows, lambda: EngineStats(running=app.running), lambda: 0)
    asyncio.run(Job(store, stored, anonymous(), ("m",), 10_000, slots, app).run())
    return store.batch(stored.batch.id, "").batch


def output(store: Store, ident: str | None) -> list[dict[str, Any]]:
    return [] if ident is None else [json.loads(line) for line in store.content(ident).read_bytes().splitlines()]


def test_a_batch_keeps_the_order_and_sorts_out_errors(store: Store) -> None:
    """Red if outputs and errors are mixed, out of order, or the counts differ from the files."""
    app = App({"p3": [(400, "bad")], "p5": [(500, "fault")]})
    batch = run_job(store, add_batch(store, [item(i) for i in range(9)]), app)
    assert batch.status == "completed"
    assert [line["custom_id"] for line in output(store, batch.output_file_id)] == [f"c{i}" for i in range(9) if i not in (3, 5)]
    failed = output(store, batch.error_file_id)
    assert [(line["custom_id"], line["response"]["status_code"]) for line in failed] == [("c3", 400), ("c5", 500)]
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (9, 7, 2)
    assert app.most <= 6, "three quarters of eight rows"
    assert not list(store.results(1)), "lines are forgotten once the files are named"


def test_a_busy_server_is_asked_again(store: Store) -> None:
    """Red if a full queue becomes a line's result, or a line that always times out is run for ever."""
    busy = [(429, "queue_full"), (503, "draining"), (429, "rate_limit_exceeded")]
    app = App({"p0": list(busy), "p1": [(503, "timeout")] * 9})
    batch = run_job(store, add_batch(store, [item(0), item(1)]), app)
    assert app.calls.count("p0") == 4
    assert app.calls.count("p1") == MAX_TIMEOUTS
    assert [line["custom_id"] for line in output(store, batch.output_file_id)] == ["c0"]
    assert output(store, batch.error_file_id)[0]["response"]["status_code"] == 503


def test_a_line_that_always_ends_the_process_is_given_up(store: Store) -> None:
    """Red if one request can keep a server from ever coming up again."""
    stored = add_batch(store, [item(0), item(1)])
    first = json.dumps(item(0)).encode()
    stored.batch.status, stored.batch.model = "in_progress", "m"
    store.begin(stored.seq, stored.batch, [Line(1, "c0", 0, len(first)), Line(2, "c1", len(first) + 1, len(first))])
    for _ in range(MAX_ATTEMPTS):
        store.attempt(stored.seq, 1, 1)
    app = App()
    batch = run_job(store, stored, app)
    assert app.calls == ["p1"]
    assert output(store, batch.error_file_id)[0]["error"]["code"] == "server_error"


def test_a_shutdown_is_no_attempt(store: Store) -> None:
    """Red if restarts in good order use up a line's attempts, or commit something of a line that was broken off."""
    stored = add_batch(store, [item(0)])

    async def stop_in_the_middle() -> None:
        entered = asyncio.Event()

        async def never(path: str, body: bytes, exchange: Exchange) -> Answered:
            entered.set()
            await asyncio.Event().wait()
            raise AssertionError

        task = asyncio.create_task(
            Job(store, stored, anonymous(), ("m",), 10_000, Slots(4, EngineStats, lambda: 0), never).run()
        )
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for _ in range(2 * MAX_ATTEMPTS):
        asyncio.run(stop_in_the_middle())
    (line,) = store.next_lines(stored.seq, 0, 9)
    assert line.attempts == 0
    assert run_job(store, store.open_batches()[0], App()).request_counts.completed == 1


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
def test_an_early_end_keeps_what_is_done(store: Store, ending: str) -> None:
    """Red if results are lost, undone lines are not told, or the counts do not add up."""
    stored = add_batch(store, [item(i) for i in range(20)], window=2 if ending == "expired" else DAY)

    async def go() -> None:
        done = 0

        async def some(path: str, body: bytes, exchange: Exchange) -> Answered:
            nonlocal done
            done += 1
            if done > 7:
                await asyncio.Event().wait()
            return Answered(200, {}, b"{}")

        job = Job(store, stored, anonymous(), ("m",), 10_000, Slots(4, EngineStats, lambda: 0), some)
        task = asyncio.create_task(job.run())
        while done < 8:
            await asyncio.sleep(0.01)
        if ending == "cancelled":
            await job.cancel()
        await task

    asyncio.run(go())
    batch = store.batch(stored.batch.id, "").batch
    assert batch.status == ending
    good, bad = output(store, batch.output_file_id), output(store, batch.error_file_id)
    assert len(good) == batch.request_counts.completed == 7
    assert len(bad) == batch.request_counts.failed == 13
    assert {line["error"]["code"] for line in bad} == {f"batch_{ending}"}
    assert sorted(line["custom_id"] for line in good + bad) == sorted(f"c{i}" for i in range(20))


def test_a_batch_of_a_model_that_is_not_served_waits(store: Store) -> None:
    """Red if its lines are answered with 404, or it can neither be cancelled nor end."""
    stored = add_batch(store, [item(0)])
    stored.batch.status, stored.batch.model = "in_progress", "other"
    store.begin(stored.seq, stored.batch, [Line(1, "c0", 0, 10)])
    app = App()

    async def go() -> None:
        job = Job(store, stored, anonymous(), ("m",), 10_000, Slots(4, EngineStats, lambda: 0), app)
        task = asyncio.create_task(job.run())
        await asyncio.sleep(0.05)
        assert not task.done()
        await job.cancel()
        await task

    asyncio.run(go())
    assert not app.calls
    assert store.batch(stored.batch.id, "").batch.status == "cancelled"


# Room for lines


def test_lines_leave_room_for_others() -> None:
    """Red if a batch takes the last rows, or goes on taking while somebody waits."""
    stats, interactive = EngineStats(), 0

    async def taken(most: int) -> int:
        slots = Slots(8, lambda: stats, lambda: interactive)
        count = 0
        for _ in range(most):
            try:
                async with asyncio.timeout(0.01):
                    await slots.take()
            except TimeoutError:
                break
            count += 1
        return count

    cases = ((0, 0, 0, 6), (0, 0, 4, 2), (4, 0, 4, 2), (6, 0, 1, 0), (0, 0, 9, 0), (0, 1, 0, 0))
    for running, waiting, interactive, expected in cases:
        stats = EngineStats(running=running, waiting=waiting)
        assert asyncio.run(taken(9)) == expected, (running, waiting, interactive)
