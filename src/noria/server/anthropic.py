"""Anthropic's request bodies: checked, and translated into the chat body that everything behind understands.

Anthropic                              chat
system                                 a system message
user: text blocks                      a user message
user: tool_result blocks               tool messages, before the user's text
assistant: text, thinking, tool_use    an assistant message with content, reasoning_content and tool_calls
the last message an assistant's        continue_final_message
tools, tool_choice                     tools, tool_choice, parallel_tool_calls
thinking, output_config.effort         reasoning_effort
output_config.format, output_format    response_format
stop_sequences                         stop
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from noria.server.requests import MAX_SALT_CHARACTERS, ChatBody
from noria.types import RequestError

CUSTOM_TOOL = (None, "custom")  # the others run on Anthropic's servers
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}


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
    service_tier: Literal["auto", "standard_only"] = "auto"  # there is one tier
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)] = ""


def chat_body(body: CountBody) -> ChatBody:
    """The chat body that asks for the same. Raises RequestError that names the field."""
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text_of(body.system, "system")})
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    choice, parallel = _tool_choice(body.tool_choice)
    continued = _is_continued(messages[-1], f"messages[{len(body.messages) - 1}]")
    chat = ChatBody(
        model=body.model,
        messages=messages,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        reasoning_effort=_thinking(body.thinking, _effort(body)),
    )
    if isinstance(body, MessagesBody):
        chat.max_tokens, chat.stop, chat.cache_salt = body.max_tokens, body.stop_sequences, body.cache_salt
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.response_format = _format(body)
    return chat


def as_sent(error: RequestError, body: CountBody) -> RequestError:
    """What is wrong with the chat body, told of the field of `body` that it came from."""
    text = str(error)
    if error.param == "tools":
        text = text.replace(".function.parameters", ".input_schema").replace(".function.", ".")
        return RequestError(text, param=error.param, code=error.code, status=error.status)
    names = {"stop": "stop_sequences", "response_format": _format_field(body)}
    if error.param not in names:
        return error
    name = names[error.param]
    if text.startswith(error.param):
        text = name + text.removeprefix(error.param)
    return RequestError(text, param=name, code=error.code, status=error.status)


def _is_continued(last: Mapping[str, Any], where: str) -> bool:
    """Whether the answer goes on from the last message: one of the assistant is its beginning."""
    if "tool_calls" in last:
        raise RequestError(f"{where}.content ends in a tool_use, whose tool_result must follow", param="messages")
    return bool(last["role"] == "assistant")


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"{where}.role must be user or assistant; instructions go to the field system", param="messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{where}.content must be a string or a list of blocks", param="messages")
    if role == "user" and not content:
        raise RequestError(f"{where}.content must not be empty", param="messages")
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
                content = block.get("content")
                text = "" if content is None else _text_of(content, f"{where}.content")
                if _flag(block, "is_error", where):
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
                    raise _wrong(f"{where}.input", "must be an object")
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


def _wrong(where: str, what: str) -> RequestError:
    """`where` is a path into the body, whose first step is the field."""
    return RequestError(f"{where} {what}", param=where.split("[")[0].split(".")[0])


def _unread(kind: object, where: str) -> RequestError:
    return _wrong(where, f"has the type {str(kind)[:40]!r}, which this server does not read")


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", "must be a string")
    return value


def _flag(block: Mapping[str, Any], name: str, where: str) -> bool:
    value = block.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(f"{where}.{name}", "must be true or false")
    return value is True


def _text_of(value: Any, where: str) -> str:
    """A string, or the texts of a list of text blocks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(where, "must be a string or a list of text blocks")
    texts = []
    for i, block in enumerate(value):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise _unread(block.get("type") if isinstance(block, dict) else block, f"{where}[{i}]")
        texts.append(_string(block, "text", f"{where}[{i}]"))
    return "\n".join(texts)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in CUSTOM_TOOL:
        raise RequestError(f"{where}: tools of the type {str(tool['type'])[:40]!r} are not run by this server", param="tools")
    if not isinstance(tool.get("input_schema"), dict):
        raise _wrong(f"{where}.input_schema", "must be the JSON schema of an object")
    function = {"name": _string(tool, "name", where), "parameters": tool["input_schema"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """(tool_choice, parallel_tool_calls)"""
    if choice is None:
        return None, True
    parallel = not _flag(choice, "disable_parallel_tool_use", "tool_choice")
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


def _thinking(thinking: Mapping[str, Any] | None, effort: Any) -> Any:
    """How much the model is told to think. A budget in tokens is no control that open models have; it is part of max_tokens."""
    if thinking is None:
        return effort
    if thinking.get("display") not in (None, "summarized"):
        raise RequestError("thinking.display must be summarized: this server shows what the model thinks", param="thinking")
    match thinking.get("type"):
        case "disabled":
            return "none"
        case "adaptive":
            return effort
        case "enabled":
            budget = thinking.get("budget_tokens")
            if budget is not None and (type(budget) is not int or budget < 1):
                raise RequestError("thinking.budget_tokens must be a positive number", param="thinking")
            return effort or "high"
    raise RequestError("thinking.type must be enabled, disabled or adaptive", param="thinking")


def _effort(body: CountBody) -> str | None:
    effort = body.output_config.get("effort") if isinstance(body, MessagesBody) and body.output_config else None
    if effort is None:
        return None
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise RequestError(f"output_config.effort must be one of {', '.join(EFFORTS)}", param="output_config")
    return EFFORTS[effort]


def _format(body: MessagesBody) -> Any:
    if body.output_config is not None and (unknown := body.output_config.keys() - {"format", "effort"}):
        raise RequestError(f"output_config.{min(unknown)[:40]} is not supported; leave it out", param="output_config")
    field = _format_field(body)
    wanted = body.output_format if field == "output_format" else (body.output_config or {}).get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema" or "schema" not in wanted:
        raise RequestError(f"{field} must have a format of the type json_schema with a schema", param=field)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted["schema"]}}


def _format_field(body: CountBody) -> str:
    """Where the format is: `output_config`, or its older name."""
    if not isinstance(body, MessagesBody) or body.output_format is None or (body.output_config or {}).get("format") is not None:
        return "output_config"
    return "output_format"
