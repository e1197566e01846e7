"""Request bodies: from bytes to checked values, or a RequestError that names the field.

A field is one of four things:

* declared in a body struct below: parsed, and its type checked (booleans are not numbers, `null` is absent);
* in `ACCEPTED`: real clients send it, and nothing is lost without it;
* refused by `REFUSED` or by `CONSTRAINT`: it asks for something that would silently not happen;
* unknown: ignored, and reported to the caller, who counts it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from noria.server.json_values import check_values
from noria.server.structured import FIELDS, structured_output
from noria.server.validate import MAX_TOP_LOGPROBS
from noria.types import RequestError, SamplingParams

MAX_PROMPTS = 2048  # of one completions request
MAX_CHOICES_OF_BATCH = 4096  # prompts times n
MAX_COMPLETION_LOGPROBS = 5  # as OpenAI
MAX_NESTING = 64  # of JSON that reaches a chat template
FLAT = frozenset({"prompt", "tokens", "input", "documents", "text_1", "text_2"})  # long, and checked item by item elsewhere
MAX_ID_CHARACTERS = 256  # request ids are echoed in headers and logs
MAX_SALT_CHARACTERS = 4096
PRIORITY_BOUND = 2**31
COMPLETION_MAX_TOKENS = 16  # as OpenAI, where a completions request does not say

PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}},
    ]
}

# Sent by real clients; they change nothing in an answer, so that nothing is lost by ignoring them.
ACCEPTED = frozenset(
    {
        "metadata",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "store",
        "verbosity",
        "cache_control",
    }
)


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream reports besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(msgspec.Struct, kw_only=True):
    """The fields that both generation endpoints have. Ranges are in `noria.server.validate`."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    response_format: Any = None  # this and the following: see `noria.server.structured`
    structured_outputs: Any = None
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    grammar: Any = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    return_token_ids: bool = False
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)] = ""
    priority: Annotated[int, Meta(ge=-PRIORITY_BOUND, lt=PRIORITY_BOUND)] = 0
    request_id: Annotated[str, Meta(max_length=MAX_ID_CHARACTERS)] | None = None
    timing: bool = False
    use_beam_search: bool = False
    length_penalty: float = 1.0

    def stops(self) -> tuple[str, ...]:
        """The stop strings; one may come bare."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def token_limit(self) -> int | None:
        """The most tokens of an answer, under its newer name or its older one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(Body, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[Any, Meta(extra_json_schema=PROMPT_SCHEMA)]  # see `prompts_of`
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    add_special_tokens: bool = True


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a predicted content."""

    type: Literal["text"]
    text: str


class PredictedContent(msgspec.Struct, kw_only=True):
    """What the answer may say: where it does, it comes several tokens at a time. It changes no token."""

    type: Literal["content"]
    content: str | list[TextPart]

    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    prediction: PredictedContent | None = None
    # Checked by `noria.server.tools`.
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def _only(*allowed: object) -> Callable[[object], bool]:
    return lambda value: any(type(value) is type(a) and value == a for a in allowed)


def _never(value: object) -> bool:
    return False


# What Noria does not do (yet), and the values of each field that ask for nothing.
REFUSED: Mapping[str, Callable[[object], bool]] = {
    "tools": _only([]),  # chat has them
    "tool_choice": _only("none"),
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "suffix": _only(""),
    "audio": _never,
    "modalities": _only(["text"], []),
    "images": _never,
    "prediction": _never,
    "web_search_options": _never,
    "early_stopping": _only(False),
    "bad_words": _only([]),
    "logits_processors": _only([]),
    "mcp_servers": _only([]),
    "container": _never,
    "chat_template": _never,  # a template is a program: only the operator's is run
    "chat_template_kwargs": _only({}),  # chat has them
    "documents": _only([]),
    "prompt_embeds": _never,
    "mm_processor_kwargs": _never,
    "service_tier": _only("auto", "default"),
    # Records of a hand-over between engines, and names of hosts and files. Never taken from a client.
    "kv_transfer_params": _never,
    "bootstrap_host": _never,
    "bootstrap_port": _never,
    "bootstrap_room": _never,
    "data_parallel_rank": _never,
    "disagg_prefill_dp_rank": _never,
    "session_params": _never,
    "lora_path": _never,
    "lora_request": _never,
    "input_embeds": _never,
}
# What to send instead of a refused field.
HINTS: Mapping[str, str] = {
    "functions": "send tools instead",
    "function_call": "send tool_choice instead",
}
# Names that look like a constraint on the output: ignoring one would return text that breaks it.
CONSTRAINT = re.compile(
    r"guided_|structured_|constrain|grammar|regex|ebnf|json_schema|json_object|structural_tag|logits_processor|do_remote_|remote_"
)

# Fields of a body that are fields of SamplingParams, with the same meaning; absent ones take its defaults.
SAMPLING_FIELDS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)

B = TypeVar("B", bound=msgspec.Struct)


def parse_body(data: bytes, kind: type[B]) -> tuple[B, list[str]]:
    """(the body, names of unknown fields). Raises RequestError for malformed JSON, wrong types and refused fields."""
    body = parse_json(data)
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object")
    present = {name: value for name, value in body.items() if value is not None}
    for name, value in present.items():
        if name not in FLAT and _deeper(value, MAX_NESTING):
            raise RequestError(f"{name[:64]} is nested more than {MAX_NESTING} levels deep", param=name[:64])
    known = frozenset(kind.__struct_encode_fields__)
    unknown = []
    for name, value in present.items():
        if name in known or name in ACCEPTED:
            continue
        _refuse(name, value, present)
        if name not in REFUSED:
            unknown.append(name)
    try:
        return msgspec.convert(present, kind, str_keys=True), unknown
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None


def parse_json(data: bytes) -> Any:
    """Strict JSON: no NaN, no infinities, valid UTF-8, bounded nesting, bounded in its values. Raises RequestError."""
    check_values(data)
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None


def _deeper(value: Any, levels: int) -> bool:
    """Whether `value` has more than `levels` levels of objects and lists."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [
            inner
            for item in layer
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not layer:
            return False
    return True


def _refuse(name: str, value: object, body: Mapping[str, object]) -> None:
    allowed = REFUSED.get(name)
    if name == "best_of":
        _check_best_of(value, body.get("n", 1))
        return
    if (allowed is None and CONSTRAINT.search(name)) or (allowed is not None and not allowed(value)):
        raise RequestError(f"{name} is not supported by this server; {HINTS.get(name, 'leave it out')}", param=name)


def _check_best_of(best_of: object, n: object) -> None:
    """Equal to n it asks for nothing. More would need choices to be made and thrown away."""
    if type(best_of) is not int or best_of != n:
        raise RequestError("best_of must be absent or equal to n", param="best_of")


def _named(message: str) -> RequestError:
    """A msgspec error as ours: "Expected `int`, got `str` - at `$.n`" names n."""
    reason, _, path = message.partition(" - at ")
    match = re.search(r"\$\.(\w+)", path)
    missing = re.match(r"Object missing required field `(\w+)`", reason)
    if missing and match is None:
        return RequestError(f"{missing[1]} is required", param=missing[1])
    if match is None:
        return RequestError(f"the request body is wrong: {reason}")
    # The path may hold keys of the client's making; only the field's own name is repeated.
    return RequestError(f"{match[1]}: {reason[:1].lower()}{reason[1:]}", param=match[1])


def prompts_of(body: CompletionBody) -> list[str | tuple[int, ...]]:
    """The prompts of a completions request: texts, or token ids (unchecked against the vocabulary)."""
    prompts = listed_prompts(body.prompt, "prompt")
    if len(prompts) * (body.n or 1) > MAX_CHOICES_OF_BATCH:
        raise RequestError(f"prompts times n may be at most {MAX_CHOICES_OF_BATCH}", param="n")
    return prompts


def listed_prompts(prompt: Any, param: str) -> list[str | tuple[int, ...]]:
    """One prompt or several, as text or ids, in the forms of OpenAI's API. `param` is the field's name."""
    prompts: list[str | tuple[int, ...]]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif not isinstance(prompt, list) or not prompt:
        raise RequestError(f"{param} must be a string, a list of strings, or token ids", param=param)
    elif all(type(item) is int for item in prompt):
        prompts = [tuple(prompt)]
    elif all(isinstance(item, str) for item in prompt):
        prompts = list(prompt)
    elif all(isinstance(item, list) and item and all(type(t) is int for t in item) for item in prompt):
        prompts = [tuple(item) for item in prompt]
    else:
        raise RequestError(
            f"{param} must be all strings, all token ids, or all lists of token ids, none of them empty", param=param
        )
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"{param} may hold at most {MAX_PROMPTS} prompts, not {len(prompts)}", param=param)
    return prompts


def sampling_params(
    body: ChatBody | CompletionBody,
    defaults: Mapping[str, float | int],
    *,
    logprobs: int | None,
    max_tokens: int | None,
) -> SamplingParams:
    """The body's parameters; `defaults` are the server's, for fields that the client left out. Ranges are not checked."""
    values: dict[str, Any] = dict(defaults)
    for name in SAMPLING_FIELDS:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    constraint = structured_output({name: getattr(body, name) for name in FIELDS})
    return SamplingParams(
        **values,
        structured_output=None if constraint is None else constraint[1],
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=body.stops(),
        stop_token_ids=tuple(body.stop_token_ids),
    )
