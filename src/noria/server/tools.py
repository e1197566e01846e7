"""The tool fields of a chat request: checked, and what follows from them for the prompt, the grammar and the parser."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from noria.server.validate import check_params
from noria.text.call_formats import PLAIN_JSON, CallFormat, ReasoningFormat
from noria.text.call_grammar import CallGrammar, Function, writable
from noria.text.lark import ReasoningState, Thinking, joined, literal, thinking
from noria.text.loader import TextModel
from noria.text.parsing import ParsePlan
from noria.types import RequestError, SamplingParams, StructuredOutput

MAX_TOOLS = 512
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class ToolUse:
    """Which functions a request offers, and which of them may or must be called.

    `named`: the choice was one function by name. `offered` are the tools as templates read them, `callable` those that may be
    called: all, but for an `allowed_tools` or a named choice.
    """

    mode: Literal["none", "auto", "required"] = "none"
    named: bool = False
    parallel: bool = True
    offered: tuple[dict[str, Any], ...] = ()
    callable: tuple[Function, ...] = ()

    @property
    def active(self) -> bool:
        """Whether the model may call something."""
        return self.mode != "none" and bool(self.callable)

    @property
    def several(self) -> bool:
        """Whether an answer may have more than one call."""
        return self.parallel and not self.named

    @property
    def shown(self) -> tuple[dict[str, Any], ...] | None:
        """The tools that the prompt tells of: those that must not be called need not be known."""
        return self.offered if self.active else None


def tool_use(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None, parallel: bool = True) -> ToolUse:
    """The tool fields of a chat body, checked. Raises RequestError that names the field."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools may hold at most {MAX_TOOLS} tools, not {len(tools)}", param="tools")
    functions: dict[str, Function] = {}
    offered = []
    for i, tool in enumerate(tools):
        function, shown = _function(tool, f"tools[{i}]")
        if function.name in functions:
            raise RequestError(f"tools[{i}].function.name: there are two tools of the name {function.name}", param="tools")
        functions[function.name] = function
        offered.append(shown)
    mode, names = _choice(choice, functions)
    return ToolUse(
        mode=mode,
        named=isinstance(choice, Mapping) and choice.get("type") == "function",
        parallel=parallel,
        offered=tuple(offered),
        callable=tuple(functions[name] for name in names),
    )


def _function(tool: Mapping[str, Any], where: str) -> tuple[Function, dict[str, Any]]:
    """A tool as (what may be called, what templates read)."""
    if tool.get("type") != "function":
        raise RequestError(f"{where}.type must be 'function': other tools are not known here", param="tools")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function must be an object", param="tools")
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    strict = function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where}.function.name must be 1 to 64 letters, digits, _ or -", param="tools")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{where}.function.description must be a string", param="tools")
    if parameters is not None and not (isinstance(parameters, Mapping) and parameters.get("type", "object") == "object"):
        raise RequestError(f"{where}.function.parameters must be the JSON schema of an object", param="tools")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{where}.function.strict must be true or false", param="tools")
    shown: dict[str, Any] = {"name": name}
    if description is not None:
        shown["description"] = description
    shown["parameters"] = dict(parameters or {"type": "object", "properties": {}})
    return Function(name, parameters or None, bool(strict)), {"type": "function", "function": shown}


def _choice(
    choice: str | Mapping[str, Any] | None, functions: Mapping[str, Function]
) -> tuple[Literal["none", "auto", "required"], Sequence[str]]:
    """(mode, names that may be called) of tool_choice."""
    if isinstance(choice, Mapping):
        return _object_choice(choice, functions)
    if choice is not None and choice not in ("none", "auto", "required"):
        raise RequestError(
            "tool_choice must be none, auto, required, or an object that names a function or allowed_tools", param="tool_choice"
        )
    if choice == "required" and not functions:
        raise RequestError("tool_choice required needs tools", param="tool_choice")
    mode: Literal["none", "auto", "required"] = "required" if choice == "required" else "auto"
    return ("none" if choice == "none" or not functions else mode), list(functions)


def _object_choice(
    choice: Mapping[str, Any], functions: Mapping[str, Function]
) -> tuple[Literal["auto", "required"], Sequence[str]]:
    if choice.get("type") == "function":
        return "required", [_known(choice, functions, "tool_choice")]
    if choice.get("type") != "allowed_tools":
        raise RequestError("tool_choice.type must be function or allowed_tools", param="tool_choice")
    allowed = choice.get("allowed_tools")
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise RequestError("tool_choice.allowed_tools needs a mode, auto or required, and a list of tools", param="tool_choice")
    names = [_known(tool, functions, f"tool_choice.allowed_tools.tools[{i}]") for i, tool in enumerate(listed)]
    return ("required" if mode == "required" else "auto"), list(dict.fromkeys(names))


def _known(tool: Any, functions: Mapping[str, Function], where: str) -> str:
    """The name in {"type": "function", "function": {"name": ...}}, which must be one of the request's tools."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f"{where}.function.name is required", param="tool_choice")
    if name not in functions:
        raise RequestError(f"{where} names a function that is not among the tools", param="tool_choice")
    return name


@dataclass(frozen=True)
class CallPlan:
    """How the answers of a request are parsed, and the grammar that they are bound to, if to one."""

    parse: ParsePlan | None = None
    grammar: StructuredOutput | None = None


def call_plan(
    text: TextModel, use: ToolUse, *, reasoning: ReasoningState, constrained: StructuredOutput | None = None
) -> CallPlan:
    """The plan for a request to a model. Raises RequestError for a format of the text that calls cannot have.

    `reasoning`: where the prompt leaves it. `constrained`: what the request's own format makes of the text. It holds behind the
    reasoning, for what is no call; where a call is required there is no text that it could be of.

    Required and named choices are bound to a grammar. Under auto, a grammar takes care of the calls if one of the functions is
    strict, or if the text has a format. Formats whose arguments are not JSON give way to plain JSON where calls are bound,
    but for strict functions under auto: there they are not.
    """
    if constrained is not None and use.mode != "required":
        return _format_plan(text, use, reasoning, constrained)
    calls = text.calls if use.active else None
    if use.mode == "required" and (calls is None or not writable(calls)):
        calls = PLAIN_JSON
    if calls is None:  # nothing to call, or the operator wants calls as text
        return CallPlan(None if text.reasoning is None else ParsePlan(text.reasoning, opened=reasoning == "open"))
    bound = use.mode == "required" or (writable(calls) and any(function.strict for function in use.callable))
    if bound:
        calls = _as_written(calls)
    parse = _parse_plan(text.reasoning, calls, use, opened=reasoning == "open", streams=bound)
    if not bound:
        return CallPlan(parse)
    grammar = _call_grammar(text, calls, use, thinking(text.tokenizer, text.reasoning, reasoning))
    written = grammar.required() if use.mode == "required" else grammar.free()
    return CallPlan(parse, StructuredOutput(kind="grammar", value=written))


def bind(
    text: TextModel, use: ToolUse, prompt: Sequence[int], params: SamplingParams, *, vocab_size: int
) -> tuple[SamplingParams, ParsePlan | None]:
    """(checked parameters, bound to the grammar that calls and format ask for; how to read the answers) of a chat's prompt.

    Raises RequestError.
    """
    plan = call_plan(text, use, reasoning=reasoning_state(text, prompt), constrained=params.structured_output)
    if plan.grammar is not None:
        params = msgspec.structs.replace(params, structured_output=plan.grammar)
    check_params(params, vocab_size, control_ids=text.tokenizer.control_ids)
    return params, plan.parse


def _format_plan(text: TextModel, use: ToolUse, state: ReasoningState, constrained: StructuredOutput) -> CallPlan:
    """The plan for a format of the text: reasoning, then calls or a text of that format."""
    reasoning = None if state == "over" else text.reasoning
    before = thinking(text.tokenizer, reasoning, state)
    head = "" if reasoning is None else reasoning.content
    opened = state == "open"
    if not use.active:
        if reasoning is None:
            return CallPlan(grammar=constrained)
        around = f"start: {joined(before.reference, literal(text.tokenizer, head), 'content')}"
        parse = ParsePlan(reasoning, opened=opened)
        return CallPlan(parse, msgspec.structs.replace(constrained, around="\n".join((around, *before.rules))))
    if text.calls is None:
        raise RequestError(
            "the text has a format, and this server leaves calls in the text: set tool_choice to none or required",
            param="tool_choice",
        )
    calls = _as_written(text.calls if writable(text.calls) else PLAIN_JSON)
    # What looks like a bare call may turn out to be the text: it is held until it is complete.
    parse = _parse_plan(reasoning, calls, use, opened=opened, streams=not calls.bare)
    around = _call_grammar(text, calls, use, before).or_content(head)
    return CallPlan(parse, msgspec.structs.replace(constrained, around=around))


def _as_written(calls: CallFormat) -> CallFormat:
    """The format as grammars write it: of one with bare calls, they know the bare form only."""
    return msgspec.structs.replace(calls, starts=(), ignored=()) if calls.bare else calls


def _parse_plan(
    reasoning: ReasoningFormat | None, calls: CallFormat, use: ToolUse, *, opened: bool, streams: bool
) -> ParsePlan:
    return ParsePlan(
        reasoning,
        calls,
        {function.name: function.parameters or {} for function in use.callable},
        known_only=len(use.callable) < len(use.offered),
        most_calls=None if use.several else 1,
        opened=opened,
        streams=streams,
    )


def _call_grammar(text: TextModel, calls: CallFormat, use: ToolUse, before: Thinking) -> CallGrammar:
    return CallGrammar(text.tokenizer, calls, use.callable, parallel=use.several, thinking=before)


_TAIL = 48  # tokens: enough for the longest mark of reasoning, and white space


def reasoning_state(text: TextModel, prompt: Sequence[int]) -> ReasoningState:
    """Where a prompt leaves reasoning: some templates write the mark that opens it for the model, or an empty thought."""
    if text.reasoning is None:
        return "possible"
    end = text.tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
    if end.endswith(text.reasoning.start.rstrip()):
        return "open"
    closed = text.reasoning.end + text.reasoning.after
    return "over" if end.endswith(closed.rstrip()) and not text.reasoning.anywhere else "possible"
