"""Conversations: from OpenAI's messages to the ids that the model was trained to read.

Rendering follows Hugging Face's `apply_chat_template`, and the ids equal its ids, with one difference that is the point: text
in a message that spells a control token stays text (see `noria.text.marks`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import orjson
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.filters import do_urlencode

from noria.text.call_formats import CallFormat
from noria.text.marks import ControlTexts, Marks, marks_for, strings_of, unused_characters
from noria.text.template import compile_template, render, tojson
from noria.text.tokenizer import Tokenizer
from noria.text.tool_prompt import plain_history, tool_instructions, with_tool_instructions
from noria.types import LoadError, RequestError

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# Variables of a template that the request sets through fields of its own, and the one that it may not set at all.
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template")
# Content parts that are text, and the field that holds it.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Other names under which clients return a model's reasoning; templates read `reasoning_content`.
_REASONING = ("reasoning_content", "reasoning", "thinking")

_MAX_REASON = 300  # characters of a template's own error, which may quote a message

# A call's arguments, as an object and as its JSON.
_PROBE_ARGUMENTS: tuple[Any, Any] = ({"probe_key": "x"}, json.dumps({"probe_key": "x"}))

_marks: ContextVar[Marks | None] = ContextVar("marks", default=None)


class ChatTemplate:
    """A model's chat template, compiled once, and how to speak to it. Thread-safe.

    `calls` is the format in which tools and calls are told where the template knows nothing of them.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, *, tool_source: str | None = None) -> None:
        """`tool_source` is the variant for requests with tools, where a model has one. Raises LoadError for bad syntax."""
        self._tokenizer = tokenizer
        self._source = source
        self._tool_source = tool_source
        self.calls: CallFormat | None = None
        filters = {"tojson": _tojson, "urlencode": _urlencode}
        try:
            self._template = compile_template(source, filters)
            self._tool_template = compile_template(tool_source, filters) if tool_source else self._template
        except TemplateSyntaxError as error:
            raise LoadError(f"the chat template has an error in line {error.lineno}: {error.message}") from None

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The ids of a conversation.

        `continue_final_message`: the prompt ends inside the last message, which the model goes on writing. RequestError for
        messages that are malformed, that the template refuses, or that certainly have more than `max_tokens` tokens.
        """
        options = (tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        text, marks = self._rendered(messages, *options, max_tokens=max_tokens)
        if marks is None:
            return self._tokenizer.encode(text, add_special_tokens=False, parse_special=True, max_tokens=max_tokens)
        parts = [marks.remove(part) for part in self._tokenizer.split_control(text)]
        return self._tokenizer.encode_parts([part for part in parts if part != ""])

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, for people: in it, control tokens and text that spells them look the same."""
        text, marks = self._rendered(messages, tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        return text if marks is None else text.replace(marks.mark, "")

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
        max_tokens: int | None = None,
    ) -> tuple[str, Marks | None]:
        """The template's output, and the marks that are still in it."""
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: set add_generation_prompt to false",
                param="continue_final_message",
            )
        conversation = self._normalised(messages)
        shown_tools = _checked_tools(tools)
        if not self._shows_calls:
            conversation = plain_history(conversation, self.calls)
        if shown_tools and not self.knows_tools:
            instructions = tool_instructions(shown_tools, self.calls)
            conversation = with_tool_instructions(conversation, instructions, system=self._knows_system)
            shown_tools = None
        variables = {
            "messages": conversation,
            "tools": shown_tools,
            "documents": None,
            **_checked_kwargs(chat_template_kwargs),
        }
        strings = strings_of(variables)
        if max_tokens is not None:
            for text in strings:
                self._tokenizer.check_length(text, max_tokens)
        mark, end_mark = unused_characters([*strings, self._source], 2)
        if continue_final_message:
            conversation[-1]["content"] += end_mark + " "
        marks = marks_for(self._control_texts, strings_of(variables), mark)
        if marks is not None:
            variables = marks.apply(variables)
        variables["messages"] = self._as_parts(variables["messages"])
        text = self._run(variables | {"add_generation_prompt": add_generation_prompt}, marks)
        return (_cut_at(text, end_mark) if continue_final_message else text), marks

    def _run(self, variables: Mapping[str, Any], marks: Marks | None = None) -> str:
        """Render; RequestError with the template's own words if it refuses."""
        template = self._tool_template if variables.get("tools") else self._template
        token = _marks.set(marks)
        try:
            return render(template, {**self._tokenizer.special_tokens, **variables})
        except TemplateError as error:
            reason = str(error)[:_MAX_REASON]
            raise RequestError(f"the chat template does not accept these messages: {reason}", param="messages") from None
        finally:
            _marks.reset(token)

    @cached_property
    def _control_texts(self) -> ControlTexts:
        return ControlTexts(self._tokenizer)

    # --- what the template expects -----------------------------------------------------------------------------------------

    @property
    def sources(self) -> str:
        """The text of the template, and of its variant for tools."""
        return self._source if self._tool_source is None else f"{self._source}\n{self._tool_source}"

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template tells the model of tools; one that is made for them does."""
        if self._tool_source is not None:
            return True
        tool = {"type": "function", "function": {"name": "probe_tool", "description": "x", "parameters": {"type": "object"}}}
        try:
            return "probe_tool" in self._run(_probe([{"role": "user", "content": "x"}]) | {"tools": [tool]})
        except RequestError:
            return False

    @cached_property
    def _shows_calls(self) -> bool:
        """Whether the template shows the calls of a history, and their results."""
        return any("probe_key" in text and "probe_result" in text for text in map(self._calls, _PROBE_ARGUMENTS))

    @cached_property
    def _knows_system(self) -> bool:
        """Whether the template shows a system message before the user's."""
        messages = [{"role": "system", "content": "probe text"}, {"role": "user", "content": "x"}]
        try:
            return "probe text" in self._run(_probe(self._as_parts(messages)))
        except RequestError:
            return False

    @cached_property
    def _knows_developer(self) -> bool:
        return "developer" in self._source

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template shows content only when it is a list of parts."""
        needle = "probe text"
        parts = [{"type": "text", "text": needle}]
        return not self._shows(needle, content=needle) and self._shows(needle, content=parts)

    def _as_parts(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with their contents as lists of parts, if the template wants that."""
        if not self._takes_parts:
            return messages
        return [{**m, "content": [{"type": "text", "text": m["content"]}] if m["content"] else []} for m in messages]

    @cached_property
    def _takes_object_arguments(self) -> bool:
        """Whether the arguments of a call in the history reach the template as an object, or as a JSON string.

        Both are tried. An object that is printed as Python would print it, and a string that is escaped once more, are wrong.
        """
        name = "probe_key"
        as_object, as_string = map(self._calls, _PROBE_ARGUMENTS)
        if name in as_object and f"'{name}'" not in as_object:
            return True
        return name not in as_string or f'\\"{name}' in as_string

    def _shows(self, needle: str, content: Any) -> bool:
        try:
            return needle in self._run(_probe([{"role": "user", "content": content}]))
        except RequestError:
            return False

    def _calls(self, arguments: Any) -> str:
        """What the template makes of a history with a tool call; nothing if it refuses."""
        function = {"name": "probe", "arguments": arguments}
        # Mistral's templates want ids of nine letters and digits.
        call = {"id": "probe0001", "type": "function", "function": function}
        user, assistant = {"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "probe0001", "name": "probe", "content": "probe_result"}
        tool = {"type": "function", "function": {"name": "probe", "description": "x", "parameters": {"type": "object"}}}
        try:
            return self._run(_probe(self._as_parts([user, assistant, result])) | {"tools": [tool]})
        except RequestError:
            return ""

    # --- messages ----------------------------------------------------------------------------------------------------------

    def _normalised(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("messages must be a list with at least one message", param="messages")
        return [self._normalised_message(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _normalised_message(self, message: Message, where: str) -> dict[str, Any]:
        """One message as templates expect it: content is a string, null fields are absent."""
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object", param=where)
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
        normal = {key: value for key, value in message.items() if value is not None}
        if role == "developer" and not self._knows_developer:
            normal["role"] = "system"
        normal["content"] = _content_text(normal.get("content", ""), f"{where}.content")
        reasoning = next((normal[name] for name in _REASONING if normal.get(name)), None)
        if reasoning is not None:
            normal["reasoning_content"] = reasoning
        if "tool_calls" in normal:
            normal["tool_calls"] = self._normalised_calls(normal["tool_calls"], f"{where}.tool_calls")
        return normal

    def _normalised_calls(self, calls: Any, where: str) -> list[dict[str, Any]]:
        """Tool calls whose arguments have the type that the template takes."""
        if not isinstance(calls, list):
            raise RequestError(f"{where} must be a list", param=where)
        normal = []
        for i, call in enumerate(calls):
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise RequestError(f"{where}[{i}].function must be an object with a name", param=f"{where}[{i}]")
            arguments = _arguments_object(function.get("arguments"), f"{where}[{i}].function.arguments")
            passed = arguments if self._takes_object_arguments else tojson(arguments)
            normal.append({**call, "function": {**function, "arguments": passed}})
        return normal


def encode_chat(template: ChatTemplate | None, messages: Sequence[Message], **options: Any) -> list[int]:
    """`template.encode(messages, **options)`; RequestError for a model that has no chat template."""
    if template is None:
        raise RequestError(
            "this model has no chat template (it is a base model): use /v1/completions, or start the server with "
            "--chat-template FILE",
            param="messages",
        )
    return template.encode(messages, **options)


def _probe(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}


def _content_text(content: Any, where: str) -> str:
    """A message's content as one string; the texts of several parts are lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise RequestError(f"{where}[{i}] has the type {kind!r}; this model reads 'text' parts only", param=where)
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise RequestError(f"{where}[{i}].{_TEXT_PARTS[kind]} must be a string", param=where)
        texts.append(text)
    return "\n".join(texts)


def _arguments_object(arguments: Any, where: str) -> dict[str, Any]:
    """A call's arguments as an object, whether they came as one or as its JSON; no arguments are an empty one."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            raise RequestError(f"{where} is not valid JSON", param=where) from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} must be a JSON object", param=where)
    return arguments


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects", param="tools")
    return [dict(tool) for tool in tools]


def _checked_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The request's own template variables. Templates are the operator's: a request cannot bring one."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    for name in _RESERVED:
        if name in kwargs:
            reason = "templates do not come with requests" if name == "chat_template" else "it has a field of its own"
            raise RequestError(f"chat_template_kwargs.{name} is not allowed: {reason}", param="chat_template_kwargs")
    return dict(kwargs)


def _cut_at(text: str, end_mark: str) -> str:
    """The text up to the end of the last message. A template that strips messages has stripped the space after the mark."""
    end = text.rfind(end_mark)
    if end < 0:
        raise RequestError("the chat template does not show the last message, so it cannot be continued", param="messages")
    kept = text[end + len(end_mark) :].startswith(" ")
    return text[:end] if kept else text[:end].rstrip()


def _tojson(value: Any, *args: Any, **kwargs: Any) -> str:
    marks = _marks.get()
    return tojson(value, *args, **kwargs) if marks is None else marks.rewritten(tojson, value, *args, **kwargs)


def _urlencode(value: Any) -> str:
    marks = _marks.get()
    return do_urlencode(value) if marks is None else marks.rewritten(do_urlencode, value)
