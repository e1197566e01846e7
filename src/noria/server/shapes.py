"""How an answer's deltas become the choices of OpenAI's objects, for each of the two generation endpoints.

A whole response is the same as a stream of one chunk: `merge` joins a choice's deltas, then the same functions shape it.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from noria.server.answer import Answer, Delta
from noria.server.dialect import chat_logprobs, completion_logprobs, prompt_logprobs
from noria.text.events import CallArguments, CallStart, Content, Event, Reasoning
from noria.text.tokenizer import Tokenizer
from noria.types import FinishReason, TokenLogprobs


class Shape(ABC):
    """One endpoint's objects. `top` is the number of most likely tokens that were asked for, None without logprobs."""

    kind: str  # of a whole response
    chunk_kind: str
    id_prefix: str

    def __init__(self, tokenizer: Tokenizer, *, top: int | None, token_ids: bool, prompt_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._token_ids = token_ids
        self._prompt_logprobs = prompt_logprobs

    @abstractmethod
    def chunk(self, index: int, answer: Answer, delta: Delta, *, first: bool) -> dict[str, Any]:
        """A choice of a chunk; `first` is the choice's first one."""

    @abstractmethod
    def choice(self, index: int, answer: Answer, delta: Delta) -> dict[str, Any]:
        """A choice of a whole response."""

    def silent(self, delta: Delta) -> bool:
        """Whether a delta has nothing that a chunk would show."""
        return False

    def _ends(self, answer: Answer, delta: Delta, *, first: bool) -> dict[str, Any]:
        """What chunks and whole choices of both endpoints have: how it ended, and the extensions that were asked for."""
        ends: dict[str, Any] = {
            "finish_reason": None if delta.finish_reason is None else delta.finish_reason.value,
            "stop_reason": delta.stop_reason,
        }
        if self._token_ids:
            ends["token_ids"] = list(delta.tokens)
            if first:
                ends["prompt_token_ids"] = list(answer.request.prompt)
        if self._prompt_logprobs and first:
            ends["prompt_logprobs"] = prompt_logprobs(self._tokenizer, answer.prompt_logprobs or ())
        return ends


class CompletionShape(Shape):
    """/v1/completions. With `echo` a choice's first chunk begins with the prompt."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def chunk(self, index: int, answer: Answer, delta: Delta, *, first: bool) -> dict[str, Any]:
        text = delta.text
        if first and answer.echo is not None:
            text = answer.echo.text + text
        return {
            "index": index,
            "text": text,
            "logprobs": None if self._top is None else self._logprobs(answer, delta, self._top, first),
            **self._ends(answer, delta, first=first),
        }

    def choice(self, index: int, answer: Answer, delta: Delta) -> dict[str, Any]:
        return self.chunk(index, answer, delta, first=True)

    def _logprobs(self, answer: Answer, delta: Delta, top: int, first: bool) -> dict[str, Any]:
        entries: list[TokenLogprobs | None] = list(delta.logprobs)
        tokens, offsets = delta.tokens, delta.offsets
        if first and answer.echo is not None:
            entries = [None, *(answer.prompt_logprobs or ()), *entries]
            tokens, offsets = answer.request.prompt + tokens, answer.echo.offsets + offsets
        return completion_logprobs(self._tokenizer, entries, tokens, offsets, top)


class ChatShape(Shape):
    """/v1/chat/completions. A choice's first chunk carries the role.

    `named`: the request chose one function by name; its call then is what was asked for, and ends the choice with "stop".
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(
        self, tokenizer: Tokenizer, *, top: int | None, token_ids: bool, prompt_logprobs: bool, named: bool = False
    ) -> None:
        super().__init__(tokenizer, top=top, token_ids=token_ids, prompt_logprobs=prompt_logprobs)
        self._named = named

    def chunk(self, index: int, answer: Answer, delta: Delta, *, first: bool) -> dict[str, Any]:
        shown = message_delta(delta.events)
        if first:
            shown = {"role": "assistant", "content": "", **shown}
        return {"index": index, "delta": shown, "logprobs": self._logprobs(delta), **self._ends(answer, delta, first=first)}

    def silent(self, delta: Delta) -> bool:
        return not delta.events and delta.finish_reason is None and self._top is None and not self._token_ids

    def choice(self, index: int, answer: Answer, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "message": message_of(delta.events),
            "logprobs": self._logprobs(delta),
            **self._ends(answer, delta, first=True),
        }

    def _ends(self, answer: Answer, delta: Delta, *, first: bool) -> dict[str, Any]:
        ends = super()._ends(answer, delta, first=first)
        if delta.finish_reason is FinishReason.STOP and delta.calls and not self._named:
            ends["finish_reason"] = "tool_calls"
        return ends

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._top is None or not delta.tokens:
            return None
        return chat_logprobs(self._tokenizer, delta.logprobs, self._top)


def message_delta(events: Sequence[Event]) -> dict[str, Any]:
    """Events as the `delta` of a chunk: content, reasoning under both of its names, and pieces of tool calls."""
    delta: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for event in events:
        match event:
            case Content(text=text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text=text):
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + text
            case CallStart(index=index, name=name):
                function = {"name": name, "arguments": ""}
                calls.append({"index": index, "id": new_call_id(), "type": "function", "function": function})
            case CallArguments(index=index, text=text):
                if calls and calls[-1]["index"] == index:
                    calls[-1]["function"]["arguments"] += text
                else:
                    calls.append({"index": index, "function": {"arguments": text}})
    if calls:
        delta["tool_calls"] = calls
    return delta


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """All events of a choice as its message. Content is null only beside calls."""
    message = {"role": "assistant", "content": None, "refusal": None, **message_delta(events)}
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
    elif message["content"] is None:
        message["content"] = ""
    return message


def new_call_id() -> str:
    """An id by which a result names its call."""
    return f"call_{secrets.token_hex(12)}"
