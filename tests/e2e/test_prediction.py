"""`prediction` over HTTP: no token changes, and usage says what of it came true, streamed and not."""

from __future__ import annotations

from typing import Any

import pytest
from harness import RunningServer

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"


def whole(server: RunningServer, body: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """(content, the usage's completion details with all completion tokens) of an answer in one piece."""
    out = server.ok(CHAT, body)
    return out["choices"][0]["message"]["content"], details(out["usage"])


def streamed(server: RunningServer, body: dict[str, Any]) -> tuple[str, dict[str, int]]:
    status, events, done = server.stream(CHAT, {**body, "stream_options": {"include_usage": True}})
    assert status == 200
    assert done
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return text, details(events[-1]["usage"])


def details(usage: dict[str, Any]) -> dict[str, int]:
    return {**usage["completion_tokens_details"], "completion_tokens": usage["completion_tokens"]}


@pytest.mark.parametrize("answer", [whole, streamed])
def test_usage_tells_what_a_prediction_foresaw(server: RunningServer, answer: Any) -> None:
    """Red when a prediction changes the text, is not used, or its counts are lost in one of the two forms."""
    body = server.chat("Tell me about the sea.", max_tokens=40)
    text, plain = answer(server, body)
    assert (plain["accepted_prediction_tokens"], plain["rejected_prediction_tokens"]) == (0, 0)

    def predicted(content: Any) -> tuple[str, dict[str, int]]:
        made: tuple[str, dict[str, int]] = answer(server, {**body, "prediction": {"type": "content", "content": content}})
        return made

    for content in (text, [{"type": "text", "text": text}]):
        same, right = predicted(content)
        assert same == text
        assert right["completion_tokens"] == plain["completion_tokens"]
        assert 0 < right["accepted_prediction_tokens"] <= right["completion_tokens"]
    nonsense = "§§ 0123456789 §§ " * 4
    same, wrong = predicted(nonsense)
    assert same == text
    assert wrong["rejected_prediction_tokens"] > 0
    assert wrong["accepted_prediction_tokens"] < right["accepted_prediction_tokens"]


def test_a_prediction_is_a_chats_and_has_its_form(server: RunningServer) -> None:
    """Red when a prediction that cannot be used is passed over."""
    server.refused(CHAT, server.chat("x", prediction={"type": "content"}), param="prediction")
    server.refused(CHAT, server.chat("x", prediction={"type": "image", "content": "x"}), param="prediction")
    server.refused(
        "/v1/completions", server.completion("x", prediction={"type": "content", "content": "x"}), param="prediction"
    )


def test_a_prediction_changes_no_bit_of_what_is_sampled(server: RunningServer) -> None:
    """Red when a draft that was taken is not the token that is drawn without it, or none is ever taken."""
    body = server.chat("Tell me about the sea.", max_tokens=40, temperature=1, seed=3, logprobs=True)
    plain = server.ok(CHAT, body)["choices"][0]
    taken = server.metric("noria_spec_decode_num_accepted_tokens_total")
    prediction = {"type": "content", "content": plain["message"]["content"]}
    predicted = server.ok(CHAT, {**body, "prediction": prediction})["choices"][0]
    assert predicted == plain
    assert server.metric("noria_spec_decode_num_accepted_tokens_total") > taken
