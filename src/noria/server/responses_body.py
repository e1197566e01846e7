"""OpenAI's /v1/responses bodies: checked, and translated into the chat body that everything behind understands.

item                          chat
message (or role + content)   a message of that role; instructions come first, as a system message
function_call                 a tool call of an assistant message; neighbouring ones are one message
function_call_output          a tool message
reasoning                     reasoning_content of the assistant message that follows
item_reference                the item itself, from the stored responses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from noria.server.requests import MAX_SALT_CHARACTERS, ChatBody
from noria.server.validate import MAX_TOP_LOGPROBS
from noria.types import RequestError

Item = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
INCLUDES = frozenset({LOGPROBS, "reasoning.encrypted_content"})  # the second is for stateless use; our reasoning is in plain
TEXT_PARTS = ("input_text", "output_text", "text")
ROLES = ("user", "assistant", "system", "developer")


class ResponsesBody(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] = []
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: bool = True
    truncation: Literal["auto", "disabled"] = "disabled"
    previous_response_id: str | None = None
    background: bool = False
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)] = ""
    # Not done here, at any value but these.
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None


def chat_body(body: ResponsesBody, items: Sequence[Item]) -> ChatBody:
    """The chat body that asks for the same, of `items`: those of earlier responses and the body's. Raises RequestError."""
    for name in body.include:
        if name not in INCLUDES:
            raise RequestError(f"include has {name[:60]!r}, which this server does not have", param="include")
    if body.truncation == "auto":
        raise RequestError("truncation auto is not supported: shorten the input yourself", param="truncation")
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    wants_logprobs = LOGPROBS in body.include or bool(body.top_logprobs)
    return ChatBody(
        model=body.model,
        messages=messages + _messages(items),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=wants_logprobs,
        top_logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=_effort(body.reasoning),
        response_format=_format(body.text),
        cache_salt=body.cache_salt,
    )


def input_items(body: ResponsesBody, stored: Callable[[str], Item]) -> list[Item]:
    """The body's input as items; `stored` finds a referenced one. Raises RequestError."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    if not body.input:
        raise RequestError("input must not be an empty list", param="input")
    items = []
    for i, item in enumerate(body.input):
        if item.get("type") == "item_reference":
            ident = item.get("id")
            if not isinstance(ident, str):
                raise RequestError(f"input[{i}].id must be a string", param="input")
            items.append(stored(ident))
        else:
            items.append(item)
    return items


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        match item.get("type", "message"):
            case "message":
                message = _message(item, where)
                if message["role"] == "assistant" and thoughts:
                    message["reasoning_content"], thoughts = "\n".join(thoughts), []
                messages.append(message)
            case "reasoning":
                thoughts += [str(part.get("text", "")) for part in item.get("content") or [] if isinstance(part, dict)]
            case "function_call":
                call = {
                    "id": _string(item, "call_id", where),
                    "type": "function",
                    "function": {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)},
                }
                if messages and messages[-1].get("role") == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
                if thoughts:
                    messages[-1]["reasoning_content"], thoughts = "\n".join(thoughts), []
            case "function_call_output":
                text = _text_of(item.get("output"), f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": text})
            case kind:
                raise RequestError(f"{where} has the type {str(kind)[:40]!r}, which this server does not read", param="input")
    return messages


def _message(item: Item, where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", param="input")
    return {"role": role, "content": _text_of(item.get("content"), f"{where}.content")}


def _text_of(value: Any, where: str) -> str:
    """A string, or the texts of a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a string or a list of parts", param="input")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise RequestError(f"{where}[{i}] has the type {str(kind)[:40]!r}; this model reads text only", param="input")
        texts.append(text)
    return "\n".join(texts)


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string", param="input")
    return value


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"{where}: tools of the type {str(tool.get('type'))[:40]!r} are not run by this server", param="tools"
        )
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Here a function is named beside the type; in a chat body inside an object."""
    if choice is None or isinstance(choice, str):
        return choice
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            listed = choice.get("tools")
            tools = [
                {"type": "function", "function": {"name": tool.get("name") if isinstance(tool, dict) else None}}
                for tool in (listed if isinstance(listed, list) else [])
            ]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    raise RequestError("tool_choice.type must be function or allowed_tools", param="tool_choice")


def _effort(reasoning: Mapping[str, Any] | None) -> Any:
    effort = None if reasoning is None else reasoning.get("effort")
    if effort not in (None, "none", "minimal", "low", "medium", "high", "xhigh"):
        raise RequestError("reasoning.effort must be none, minimal, low, medium, high or xhigh", param="reasoning")
    return effort


def _format(text: Mapping[str, Any] | None) -> Any:
    wanted = None if text is None else text.get("format")
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind == "json_schema" and "schema" in wanted:
        return {"type": "json_schema", "json_schema": {"name": wanted.get("name", "output"), "schema": wanted["schema"]}}
    raise RequestError("text.format.type must be text, json_object, or json_schema with a schema", param="text")
