"""The HTTP interface before a fake engine. Red if an answer's form, text, counts or errors leave the contract."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from fake_engine import token_at
from harness import RunningServer, check_error, joined, strict_json, text_of, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def expected(prompt: str, count: int) -> str:
    """The fake engine's greedy text."""
    ids = tuple(prompt.encode())
    return bytes(token_at(ids, 0, 0, i) for i in range(count)).decode("utf-8", "replace")


# Streams


@pytest.mark.parametrize("count", range(1, 40, 3))
def test_stream_joins_to_the_whole_text(server: RunningServer, count: int) -> None:
    """Red if a delta splits a character, repeats text, or the end is not flushed."""
    whole = server.complete("a prompt", max_tokens=count)
    status, events, done = server.stream(COMPLETIONS, server.completion("a prompt", max_tokens=count))
    assert status == 200
    assert done
    assert joined(events) == text_of(whole) == expected("a prompt", count)
    deltas = [choice["text"] for event in events[:-1] for choice in event["choices"]]
    assert not any("�" in delta for delta in deltas)


def test_each_choice_of_a_stream_has_one_role_and_one_end(server: RunningServer) -> None:
    """Red if indices mix, a role or a finish reason is missing, doubled or early, or choices are equal."""
    body = server.chat("Hello", n=3, temperature=1, seed=5, max_tokens=9)
    _, events, _ = server.stream(CHAT, body)
    choices: dict[int, list[Any]] = {}
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    assert sorted(choices) == [0, 1, 2]
    for made in choices.values():
        assert made[0]["delta"]["role"] == "assistant"
        assert sum("role" in choice["delta"] for choice in made) == 1
        assert [c["finish_reason"] for c in made] == [None] * (len(made) - 1) + ["length"]
    whole = server.ok(CHAT, body)
    assert [text_of(whole, i) for i in range(3)] == [joined(events, i) for i in range(3)]
    assert len({text_of(whole, i) for i in range(3)}) == 3


def test_several_prompts_are_numbered_after_one_another(server: RunningServer) -> None:
    """Red if choice indices of a batch of prompts are not prompt * n + choice."""
    body = server.completion(["one", "two", "three"], n=2, max_tokens=5)
    out = server.ok(COMPLETIONS, body)
    assert [c["index"] for c in out["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [text_of(out, i) for i in (0, 2, 4)] == [expected(p, 5) for p in ("one", "two", "three")]
    assert out["usage"]["prompt_tokens"] == len("onetwothree")
    assert out["usage"]["completion_tokens"] == 30
    _, events, _ = server.stream(COMPLETIONS, body)
    assert [joined(events, i) for i in range(6)] == [text_of(out, i) for i in range(6)]


@pytest.mark.parametrize(("prompt", "ids"), [("abc", [97, 98, 99]), ("é", [0xC3, 0xA9])])
def test_token_ids_are_the_same_prompt_as_their_text(server: RunningServer, prompt: str, ids: list[int]) -> None:
    """Red if ids are read as texts, or a list of lists as one prompt."""
    text = text_of(server.complete(prompt))
    assert text == text_of(server.complete(ids)) == text_of(server.complete([ids])) == text_of(server.complete([prompt]))


def test_usage_comes_once_and_equals_the_whole_answer(server: RunningServer) -> None:
    """Red if usage appears on other chunks, counts one choice only, or stands before the last delta."""
    body = server.completion("count", n=2, max_tokens=7)
    _, events, done = server.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    assert done
    assert events[-1]["choices"] == []
    assert all(event["usage"] is None and event["choices"] for event in events[:-1])
    assert events[-1]["usage"] == server.ok(COMPLETIONS, body)["usage"]
    assert events[-1]["usage"]["completion_tokens"] == 14
    _, plain, _ = server.stream(COMPLETIONS, body)
    assert all("usage" not in event and event["choices"] for event in plain)


def test_continuous_usage_grows_with_the_deltas(server: RunningServer) -> None:
    """Red if running counts are missing, or do not end at the total."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, events, _ = server.stream(COMPLETIONS, server.completion("count", max_tokens=6, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_stream_options_without_a_stream_are_refused(server: RunningServer) -> None:
    """Red if they are dropped in silence."""
    server.refused(COMPLETIONS, server.completion("x", stream_options={"include_usage": True}), param="stream_options")


# Stop strings


def test_stop_string_ends_the_text_before_it_wherever_it_lies(server: RunningServer) -> None:
    """Red if a stop is matched on tokens, kept, leaked into a stream, or its choice is not counted as stopped."""
    text = expected("weekdays", 40)
    for start in range(2, 30, 5):
        stop = text[start : start + 3]
        if "�" in stop or not stop.strip():
            continue
        want = text[: text.index(stop)]
        body = server.completion("weekdays", max_tokens=40, stop=[stop])
        out = server.ok(COMPLETIONS, body)
        assert text_of(out) == want
        assert out["choices"][0]["finish_reason"] == "stop"
        assert out["choices"][0]["stop_reason"] == stop
        _, events, _ = server.stream(COMPLETIONS, body)
        sent = ""
        for event in events:
            sent += joined([event])
            assert want.startswith(sent)
        assert sent == want


def test_stop_is_told_to_the_engine_and_counted_once(server: RunningServer) -> None:
    """Red if a stopped request runs on in the engine, or is counted as aborted, or its tokens after the stop are counted."""
    names = ("noria_request_success_total", "noria_generation_tokens_total", "noria_engine_steps_total")
    before = [server.metric(name) for name in names]
    out = server.complete("weekdays", max_tokens=400, stop=expected("weekdays", 20)[10:13])
    assert server.metric(names[2]) < before[2] + 200
    assert server.metric(names[0]) == before[0] + 1
    assert server.metric(names[1]) == before[1] + out["usage"]["completion_tokens"]
    assert out["usage"]["completion_tokens"] < 24
    assert server.idle()


def test_include_stop_str_in_output_keeps_it(server: RunningServer) -> None:
    """Red if the extension is ignored."""
    stop = expected("weekdays", 20)[8:11]
    assert text_of(server.complete("weekdays", stop=stop, include_stop_str_in_output=True)).endswith(stop)


def test_stop_token_ids_end_a_choice_and_are_counted(server: RunningServer) -> None:
    """Red if the id is shown as text, not counted, or not reported."""
    text = expected("ids", 30)
    first = text.index(" ")
    out = server.complete("ids", stop_token_ids=[ord(" ")], return_token_ids=True)
    choice = out["choices"][0]
    assert choice["text"] == text[:first]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ord(" ")
    assert choice["token_ids"][-1] == ord(" ")
    assert choice["prompt_token_ids"] == [*b"ids"]
    assert out["usage"]["completion_tokens"] == len(choice["token_ids"])


# Logprobs and echo


def test_legacy_logprobs_with_echo_cover_prompt_and_text(server: RunningServer) -> None:
    """Red if prompt entries are missing, the first is not null, or offsets are not places in the returned text."""
    prompt = "Alpha é beta"
    body = server.completion(prompt, max_tokens=20, echo=True, logprobs=2)
    out = server.ok(COMPLETIONS, body)
    logprobs, text = out["choices"][0]["logprobs"], text_of(out)
    assert text == prompt + expected(prompt, 20)
    total = out["usage"]["total_tokens"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [total] * 4
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert all(len(top) <= 3 for top in logprobs["top_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
    _, events, _ = server.stream(COMPLETIONS, body)
    streamed: dict[str, list[Any]] = {name: [] for name in logprobs}
    for event in events:
        for choice in event["choices"]:
            for name, values in choice["logprobs"].items():
                streamed[name] += values
    assert streamed == logprobs
    assert joined(events) == text


def test_scoring_a_prompt_makes_no_token(server: RunningServer) -> None:
    """Red if max_tokens 0 with echo runs as 1, or returns more than the prompt."""
    out = server.complete("Score this", max_tokens=0, echo=True, logprobs=1)
    assert text_of(out) == "Score this"
    assert out["usage"]["completion_tokens"] == 0
    assert len(out["choices"][0]["logprobs"]["tokens"]) == out["usage"]["prompt_tokens"]
    server.refused(COMPLETIONS, server.completion("x", max_tokens=0), param="max_tokens")
    server.refused(CHAT, server.chat("x", max_tokens=0), param="max_tokens")


def test_chat_logprobs_have_exact_bytes(server: RunningServer) -> None:
    """Red if tokens that are parts of a character lose their bytes, or more alternatives come than were asked for."""
    out = server.ok(CHAT, server.chat("Hi", max_tokens=30, logprobs=True, top_logprobs=2))
    content = out["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode("utf-8", "ignore") == text_of(out).strip("�")
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert server.ok(CHAT, server.chat("Hi", logprobs=True))["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    server.refused(CHAT, server.chat("Hi", top_logprobs=2), param="top_logprobs")


def test_prompt_logprobs_are_vllms(server: RunningServer) -> None:
    """Red if the extension is dropped, or its first entry is not null."""
    out = server.ok(CHAT, server.chat("Hi", prompt_logprobs=1))
    entries = out["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == out["usage"]["prompt_tokens"]
    assert all(set(v) == {"logprob", "rank", "decoded_token"} for v in entries[1].values())


# What is returned besides


def test_seed_is_returned_and_repeats_an_answer(server: RunningServer) -> None:
    """Red if the drawn seed is not told, or telling it back does not repeat the answer."""
    body = server.completion("sample", temperature=1, max_tokens=20)
    first = server.ok(COMPLETIONS, body)
    again = server.ok(COMPLETIONS, {**body, "seed": first["seed"]})
    assert text_of(first) == text_of(again)
    assert text_of(server.ok(COMPLETIONS, body)) != text_of(first)
    assert first["system_fingerprint"] == "fp_fake"
    assert server.ok(COMPLETIONS, {**body, "seed": -1})["seed"] == -1


def test_timing_parts_sum_to_the_whole(server: RunningServer) -> None:
    """Red if a phase is lost: delivery is what the engine did not account for."""
    out = server.ok(COMPLETIONS, server.completion("x", max_tokens=30), headers={"X-Noria-Timing": "1"})
    timing = out["timing"]
    assert timing.pop("cache") == {"cached_tokens": 0, "miss": "never seen"}
    assert set(timing) == {"queue", "grammar", "kv", "prefill", "decode", "preempted", "delivery"}
    assert all(value >= 0 for value in timing.values())
    assert 0 < sum(timing.values()) < 5
    _, events, _ = server.stream(COMPLETIONS, server.completion("x", timing=True))
    assert set(events[-1]["timing"]) == {*timing, "cache"}
    assert "timing" not in server.complete("x")


def test_request_id_is_echoed_and_bounded(server: RunningServer) -> None:
    """Red if a client's id is not echoed, one of 60 kB is repeated, or none is made where none came."""
    with server.open("/version", headers={"X-Request-Id": "mine-1"}) as response:
        assert response.headers["X-Request-Id"] == "mine-1"
    with server.open(COMPLETIONS, server.completion("x", request_id="body-1")) as response:
        assert response.headers["X-Request-Id"] == "body-1"
    with server.open("/version") as response:
        assert response.headers["X-Request-Id"].startswith("req-")
    server.refused("/version", headers={"X-Request-Id": "r" * 60000}, param="request_id")
    server.refused(COMPLETIONS, server.completion("x", request_id="é"), param="request_id")
    server.refused(COMPLETIONS, server.completion("x", request_id="r" * 300), param="request_id")


# Errors


def test_context_length_is_checked_before_a_stream_begins(server: RunningServer) -> None:
    """Red if an overlong request gets a stream's header, another code, or a message without both numbers."""
    for path, body in (
        (COMPLETIONS, server.completion("tree " * 400)),
        (CHAT, server.chat("tree " * 400)),
        (COMPLETIONS, server.completion("tree", max_tokens=600)),
        (COMPLETIONS, server.completion([65] * 5000)),
        (CHAT, server.chat("tree " * 100_000)),
    ):
        for stream in (False, True):
            error = server.refused(path, {**body, "stream": stream})
            assert error["code"] == "context_length_exceeded"
            assert "512" in error["message"]


def test_chat_fills_the_context_and_completions_use_16(server: RunningServer) -> None:
    """Red if a missing or null max_tokens means something else than at OpenAI."""
    chat = server.chat("Hi")
    del chat["max_tokens"]
    assert server.ok(CHAT, chat)["usage"]["total_tokens"] == 512
    for fields in ({"max_tokens": None}, {}):
        body = {"model": "fake", "prompt": "x", **fields}
        assert server.ok(COMPLETIONS, body)["usage"]["completion_tokens"] == 16
    assert server.complete("x", max_tokens=9, max_completion_tokens=5)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[1]", b'"x"', b'{"model":"fake","prompt":"x","temperature":NaN}', b"\xff\xfe", b"[" * 5000, b'{"a":1e999}'],
)
def test_bodies_that_are_not_json_objects_are_400(server: RunningServer, raw: bytes) -> None:
    """Red if broken JSON ends in a 500 or another shape."""
    server.refused(COMPLETIONS, raw=raw)


def test_unknown_paths_models_and_methods(server: RunningServer) -> None:
    """Red if the error shape is the framework's own."""
    for path in ("/v1/nothing", "/v1/completions/", "//v1/completions", "/"):
        server.refused(path, {}, status=404)
    assert server.refused("/v1/models/nobody", status=404)["code"] == "model_not_found"
    server.refused(CHAT, {**server.chat("x"), "model": "nobody"}, status=404, param="model")
    for method in ("GET", "DELETE", "PUT", "PATCH", "TRACE", "OPTIONS"):
        server.refused(CHAT, status=405, method=method)
    no_model = server.chat("x")
    del no_model["model"]
    server.refused(CHAT, no_model, param="model")


def test_what_is_no_http_gets_a_json_error(server: RunningServer) -> None:
    """Red if the parser's own plain text is sent."""
    with socket.create_connection((server.host, server.port), 10) as connection:
        connection.sendall(b"NONSENSE\r\n\r\n")
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert b" 400 " in head
    check_error(strict_json(body))


def test_engine_refusals_come_back_as_they_are(server: RunningServer) -> None:
    """Red if an engine's RequestError becomes a 500, or a stream's header is sent before it."""
    for stream in (False, True):
        server.refused(COMPLETIONS, server.completion([1, 2, 3], stream=stream), param="prompt")
    assert server.idle()


def test_one_bad_prompt_of_a_batch_ends_the_others(server: RunningServer) -> None:
    """Red if the other prompts of the call go on without a reader."""
    server.refused(COMPLETIONS, server.completion([[9, 9], [1, 2, 3], [8, 8]], max_tokens=400), param="prompt")
    until(server.idle, 5)


def test_bodies_over_the_limit_are_413(chat_folder: Path, tmp_path: Path) -> None:
    """Red if a body is read to its end, or the limit is not that of --max-body-bytes."""
    with RunningServer.fake(chat_folder, log=tmp_path / "log", serve={"max_body_bytes": 4096}) as small:
        small.refused(COMPLETIONS, small.completion("x" * 5000), status=413)
        assert small.complete("x" * 100)["usage"]["prompt_tokens"] == 100


def test_api_keys_guard_everything_but_the_probes(chat_folder: Path, tmp_path: Path) -> None:
    """Red if a route is open, a wrong key passes, or probes need a key."""
    with RunningServer.fake(chat_folder, log=tmp_path / "log", serve={"api_key": ("k1", "k2")}) as guarded:
        for path in ("/v1/models", "/metrics", "/version", "/nowhere"):
            guarded.refused(path, status=401, headers={"Authorization": "Bearer wrong"})
            guarded.refused(path, status=401, headers={"Authorization": ""})
        for key in ("k1", "k2"):
            assert guarded.call("/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200
        for path in ("/health", "/ready"):
            assert guarded.call(path, headers={"Authorization": ""})[0] == 200


def test_base_model_has_no_chat(base_folder: Path, tmp_path: Path) -> None:
    """Red if a model without a template invents one, or its announcement shows a chat."""
    with RunningServer.fake(base_folder, log=tmp_path / "log") as base:
        assert "chat template" in base.refused(CHAT, base.chat("Hi"))["message"]
        assert "/v1/completions" in base.announcement
        assert base.complete("x")["usage"]["completion_tokens"] == 24


# Tokenizer endpoints, models, metrics


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    """Red if ids differ from what a request would use, or text is lost."""
    out = server.ok("/tokenize", {"model": "fake", "prompt": "é x", "return_token_strs": True})
    assert out["tokens"] == [*"é x".encode()]
    assert out["count"] == 4
    assert out["max_model_len"] == 512
    assert len(out["token_strs"]) == 4
    assert server.ok("/detokenize", {"tokens": out["tokens"]}) == {"prompt": "é x"}
    chat = server.ok("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
    assert chat["count"] == server.ok(CHAT, server.chat("Hi"))["usage"]["prompt_tokens"]
    assert chat["tokens"][0] == 256
    server.refused("/detokenize", {"tokens": [99999]}, param="tokens")
    server.refused("/tokenize", {"model": "fake"}, param="prompt")


def test_models_say_their_context(server: RunningServer) -> None:
    """Red if max_model_len is missing, which load tools read."""
    status, out = server.call("/v1/models")
    assert status == 200
    assert [(m["id"], m["max_model_len"], m["object"]) for m in out["data"]] == [("fake", 512, "model")]
    assert server.call("/v1/models/fake")[1]["id"] == "fake"


def test_metrics_count_what_usage_says(server: RunningServer) -> None:
    """Red if tokens or requests are counted twice, or not."""
    names = ["prompt_tokens_total", "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_count"]
    names += ["e2e_request_latency_seconds_count", "request_queue_time_seconds_count", "inter_token_latency_seconds_count"]
    before = [server.metric(f"noria_{name}") for name in names]
    usages = [server.complete(f"count {i}", max_tokens=7)["usage"] for i in range(3)]
    after = [server.metric(f"noria_{name}") for name in names]
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    assert [b - a for a, b in zip(before, after, strict=True)] == [prompt, 21, 3, 3, 3, 3, 18]


def test_unknown_fields_are_ignored_and_counted(server: RunningServer) -> None:
    """Red if a new field of a client breaks its requests, or is invisible."""
    before = server.metric("noria_unknown_fields_total")
    server.complete("x", brand_new_field=1, another={"a": 1}, metadata={"k": "v"}, user="u", store=False)
    assert server.metric("noria_unknown_fields_total") == before + 2


def test_echo_shows_what_is_left_of_a_truncated_prompt(server: RunningServer) -> None:
    """Red when the whole text is echoed beside the tokens and offsets of its end."""
    body = server.completion("abcdef", truncate_prompt_tokens=2, echo=True, logprobs=1, max_tokens=2)
    (choice,) = server.ok("/v1/completions", body)["choices"]
    assert choice["text"].startswith("ef")
    assert choice["logprobs"]["tokens"][:2] == ["e", "f"]
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]
