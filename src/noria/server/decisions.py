"""Typed decisions: a question about a state as a prompt, and its answer from the probabilities of the next token.

    <state> Question: <instructions>  A) ...  B) ...        next token:  A 0.61   B 0.22   anything else 0.17
                                                            answer:      A 0.73   B 0.27   coverage 0.83

Each option has a label that is one token of the model (with or without a space before it: both count). The labels'
probabilities are read from one forward pass and divided by their sum, the coverage. The state comes first, so all questions
share its KV.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal

import msgspec

from noria.text.tokenizer import Tokenizer
from noria.types import RequestError, TokenLogprobs

LETTERS = tuple(ascii_uppercase)
DIGITS = tuple("123456789")
YES_NO = ("Yes", "No")
PLACES = (("\n", ""), (":", " "))  # what may stand before a label: the end of a template's header, or "Answer:"


class Question(msgspec.Struct, kw_only=True):
    """One question. `criteria` by `type`.

    noul: nothing, a text that says more, or what "yes" and "no" mean. choice: option -> description, or a list of options.
    score: the levels from the lowest to the highest, as a list or as level -> description.
    """

    type: Literal["noul", "choice", "score"]
    instructions: str
    criteria: dict[str, str | None] | list[str] | str | None = None


@dataclass(frozen=True)
class Labels:
    """The names of the options' labels, and for each the tokens that say it."""

    names: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """Those of all labels, one after the other."""
        return tuple(token for tokens in self.tokens for token in tokens)


def options_of(question: Question) -> dict[str, str]:
    """The options in their order, each with its description or "". Raises RequestError for criteria that do not fit."""
    criteria = question.criteria
    if question.type == "noul":
        meant = criteria if isinstance(criteria, dict) else {}
        if isinstance(criteria, list) or set(meant) - {"yes", "no"}:
            raise _wrong("criteria of a noul question are a text, or an object with yes and no")
        return {name: meant.get(name) or "" for name in ("yes", "no")}
    if isinstance(criteria, list):
        options = dict.fromkeys(criteria, "")
        if len(options) < len(criteria):
            raise _wrong("criteria name an option twice")
    elif isinstance(criteria, dict):
        options = {name: text or "" for name, text in criteria.items()}
    else:
        raise _wrong(f"a {question.type} question needs criteria: a list of options, or an object of option and description")
    if not 2 <= len(options) <= len(LETTERS):
        raise _wrong(f"criteria must have 2 to {len(LETTERS)} options")
    return options


def _wrong(message: str) -> RequestError:
    return RequestError(f"questions: {message}", param="questions")


class LabelMaker:
    """Finds labels that are single tokens of a tokenizer; remembers what it found."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._found: dict[str, tuple[int, ...]] = {}

    def labels(self, kind: str, count: int) -> Labels:
        """Labels for `count` options: yes and no, digits for levels, else letters. RequestError if the model has none."""
        choices = {"noul": (YES_NO,), "score": (DIGITS,)}.get(kind, ())
        for names in (*choices, LETTERS):
            if count <= len(names):
                tokens = tuple(map(self._tokens, names[:count]))
                flat = [token for found in tokens for token in found]
                if all(tokens) and len(set(flat)) == len(flat):
                    return Labels(names[:count], tokens)
        raise RequestError("this model's vocabulary has no single tokens for so many options", param="questions")

    def _tokens(self, name: str) -> tuple[int, ...]:
        """The tokens that are the whole label, at the places where one may stand."""
        if name not in self._found:
            spellings = dict.fromkeys((name, name.lower())) if name in YES_NO else (name,)
            found = [self._token(before, space + text) for text in spellings for before, space in PLACES]
            self._found[name] = tuple(dict.fromkeys(token for token in found if token is not None))
        return self._found[name]

    def _token(self, before: str, text: str) -> int | None:
        alone = self._tokenizer.encode(before, add_special_tokens=False, parse_special=False)
        whole = self._tokenizer.encode(before + text, add_special_tokens=False, parse_special=False)
        return whole[-1] if whole[:-1] == alone else None


def state_text(state: Any) -> str:
    """A state as text: JSON, unless it is text."""
    return state if isinstance(state, str) else json.dumps(state, ensure_ascii=False)


def question_text(state: str, question: Question, options: Mapping[str, str], labels: Labels) -> str:
    """The prompt: the state first, then what differs between questions."""
    lines = [state, "", "---", f"Question: {question.instructions.strip()}"]
    if isinstance(question.criteria, str):
        lines.append(question.criteria.strip())
    spelled = labels.names == YES_NO
    for label, (name, description) in zip(labels.names, options.items(), strict=True):
        if spelled and not description:
            continue
        option = label if spelled else f"{label}) {name}"
        lines.append(f"{option}: {description}" if description else option)
    if spelled:
        lines.append("Answer with Yes or No only.")
    else:
        lines.append(f"Answer with one of {', '.join(labels.names)} only.")
    return "\n".join(lines)


def answer_of(question: Question, options: Sequence[str], labels: Labels, entry: TokenLogprobs) -> dict[str, Any]:
    """The typed answer; `entry` has the log probabilities of `labels.all_tokens`, in their order."""
    values = iter(entry.top_logprobs)
    logs = [_log_sum([next(values) for _ in tokens]) for tokens in labels.tokens]
    coverage = _log_sum(logs)
    shares = [math.exp(log - coverage) for log in logs]
    probabilities = dict(zip(options, shares, strict=True))
    answer: Any
    if question.type == "noul":
        answer = probabilities["yes"]
    elif question.type == "choice":
        answer = max(probabilities, key=probabilities.__getitem__)  # the first of equals
    else:
        answer = sum(share * value for share, value in zip(shares, _level_values(options), strict=True))
    return {
        "type": question.type,
        question.type: answer,
        "probabilities": probabilities,
        "confidence": max(shares),
        "coverage": math.exp(coverage),
    }


def _level_values(levels: Sequence[str]) -> list[float]:
    """What levels count in a score: the numbers that they are, or their places from 1 on if they are words."""
    try:
        numbers = [float(level) for level in levels]
    except ValueError:
        numbers = []
    if numbers and all(map(math.isfinite, numbers)):
        return numbers
    return [float(place) for place in range(1, len(levels) + 1)]


def _log_sum(logs: Sequence[float]) -> float:
    """log of the sum of exp."""
    most = max(logs)
    return most + math.log(sum(math.exp(log - most) for log in logs))
