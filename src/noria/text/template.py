"""Jinja as chat templates expect it: Hugging Face's dialect, in a sandbox, with bounds on work and size.

A template belongs to the model or to the operator, never to a request. It is still not trusted: it runs in Jinja's immutable
sandbox, and every rendering has a budget of steps (loop iterations, attribute reads, calls, operators) and a largest size
of strings and of output. Steps are counted, not timed, so that the outcome does not depend on the machine's load; a budget
takes about a second to use up.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2 import ext as jinja_extensions
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 2_000_000
MAX_CHARACTERS = 1 << 26  # of a string that a template builds, and of its output
MAX_NUMBER = 1 << 20  # of an integer argument: a width, a count, an end of a range
MAX_POWER_BITS = 4096

# A printf conversion whose width or precision has seven digits or more, or comes from an argument.
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|\d{7})")

_LOOP = "_bounded_loop"
_JOIN = "_bounded_join"


class Budget:
    """What one rendering may still do."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = MAX_STEPS

    def spend(self, steps: int = 1) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise SecurityError(f"the chat template does more than {MAX_STEPS} steps")


_budget: ContextVar[Budget] = ContextVar("budget")


def render(template: Template, variables: Mapping[str, Any]) -> str:
    """The template's output. Raises jinja2.TemplateError, also for output or work beyond the bounds."""
    token = _budget.set(Budget())
    try:
        parts: list[str] = []
        size = 0
        for part in template.generate(**variables):
            size += len(part)
            if size > MAX_CHARACTERS:
                raise SecurityError(f"the chat template writes more than {MAX_CHARACTERS} characters")
            parts.append(part)
        return "".join(parts)
    except (TemplateError, MemoryError):
        raise
    except RecursionError:
        raise TemplateError("the chat template calls itself too deeply") from None
    except Exception as error:  # a template is a program: any operation in it may fail on the messages it gets
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    finally:
        _budget.reset(token)


def compile_template(source: str, filters: Mapping[str, Callable[..., Any]]) -> Template:
    """Compile a chat template. `filters` replace Jinja's own. Raises jinja2.TemplateSyntaxError."""
    environment = _Environment()
    environment.filters.update(filters)
    # Filters of the environment, like calls, may build strings of any size from small ones.
    environment.filters = {name: _bounded_call(f) for name, f in environment.filters.items()}
    environment.filters |= {_LOOP: _bounded_loop, _JOIN: _bounded_join}
    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, _LOOP, [], [], None, None, lineno=loop.lineno)
    _bound_concatenations(tree)
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


class _Generation(jinja_extensions.Extension):
    """`{% generation %}` marks what the assistant wrote, for training: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Hugging Face's environment for chat templates, with the budget hung into the places where a template does work."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja_extensions.loopcontrols])
        self.globals["range"] = _bounded_range
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def getattr(self, obj: Any, attribute: str) -> Any:
        _budget.get().spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _budget.get().spend()
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, kwargs)
        return _checked_size(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator_name: str, left: Any, right: Any) -> Any:
        _budget.get().spend()
        if operator_name == "*":
            size = _size(left) * right if isinstance(right, int) else _size(right) * left if isinstance(left, int) else 0
            _check_size(size)
        elif operator_name == "**" and _bits(left) * abs(right) > MAX_POWER_BITS:
            raise SecurityError("the chat template computes too large a power")
        elif operator_name == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("the chat template formats to a very large or variable width")
        return _checked_size(_OPERATORS[operator_name](left, right))


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "*": operator.mul,
    "**": operator.pow,
    "%": operator.mod,
}


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates write it: not escaped for HTML, as Jinja's own filter does, and not for ASCII."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# --- bounds --------------------------------------------------------------------------------------------------------------


def _bound_concatenations(tree: nodes.Node) -> None:
    """Turn `a ~ b` into a filter over the list of its parts, which checks the size."""
    for node in tree.iter_child_nodes():
        _bound_concatenations(node)
    for name, value in tree.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(tree, name, _joined(value))
        elif isinstance(value, list):
            setattr(tree, name, [_joined(item) if isinstance(item, nodes.Concat) else item for item in value])


def _joined(concat: nodes.Concat) -> nodes.Filter:
    parts = nodes.List(concat.nodes, lineno=concat.lineno)
    return nodes.Filter(parts, _JOIN, [], [], None, None, lineno=concat.lineno)


def _bounded_join(parts: list[Any]) -> str:
    _budget.get().spend()
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _bounded_loop(items: Iterable[Any]) -> list[Any]:
    """The items of a loop, paid for before it runs."""
    found = list(items)
    _budget.get().spend(len(found) + 1)
    return found


def _bounded_range(*bounds: int) -> range:
    found = range(*bounds)
    if len(found) > MAX_NUMBER:
        raise SecurityError(f"the chat template makes a range of {len(found)} numbers; at most {MAX_NUMBER} are allowed")
    return found


def _bounded_call(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # also copies the mark by which Jinja passes its context
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, kwargs)
        return _checked_size(function(*args, **kwargs))

    return bounded


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _budget.get().spend()
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, int) and abs(argument) > MAX_NUMBER:
            raise SecurityError(f"the chat template passes the number {argument}; at most {MAX_NUMBER} is allowed")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _check_size(size: float) -> None:
    if size > MAX_CHARACTERS:
        raise SecurityError(f"the chat template builds a string or list of more than {MAX_CHARACTERS} items")


def _checked_size(value: Any) -> Any:
    _check_size(_size(value))
    return value
