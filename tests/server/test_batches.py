"""/v1/files and /v1/batches over HTTP, with kills in between."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_client import form, jsonl, lines, results, start, upload, wait
from harness import RunningServer, alive, check_error, until

from noria.server.batches.upload import MAX_FILE_BYTES

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def batching(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("batching")
    with RunningServer.fake(chat_folder, log=folder / "log", serve={"data_dir": str(folder / "data")}) as running:
        yield running


# Files


def test_a_file_from_upload_to_deletion(batching: RunningServer) -> None:
    """Red if bytes change on the way, or a deleted file is still there."""
    data = os.urandom(3_000_000)
    status, file = upload(batching, data, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"})
    assert status == 200
    assert file["expires_at"] == file["created_at"] + 7200
    assert (file["bytes"], file["filename"], file["purpose"]) == (len(data), "in.jsonl", "batch")
    assert batching.call(f"/v1/files/{file['id']}")[1] == file
    with batching.open(f"/v1/files/{file['id']}/content") as response:
        assert response.read() == data
        assert response.headers["Content-Type"] == "application/octet-stream"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert file in batching.call("/v1/files?purpose=batch")[1]["data"]
    assert batching.call(f"/v1/files/{file['id']}", method="DELETE")[1] == {"id": file["id"], "object": "file", "deleted": True}
    for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content"):
        assert check_error(batching.call(path)[1])["code"] == "file_not_found"


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({"purpose": "fine-tune"}, {"file": ("x", b"x")}, "purpose"),
        ({}, {"file": ("x", b"x")}, "purpose"),
        ({"purpose": "batch"}, {}, "file"),
        ({"purpose": "batch"}, {"file": ("x", b"")}, "file"),
        ({"purpose": "batch", "expires_after[seconds]": "5"}, {"file": ("x", b"x")}, "expires_after"),
        ({"purpose": "batch", "expires_after[anchor]": "now"}, {"file": ("x", b"x")}, "expires_after"),
        ({"purpose": "batch", "path": "/etc"}, {"file": ("x", b"x")}, "path"),
        ({"purpose": "b" * 5000}, {"file": ("x", b"x")}, "purpose"),
    ],
)
def test_wrong_uploads(batching: RunningServer, fields: dict[str, str], files: Any, param: str) -> None:
    """Red if a wrong form is accepted, is a 500, or leaves a file behind."""
    folder = Path(batching.log_path or "").parent / "data" / "files"
    before = set(folder.iterdir()) if folder.exists() else set()
    body, kind = form(fields, files)
    batching.refused("/v1/files", raw=body, param=param, headers={"Content-Type": kind})
    batching.refused("/v1/files", raw=body[:-20], headers={"Content-Type": kind})
    assert set(folder.iterdir()) == before


def test_file_names_are_no_paths(batching: RunningServer) -> None:
    """Red if a client's file name reaches the disk."""
    for name, shown in (("../../etc/passwd", "passwd"), ("C:\\x\\y.jsonl", "y.jsonl"), ("/", "")):
        body, kind = form({"purpose": "batch"}, {"file": (name, b"x")})
        out = batching.ok("/v1/files", raw=body, headers={"Content-Type": kind}, body={})
        assert out["filename"] == shown
    for ident in ("..%2f..%2fstate.sqlite3", "..", "%2e%2e%2flock"):
        assert batching.call(f"/v1/files/{ident}/content")[0] == 404


def test_a_large_upload_costs_no_memory_and_ends_at_the_limit(batching: RunningServer) -> None:
    """Red if an upload is held in memory, or one past the limit is not ended: with 413, and with nothing left of it."""

    def resident() -> int:
        return int(Path(f"/proc/{batching.process.pid}/statm").read_text().split()[1]) * 4096

    before = resident()
    boundary = "bb"
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'.encode()
    request = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary={boundary}\r\n"
    chunk = b"%x\r\n%s\r\n" % (1 << 20, b"a" * (1 << 20))
    with socket.create_connection((batching.host, batching.port), 30) as connection:
        connection.sendall(request.encode() + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(head), head))
        grown = 0
        for _ in range((MAX_FILE_BYTES >> 20) + 1):
            try:
                connection.sendall(chunk)
            except OSError:
                break
            grown = max(grown, resident() - before)
        assert b" 413 " in connection.recv(100)
    assert grown < 24 << 20
    until(lambda: not list(Path(batching.log_path or "").parent.glob("data/files/*.part")), 5)


# Batches


def test_the_openai_client(batching: RunningServer) -> None:
    """Red if the official client, its types or its pagination notice a difference."""
    client = openai.OpenAI(base_url=batching.url + "/v1", api_key="x", max_retries=0)
    data = jsonl([*lines(batching, 3), {**lines(batching, 1)[0], "custom_id": "bad", "body": {"model": "fake"}}])
    file = client.files.create(file=("mine.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"job": "7"}
    )
    assert batch.status == "validating"
    wait(batching, batch.id)
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.metadata, batch.model) == ("completed", {"job": "7"}, "fake")
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (4, 3, 1)
    assert batch.output_file_id is not None
    rows = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    for row in rows:
        assert (
            row["response"]["body"]["choices"][0]["text"]
            == batching.complete(f"line {row['custom_id'][1:]}")["choices"][0]["text"]
        )
    assert batch.error_file_id is not None
    (wrong,) = results(batching, batch.error_file_id)
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("bad", 400)
    assert wrong["response"]["body"]["error"]["param"] == "prompt"
    assert batch.id in {one.id for one in client.batches.list(limit=1)}, "the page iterator follows `after`"
    assert batch.usage is not None
    assert batch.usage.output_tokens == 72
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_chat_lines(batching: RunningServer) -> None:
    """Red if only one endpoint works in a batch."""
    item = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": batching.chat("hi")}
    done = wait(batching, start(batching, [item], endpoint="/v1/chat/completions")["id"])
    (row,) = results(batching, done["output_file_id"])
    assert row["response"]["body"]["object"] == "chat.completion"


def test_a_wrong_file_fails_the_batch_before_anything_runs(batching: RunningServer) -> None:
    """Red if some lines of a wrong file are run, or the faults are not listed."""
    items = lines(batching, 3)
    items[1]["custom_id"] = items[0]["custom_id"]
    items[2]["url"] = "/v1/embeddings"
    before = batching.metric("noria_prompt_tokens_total")
    done = wait(batching, start(batching, items)["id"])
    assert done["status"] == "failed"
    assert [(error["line"], error["code"]) for error in done["errors"]["data"]] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_url"),
    ]
    assert batching.metric("noria_prompt_tokens_total") == before


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, 400, "endpoint"),
        ({"endpoint": "/v1/batches"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"input_file_id": "file-none"}, 404, "file_id"),
        ({"input_file_id": 5}, 400, "input_file_id"),
        ({"metadata": {"a": "b" * 600}}, 400, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after"),
    ],
)
def test_wrong_batches(batching: RunningServer, fields: dict[str, Any], status: int, param: str) -> None:
    """Red if a batch that cannot run is made."""
    ident = upload(batching, b"x")[1]["id"]
    body = {"input_file_id": ident, "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
    batching.refused("/v1/batches", body, status=status, param=param)


def test_a_killed_server_loses_and_repeats_nothing(chat_folder: Path, tmp_path: Path) -> None:
    """SIGKILL in validation and twice in the middle: red if a line is missing, stands twice, or differs from its own answer."""
    serve = {"data_dir": str(tmp_path / "data")}
    count, ident = 150, ""

    def done_lines(server: RunningServer) -> int:
        return int(server.call(f"/v1/batches/{ident}")[1]["request_counts"]["completed"])

    for kill in range(3):
        server = RunningServer.fake(chat_folder, "paced", log=tmp_path / f"log{kill}", serve=serve, max_num_seqs=16)
        with server:
            engine = server.engine_pid()
            if not ident:
                ident = start(server, lines(server, count, max_tokens=6))["id"]
                before = 0  # killed at once
            else:
                before = done_lines(server) + 15
            until(lambda: done_lines(server) >= before)  # noqa: B023
            os.kill(server.process.pid, signal.SIGKILL)
        until(lambda: not alive(engine), 5)  # noqa: B023
    with RunningServer.fake(chat_folder, "paced", log=tmp_path / "log", serve=serve, max_num_seqs=16) as server:
        assert 30 <= done_lines(server) < count, "results were kept, and some were left to do"
        done = wait(server, ident)
        rows = results(server, done["output_file_id"])
        texts = {f"c{i}": server.complete(f"line {i}", max_tokens=6)["choices"][0]["text"] for i in range(0, count, 25)}
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": count, "completed": count, "failed": 0}
    assert [row["custom_id"] for row in rows] == [f"c{i}" for i in range(count)]
    found = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert {name: found[name] for name in texts} == texts


def test_a_drain_breaks_lines_off_and_they_go_on(chat_folder: Path, tmp_path: Path) -> None:
    """Red if SIGTERM waits for a long batch, or its lines get a shutdown's error as their result."""
    serve = {"data_dir": str(tmp_path / "data")}
    with RunningServer.fake(chat_folder, "slow", log=tmp_path / "log", serve=serve) as server:
        ident = start(server, lines(server, 5, max_tokens=400, ignore_eos=True))["id"]
        until(lambda: server.metric("noria_num_requests_running") > 0)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 0
        assert time.monotonic() - began < 3
    with RunningServer.fake(chat_folder, log=tmp_path / "log2", serve=serve) as server:
        done = wait(server, ident)
        assert done["request_counts"] == {"total": 5, "completed": 5, "failed": 0}


def test_cancel(chat_folder: Path, tmp_path: Path) -> None:
    """Red if lines go on in the engine, or undone ones are not told."""
    with RunningServer.fake(chat_folder, "slow", log=tmp_path / "log", serve={"data_dir": str(tmp_path / "data")}) as server:
        batch = start(server, lines(server, 20, max_tokens=400, ignore_eos=True))
        until(lambda: server.metric("noria_num_requests_running") > 0)
        status, out = server.call(f"/v1/batches/{batch['id']}/cancel", method="POST")
        assert status == 200
        assert out["status"] in ("cancelling", "cancelled")
        done = wait(server, batch["id"], 5)
        assert done["status"] == "cancelled"
        assert len(results(server, done["error_file_id"])) == done["request_counts"]["failed"] == 20
        until(server.idle, 2)


def test_interactive_requests_do_not_wait_behind_a_batch(chat_folder: Path, tmp_path: Path) -> None:
    """Red if a batch fills every row: then a chat would wait for one of its long lines."""
    serve = {"data_dir": str(tmp_path / "data")}
    with RunningServer.fake(chat_folder, "slow", log=tmp_path / "log", serve=serve, max_num_seqs=4) as server:
        start(server, lines(server, 12, max_tokens=400, ignore_eos=True))
        until(lambda: server.metric("noria_num_requests_running") == 3)
        timing = server.ok(COMPLETIONS, server.completion("now", max_tokens=2, timing=True))["timing"]
        assert timing["queue"] < 0.15  # a step takes 0.05 s
        assert server.metric("noria_num_requests_running") == 3


def test_tenants_see_their_own_only(chat_folder: Path, tmp_path: Path) -> None:
    """Red if one tenant can list, read, run, cancel or delete what is another's; or a batch forgets its tenant."""
    keys = tmp_path / "keys.json"
    entries = [{"key": "sk-a", "name": "a"}, {"key": "sk-b", "name": "b"}, {"key": "sk-a2", "name": "a2", "tenant": "a"}]
    keys.write_text(json.dumps({"keys": entries}))
    serve = {"data_dir": str(tmp_path / "data"), "api_key_file": str(keys)}
    a, b, colleague = ({"Authorization": f"Bearer sk-{name}"} for name in ("a", "b", "a2"))
    with RunningServer.fake(chat_folder, log=tmp_path / "log", serve=serve) as server:
        server.key = "sk-a"
        batch = start(server, lines(server, 2), a)
        done = wait(server, batch["id"], headers=colleague)
        for ident in (batch["input_file_id"], done["output_file_id"]):
            assert server.call(f"/v1/files/{ident}", headers=colleague)[0] == 200
            for path, method in (
                (f"/v1/files/{ident}", "GET"),
                (f"/v1/files/{ident}/content", "GET"),
                (f"/v1/files/{ident}", "DELETE"),
            ):
                assert server.call(path, method=method, headers=b)[0] == 404
        assert server.call(f"/v1/batches/{batch['id']}", headers=b)[0] == 404
        assert server.call(f"/v1/batches/{batch['id']}/cancel", method="POST", headers=b)[0] == 404
        stolen = {"input_file_id": batch["input_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        assert server.call("/v1/batches", stolen, headers=b)[0] == 404
        for path in ("/v1/files", "/v1/batches"):
            assert server.call(path, headers=b)[1]["data"] == []


def test_a_revoked_key_ends_its_batches(chat_folder: Path, tmp_path: Path) -> None:
    """Red if work of a key that was taken away goes on after a restart."""
    keys = tmp_path / "keys"
    serve = {"data_dir": str(tmp_path / "data"), "api_key_file": str(keys)}
    keys.write_text("sk-old team\n")
    with RunningServer.fake(chat_folder, "slow", log=tmp_path / "log", serve=serve) as server:
        server.key = "sk-old"
        ident = start(server, lines(server, 9, max_tokens=400, ignore_eos=True))["id"]
        until(lambda: server.metric("noria_num_requests_running") > 0)
    keys.write_text("sk-new other\n")
    with RunningServer.fake(chat_folder, "slow", log=tmp_path / "log2", serve=serve) as server:
        server.key = "sk-new"
        assert server.call(f"/v1/batches/{ident}")[0] == 404
        time.sleep(0.2)
        assert server.idle()


def test_without_a_folder_files_are_off_with_a_hint(chat_folder: Path, tmp_path: Path) -> None:
    """Red if a server cannot start where nothing can be written, says nothing, or two servers share one folder."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with RunningServer.fake(chat_folder, log=tmp_path / "log", cache_dir=str(blocked)) as server:
        status, out = upload(server, b"x")
        assert status == 404
        assert "files and batches are off" in check_error(out)["message"]
        assert server.call("/v1/files")[1]["data"] == []
        assert server.call("/v1/batches/none")[0] == 404
    given = RunningServer.fake(chat_folder, log=tmp_path / "log2", serve={"data_dir": str(blocked)})
    assert given.process.wait(20) == 1
    assert "--data-dir" in given.errors().strip().splitlines()[-1]
    shared = str(tmp_path / "data")
    with RunningServer.fake(chat_folder, log=tmp_path / "log3", serve={"data_dir": shared}) as first:
        assert upload(first, b"x")[0] == 200
        second = RunningServer.fake(chat_folder, log=tmp_path / "log4", serve={"data_dir": shared})
        assert second.process.wait(20) == 1
        assert "in use by another server" in second.errors()


def test_many_batches_at_once(batching: RunningServer) -> None:
    """Red if batches of several clients mix, or one waits for all of another's lines."""
    found: dict[int, list[dict[str, Any]]] = {}

    def client(i: int) -> None:
        items = [{**line, "custom_id": f"{i}-{line['custom_id']}"} for line in lines(batching, 20)]
        found[i] = results(batching, wait(batching, start(batching, items)["id"])["output_file_id"])

    threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(6):
        assert [row["custom_id"] for row in found[i]] == [f"{i}-c{j}" for j in range(20)]
