"""A conversation made ready for an engine without HTTP: LLM's and AsyncEngine's chats, on the terms of the server's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from noria.server.structured import structured_output
from noria.server.tools import bind, tool_use
from noria.text.chat import Message, encode_chat
from noria.text.loader import TextModel
from noria.text.parsing import ParsePlan
from noria.types import RequestError, SamplingParams


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What a chat asks for besides its messages; names and meanings are OpenAI's.

    `template`: keywords of `noria.text.chat.encode_chat`.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    template: Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """The prompt, the parameters with what binds the answer, and how it is read."""

    ids: tuple[int, ...]
    params: SamplingParams
    parse: ParsePlan | None


def prepared_chat(
    text: TextModel,
    messages: Sequence[Message],
    params: SamplingParams,
    options: ChatOptions,
    *,
    vocab_size: int,
    max_tokens: int,
) -> Chat:
    """A conversation's prompt of at most `max_tokens` ids, checked. Raises RequestError that names what is wrong."""
    use = tool_use(options.tools, options.tool_choice, options.parallel_tool_calls)
    asked = structured_output({"response_format": options.response_format})
    if asked is not None:
        if params.structured_output is not None:
            message = "response_format and the structured_output of the parameters both constrain the text: give one of them"
            raise RequestError(message, param="response_format")
        params = msgspec.structs.replace(params, structured_output=asked[1])
    ids = tuple(encode_chat(text.template, messages, tools=use.shown, max_tokens=max_tokens, **options.template))
    params, parse = bind(text, use, ids, params, vocab_size=vocab_size)
    return Chat(ids, params, parse)
