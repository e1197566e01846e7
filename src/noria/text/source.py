"""TokenizerSource: everything a GGUF file or a SentencePiece model says about its tokenizer, as one value.

The readers of those files (`noria.weights.gguf`, `noria.text.sentencepiece`) know bytes; the builder in `noria.text.tokenizer`
knows tokenizers. They meet here, so that neither imports the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from noria.end_tokens import end_tokens
from noria.text.pretokenizers import pre_tokenizer
from noria.types import LoadError


class TokenType(IntEnum):
    """GGUF's `tokenizer.ggml.token_type`; SentencePiece numbers its pieces the same way."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # never made from plain text, not shown in output
    USER_DEFINED = 4  # matched in plain text before any merge, shown in output
    UNUSED = 5  # a place kept free: neither made nor shown
    BYTE = 6


@dataclass(frozen=True)
class TokenizerSource:
    """A vocabulary and the rules around it. `types` and `scores` run beside `tokens`; ids index `tokens`."""

    kind: Literal["bpe", "spm"]  # byte-level BPE with merges; SentencePiece BPE with scores
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float] = ()  # spm
    merges: Sequence[str] = ()  # bpe: "left right", best first
    pre: str = "default"  # bpe: a name in noria.text.pretokenizers
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False  # spm: a space goes before the text, and before each text after a control token
    charsmap: bytes = b""  # spm: SentencePiece's compiled normaliser; empty is the identity
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    end_ids: tuple[int, ...] = ()  # end-of-turn and end-of-message ids beside `eos_id`
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # by name; the model's own is "default"


_PREFIX = "tokenizer.ggml."
_KINDS: dict[str, Literal["bpe", "spm"]] = {"gpt2": "bpe", "llama": "spm"}


def source_from_gguf(metadata: Mapping[str, Any]) -> TokenizerSource:
    """The tokenizer described by a GGUF file's metadata. Arrays may be lists or anything with `tolist()`.

    Follows the GGUF specification (ggml's docs/gguf.md) and llama.cpp's defaults for absent keys. Raises LoadError for a kind
    of tokenizer that is not known, and for arrays or ids that do not fit each other.
    """
    model = metadata.get(_PREFIX + "model")
    if model not in _KINDS:
        what = "has no tokenizer" if model is None else f"has a tokenizer of kind '{model}'"
        raise LoadError(
            f"the GGUF file {what} (tokenizer.ggml.model); Noria reads 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        )
    kind = _KINDS[model]
    tokens: list[str] = _array(metadata, "tokens")
    if not tokens:
        raise LoadError("the GGUF file has an empty vocabulary (tokenizer.ggml.tokens)")
    types: list[int] = _array(metadata, "token_type") or [int(TokenType.NORMAL)] * len(tokens)
    scores: list[float] = _array(metadata, "scores")
    merges: list[str] = _array(metadata, "merges")
    if len(types) != len(tokens):
        raise LoadError(f"the GGUF file has {len(tokens)} tokens and {len(types)} token types")
    if kind == "spm" and len(scores) != len(tokens):
        raise LoadError(f"the GGUF file has {len(tokens)} tokens and {len(scores)} scores (tokenizer.ggml.scores)")
    if kind == "bpe" and not merges:
        raise LoadError("the GGUF file has a byte-level BPE tokenizer without merges (tokenizer.ggml.merges)")
    pre = str(metadata.get(_PREFIX + "pre", "default"))
    add_bos = pre_tokenizer(pre).add_bos if kind == "bpe" else True
    # SentencePiece models that do not say so have <s> = 1 and </s> = 2; files with byte-level BPE name their ids.
    spm_default = {"bos": 1, "eos": 2, "unknown": 0} if kind == "spm" else {}

    def token_id(name: str) -> int | None:
        value = metadata.get(f"{_PREFIX}{name}_token_id", spm_default.get(name))
        if value is None or int(value) < 0:
            return None
        if int(value) >= len(tokens):
            raise LoadError(f"the GGUF file's {name}_token_id is {value}, and it has {len(tokens)} tokens")
        return int(value)

    named = [token_id("eot"), token_id("eom")]
    ends = end_tokens({i: text for i, text in enumerate(tokens) if types[i] == TokenType.CONTROL})
    return TokenizerSource(
        kind=kind,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=merges,
        pre=pre,
        add_bos=bool(metadata.get(_PREFIX + "add_bos_token", add_bos)),
        add_eos=bool(metadata.get(_PREFIX + "add_eos_token", False)),
        add_space_prefix=bool(metadata.get(_PREFIX + "add_space_prefix", kind == "spm")),
        bos_id=token_id("bos"),
        eos_id=token_id("eos"),
        unk_id=token_id("unknown"),
        pad_id=token_id("padding"),
        end_ids=tuple(dict.fromkeys([i for i in named if i is not None] + ends)),
        chat_templates=_chat_templates(metadata),
    )


def _array(metadata: Mapping[str, Any], name: str) -> list[Any]:
    """A metadata array as a plain list; empty if the key is absent."""
    value = metadata.get(_PREFIX + name, [])
    return value if isinstance(value, list) else list(value.tolist())


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` and its named variants, `tokenizer.chat_template.NAME`."""
    key = "tokenizer.chat_template"
    named = {k.removeprefix(key + "."): str(v) for k, v in metadata.items() if k.startswith(key + ".")}
    return named | ({"default": str(metadata[key])} if key in metadata else {})
