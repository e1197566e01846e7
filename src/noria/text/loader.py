"""Finding a model's tokenizer and chat template: in a Hugging Face folder, or in a TokenizerSource (a GGUF file)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noria.text.call_formats import PLAIN_JSON, CallFormat, ReasoningFormat, call_format, reasoning_format
from noria.text.chat import ChatTemplate
from noria.text.huggingface import read_json, tokenizer_from_folder
from noria.text.merges_cache import cached_merges
from noria.text.source import TokenizerSource
from noria.text.tokenizer import Tokenizer, build
from noria.types import ConfigError

_TOOL_USE = "tool_use"  # the name under which a model keeps a template for requests with tools


@dataclass(frozen=True)
class TextModel:
    """The text half of a model: its tokenizer, its chat template if it has one, and how its answers are written.

    `calls` and `reasoning` are the formats of its tool calls and of its reasoning, None where they are left in the text.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None


def load_text_model(
    model: Path | TokenizerSource,
    *,
    cache_dir: Path | None = None,
    chat_template: Path | None = None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> TextModel:
    """Tokenizer, chat template and formats of a model. The parsers are names of formats, "auto" for the model's own.

    Errors as `load_tokenizer` and `load_chat_template`; ConfigError for an unknown format.
    """
    tokenizer = load_tokenizer(model, cache_dir)
    template = load_chat_template(model, tokenizer, chat_template)
    source = "" if template is None else template.sources
    calls = call_format(tool_call_parser, source)
    reasoning = reasoning_format(reasoning_parser, source, tokenizer)
    if template is not None:
        if tool_call_parser == "auto" and not template.knows_tools:
            calls = PLAIN_JSON
        template.calls = calls
    return TextModel(tokenizer, template, calls, reasoning)


def load_tokenizer(model: Path | TokenizerSource, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of a folder or a source. Under `cache_dir`, what is slow to work out is kept for the next start.

    Raises LoadError if there is none, or if it is of a kind that Noria does not read.
    """
    if isinstance(model, TokenizerSource):
        return build(model, lambda source: cached_merges(source, cache_dir))
    return tokenizer_from_folder(model, lambda source: cached_merges(source, cache_dir))


def load_chat_template(
    model: Path | TokenizerSource, tokenizer: Tokenizer, override: Path | None = None
) -> ChatTemplate | None:
    """The model's chat template, or the operator's file `override` in its place; None for a model without one.

    Raises ConfigError if the file cannot be read, LoadError if a template has a syntax error.
    """
    if override is not None:
        return ChatTemplate(_read(override), tokenizer)
    templates = dict(model.chat_templates) if isinstance(model, TokenizerSource) else _folder_templates(model)
    source = templates.get("default") or templates.get(_TOOL_USE)
    if source is None:
        return None
    return ChatTemplate(source, tokenizer, tool_source=templates.get(_TOOL_USE))


def _folder_templates(folder: Path) -> dict[str, str]:
    """A folder's templates by name. Files win over tokenizer_config.json, as in transformers."""
    templates = _configured(read_json(folder / "tokenizer_config.json").get("chat_template"))
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read(path)
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read(folder / "chat_template.jinja")
    return templates


def _configured(value: Any) -> dict[str, str]:
    """`chat_template` of tokenizer_config.json: a template, or a list of {name, template}."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    return {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {path}: {error}") from None
