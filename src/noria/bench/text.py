"""Text to measure quality on: English prose that every Python installation carries, so that nothing has to be fetched.

`pydoc_data.topics` is the language reference, under Python's licence. It changes with Python's version: results say which text
they are of, and only results of the same text are comparable.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from noria.text.tokenizer import Tokenizer
from noria.types import ConfigError


@dataclass(frozen=True)
class Corpus:
    """A text and what names it."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def load_corpus(path: Path | None) -> Corpus:
    """The text of a file, or Python's topics in the order of their names. ConfigError if there is none."""
    if path is not None:
        try:
            return Corpus(path.name, path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {path}: {error}") from None
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError("this Python comes without pydoc_data: give a text with --text FILE") from None
    return Corpus("pydoc_data.topics", "\n\n".join(topics[name] for name in sorted(topics)))


def slices(corpus: Corpus, tokenizer: Tokenizer, count: int, length: int) -> list[tuple[int, ...]]:
    """`count` slices of `length` tokens, evenly spread over the text, each after the ids that begin a text of this model.

    ConfigError if the text is too short for them.
    """
    start = _start_ids(tokenizer)
    ids = tokenizer.encode(corpus.text, add_special_tokens=False, parse_special=False)
    own = length - len(start)
    if len(ids) < count * own:
        raise ConfigError(
            f"{corpus.name} has {len(ids)} tokens, not {count} times {own}: ask for fewer, or give a longer --text"
        )
    stride = len(ids) // count
    return [start + tuple(ids[i * stride : i * stride + own]) for i in range(count)]


def _start_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the model's texts begin with: often one id, or none."""
    bare = tokenizer.encode("a", add_special_tokens=False, parse_special=False)
    whole = tokenizer.encode("a", add_special_tokens=True, parse_special=False)
    return tuple(whole[: next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)])
