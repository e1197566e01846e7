"""A response's output items as its events come, and what a stream is told of them.

    reasoning      output_item.added, content_part.added, reasoning_text.delta ... done, content_part.done, output_item.done
    message        output_item.added, content_part.added, output_text.delta ... done, content_part.done, output_item.done
    function_call  output_item.added, function_call_arguments.delta ... done, output_item.done

One item is open at a time; each ends before the next begins.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from noria.server.shapes import new_call_id
from noria.text.events import CallArguments, CallStart, Content, Event, Reasoning

Told = dict[str, Any]
TEXT_OF = {"message": "output_text", "reasoning": "reasoning_text"}  # the part's type, and the name of its events


def retold(index: int, item: dict[str, Any]) -> Iterator[Told]:
    """What a stream is told of an item that is whole, in one piece."""

    def told(kind: str, /, **fields: Any) -> Told:
        return {"type": f"response.{kind}", "item_id": item["id"], "output_index": index, **fields}

    call = item["type"] == "function_call"
    blank: dict[str, Any] = {"arguments": ""} if call else {"content": []}
    added = {**item, "status": "in_progress", **blank}
    yield {"type": "response.output_item.added", "output_index": index, "item": added}
    if call:
        yield told("function_call_arguments.delta", delta=item["arguments"])
        yield told("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
    else:
        part, name = item["content"][0], TEXT_OF[item["type"]]
        extra = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        yield told("content_part.added", content_index=0, part=part | {"text": ""} | {key: [] for key in extra})
        yield told(f"{name}.delta", content_index=0, delta=part["text"], **extra)
        yield told(f"{name}.done", content_index=0, text=part["text"], **extra)
        yield told("content_part.done", content_index=0, part=part)
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


class Items:
    """Output items. `logprobs` of a message's tokens are added as they come, in the Responses API's shape."""

    def __init__(self) -> None:
        self.whole: list[dict[str, Any]] = []
        self._open = False

    def push(self, events: Sequence[Event], logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Told]:
        """What a stream is told of more events."""
        rest = list(logprobs)
        for event in events:
            match event:
                case Content(text=text) if text:
                    yield from self._text("message", text, rest)
                    rest = []
                case Reasoning(text=text) if text:
                    yield from self._text("reasoning", text, [])
                case CallStart(name=name):
                    call = {"type": "function_call", "call_id": new_call_id(), "name": name, "arguments": ""}
                    yield from self._begin("fc_", call)
                case CallArguments(text=text) if text:
                    self.whole[-1]["arguments"] += text
                    yield self._told("function_call_arguments.delta", delta=text)

    def close(self, *, complete: bool = True) -> Iterator[Told]:
        """End the open item, if there is one."""
        if not self._open:
            return
        self._open = False
        item = self.whole[-1]
        item["status"] = "completed" if complete else "incomplete"
        if item["type"] == "function_call":
            yield self._told("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part, name = item["content"][0], TEXT_OF[item["type"]]
            extra = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._told(f"{name}.done", content_index=0, text=part["text"], **extra)
            yield self._told("content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.whole) - 1, "item": item}

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Told]:
        name = TEXT_OF[kind]
        if not self._open or self.whole[-1]["type"] != kind:
            item: dict[str, Any] = {"type": kind, "content": []}
            if kind == "message":
                item["role"] = "assistant"
            else:
                item["summary"] = []
            yield from self._begin("msg_" if kind == "message" else "rs_", item)
            part: dict[str, Any] = {"type": name, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            yield self._told("content_part.added", content_index=0, part=dict(part))
            self.whole[-1]["content"].append(part)
        part = self.whole[-1]["content"][0]
        part["text"] += text
        extra = {}
        if kind == "message":
            part["logprobs"] = part["logprobs"] + logprobs
            extra = {"logprobs": logprobs}
        yield self._told(f"{name}.delta", content_index=0, delta=text, **extra)

    def _begin(self, prefix: str, item: dict[str, Any]) -> Iterator[Told]:
        yield from self.close()
        self._open = True
        self.whole.append({"id": prefix + secrets.token_hex(16), "status": "in_progress", **item})
        shown = {key: list(value) if isinstance(value, list) else value for key, value in self.whole[-1].items()}
        yield {"type": "response.output_item.added", "output_index": len(self.whole) - 1, "item": shown}

    def _told(self, kind: str, /, **fields: Any) -> Told:
        place = {"item_id": self.whole[-1]["id"], "output_index": len(self.whole) - 1}
        return {"type": f"response.{kind}", **place, **fields}
