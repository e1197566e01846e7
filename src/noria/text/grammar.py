"""Grammars: from what a request asks of its output to a compiled llguidance matcher over the model's tokens.

    StructuredOutput ── grammar_text ──► Lark (llguidance's dialect) ── Compiler.compile ──► LLMatcher, one a sequence

Grammars are compiled without *forcing*: a mask holds every token that can be part of a valid text, not only those of one
tokenisation of it. So a mask is a function of the bytes so far, computing one is bounded work (a forced text of a million
characters would be built whole), and no tokenizer is called.

JSON is compact, with no white space between its tokens, as OpenAI writes it: a small model cannot lose itself in blanks.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from noria.text.schema import checked_schema
from noria.types import RequestError, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from noria.text.tokenizer import Tokenizer

MAX_CHARACTERS = 1 << 18  # of a schema, regular expression, list of choices or grammar
MAX_CHOICES = 4096
CACHED_GRAMMARS = 64  # compiled ones that are kept; each is a megabyte at most, unless it is a very large one

HEADER = '%llguidance {"no_forcing": true}\n'
JSON_STYLE = {"whitespace_flexible": False}

# llguidance's limits (its defaults in brackets): work and memory of one grammar, whatever its author had in mind.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # (same) some 20 ms
    "step_lexer_fuel": 200_000,  # (same) some 14 ms a mask
    "step_max_items": 50_000,  # (same) some 3 ms a mask
    "max_lexer_states": 50_000,  # (250,000) 1 to 2 kB each
    "max_grammar_size": 500_000,  # (same)
    "verbose_errors": False,  # (true) errors go to clients
}


class Vocabulary(msgspec.Struct, frozen=True):
    """What a grammar knows of a tokenizer: the bytes of every token that the model can draw. Travels between processes."""

    tokens: tuple[bytes, ...]  # as many as the model has logits; b"" is never drawn under a grammar
    control: tuple[int, ...]  # control tokens: not part of any text
    ends: tuple[int, ...]  # those that end a text; not empty


def vocabulary_of(tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> Vocabulary:
    """The vocabulary of a model with `size` logits. RequestError if no token ends a text: no grammar could end."""
    if not ends:
        raise RequestError("this model has no end token, and structured output needs one")
    tokens = tuple(tokenizer.token_bytes(token) for token in range(size))
    return Vocabulary(tokens, tuple(sorted(t for t in {*tokenizer.control_ids, *ends} if t < size)), tuple(ends))


class _Words:
    """A vocabulary as LLTokenizer wants it (llguidance's TokenizerWrapper)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.control)
        self.eos_token_id = vocabulary.ends[0]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("grammars are compiled without forcing, which is all that would tokenise")


class Compiler:
    """Compiles grammars for one vocabulary and keeps the last ones by content. Making it takes 0.1 to 1 s (262,144 tokens).

    One thread at a time. The interpreter lock is released while a grammar is compiled, not while this is made.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        self.vocabulary = vocabulary
        self._tokenizer: LLTokenizer = LLTokenizer(_Words(vocabulary), eos_token=list(vocabulary.ends))  # type: ignore[arg-type]
        self._limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        self._cache: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()

    def cached(self, output: StructuredOutput) -> LLMatcher | None:
        """A new matcher of a grammar that is kept compiled; microseconds."""
        kept = self._cache.get(output)
        if kept is None:
            return None
        self._cache.move_to_end(output)
        return kept.deep_copy()

    def compile(self, output: StructuredOutput) -> LLMatcher:
        """A new matcher, before its first token. RequestError if the grammar is wrong or too complex."""
        matcher = self.cached(output)
        if matcher is None:
            matcher = self._compile(output)
            self._cache[output] = matcher
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
            matcher = matcher.deep_copy()
        return matcher

    def _compile(self, output: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar_text(output, self.vocabulary), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise refusal(output, matcher.get_error())
        return matcher


def refusal(output: StructuredOutput, error: str) -> RequestError:
    """llguidance's error as ours, in one line."""
    lines = [line.strip(" |") for line in error.replace("<non-verbose/>", "").splitlines()]
    reason = "; ".join(line for line in lines if line and not re.fullmatch(r"[\^ ]+|\d+ \|.*", line))
    names = {"json_object": "JSON", "json_schema": "JSON schema", "regex": "regular expression", "choice": "list of choices"}
    name = names.get(output.kind, output.kind.replace("_", " "))
    return RequestError(
        f"the {name} cannot be used: {reason[:400] or 'it is too complex'}", param="structured_output", code="invalid_grammar"
    )


# --- what is asked for, as a grammar ---------------------------------------------------------------------------------------


def grammar_text(output: StructuredOutput, vocabulary: Vocabulary) -> str:
    """The grammar in llguidance's notation (its docs/syntax.md). RequestError for a value that has not its kind's form."""
    if len(output.value) + len(output.around) > MAX_CHARACTERS:
        raise refusal(output, f"it has more than {MAX_CHARACTERS} characters")
    rules = _rules(output, vocabulary)
    if output.around:
        # A nested grammar has its own names: those of a client's rules do not meet ours.
        return f"{HEADER}{output.around}\ncontent: %lark {{\n{rules}\n}}\n"
    return HEADER + rules


def _rules(output: StructuredOutput, vocabulary: Vocabulary) -> str:
    match output.kind:
        case "json_object":
            return "start: " + _json({"type": "object"})
        case "json_schema":
            return "start: " + _json(checked_schema(_parsed(output)))
        case "regex":
            return "start: " + _regex(output.value)
        case "choice":
            return "start: " + _choice(output)
        case "grammar":
            return _lark(output)
        case "structural_tag":
            return _tags(output, vocabulary)


def _parsed(output: StructuredOutput) -> Any:
    try:
        return msgspec.json.decode(output.value)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise refusal(output, f"it is not valid JSON: {error}") from None


def _json(schema: dict[str, Any]) -> str:
    # The key is read at the top of a schema only; a client's own would change the style, and is refused as an unknown keyword.
    return "%json " + json.dumps({**schema, "x-guidance": JSON_STYLE}, ensure_ascii=False)


def _regex(expression: str) -> str:
    r"""An expression (of Rust's regex crate) between slashes; \d and \w are ASCII's, as in a schema's pattern (ECMA 262)."""
    from llguidance import regex_to_lark

    text = regex_to_lark(expression, "dw")
    return "/" + re.sub(r"\\?\n|\\.", lambda match: r"\n" if match[0].endswith("\n") else match[0], text) + "/"


def _choice(output: StructuredOutput) -> str:
    """The strings as one regular expression, in which only letters and digits stand for themselves."""
    choices = _parsed(output)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise refusal(output, "it must be a list of strings that is not empty")
    if len(choices) > MAX_CHOICES:
        raise refusal(output, f"it has more than {MAX_CHOICES} choices")
    if choices == [""]:
        raise refusal(output, "it allows nothing but the empty text")
    return f"/{'|'.join(map(_escaped, choices))}/"


def _escaped(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text)


def _lark(output: StructuredOutput) -> str:
    """A grammar of the client's: Lark as llguidance reads it, or GBNF (llama.cpp's), which is converted."""
    from llguidance.gbnf_to_lark import any_to_lark

    text = re.sub(r"\A\s*%llguidance\s*\{\s*\}[ \t]*$", "", output.value, flags=re.MULTILINE)
    if "%llguidance" in text:
        raise refusal(output, "leave out %llguidance: its options are the server's")
    try:
        return str(any_to_lark(text))
    except Exception as error:  # GbnfToLarkError, and whatever its parser trips over
        raise refusal(output, str(error) or type(error).__name__) from None


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A tag: after `begin` comes JSON of the schema, then `end`."""

    begin: str
    schema: dict[str, Any] | bool
    end: str


class _StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's and xgrammar's first form of a structural tag."""

    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


def _tags(output: StructuredOutput, vocabulary: Vocabulary) -> str:
    """Free text, in which a trigger must go on as one of the tags that begin with it."""
    try:
        tag = msgspec.json.decode(output.value, type=_StructuralTag)
    except (msgspec.DecodeError, RecursionError) as error:
        raise refusal(output, f"expected {{structures: [{{begin, schema, end}}], triggers: [..]}}: {error}") from None
    if not tag.structures or not tag.triggers or not all(tag.triggers):
        raise refusal(output, "it needs a structure and a trigger that is not empty")
    control = {vocabulary.tokens[token].decode("utf-8", "replace"): token for token in vocabulary.control}
    rules = []
    for number, structure in enumerate(tag.structures):
        trigger = next((t for t in tag.triggers if structure.begin.startswith(t)), None)
        if trigger is None:
            raise refusal(output, f"structure {number} begins with none of the triggers")
        rest = [_literal(structure.begin[len(trigger) :]), _json(checked_schema(structure.schema)), _literal(structure.end)]
        body = " ".join(part for part in rest if part)
        if trigger in control:  # one token of the model, which no text contains
            rules.append(f"tag_{number}: TEXT <[{control[trigger]}]> {body}\n")
        else:
            rules.append(f"begin_{number}[lazy]: TEXT {_literal(trigger)}\ntag_{number}: begin_{number} {body}\n")
    names = " | ".join(f"tag_{number}" for number in range(len(rules)))
    return f"start: ({names})* tail\ntail: TEXT\nTEXT: /(.|\\n)*/\n{''.join(rules)}"


def _literal(text: str) -> str:
    """A terminal for exactly this text; "" for none."""
    return f"/{_escaped(text)}/" if text else ""
