"""How models write tool calls and reasoning: one entry a format, and nothing else to write for one.

An entry is data for the one parser (`noria.text.parsing`), the one grammar writer (`noria.text.call_grammar`) and the choice
by a model's chat template. Names are vLLM's where it has the format. docs/tool-formats.md explains an entry line by line.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from noria.text.tokenizer import Tokenizer
from noria.types import ConfigError


class JsonCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A call is an object with a name and arguments; calls may come in a list, or one after the other. Of the notations of a
    format, the first is the one that is written where a call is enforced.

    `arguments` is the key the model was trained to write; all usual ones are read. `listed`: written as a list.
    """

    arguments: str = "arguments"
    listed: bool = False


class Headed(msgspec.Struct, frozen=True, kw_only=True):
    """A call is a head with the name, then the arguments.

    `head` matches all before the arguments, which begin with the first of the characters `until`; its group `name` is the
    function's. `written` is a head as a model writes it, with NAME in the name's place, `tail` what it writes after the
    arguments.
    """

    head: str
    until: str = "{"
    arguments: Literal["json", "braces", "tags"] = "json"
    quote: str = ""  # braces: what stands for both quotes of a string
    tags: Tags | None = None  # tags: see there
    written: str = ""  # json only: others are not written by grammar
    tail: str = ""


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments as pairs of tagged texts; `end` closes the call. Values are strings, or JSON where the schema wants that."""

    pair: str  # a regular expression with the groups `key` and `value`
    end: str


class PythonCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Python expressions, `f(a=1)`, in a list or one after the other."""


Notation = JsonCalls | Headed | PythonCalls


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Where calls are in an answer, and how one is written.

    `starts` are the texts that begin calls. `hidden` marks are never shown; `ignored` ones, which ordinary text may hold too,
    are not shown beside a call: ends, mostly. `bare`: calls may also begin a line without a start; then, as JSON and lists
    begin ordinary answers too, only names of the request's tools are calls. `signs`: a chat template with one of these texts
    is of this format.

    How a call is written where a grammar enforces it: `opening`, then the calls, each between `begin` and `end`, with `between`
    between them, then `closing`. A list of calls stands in one `begin` and `end`. `single`: a turn ends with its first call.
    """

    names: tuple[str, ...]  # of --tool-call-parser; the first is reported
    notations: tuple[Notation, ...]
    starts: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    bare: bool = False
    opening: str = ""
    begin: str = ""
    end: str = ""
    between: str = ""
    closing: str = ""
    single: bool = False
    signs: tuple[str, ...] = ()


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Where reasoning is in an answer. `anywhere`: also after content; else only before it. `after` is written behind it.

    `content` is what begins the answer proper, with and without reasoning before it. None of both is shown.
    """

    names: tuple[str, ...]  # of --reasoning-parser
    start: str
    end: str
    anywhere: bool = False
    after: str = ""
    content: str = ""
    signs: tuple[str, ...] = ()


_NAME = r"(?P<name>[\w.-]+)"

_MISTRAL_HEADED = Headed(head=_NAME + r"\s*(\[CALL_ID\]\s*\w+\s*)?(\[ARGS\])?\s*", written="NAME[ARGS]")

# The first whose sign is in a chat template is taken, so the more telling signs come first.
CALL_FORMATS: tuple[CallFormat, ...] = (
    CallFormat(
        names=("openai", "harmony", "gpt_oss"),
        starts=("<|channel|>commentary to=functions.", "<|start|>assistant to=functions."),
        notations=(
            Headed(
                head=_NAME + r"\s*(<\|channel\|>commentary)?\s*(<\|constrain\|>)?\s*(json)?\s*<\|message\|>\s*",
                written="NAME <|constrain|>json<|message|>",
            ),
        ),
        hidden=(
            *("<|start|>assistant", "<|end|>", "<|call|>", "<|return|>"),
            *("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
            "<|channel|>final <|constrain|>json<|message|>",
        ),
        begin="<|channel|>commentary to=functions.",
        single=True,
        signs=("<|channel|>",),
    ),
    CallFormat(
        names=("deepseek_v31",),
        starts=("<｜tool▁call▁begin｜>",),
        notations=(Headed(head=_NAME + r"<｜tool▁sep｜>\s*", written="NAME<｜tool▁sep｜>"),),
        hidden=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
        signs=("<｜tool▁call▁begin｜>'+ tool['function']['name']", "<｜tool▁call▁begin｜>'+tool['function']['name']"),
    ),
    CallFormat(
        names=("deepseek_v3", "deepseek_r1"),
        starts=("<｜tool▁call▁begin｜>",),
        notations=(
            Headed(
                head=r"function<｜tool▁sep｜>" + _NAME + r"\s*```json\s*",
                written="function<｜tool▁sep｜>NAME\n```json\n",
                tail="\n```",
            ),
        ),
        hidden=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ignored=("```",),
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>",
        between="\n",
        closing="<｜tool▁calls▁end｜>",
        signs=("<｜tool▁call▁begin｜>",),
    ),
    CallFormat(
        names=("kimi_k2",),
        starts=("<|tool_call_begin|>",),
        notations=(
            Headed(
                head=r"\s*functions\." + _NAME + r":\d+\s*<\|tool_call_argument_begin\|>\s*",
                written="functions.NAME:0<|tool_call_argument_begin|>",
            ),
        ),
        hidden=("<|tool_calls_section_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        begin="<|tool_call_begin|>",
        end="<|tool_call_end|>",
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
        signs=("<|tool_calls_section_begin|>",),
    ),
    CallFormat(
        names=("qwen3_coder", "qwen3_xml"),
        starts=("<tool_call>",),
        notations=(
            Headed(
                head=r"\s*<function=" + _NAME,
                until=">",
                arguments="tags",
                tags=Tags(pair=r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>", end="</function>"),
            ),
        ),
        ignored=("</tool_call>",),
        signs=("<function=",),
    ),
    CallFormat(
        names=("glm45", "glm47"),
        starts=("<tool_call>",),
        notations=(
            Headed(
                head=r"\s*" + _NAME + r"\s*",
                until="<",
                arguments="tags",
                tags=Tags(pair=r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", end="</tool_call>"),
            ),
        ),
        signs=("<arg_key>",),
    ),
    CallFormat(
        names=("hermes", "qwen"),
        starts=("<tool_call>",),
        notations=(JsonCalls(),),
        ignored=("</tool_call>",),
        begin="<tool_call>\n",
        end="\n</tool_call>",
        between="\n",
        signs=("<tool_call>",),
    ),
    CallFormat(
        names=("gemma4",),
        starts=("<|tool_call>",),
        notations=(Headed(head=r"\s*call:" + _NAME, arguments="braces", quote='<|"|>'),),
        hidden=("<tool_call|>",),
        signs=("<|tool_call>",),
    ),
    CallFormat(
        names=("functiongemma",),
        starts=("<start_function_call>",),
        notations=(Headed(head=r"\s*call:" + _NAME, arguments="braces", quote="<escape>"),),
        hidden=("<end_function_call>",),
        signs=("<start_function_call>",),
    ),
    CallFormat(
        names=("granite",),
        starts=("<|tool_call|>",),
        notations=(JsonCalls(listed=True),),
        begin="<|tool_call|>",
        signs=("<|tool_call|>",),
    ),
    CallFormat(
        names=("mistral_v11",),
        starts=("[TOOL_CALLS]",),
        notations=(_MISTRAL_HEADED, JsonCalls(listed=True)),
        begin="[TOOL_CALLS]",
        signs=("[ARGS]",),
    ),
    CallFormat(
        names=("mistral",),
        starts=("[TOOL_CALLS]",),
        notations=(JsonCalls(listed=True), _MISTRAL_HEADED),
        begin="[TOOL_CALLS]",
        signs=("[TOOL_CALLS]",),
    ),
    CallFormat(
        names=("command_r7b", "cohere_command3"),
        starts=("<|START_ACTION|>",),
        notations=(JsonCalls(arguments="parameters", listed=True),),
        hidden=("<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        begin="<|START_ACTION|>",
        end="<|END_ACTION|>",
        signs=("<|START_ACTION|>",),
    ),
    CallFormat(
        names=("olmo3",),
        starts=("<function_calls>",),
        notations=(PythonCalls(),),
        ignored=("</function_calls>",),
        signs=("<function_calls>",),
    ),
    CallFormat(
        names=("jamba",),
        starts=("<tool_calls>",),
        notations=(JsonCalls(listed=True),),
        ignored=("</tool_calls>",),
        begin="<tool_calls>",
        end="</tool_calls>",
        signs=("<tool_calls>",),
    ),
    CallFormat(
        names=("internlm",),
        starts=("<|action_start|><|plugin|>",),
        notations=(JsonCalls(arguments="parameters"),),
        hidden=("<|action_end|>",),
        begin="<|action_start|><|plugin|>",
        end="<|action_end|>",
        signs=("<|plugin|>",),
    ),
    CallFormat(
        names=("phi4_mini_json",),
        starts=("functools",),
        notations=(JsonCalls(listed=True),),
        begin="functools",
        signs=("functools",),
    ),
    CallFormat(
        names=("pythonic", "llama4_pythonic"),
        starts=("<|python_start|>",),
        notations=(PythonCalls(),),
        hidden=("<|python_end|>",),
        bare=True,
        signs=("<|python_start|>", "[func_name1(params_name1"),
    ),
    CallFormat(
        names=("llama3_json", "llama4_json"),
        starts=("<|python_tag|>",),
        notations=(JsonCalls(arguments="parameters"),),
        bare=True,
        between="; ",
        signs=("<|python_tag|>", '"parameters": '),
    ),
    CallFormat(
        names=("json",),
        starts=("```json",),
        notations=(JsonCalls(),),
        ignored=("```",),
        bare=True,
        between="\n",
    ),
)

REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        names=("openai_gptoss", "harmony"),
        start="<|channel|>analysis<|message|>",
        end="<|end|>",
        anywhere=True,
        after="<|start|>assistant",
        content="<|channel|>final<|message|>",
        signs=("<|channel|>",),
    ),
    ReasoningFormat(names=("mistral",), start="[THINK]", end="[/THINK]", signs=("[THINK]",)),
    ReasoningFormat(names=("gemma4",), start="<|channel>thought\n", end="<channel|>", signs=("<|channel>",)),
    ReasoningFormat(
        names=("cohere_command3",),
        start="<|START_THINKING|>",
        end="<|END_THINKING|>",
        content="<|START_RESPONSE|>",
        signs=("<|START_THINKING|>",),
    ),
    ReasoningFormat(names=("seed_oss",), start="<seed:think>", end="</seed:think>", signs=("<seed:think>",)),
    ReasoningFormat(
        names=("granite",),
        start="Here is my thought process:",
        end="Here is my response:",
        signs=("Here is my thought process:",),
    ),
    ReasoningFormat(
        names=("deepseek_r1", "qwen3", "deepseek_v3", "glm45", "hunyuan_a13b", "olmo3", "kimi_k2"),
        start="<think>",
        end="</think>",
        signs=("<think>", "</think>"),
    ),
)

PLAIN_JSON = CALL_FORMATS[-1]


def call_format(name: str, template: str) -> CallFormat | None:
    """The format called `name`; for "auto", that of a chat template; for "none", none. Raises ConfigError."""
    if name == "auto":
        return next((f for f in CALL_FORMATS if any(sign in template for sign in f.signs)), PLAIN_JSON)
    return _named(name, CALL_FORMATS, "--tool-call-parser")


def reasoning_format(name: str, template: str, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """As `call_format`, but a model without a sign of reasoning has none. Marks that are tokens are a sign too."""
    if name == "auto":
        known = tokenizer.backend.token_to_id
        return next(
            (
                f
                for f in REASONING_FORMATS
                if any(sign in template for sign in f.signs) or (known(f.start) is not None and known(f.end) is not None)
            ),
            None,
        )
    return _named(name, REASONING_FORMATS, "--reasoning-parser")


F = TypeVar("F", CallFormat, ReasoningFormat)


def _named(name: str, formats: tuple[F, ...], flag: str) -> F | None:
    found = next((f for f in formats if name in f.names), None)
    if found is None and name != "none":
        known = ", ".join(n for f in formats for n in f.names)
        raise ConfigError(f"{flag} {name}: there is no such format; there are auto, none, {known}")
    return found
