"""A real model whose template opens reasoning: it thinks freely, and what a request binds begins behind the end mark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import CONTEXT, RunningServer

pytestmark = pytest.mark.slow

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
{% if thinking is defined and not thinking %}</think>

{% endif %}"""
QUESTIONS = ("Is snow white?", "Is grass blue?", "Is coal black?")
THOUGHT = "I know this.</think>\n\nyes"  # what the model copies, so that its reasoning has an end
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    from noria.types import LoadError
    from noria.weights.hub import cache_directory, resolve_model

    try:
        path = str(resolve_model("smollm2-135m", cache_directory()).path)
    except LoadError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("thinker")
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = ["--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", "256M", "--reasoning-parser", "qwen3"]
    flags += ["--chat-template", str(folder / "template.jinja")]
    with RunningServer.real(path, *flags, log=Path(folder / "log")) as running:
        yield running


def asked(**fields: Any) -> dict[str, Any]:
    shots = [{"role": r, "content": c} for q in QUESTIONS for r, c in (("user", q), ("assistant", THOUGHT))]
    messages = [*shots, {"role": "user", "content": "Is milk white?"}]
    return {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 200, **fields}


SCHEMA = {"type": "object", "properties": {"answer": {"enum": ["no"]}}, "required": ["answer"], "additionalProperties": False}
FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, '{"answer":"no"}'),
    ({"structured_outputs": {"regex": "n[o]{3}"}}, "nooo"),
    ({"structured_outputs": {"choice": ["nope"]}}, "nope"),
    ({"structured_outputs": {"grammar": 'start: "n" thought\nthought: "ay"'}}, "nay"),
]


@pytest.mark.parametrize(("fields", "content"), FORMATS, ids=["schema", "regex", "choice", "grammar"])
def test_formats_hold_behind_the_reasoning(thinker: RunningServer, fields: dict[str, Any], content: str) -> None:
    """Red when a format binds the reasoning, does not bind what follows, or waits for reasoning that is off."""
    free = thinker.ok(CHAT, asked())["choices"][0]["message"]
    made = thinker.ok(CHAT, asked(**fields))
    message = made["choices"][0]["message"]
    assert message["content"] == content
    assert message["reasoning"] == free["reasoning"] != ""
    assert made["choices"][0]["finish_reason"] == "stop"
    assert made["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    off = thinker.ok(CHAT, asked(**fields, reasoning_effort="none"))["choices"][0]["message"]
    assert off["content"] == content
    assert not off.get("reasoning")


def test_required_calls_come_behind_the_reasoning(thinker: RunningServer) -> None:
    """Red when a call that is asked for must come at once, where the template has opened reasoning."""
    tool = {"type": "function", "function": {"name": "answer", "parameters": SCHEMA}}
    message = thinker.ok(CHAT, asked(tools=[tool], tool_choice="required", parallel_tool_calls=False))["choices"][0]["message"]
    assert message["reasoning"]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"answer": "no"}]
