"""Anthropic's request bodies: checked, and translated into the chat body that everything behind understands.

Anthropic                              chat
system                                 a system message
user: text blocks                      a user message
user: tool_result blocks               tool messages, before the user's text
assistant: text, thinking, tool_use    an assistant message with content, reasoning_content and tool_calls
tools, tool_choice                     tools, tool_choice, parallel_tool_calls
thinking                               reasoning_effort
output_config.format, output_format    response_format
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from noria.server.requests import MAX_SALT_CHARACTERS, ChatBody
from noria.types import RequestError

CUSTOM_TOOL = (None, "custom")  # the others run on Anthropic's servers


class CountBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesBody(CountBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool = False
    stop_sequences: list[Annotated[str, Meta(min_length=1)]] = []
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)] = ""


def chat_body(body: CountBody) -> ChatBody:
    """The chat body that asks for the same. Raises RequestError that names the field."""
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text_of(body.system, "system")})
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    choice, parallel = _tool_choice(body.tool_choice)
    chat = ChatBody(
        model=body.model,
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        reasoning_effort=_effort(body.thinking),
    )
    if isinstance(body, MessagesBody):
        chat.max_tokens, chat.stop, chat.cache_salt = body.max_tokens, body.stop_sequences, body.cache_salt
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.response_format = _format(body)
    return chat


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"{where}.role must be user or assistant; instructions go to the field system", param="messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{where}.content must be a string or a list of blocks", param="messages")
    blocks = [(block, f"{where}.content[{i}]") for i, block in enumerate(content)]
    return _user(blocks) if role == "user" else [_assistant(blocks)]


Blocks = Sequence[tuple[Mapping[str, Any], str]]


def _user(blocks: Blocks) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    texts = []
    for block, where in blocks:
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", where))
            case "tool_result":
                text = _text_of(block.get("content") or "", f"{where}.content")
                if block.get("is_error") is True:
                    text = f"Error: {text}"
                results.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text})
            case kind:
                raise _unread(kind, where)
    if texts:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _assistant(blocks: Blocks) -> dict[str, Any]:
    texts, thoughts = [], []
    calls: list[dict[str, Any]] = []
    for block, where in blocks:
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", where))
            case "thinking":
                thoughts.append(_string(block, "thinking", where))
            case "tool_use":
                arguments = block.get("input", {})
                if not isinstance(arguments, dict):
                    raise RequestError(f"{where}.input must be an object", param="messages")
                function = {"name": _string(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": _string(block, "id", where), "type": "function", "function": function})
            case kind:
                raise _unread(kind, where)
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _unread(kind: object, where: str) -> RequestError:
    return RequestError(f"{where} has the type {str(kind)[:40]!r}, which this server does not read", param=_field(where))


def _field(where: str) -> str:
    """The body's field that a place is in."""
    return where.split("[")[0].split(".")[0]


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string", param=_field(where))
    return value


def _text_of(value: Any, where: str) -> str:
    """A string, or the texts of a list of text blocks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a string or a list of text blocks", param=_field(where))
    texts = []
    for i, block in enumerate(value):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise _unread(block.get("type") if isinstance(block, dict) else block, f"{where}[{i}]")
        texts.append(_string(block, "text", f"{where}[{i}]"))
    return "\n".join(texts)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in CUSTOM_TOOL:
        raise RequestError(f"{where}: tools of the type {str(tool['type'])[:40]!r} are not run by this server", param="tools")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """(tool_choice, parallel_tool_calls)"""
    if choice is None:
        return None, True
    parallel = choice.get("disable_parallel_tool_use") is not True
    match choice.get("type"):
        case "auto":
            return "auto", parallel
        case "any":
            return "required", parallel
        case "none":
            return "none", parallel
        case "tool" if isinstance(choice.get("name"), str):
            return {"type": "function", "function": {"name": choice["name"]}}, parallel
    raise RequestError("tool_choice.type must be auto, any, none, or tool with a name", param="tool_choice")


def _effort(thinking: Mapping[str, Any] | None) -> Any:
    """How much the model is told to think. A budget in tokens is no control that open models have; it is part of max_tokens."""
    match None if thinking is None else thinking.get("type"):
        case None if thinking is None:
            return None
        case "disabled":
            return "none"
        case "adaptive":
            return None
        case "enabled":
            budget = thinking.get("budget_tokens") if thinking else None
            if budget is not None and (type(budget) is not int or budget < 1):
                raise RequestError("thinking.budget_tokens must be a positive number", param="thinking")
            return "high"
    raise RequestError("thinking.type must be enabled, disabled or adaptive", param="thinking")


def _format(body: MessagesBody) -> Any:
    wanted = body.output_format
    if body.output_config is not None:
        if unknown := body.output_config.keys() - {"format", "effort"}:
            raise RequestError(f"output_config.{min(unknown)[:40]} is not supported; leave it out", param="output_config")
        wanted = body.output_config.get("format", wanted)
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema" or "schema" not in wanted:
        raise RequestError("the output format must be a json_schema with a schema", param="output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted["schema"]}}
