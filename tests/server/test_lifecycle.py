"""Start, drain, death, disconnects. Red if a request hangs, a child survives, or work goes on for nobody."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, PACKAGES, RunningServer, alive, at_once, check_error, joined, until

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def background(function: Any, *arguments: Any) -> list[Any]:
    """Run in a thread; the list gets the result, or the exception."""
    result: list[Any] = []

    def work() -> None:
        try:
            result.append(function(*arguments))
        except Exception as error:
            result.append(error)

    threading.Thread(target=work, daemon=True).start()
    return result


@pytest.fixture
def slow(chat_folder: Path, tmp_path: Path) -> Any:
    """A server of its own, steps of 50 ms."""
    with RunningServer.fake(chat_folder, "slow", log=tmp_path / "log") as running:
        yield running


# Start


@pytest.mark.parametrize(
    ("factory", "told"),
    [("broken", "expected 4x4"), ("crashing", "exit code 7"), ("buggy", "ZeroDivisionError")],
)
def test_failed_start_is_one_line_and_exit_code_1(chat_folder: Path, tmp_path: Path, factory: str, told: str) -> None:
    """Red if a load error hangs, exits 0, or drowns in a traceback."""
    server = RunningServer.fake(chat_folder, factory, log=tmp_path / "log")
    assert server.process.wait(20) == 1
    last = server.errors().strip().splitlines()[-1]
    assert last.startswith("noria: ")
    assert told in last
    if factory != "buggy":  # a bug of ours keeps its trace above the line
        assert "Traceback" not in server.errors()


def test_missing_tokenizer_is_one_line(tmp_path: Path) -> None:
    """Red if what fails in the HTTP process leaves the engine running or a trace."""
    empty = tmp_path / "empty"
    empty.mkdir()
    server = RunningServer.fake(empty, log=tmp_path / "log")
    assert server.process.wait(20) == 1
    assert "Traceback" not in server.errors()
    assert server.errors().strip().splitlines()[-1].startswith("noria: ")


def test_port_in_use_is_told_before_anything_loads(chat_folder: Path, tmp_path: Path) -> None:
    """Red if a model is loaded first, or the reason is lost."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = RunningServer.fake(chat_folder, log=tmp_path / "log", serve={"port": port})
        assert server.process.wait(20) == 1
    assert f"port {port}" in server.errors()
    assert "loading" not in server.errors()


def test_probes_while_loading_and_after(chat_folder: Path, tmp_path: Path) -> None:
    """Red if health is 200 before the engine answers, or requests wait for the load instead of 503."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = RunningServer.fake(chat_folder, "late", log=tmp_path / "log", serve={"port": port})
    server.url, server.host, server.port = f"http://127.0.0.1:{port}", "127.0.0.1", port
    try:
        until(lambda: _answers(server), 10)
        for path in ("/health", "/ready", "/metrics"):
            assert server.call(path)[0] == 503
        status, out = server.call(COMPLETIONS, server.completion("x"))
        assert status == 503
        check_error(out)
        server.wait_ready()
        assert server.call("/health")[0] == server.call("/ready")[0] == 200
    finally:
        server.close()


def _answers(server: RunningServer) -> bool:
    try:
        return bool(server.call("/version")[0] == 200)
    except OSError:
        return False


# Death


def test_no_engine_survives_its_parent(slow: RunningServer) -> None:
    """Red if the death pipe or the parent-death signal is missing: checked while the engine is busy."""
    pid = slow.engine_pid()
    background(slow.call, COMPLETIONS, slow.completion("x", max_tokens=400))
    time.sleep(0.3)
    os.kill(slow.process.pid, signal.SIGKILL)
    until(lambda: not alive(pid), 2)


def test_no_engine_survives_a_parent_that_started_it_in_a_thread(chat_folder: Path) -> None:
    """Red if only the parent-death signal works, which follows the starting thread: here the pipe alone has to."""
    code = (
        "import threading, time\n"
        "from noria.config import EngineConfig\n"
        "from noria.server.launch import EngineProcess\n"
        "def start():\n"
        f"    global child; child = EngineProcess(EngineConfig(model={str(chat_folder)!r}), factory='fake_engine:fast')\n"
        "thread = threading.Thread(target=start); thread.start(); thread.join()\n"
        "time.sleep(1); assert child.process.poll() is None; print(child.process.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGES), str(HERE)])}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    until(lambda: not alive(pid), 2)


def test_killed_engine_ends_every_request_and_the_server(slow: RunningServer) -> None:
    """Red if a request hangs, a stream ends without an error event, or the server goes on without its engine."""
    plain = background(slow.call, COMPLETIONS, slow.completion("plain", max_tokens=400))
    stream = background(slow.stream, COMPLETIONS, slow.completion("stream", max_tokens=400))
    chat = background(slow.stream, CHAT, slow.chat("stream", max_tokens=400))
    time.sleep(0.6)
    os.kill(slow.engine_pid(), signal.SIGKILL)
    until(lambda: plain and stream and chat, 5)
    status, out = plain[0]
    assert status == 500
    assert "SIGKILL" in check_error(out)["message"]
    for _, events, _ in (stream[0], chat[0]):
        assert events[0]["choices"]
        check_error(events[-1])
        assert sum("error" in event for event in events) == 1
    assert slow.process.wait(5) == 1
    assert "SIGKILL" in slow.errors().strip().splitlines()[-1]


def test_broken_invariant_is_loud_and_ends_the_server(chat_folder: Path, tmp_path: Path) -> None:
    """Red if an exception in a step is swallowed, or its trace or message is lost."""
    with RunningServer.fake(chat_folder, "faulty", log=tmp_path / "log") as server:
        status, out = server.call(COMPLETIONS, server.completion("x", max_tokens=50))
        assert status == 500
        assert "invariant" in check_error(out)["message"]
        assert server.process.wait(5) == 1
        assert "Traceback" in server.errors()


def test_hanging_engine_is_unhealthy_and_healthy_again(slow: RunningServer) -> None:
    """Red if health does not make a round trip."""
    pid = slow.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        status, out = slow.call("/health", timeout=30)
        assert status == 503
        assert check_error(out)["code"] == "engine_hanging"
        assert time.monotonic() - began < 20
    finally:
        os.kill(pid, signal.SIGCONT)
    assert slow.call("/health")[0] == 200


# Drain


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(slow: RunningServer) -> None:
    """Red if a running answer is cut, new ones are accepted or reset, readiness stays, or the exit code is not 0."""
    stream = background(slow.stream, COMPLETIONS, slow.completion("long", max_tokens=40))
    until(lambda: slow.metric("noria_num_requests_running") == 1)
    slow.process.send_signal(signal.SIGTERM)
    until(lambda: slow.call("/ready")[0] == 503, 2)
    assert slow.call("/health")[0] == 200
    with slow.open(COMPLETIONS, slow.completion("new")) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
    until(lambda: stream, 10)
    _, events, done = stream[0]
    assert done
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert slow.process.wait(5) == 0


def test_drain_has_a_deadline(chat_folder: Path, tmp_path: Path) -> None:
    """Red if one long request keeps the server up, or its client hears nothing."""
    with RunningServer.fake(chat_folder, "slow", log=tmp_path / "log", serve={"shutdown_timeout_s": 0.5}) as server:
        plain = background(server.call, COMPLETIONS, server.completion("long", max_tokens=400))
        until(lambda: server.metric("noria_num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 0
        until(lambda: plain, 2)
        assert plain[0][0] == 503
        check_error(plain[0][1])


def test_second_signal_ends_at_once(slow: RunningServer) -> None:
    """Red if an impatient operator has to wait for the drain; the engine must not stay either."""
    pid = slow.engine_pid()
    background(slow.call, COMPLETIONS, slow.completion("long", max_tokens=400))
    until(lambda: slow.metric("noria_num_requests_running") == 1)
    slow.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    slow.process.send_signal(signal.SIGINT)
    assert slow.process.wait(2) != 0
    until(lambda: not alive(pid), 2)


def test_idle_server_uses_no_processor_time(slow: RunningServer) -> None:
    """Red if the engine or the server polls: one per cent of a core is the bound for both together."""
    slow.complete("warm")
    pids = (slow.process.pid, slow.engine_pid())
    time.sleep(1)
    before = sum(_cpu_seconds(pid) for pid in pids)
    time.sleep(4)
    assert sum(_cpu_seconds(pid) for pid in pids) - before <= 0.04


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Disconnects


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_disconnect_aborts_within_a_step(slow_server: RunningServer, path: str, *, stream: bool) -> None:
    """Red if only streams are watched, or the request runs to its end for nobody."""
    body = slow_server.completion("bye", max_tokens=400) if path == COMPLETIONS else slow_server.chat("bye", max_tokens=400)
    aborted = slow_server.metric("noria_request_success_total", "abort")
    slow_server.hangup(path, {**body, "stream": stream, "n": 2}, after=0, wait=0.3)
    until(slow_server.idle, 2)
    assert slow_server.metric("noria_request_success_total", "abort") == aborted + 1


def test_disconnect_while_waiting_for_admission(slow_server: RunningServer) -> None:
    """Red if a queued request cannot be aborted."""
    fill = [background(slow_server.call, COMPLETIONS, slow_server.completion(f"fill {i}", max_tokens=40)) for i in range(8)]
    until(lambda: slow_server.metric("noria_num_requests_running") == 8)
    slow_server.hangup(COMPLETIONS, slow_server.completion("queued", max_tokens=400), wait=0.3)
    until(lambda: slow_server.metric("noria_num_requests_waiting") == 0, 2)
    until(lambda: all(fill), 20)
    assert all(result[0][0] == 200 for result in fill)


# Overload


def test_full_queue_is_429_with_retry_after(slow_server: RunningServer) -> None:
    """Red if refused requests hang, get another status, a stream's header, or no Retry-After; or the others suffer."""

    def go(i: int) -> int:
        body = slow_server.completion(f"load {i}", max_tokens=20, stream=bool(i % 2))
        with slow_server.open(COMPLETIONS, body) as response:
            response.read()
            if response.status != 200:
                assert response.headers["Retry-After"] == "2"  # the engine's estimate
                assert "json" in response.headers["Content-Type"]
            return int(response.status)

    statuses = at_once(go, range(40), 40)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 16
    until(slow_server.idle, 5)


def test_deadline_ends_a_request_with_an_error(chat_folder: Path, tmp_path: Path) -> None:
    """Red if --request-timeout-s is ignored, or its end looks like an answer."""
    with RunningServer.fake(chat_folder, "slow", log=tmp_path / "log", request_timeout_s=0.5) as server:
        status, out = server.call(COMPLETIONS, server.completion("x", max_tokens=400))
        assert status == 503
        assert check_error(out)["code"] == "timeout"
        _, events, done = server.stream(COMPLETIONS, server.completion("x", max_tokens=400))
        assert done
        check_error(events[-1])
        assert server.metric("noria_request_success_total", "timeout") == 2
        until(server.idle, 2)


def test_waiting_stream_is_kept_alive_by_comments(chat_folder: Path, tmp_path: Path) -> None:
    """Red if a proxy would see nothing for as long as the first token takes, or one between two tokens."""
    with (
        RunningServer.fake(chat_folder, "stuck", log=tmp_path / "log") as server,
        server.open(COMPLETIONS, server.completion("x", max_tokens=2, stream=True)) as response,
    ):
        lines = [line for line in response if line.strip()]
        kinds = [line[:6] for line in lines]
        assert kinds == [b": wait", b"data: ", b": wait", b"data: ", b"data: "]
        assert lines[-1] == b"data: [DONE]\n"


def test_long_prompts_do_not_stop_other_streams(chat_folder: Path, tmp_path: Path) -> None:
    """Red if tokenising or templating a long prompt runs on the event loop: each of these takes a second or more."""
    worst = 0.0
    with RunningServer.fake(chat_folder, log=tmp_path / "log", max_model_len=8_000_000) as server:
        text = "many words " * 150_000
        bodies = [(CHAT, server.chat(text, max_tokens=1)), (COMPLETIONS, server.completion(text, max_tokens=1, echo=True))]
        work = [background(server.call, path, body) for path, body in bodies]
        while not all(work):
            began = time.monotonic()
            assert server.call("/version")[0] == 200
            worst = max(worst, time.monotonic() - began)
        assert [result[0][0] for result in work] == [200, 200]
    assert worst < 0.5


def test_256_streams_with_random_disconnects_leave_nothing(server: RunningServer) -> None:
    """Red if a gauge, a counter or an answer is wrong after a storm of clients that come and go."""
    done = server.metric("noria_request_success_total")
    texts = {i: server.complete(f"storm {i}", max_tokens=40)["choices"][0]["text"] for i in range(0, 256, 16)}

    def client(i: int) -> str | None:
        body = server.completion(f"storm {i}", max_tokens=40, n=1 + (i % 3 == 2))
        if i % 16 == 0:
            return joined(server.stream(COMPLETIONS, body)[1])
        server.hangup(COMPLETIONS, {**body, "max_tokens": 400, "stream": i % 2 == 0}, after=i % 2, wait=i % 7 * 0.02)
        return None

    answers = at_once(client, range(256), 256)
    assert {i: text for i, text in enumerate(answers) if text is not None} == texts
    until(server.idle, 20)
    until(lambda: server.metric("noria_request_success_total") == done + 16 + 256, 10)


def test_python_child_does_not_take_modules_from_the_working_directory(chat_folder: Path, tmp_path: Path) -> None:
    """Red if starting a server in a folder with a numpy.py runs it."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported from the working directory')")
    code = (
        "from noria.config import EngineConfig; from noria.server.launch import EngineProcess\n"
        f"import os; os.chdir({str(tmp_path)!r})\n"
        f"p = EngineProcess(EngineConfig(model={str(chat_folder)!r}), factory='fake_engine:fast')\n"
        "import time; time.sleep(1); alive = p.process.poll() is None; p.close(); raise SystemExit(0 if alive else 3)"
    )
    path = os.pathsep.join([str(PACKAGES), str(HERE)])
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False).returncode == 0
