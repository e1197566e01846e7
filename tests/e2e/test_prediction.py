"""`prediction` over HTTP, before a real model: it changes how fast tokens come and what usage counts, and no token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness import CONTEXT, RunningServer, joined, text_of

pytestmark = pytest.mark.slow

ASK = "Write a short list of fruits."
TOKENS = 48
NOT_SAID = "\nNobody would ever write these words in such an answer: zyzzyva, qoph, syzygy."


@pytest.fixture(scope="module")
def quiet_server(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose counts of drafts nobody else moves."""
    log = tmp_path_factory.mktemp("log") / "prediction.log"
    with RunningServer.real(model_path, "--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", "128M", log=log) as running:
        yield running


def predicted(text: str) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


def counts(usage: Any) -> tuple[int, int]:
    """(accepted, rejected)"""
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def whole(server: RunningServer, **fields: Any) -> tuple[str, Any, Any]:
    """(text, logprobs, usage)"""
    out = server.ok("/v1/chat/completions", server.chat(ASK, max_tokens=TOKENS, logprobs=True, seed=3, **fields))
    return text_of(out), out["choices"][0]["logprobs"]["content"], out["usage"]


def streamed(server: RunningServer, **fields: Any) -> tuple[str, Any, Any]:
    """The same of a stream."""
    asked = server.chat(ASK, max_tokens=TOKENS, logprobs=True, seed=3, stream_options={"include_usage": True}, **fields)
    status, events, done = server.stream("/v1/chat/completions", asked)
    assert (status, done) == (200, True)
    logprobs = [entry for event in events for choice in event["choices"] for entry in (choice["logprobs"] or {})["content"]]
    return joined(events), logprobs, events[-1]["usage"]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_prediction_changes_no_bit(quiet_server: RunningServer, ask: Any, temperature: int) -> None:
    """Red when a draft that was taken is another token than the model's own, or the counts do not say what was foreseen."""
    server = quiet_server
    text, logprobs, usage = ask(server, temperature=temperature)
    assert counts(usage) == (0, 0)
    length = len(server.ok("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"])

    drafts = server.metric("noria_spec_decode_num_accepted_tokens_total")
    same_text, same_logprobs, right = ask(server, temperature=temperature, **predicted(text))
    assert (same_text, same_logprobs) == (text, logprobs)
    accepted, rejected = counts(right)
    assert accepted + rejected == length
    if "\ufffd" not in text:  # else the random model's bytes are no text, and the prediction has other tokens
        assert accepted >= length - 1
    assert accepted > 8
    assert right["completion_tokens"] == usage["completion_tokens"]
    assert server.metric("noria_spec_decode_num_accepted_tokens_total") > drafts

    same_text, same_logprobs, wrong = ask(server, temperature=temperature, **predicted(NOT_SAID))
    assert (same_text, same_logprobs) == (text, logprobs)
    accepted, rejected = counts(wrong)
    assert rejected > accepted


def test_parts_of_a_prediction_are_one_text(quiet_server: RunningServer) -> None:
    """Red when only the first part is read."""
    text, _, _ = whole(quiet_server)
    _, _, at_once = whole(quiet_server, **predicted(text))
    half = len(text) // 2
    parts = [{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:]}]
    _, _, in_parts = whole(quiet_server, prediction={"type": "content", "content": parts})
    assert counts(in_parts) == counts(at_once)


@pytest.mark.parametrize(
    "wrong", [{"type": "content"}, {"type": "text", "content": "x"}, "x", {"type": "content", "content": 5}]
)
def test_a_malformed_prediction_is_refused(quiet_server: RunningServer, wrong: Any) -> None:
    """Red when one is ignored."""
    quiet_server.refused("/v1/chat/completions", quiet_server.chat(ASK, prediction=wrong), param="prediction")
