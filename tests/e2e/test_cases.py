"""Kinds of faults that people met on LLM servers, each as a check against `noria serve` with a real engine.

Every test names the kind; together with the tables of tests/server it covers the whole kind, not one input.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from harness import RunningServer, at_once, check_error, joined, text_of, until

from conftest import CONTEXT

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ("In the morning", " leading space", "def f(x):\n    return", "\tindented", "2 4 6 8", "héllo wörld 漢字")


def greedy(server: RunningServer, prompt: str, count: int) -> str:
    """The text of exactly `count` greedy tokens."""
    return text_of(server.complete(prompt, max_tokens=count, ignore_eos=True))


# Text


@pytest.mark.parametrize("prompt", PROMPTS)
def test_streamed_text_is_the_whole_text(server: RunningServer, prompt: str) -> None:
    """Spaces, indents and characters survive streaming: red if tokens are decoded one by one, or text is sent twice."""
    for path, body in (
        (COMPLETIONS, server.completion(prompt, max_tokens=40)),
        (CHAT, server.chat(prompt, max_tokens=40)),
    ):
        whole = server.ok(path, body)
        _, events, done = server.stream(path, body)
        assert done
        assert joined(events) == text_of(whole)


@pytest.mark.parametrize("prompt", ["The days of the week are", "A list:\n1."])
@pytest.mark.parametrize("length", [1, 3, 9])
def test_no_text_goes_past_a_stop_string(server: RunningServer, prompt: str, length: int) -> None:
    """Stops of any length at any place, on and off token borders: red if part of one is sent, or matching is by token."""
    text = greedy(server, prompt, 40)
    for start in range(1, len(text) - length, max(1, len(text) // 10)):
        stop = text[start : start + length]
        if not stop.strip():
            continue
        want = text[: text.index(stop)]
        body = server.completion(prompt, max_tokens=40, ignore_eos=True, stop=[stop])
        out = server.ok(COMPLETIONS, body)
        assert (text_of(out), out["choices"][0]["finish_reason"]) == (want, "stop")
        _, events, _ = server.stream(COMPLETIONS, body)
        sent, reasons = "", []
        for event in events:
            for choice in event["choices"]:
                sent += choice["text"]
                reasons.append(choice["finish_reason"])
                assert want.startswith(sent)
        assert sent == want
        assert [reason for reason in reasons if reason] == ["stop"]


@pytest.mark.parametrize("count", [1, 4, 5, 32])
def test_up_to_32_stops(server: RunningServer, count: int) -> None:
    """Red if two layers have two limits."""
    server.complete("a b c", stop=[f"@{i}@" for i in range(count)])


@pytest.mark.parametrize("stops", [[f"@{i}@" for i in range(33)], [f"@{i}@" for i in range(200_000)], ["a", ""]])
def test_more_stops_are_refused_quickly(server: RunningServer, stops: list[str]) -> None:
    """Red if a giant list costs the other clients time, or an empty stop gives an empty answer."""
    began = time.monotonic()
    server.refused(COMPLETIONS, server.completion("a b c", stop=stops), param="stop")
    assert time.monotonic() - began < 5


def test_end_of_turn_stays_in_force_with_own_stops(server: RunningServer) -> None:
    """Red if a client's stops replace the model's end ids."""
    for question in ("Say yes.", "What is two and two?", "Hello!"):
        plain = server.ok(CHAT, server.chat(question, max_tokens=120))
        stopped = server.ok(CHAT, server.chat(question, max_tokens=120, stop=["\n@@never@@"], stop_token_ids=[0]))
        assert text_of(plain) == text_of(stopped)
        assert plain["choices"][0]["finish_reason"] == stopped["choices"][0]["finish_reason"]


def test_ignore_eos_and_min_tokens_know_every_end_id(server: RunningServer) -> None:
    """Red if a second end id ends a request that ignores ends, or one that must go on."""
    for prompt in ("Yes", "End.", "The end", "Bye!", "ok ok"):
        for path, body in ((CHAT, server.chat(prompt)), (COMPLETIONS, server.completion(prompt))):
            out = server.ok(path, {**body, "max_tokens": 60, "ignore_eos": True})
            assert out["usage"]["completion_tokens"] == 60
            assert out["choices"][0]["finish_reason"] == "length"
            out = server.ok(path, {**body, "max_tokens": 60, "min_tokens": 25, "temperature": 1, "seed": 1})
            assert out["usage"]["completion_tokens"] >= 25


# Usage and limits


@pytest.mark.parametrize("n", [1, 3])
def test_usage_of_a_stream(server: RunningServer, n: int) -> None:
    """One chunk with no choices, last, with the sums of all choices: red if it comes elsewhere, or for one choice."""
    body = server.completion("Numbers:", max_tokens=8, n=n, temperature=1, seed=1, ignore_eos=True)
    _, events, _ = server.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert not any(event["usage"] for event in events[:-1])
    usage, whole = events[-1]["usage"], server.ok(COMPLETIONS, body)["usage"]
    assert usage["completion_tokens"] == 8 * n
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole[name]
    assert all(event["choices"] for event in server.stream(COMPLETIONS, body)[1])


def test_max_tokens_zero_null_and_its_newer_name(server: RunningServer) -> None:
    """Red if 0 runs as 1, null is an error, or the newer name is dropped."""
    out = server.complete("Score this text", max_tokens=0, echo=True, logprobs=1)
    assert text_of(out) == "Score this text"
    assert out["usage"]["completion_tokens"] == 0
    assert len(out["choices"][0]["logprobs"]["tokens"]) == out["usage"]["prompt_tokens"]
    for limit in ({"max_tokens": None}, {"max_tokens": 99, "max_completion_tokens": 16}):
        assert server.complete("x", ignore_eos=True, **limit)["usage"]["completion_tokens"] == 16
    chat = server.chat("Hi", ignore_eos=True, max_tokens=None, max_completion_tokens=9)
    assert server.ok(CHAT, chat)["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_prompts_are_400_with_both_numbers(server: RunningServer, *, stream: bool) -> None:
    """Red if the status differs between forms, or a stream begins."""
    long = "tree " * (CONTEXT * 2)
    for path, body in (
        (COMPLETIONS, server.completion(long)),
        (CHAT, server.chat(long)),
        (COMPLETIONS, server.completion([65] * (CONTEXT + 1))),
        (COMPLETIONS, server.completion("tree", max_tokens=CONTEXT)),
        (CHAT, server.chat("tree", max_tokens=CONTEXT)),
    ):
        error = server.refused(path, {**body, "stream": stream})
        assert error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error["message"]


@pytest.mark.parametrize("value", [3_000_000, 2**63, 0, -1])
def test_giant_numbers_of_choices_cost_nothing(server: RunningServer, value: int) -> None:
    """Red if state is made for choices before the limit is checked."""
    began = time.monotonic()
    for path, body in ((COMPLETIONS, server.completion("x", n=value)), (CHAT, server.chat("x", n=value))):
        server.refused(path, body, param="n")
    server.refused(CHAT, server.chat("x", logprobs=True, top_logprobs=2 * 10**9), param="top_logprobs")
    server.refused(COMPLETIONS, server.completion("x", best_of=10**6, n=1), param="best_of")
    assert time.monotonic() - began < 2
    server.complete("still there", max_tokens=1)


# Logprobs and echo


def test_offsets_of_a_stream_with_echo(server: RunningServer) -> None:
    """Each offset is the token's place in the whole text: red if the prompt is left out of the running sum."""
    prompt = "Alpha beta gamma delta"
    _, events, _ = server.stream(COMPLETIONS, server.completion(prompt, echo=True, logprobs=1, ignore_eos=True))
    full = joined(events)
    tokens: list[str] = []
    offsets: list[int] = []
    for event in events:
        for choice in event["choices"]:
            tokens += choice["logprobs"]["tokens"]
            offsets += choice["logprobs"]["text_offset"]
    assert full.startswith(prompt)
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    for token, offset in zip(tokens, offsets, strict=True):
        if token.isascii() and not token.startswith(("bytes:", "<|")):
            assert full[offset : offset + len(token)] == token


def test_likelihoods_of_a_prompt(server: RunningServer) -> None:
    """As evaluations ask for them: red if prompt entries are missing, or a token's own value differs from scoring it."""
    text = "Paris lies on the river"
    out = server.complete(text, max_tokens=1, echo=True, logprobs=2)
    logprobs, usage = out["choices"][0]["logprobs"], out["usage"]
    values = logprobs["token_logprobs"]
    assert len(values) == len(logprobs["tokens"]) == usage["prompt_tokens"] + 1
    assert values[0] is None
    assert all(value <= 0 for value in values[1:])
    ids = server.ok("/tokenize", {"prompt": text})["tokens"]
    batch = server.complete([ids, ids], max_tokens=1, echo=True, logprobs=1)
    assert batch["choices"][0]["logprobs"]["token_logprobs"] == batch["choices"][1]["logprobs"]["token_logprobs"] == values


# Sampling


def test_choices_of_one_request(server: RunningServer) -> None:
    """Red if choices are equal, or the same seed gives others the next time, streamed or not."""
    body = server.chat("Write a random word.", n=3, temperature=1, seed=7, max_tokens=12)
    _, events, _ = server.stream(CHAT, body)
    whole = server.ok(CHAT, body)
    texts = [text_of(whole, i) for i in range(3)]
    assert texts == [joined(events, i) for i in range(3)]
    assert len(set(texts)) > 1


def test_answers_do_not_depend_on_load(server: RunningServer) -> None:
    """To the last bit of every logprob: red if a batch, its order or a cached prefix changes a result."""
    prompts = [f"Topic {i}: tell me about item {i * 7}." for i in range(12)]

    def one(prompt: str) -> Any:
        choice = server.complete(prompt, max_tokens=32, ignore_eos=True, logprobs=2)["choices"][0]
        return choice["text"], choice["logprobs"]

    alone = [one(prompt) for prompt in prompts]
    assert at_once(one, prompts, 12) == alone
    assert at_once(one, prompts[::-1], 12)[::-1] == alone


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 3},
        {"temperature": 1.5, "top_k": 9_999_999, "seed": 2**63},
        {"temperature": 1, "top_p": 0, "seed": 1},
        {"frequency_penalty": 2, "presence_penalty": -2, "repetition_penalty": 1.3},
    ],
)
def test_sampled_answers_repeat_with_their_seed_under_load(server: RunningServer, fields: dict[str, Any]) -> None:
    """Red if a draw depends on the batch, or an extreme value ends the engine."""
    body = server.completion("Once upon a time", ignore_eos=True, **fields)
    alone = text_of(server.ok(COMPLETIONS, body))
    assert set(at_once(lambda _: text_of(server.ok(COMPLETIONS, body)), range(8), 8)) == {alone}


@pytest.mark.parametrize(
    ("name", "literal"),
    [
        *[("temperature", value) for value in ("NaN", "Infinity", "1e400", "-1", "3", '"hot"', "true")],
        *[("top_p", value) for value in ("-1", "7", "NaN", "[1]")],
        *[(f"{kind}_penalty", value) for kind in ("presence", "frequency") for value in ("9", "-Infinity")],
        *[("repetition_penalty", value) for value in ("0", "-1")],
        ("top_k", "-5"),
        ("min_p", "2"),
    ],
)
def test_wrong_sampling_values_never_reach_the_engine(server: RunningServer, name: str, literal: str) -> None:
    """Red if one is clamped, or ends a kernel."""
    raw = f'{{"model":"m","prompt":"x","{name}":{literal}}}'.encode()
    server.refused(COMPLETIONS, raw=raw)


def test_logit_bias_forces_and_bans(server: RunningServer) -> None:
    """Red if a bias is ignored, or an id outside the vocabulary is used as an index."""
    token = 65

    def tokens(bias: float) -> list[str]:
        body = server.completion("x", max_tokens=4, ignore_eos=True, logit_bias={str(token): bias}, logprobs=1)
        found: list[str] = server.ok(COMPLETIONS, body)["choices"][0]["logprobs"]["tokens"]
        return found

    forced = tokens(100)
    assert len(set(forced)) == 1
    assert forced[0] not in tokens(-100)
    for bias in ({"10000000": 5}, {"-1": 5}, {"a": 1}, {"65": 101}, {"65": "x"}, [1, 2]):
        server.refused(COMPLETIONS, server.completion("x", logit_bias=bias), param="logit_bias")


def test_penalties_count_generated_tokens_and_stay_with_their_request(server: RunningServer) -> None:
    """Red if prompt tokens count for presence and frequency, or a neighbour in the batch is penalised."""
    prompt = "go go go go go go go go"
    plain = server.completion(prompt, ignore_eos=True, logprobs=1)
    alone = text_of(server.ok(COMPLETIONS, plain))
    penalties = {"presence_penalty": 2, "frequency_penalty": 2}
    first = [server.complete(prompt, max_tokens=1, logprobs=1, **extra)["choices"][0] for extra in ({}, penalties)]
    assert first[0] == first[1]
    assert greedy(server, prompt, 48) != text_of(server.complete(prompt, max_tokens=48, ignore_eos=True, **penalties))
    others = [server.completion("longer " * k, ignore_eos=True, frequency_penalty=1.5) for k in (3, 40, 90)]
    assert text_of(at_once(lambda body: server.ok(COMPLETIONS, body), [plain, *others], 4)[0]) == alone


# Prefix cache and tenants


def test_cache_salt_separates_tenants(server: RunningServer) -> None:
    """Red if a prefix is reused under another salt, or a salt changes an answer."""
    prompt = f"Ledger {secrets.token_hex(6)}. " * 30

    def cached(**fields: Any) -> tuple[bool, str]:
        out = server.complete(prompt, max_tokens=8, ignore_eos=True, **fields)
        return out["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, text_of(out)

    salts: list[dict[str, str]] = [{"cache_salt": "s1"}, {"cache_salt": "s1"}, {"cache_salt": "s2"}, {}, {}]
    salts += [{"cache_salt": ""}, {"cache_salt": "s3" * 500}]
    found = [cached(**salt) for salt in salts]
    assert [hit for hit, _ in found] == [False, True, False, False, True, True, False]
    assert len({text for _, text in found}) == 1


def test_no_conversation_appears_in_another(server: RunningServer) -> None:
    """More clients than slots, each with a code word: red if an answer holds another's word, or differs from the one alone."""
    words = [f"ZQ{i:03d}KV" for i in range(40)]

    def answer(word: str) -> str:
        prompt = f"Case file {word}. " * 20 + "The case file is called"
        return text_of(server.complete(prompt, max_tokens=16, ignore_eos=True))

    alone = [answer(word) for word in words]
    for _ in range(2):
        assert at_once(answer, words, 40) == alone
    for word, text in zip(words, alone, strict=True):
        assert not [other for other in words if other != word and other in text]


@pytest.mark.parametrize("count", [15, 16, 17, 47, 48, 49, 128, 333, 700])
def test_chunk_size_and_prefix_cache_do_not_change_logprobs(
    server: RunningServer, chunked_server: RunningServer, count: int
) -> None:
    """Red if a chunk's border shifts a position, or KV is rounded differently: equal to the last bit."""
    prompt = [1 + (7 * i * i + i) % 250 for i in range(count)]

    def first(one: RunningServer) -> Any:
        return one.complete(prompt, max_tokens=4, logprobs=5, ignore_eos=True)["choices"][0]["logprobs"]

    assert first(server) == first(chunked_server) == first(server)


# Clients


def test_equal_request_ids_do_not_mix(server: RunningServer) -> None:
    """Red if a client's id is a key of our tables."""
    prompts = [f"Subject {i} is" for i in range(8)]
    alone = [greedy(server, prompt, 24) for prompt in prompts]

    def same(prompt: str) -> str:
        body = server.completion(prompt, max_tokens=24, ignore_eos=True, request_id="same")
        return text_of(server.ok(COMPLETIONS, body, headers={"X-Request-Id": "same"}))

    assert at_once(same, prompts, 8) == alone


def test_overload_ends_every_request(server: RunningServer) -> None:
    """300 at once over a queue of 128: red if one hangs, is refused in another way than 429, or the server stays ill."""

    def go(i: int) -> int:
        body = server.completion(f"Load {i}", max_tokens=24, ignore_eos=True)
        if i % 2:
            status, events, done = server.stream(COMPLETIONS, body, timeout=180)
            assert done or status != 200
            out = events[-1]
        else:
            status, out = server.call(COMPLETIONS, body, timeout=180)
        if status != 200:
            assert status == 429
            check_error(out)
        return status

    statuses = at_once(go, range(300), 300)
    assert statuses.count(200) >= 128
    until(server.idle, 10)
    server.complete("after", max_tokens=1)


def test_hangups_free_everything_and_count_once(server: RunningServer) -> None:
    """Dropped before the reply, in prefill, in decode, in the queue: red if one runs on, or is counted twice."""
    finished = server.metric("noria_request_success_total")

    def drop(i: int) -> None:
        body = server.completion(f"Tale {i}" + "long " * (i % 7) * 30, max_tokens=900, ignore_eos=True, stream=i % 2 == 1)
        server.hangup(COMPLETIONS, body, after=i % 2 if i % 3 else 0, wait=i % 5 * 0.1)

    at_once(drop, range(120), 40)
    until(server.idle, 20)
    until(lambda: server.metric("noria_request_success_total") == finished + 120, 10)
    names = ("noria_prompt_tokens_total", "noria_generation_tokens_total")
    before = [server.metric(name) for name in names]
    usages = [server.complete(f"count me {i}", max_tokens=7, ignore_eos=True)["usage"] for i in range(5)]
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [sum(u["prompt_tokens"] for u in usages), 35]


# Security


def test_hand_over_fields_of_a_client_go_nowhere(server: RunningServer) -> None:
    """Red if one is honoured, a list is sized by it, or a host that it names is connected to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(1)
        port = listener.getsockname()[1]
        record = {"remote_host": "127.0.0.1", "remote_port": port, "do_remote_prefill": True, "remote_block_ids": [1]}
        for fields in (
            {"kv_transfer_params": {**record, "tp_size": 10**9}},
            {"kv_transfer_params": record},
            {"kv_transfer_params": "x"},
            {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1},
            {"data_parallel_rank": 10**9},
            {"priority": -(10**18)},
            {"lora_path": "/etc"},
            {"session_params": {"id": "x" * 10**6}},
        ):
            began = time.monotonic()
            server.refused(COMPLETIONS, server.completion("word " * 100, max_tokens=4, **fields))
            assert time.monotonic() - began < 2
        with pytest.raises(TimeoutError):
            listener.accept()


def test_the_server_fetches_nothing_that_a_client_names(server: RunningServer) -> None:
    """Red if any part of a message makes the server open a connection or a file."""
    hits: list[str] = []

    class Trap(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hits.append(self.path)

        def log_message(self, *_: object) -> None:
            pass

    trap = HTTPServer(("127.0.0.1", 0), Trap)
    threading.Thread(target=trap.serve_forever, daemon=True).start()
    port = trap.server_port
    hosts = ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0.0.0.0", "127.1")
    urls = [f"http://{host}:{port}/a" for host in hosts]
    urls += ["http://169.254.169.254/latest/", "file:///etc/hostname", f"gopher://127.0.0.1:{port}/", f"//127.0.0.1:{port}/a"]
    for url in urls:
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "file", "file": {"file_data": url}},
        ):
            messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
            error = server.refused(CHAT, {"model": "m", "messages": messages})
            assert "root:" not in error["message"]
    assert not hits
    trap.shutdown()
    trap.server_close()


class _Marker:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self._path), "w")


def test_no_socket_takes_pickles(server: RunningServer, tmp_path: Path) -> None:
    """Red if an internal channel listens on a network, is open to other users, or unpickles what comes."""
    marker = tmp_path / "unpickled"
    blob = pickle.dumps(_Marker(marker))
    pids = (server.process.pid, server.engine_pid())
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=False).stdout.splitlines()
    ports = {int(line.split()[3].rsplit(":", 1)[1]) for line in listening if any(f"pid={pid}," in line for pid in pids)} or {
        server.port
    }
    assert ports == {server.port}, "only the HTTP port listens on a network"
    with socket.create_connection((server.host, server.port), 5) as connection:
        connection.sendall(blob)
        connection.recv(1000)
    with socket.socket(socket.AF_UNIX) as channel:
        for path in _unix_sockets(pids):
            if os.path.exists(path):
                assert os.stat(os.path.dirname(path)).st_mode & 0o077 == 0
                channel.connect(path)
                channel.sendall(blob)
    time.sleep(0.5)
    assert not marker.exists()
    server.complete("alive", max_tokens=1)


def _unix_sockets(pids: tuple[int, ...]) -> list[str]:
    """Paths of the Unix sockets that these processes have open."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if len(row) > 7 and row[6] in inodes and row[7].startswith("/")]
