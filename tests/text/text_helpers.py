"""Tokenizers for the tests: the two catalogue models where they have been pulled, and small ones that are always there."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from noria.text.loader import load_tokenizer
from noria.text.source import TokenizerSource, TokenType, source_from_gguf
from noria.text.tokenizer import Tokenizer
from noria.types import LoadError
from noria.weights.catalogue import CATALOGUE
from noria.weights.gguf import GGUFFile
from noria.weights.hub import cache_directory, resolve_model

CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def add(a, b):\n    return a + b  # naïve\n\n\nclass A:\n\tpass\n",
    "Ünïcödé 中文字符 カタカナ 한국어 مرحبا Ελληνικά ёлка 😀👍🏽 e\u0301 \u00ad \u200b",
    "  leading, trailing and     many   spaces   \n\n \n\t\t\r\n 3 1 4 1 5 12345 ½ don't I'LL </s> <html>",
]

TEXTS = [
    *CORPUS,
    "Hello",
    " Hello",
    "  Hello\n",
    "\n",
    " ",
    "\n\n  \n x",
    "https://example.com/a?b=c&d=%20#e",
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';",
    '{"key": [1, 2.5, null], "nested": {"a": "b\\n"}}',
    "👨‍👩‍👧‍👦🏳️‍🌈🇩🇪",
    "ａｂｃ １２３ ﬁ ① ²",
    "a\u0300\u0301\u0302 नमस्ते ไทย ქართული አማርኛ",
    "\ufeffBOM \u2028 line \u00a0 nbsp \u3000 wide",
    "x" * 300,
    " " * 100 + "x" + " " * 37,
    "\n" * 50 + "\t" * 40,
    "\x00\x01\x7f\x80",
    "I've  we'll\tthey'd ISN'T it's 's 'S",
    "<table><tr><td>cell</td></tr></table>\n<unused5>",
    "\U0010ffff\U000e0001",
]


@functools.cache
def source(name: str) -> TokenizerSource:
    """The tokenizer of a catalogue model, skipped where it has not been pulled and cannot be."""
    assert name in CATALOGUE
    try:
        return source_from_gguf(GGUFFile(resolve_model(name, cache_directory()).path).metadata)
    except LoadError as error:
        pytest.skip(str(error))


@functools.cache
def pulled(name: str) -> Tokenizer:
    return load_tokenizer(source(name))


# ids 0 to 4, then those of the other template families
CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
)


@functools.cache
def byte_level() -> Tokenizer:
    """A small byte-level BPE over CORPUS with the control tokens of several chat formats, built as from a GGUF file."""
    return load_tokenizer(byte_level_source())


@functools.cache
def byte_level_source(pre: str = "gpt-2") -> TokenizerSource:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(CONTROL), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [TokenType.CONTROL if text in CONTROL else TokenType.NORMAL for text in tokens]
    merges = [" ".join(merge) for merge in model["merges"]]
    return TokenizerSource(kind="bpe", tokens=tokens, types=types, merges=merges, pre=pre, bos_id=1, eos_id=2)


@functools.cache
def sentencepiece(add_space_prefix: bool = True) -> Tokenizer:
    """A small SentencePiece BPE with byte fallback, Llama's special tokens and a user-defined token."""
    return load_tokenizer(sentencepiece_source(add_space_prefix))


def sentencepiece_source(add_space_prefix: bool = True) -> TokenizerSource:
    backend = Backend(models.BPE())
    pieces = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    # Words keep their space in front, and runs of spaces may become pieces.
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.train_from_iterator([text.replace(" ", "▁") for text in CORPUS[:2]], pieces)
    learned = json.loads(backend.to_str())["model"]["vocab"]
    ordered = sorted(learned, key=learned.__getitem__)
    singles, joined = [t for t in ordered if len(t) == 1], [t for t in ordered if len(t) > 1]
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>"]
    user = ["\n\n", "<think>"]
    tokens = control + user + [f"<0x{byte:02X}>" for byte in range(256)] + joined + singles
    kinds = [TokenType.UNKNOWN] + [TokenType.CONTROL] * 6 + [TokenType.USER_DEFINED] * 2 + [TokenType.BYTE] * 256
    types = kinds + [TokenType.NORMAL] * (len(joined) + len(singles))
    first = len(kinds)
    scores = [0.0] * first + [-float(i) for i in range(len(joined) + len(singles))]
    return TokenizerSource(
        kind="spm",
        tokens=tokens,
        types=types,
        scores=scores,
        add_bos=True,
        add_space_prefix=add_space_prefix,
        bos_id=1,
        eos_id=2,
        unk_id=0,
    )


def huggingface_folder(folder: Path, backend: Backend, **config: Any) -> Path:
    """A folder as `save_pretrained` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}, ensure_ascii=False)
    )
    return folder


def byte_level_backend(source: TokenizerSource, pre: pre_tokenizers.PreTokenizer) -> Backend:
    """The same vocabulary as Hugging Face's converters would write it, with the pre-tokenizer of the model's own file."""
    vocab = {text: i for i, text in enumerate(source.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in source.merges)]
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(source.tokens, source.types, strict=True) if kind == TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    return backend


def transformers_tokenizer(backend: Backend, **names: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)  # type: ignore[no-untyped-call]


def token(tokenizer: Tokenizer, text: str) -> int:
    """The id of the token that is written `text` in the vocabulary."""
    found = tokenizer.backend.token_to_id(text)
    assert found is not None
    return found
