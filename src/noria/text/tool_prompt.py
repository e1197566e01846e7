"""Tools for models whose chat template knows none: told in plain words, so that every model can be asked to call functions.

The messages are rewritten into roles that every template knows: the tools become part of the system prompt, calls in the
history become text in the format that the prompt describes, results become the user's messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from noria.text.call_formats import PLAIN_JSON, CallFormat, JsonCalls
from noria.text.template import tojson

Messages = list[dict[str, Any]]

_INTRODUCTION = "You may call functions to answer. These are the functions, each with the JSON schema of its parameters:"
_RULES = (
    "To call a function, write nothing but\n{example}\n"
    "For several calls, write one after the other. You are given the results in the next message. "
    "If no function helps, answer in plain text."
)


def tool_instructions(tools: Sequence[Mapping[str, Any]], calls: CallFormat | None) -> str:
    """What the model is told about `tools`, as OpenAI's API describes them."""
    functions = "\n".join(tojson(tool.get("function", tool)) for tool in tools)
    return f"{_INTRODUCTION}\n{functions}\n\n{_RULES.format(example=_example(calls))}"


def with_tool_instructions(messages: Messages, text: str, *, system: bool) -> Messages:
    """The messages with `text` in the system prompt; `system`: the template has one, else it goes to the first message."""
    if messages[0]["role"] == "system":
        return [_with_text(messages[0], f"{messages[0]['content']}\n\n{text}".lstrip()), *messages[1:]]
    if system:
        return [{"role": "system", "content": text}, *messages]
    return [_with_text(messages[0], f"{text}\n\n{messages[0]['content']}"), *messages[1:]]


def plain_history(messages: Messages, calls: CallFormat | None) -> Messages:
    """The messages with calls and results as text. Results and the user's message that follows become one message."""
    plain: Messages = []
    joins = False  # whether the last message is one of results
    for message in messages:
        role, content = message["role"], message["content"]
        if message.get("tool_calls"):
            written = "\n".join(_written(call["function"], calls) for call in message["tool_calls"])
            message = {k: v for k, v in message.items() if k != "tool_calls"}
            message["content"] = f"{content}\n{written}" if content else written
        elif role in ("tool", "function"):
            name = message.get("name") or message.get("tool_call_id") or ""
            message = {"role": "user", "content": f"Result of the call {name}:\n{content}" if name else f"Result:\n{content}"}
        if joins and message["role"] == "user":
            plain[-1] = _with_text(plain[-1], f"{plain[-1]['content']}\n\n{message['content']}")
        else:
            plain.append(message)
        joins = role in ("tool", "function")
    return plain


def _with_text(message: dict[str, Any], content: str) -> dict[str, Any]:
    return {**message, "content": content}


def _example(calls: CallFormat | None) -> str:
    return _enclosed('{"name": NAME, "' + _key(calls) + '": {...}}', calls)


def _written(function: Mapping[str, Any], calls: CallFormat | None) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else tojson(arguments)
    return _enclosed(f'{{"name": {tojson(function["name"])}, "{_key(calls)}": {text}}}', calls)


def _enclosed(call: str, calls: CallFormat | None) -> str:
    """A call between the marks of a format of JSON objects; others are not worth teaching, and are read as plain JSON."""
    first = None if calls is None else calls.notations[0]
    if calls is None or not isinstance(first, JsonCalls):
        return call
    return calls.begin + (f"[{call}]" if first.listed else call) + calls.end


def _key(calls: CallFormat | None) -> str:
    first = (calls or PLAIN_JSON).notations[0]
    return first.arguments if isinstance(first, JsonCalls) else "arguments"
