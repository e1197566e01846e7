"""Tokenizer: text to ids and back, for byte-level BPE and SentencePiece BPE.

Encoding is done by the `tokenizers` library (Rust). Decoding is defined here, over bytes: every token stands for a fixed
byte string, and the text of some ids is the UTF-8 reading of their bytes joined, each maximal invalid part replaced by one
U+FFFD (as `bytes.decode(errors="replace")`). The incremental decoder and the whole-text one agree because both only join
bytes. On text that was encoded, this equals what Hugging Face's decoders give.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Encoding, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from noria.text.pretokenizers import pre_tokenizer
from noria.text.sentencepiece import Merge
from noria.text.source import TokenizerSource, TokenType
from noria.types import LoadError, RequestError

SPACE_MARK = "▁"  # U+2581, a space in SentencePiece vocabularies

# A prompt this long (in characters) is counted in pieces before it is encoded whole: encoding takes some 350 bytes of memory
# a character, and a prompt far over the context need not be encoded to its end to be refused.
_LONG_TEXT = 1 << 18
# A cut between two pieces changes the words beside it; it never adds this many tokens.
_TOKENS_PER_CUT = 256

TokenBytes = Callable[[str], bytes]


class _Table(dict[int, bytes]):
    """The bytes of each token, worked out when first asked for. Ids beyond the vocabulary have none."""

    def __init__(self, of: Callable[[int], bytes]) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, token: int) -> bytes:
        value = self._of(token)
        self[token] = value
        return value


class Tokenizer:
    """A model's tokenizer. Thread-safe; the interpreter lock is released while text is encoded.

    *Control tokens* (`control_ids`) structure a prompt: start and end marks, turn marks. They are made from text only where
    the caller says so (`parse_special`), and are left out of text with `skip_special_tokens`.

    `prefix` and `suffix` are the ids that `add_special_tokens` puts around a text. `special_tokens` holds the texts of
    bos_token, eos_token, unk_token and pad_token, as far as the model has them.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        token_bytes: TokenBytes,
        strip_first_space: bool,
        first_prefix: str = "",
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        special_tokens: dict[str, str] | None = None,
        silent_ids: Iterable[int] = (),
    ) -> None:
        """`first_prefix` goes before a text that begins with neither a space nor an added token; `silent_ids` have no bytes."""
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.prefix = tuple(prefix)
        self.suffix = tuple(suffix)
        self.special_tokens = dict(special_tokens or {})
        self.strip_first_space = strip_first_space
        self._first_prefix = first_prefix
        self._to_bytes = token_bytes
        self._silent = frozenset(silent_ids)

        self._added = backend.get_added_tokens_decoder()
        self._control = {token.content: i for i, token in self._added.items() if token.special}
        self.control_ids = frozenset(self._control.values())
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(self._added, default=-1) + 1)
        self._parsing = backend
        self._plain = _shared(backend, self._added)
        self._finder = _control_finder(self._added)
        # What a text may begin with that makes the library's first piece of it no text: (plain, control tokens read).
        plain = tuple(token.content for token in self._added.values() if not token.special)
        self._no_text = (plain, plain + tuple(self._control))

        self.bytes_of = _Table(self._bytes_of)
        self.visible_bytes_of = _Table(lambda token: b"" if token in self.control_ids else self.bytes_of[token])
        self._with_shown: dict[frozenset[int], _Table] = {}
        self._longest_token = 0

    @property
    def add_bos(self) -> bool:
        """Whether `add_special_tokens` puts the start token before a text."""
        return self.bos_id is not None and self.bos_id in self.prefix

    @property
    def backend(self) -> Backend:
        """The library's tokenizer, which reads control tokens in text."""
        return self._parsing

    @property
    def special_ids(self) -> frozenset[int]:
        return self.control_ids

    # --- text to ids ---------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool, max_tokens: int | None = None) -> list[int]:
        """The ids of `text`.

        With `add_special_tokens`, the model's start (and end) tokens are put around it, unless they are there already. With
        `parse_special`, text that spells a control token becomes it; else it stays text. Raises RequestError for text that
        is not Unicode (half a surrogate pair), and for text of certainly more than `max_tokens` tokens, which is found out
        without encoding all of it.
        """
        return self.encode_batch(
            [text], add_special_tokens=add_special_tokens, parse_special=parse_special, max_tokens=max_tokens
        )[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool, parse_special: bool, max_tokens: int | None = None
    ) -> list[list[int]]:
        """`encode` of several texts, on all cores."""
        if max_tokens is not None:
            for text in texts:
                self.check_length(text, max_tokens)
        if self._first_prefix:
            texts = [self._with_first_prefix(text, parse_special) for text in texts]
        encoded = _encode(self._parsing if parse_special else self._plain, texts)
        return [self._enclosed(ids) for ids in encoded] if add_special_tokens else encoded

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """The ids of a text whose control tokens are given as ids; the strings between them are plain text."""
        texts = [part for part in parts if isinstance(part, str)]
        if self._first_prefix and parts and isinstance(parts[0], str):
            texts[0] = self._with_first_prefix(texts[0], parse_special=False)
        encoded = iter(_encode(self._plain, texts))
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids += next(encoded)
            else:
                ids.append(part)
        return ids

    def split_control(self, text: str) -> list[str | int]:
        """`text` cut at the control tokens that it spells: strings and, in their places, ids."""
        parts: list[str | int] = []
        end = 0
        for start, stop, token in self.find_control(text):
            if start > end:
                parts.append(text[end:start])
            parts.append(token)
            end = stop
        if end < len(text):
            parts.append(text[end:])
        return parts

    def find_control(self, text: str) -> list[tuple[int, int, int]]:
        """Where `text` spells control tokens: (start, end, id), the leftmost and longest ones."""
        found = _batch(self._finder, [text], offsets=True)[0]
        return [(start, end, self._control[token]) for (start, end), token in zip(found.offsets, found.tokens, strict=True)]

    @property
    def control_texts(self) -> tuple[str, ...]:
        return tuple(self._control)

    def control_id(self, text: str) -> int | None:
        return self._control.get(text)

    def _enclosed(self, ids: list[int]) -> list[int]:
        before = self.prefix if tuple(ids[: len(self.prefix)]) != self.prefix else ()
        after = self.suffix if not ids or tuple(ids[-len(self.suffix) :]) != self.suffix else ()
        return [*before, *ids, *after]

    def _with_first_prefix(self, text: str, parse_special: bool) -> str:
        if not text or text[0] in (" ", SPACE_MARK) or text.startswith(self._no_text[parse_special]):
            return text
        return self._first_prefix + text

    def check_length(self, text: str, max_tokens: int) -> None:
        """Refuse a text that certainly has more than `max_tokens` tokens, in time that depends on `max_tokens` only."""
        shrinks = 1 if self._parsing.normalizer is None else 3  # a composed character may replace three
        at_least = len(text) // (shrinks * self.longest_token)
        if at_least > max_tokens:
            raise _too_long(at_least, max_tokens)
        if len(text) <= _LONG_TEXT:
            return
        counted = 0
        for start in range(0, len(text), _LONG_TEXT):
            counted += len(_encode(self._plain, [text[start : start + _LONG_TEXT]])[0]) - _TOKENS_PER_CUT
            if counted > max_tokens:
                raise _too_long(counted, max_tokens)

    @property
    def longest_token(self) -> int:
        """Characters of the longest token, at least 1."""
        if not self._longest_token:
            # One after the other: all names at once would be as large as the vocabulary, and leave the heap that large.
            names = map(self._parsing.id_to_token, range(self.vocab_size))
            self._longest_token = max((len(name) for name in names if name), default=1)
        return self._longest_token

    # --- ids to text ---------------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. A SentencePiece tokenizer's own first space is left out."""
        table = self.visible_bytes_of if skip_special_tokens else self.bytes_of
        data = b"".join(map(table.__getitem__, ids))
        if self.strip_first_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def shown_in(self, texts: str) -> frozenset[int]:
        """The control tokens whose names occur in `texts`."""
        return frozenset(token for name, token in self._control.items() if name in texts)

    def visible_bytes_with(self, shown: frozenset[int]) -> dict[int, bytes]:
        """As `visible_bytes_of`, but the control tokens `shown` have their names. One table for each set, kept."""
        if not shown:
            return self.visible_bytes_of
        if shown not in self._with_shown:
            hidden = self.control_ids - shown
            self._with_shown[shown] = _Table(lambda token: b"" if token in hidden else self.bytes_of[token])
        return self._with_shown[shown]

    def token_bytes(self, token: int) -> bytes:
        """Exactly the bytes that a token stands for, which may be part of a character; of control tokens, their names."""
        return self.bytes_of[token]

    def token_text(self, token: int) -> str:
        """One token's bytes as text, for display: parts of characters become U+FFFD."""
        return self.bytes_of[token].decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        if token in self._silent:
            return b""
        added = self._added.get(token)
        if added is not None:
            # Spelled as text, unlike the tokens of the vocabulary; SentencePiece marks spaces in both.
            text = added.content.replace(SPACE_MARK, " ") if self._to_bytes is spm_bytes else added.content
            return text.encode()
        name = self._parsing.id_to_token(token) if token >= 0 else None
        return b"" if name is None else self._to_bytes(name)


def _too_long(at_least: int, max_tokens: int) -> RequestError:
    return RequestError(
        f"the prompt has at least {at_least} tokens, and there is room for {max_tokens}: shorten it",
        code="context_length_exceeded",
    )


def _encode(backend: Backend, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in _batch(backend, texts)]


def _batch(backend: Backend, texts: Sequence[str], offsets: bool = False) -> list[Encoding]:
    """The library's batch call: only this one releases the interpreter lock, also for one text."""
    encode = backend.encode_batch if offsets else backend.encode_batch_fast
    try:
        return encode(list(texts), add_special_tokens=False)
    except TypeError:
        if any(not _is_unicode(text) for text in texts):
            raise RequestError("a text holds half of a surrogate pair (\\ud800 to \\udfff): it is not Unicode") from None
        raise


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shared(backend: Backend, added: dict[int, AddedToken]) -> Backend:
    """A second tokenizer over the same vocabulary that leaves text alone where it spells a control token."""
    plain = Backend(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    plain.add_tokens([added[i] for i in sorted(added)])
    if {i: t.content for i, t in plain.get_added_tokens_decoder().items()} != {i: t.content for i, t in added.items()}:
        plain = Backend.from_str(backend.to_str())  # ids with gaps: the library cannot number them again
    plain.encode_special_tokens = True
    return plain


def _control_finder(added: dict[int, AddedToken]) -> Backend:
    """A tokenizer that knows control tokens and nothing else: an automaton that finds them all in one pass."""
    finder = Backend(models.BPE({}, []))
    finder.add_special_tokens(
        [
            AddedToken(t.content, single_word=t.single_word, lstrip=t.lstrip, rstrip=t.rstrip, normalized=False)
            for t in added.values()
            if t.special
        ]
    )
    return finder


# --- what a token of the vocabulary stands for ---------------------------------------------------------------------------


def _byte_alphabet() -> dict[int, int]:
    """Byte-level BPE's alphabet (GPT-2): the character that stands for each byte, as a translation of code points to bytes.

    Bytes that are printable characters of Latin-1 stand for themselves, the others for 256, 257, ... in their order. A
    character outside the alphabet is translated beyond Latin-1, so that it cannot pass for a byte.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    outside = dict.fromkeys(others, 0xFFFD)
    return outside | {byte: byte for byte in printable} | {256 + n: byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(text: str) -> bytes:
    """The bytes of a byte-level BPE token; a token that is not written in the alphabet is its own UTF-8."""
    try:
        return text.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def spm_bytes(text: str) -> bytes:
    """The bytes of a SentencePiece token: a byte token is its byte, in others U+2581 is a space."""
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace(SPACE_MARK, " ").encode()


# --- building from a TokenizerSource ---------------------------------------------------------------------------------------


def build(source: TokenizerSource, merges_of: Callable[[TokenizerSource], list[Merge]]) -> Tokenizer:
    """The tokenizer of a GGUF file or a SentencePiece model. `merges_of` gives the merges of a scored vocabulary."""
    backend = _byte_level_backend(source) if source.kind == "bpe" else _spm_backend(source, merges_of(source))
    ids = {"bos_token": source.bos_id, "eos_token": source.eos_id, "unk_token": source.unk_id, "pad_token": source.pad_id}
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_tokens(
        [
            AddedToken(text, special=kind in special, normalized=False)
            for text, kind in zip(source.tokens, source.types, strict=True)
            if (kind in special or kind == TokenType.USER_DEFINED) and text
        ]
    )
    return Tokenizer(
        backend,
        token_bytes=byte_level_bytes if source.kind == "bpe" else spm_bytes,
        strip_first_space=source.kind == "spm" and source.add_space_prefix,
        bos_id=source.bos_id,
        eos_ids=[i for i in (source.eos_id, *source.end_ids) if i is not None],
        prefix=(source.bos_id,) if source.add_bos and source.bos_id is not None else (),
        suffix=(source.eos_id,) if source.add_eos and source.eos_id is not None else (),
        special_tokens={name: source.tokens[i] for name, i in ids.items() if i is not None},
        silent_ids=[i for i, kind in enumerate(source.types) if kind == TokenType.UNUSED],
    )


def _bpe(vocab: dict[str, int], merges: list[Merge], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:  # the library raises plain Exception for a merge of texts that are no tokens
        raise LoadError(f"the tokenizer's merges do not fit its vocabulary: {error}") from None


def _byte_level_backend(source: TokenizerSource) -> Backend:
    pre = pre_tokenizer(source.pre)
    vocab = {text: i for i, text in enumerate(source.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in source.merges)]
    backend = Backend(_bpe(vocab, merges, ignore_merges=pre.ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def _spm_backend(source: TokenizerSource, merges: list[Merge]) -> Backend:
    vocab = {text: i for i, text in enumerate(source.tokens)}
    backend = Backend(
        _bpe(
            vocab,
            merges,
            byte_fallback=TokenType.BYTE in source.types,
            unk_token=None if source.unk_id is None else source.tokens[source.unk_id],
            fuse_unk=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    if source.add_space_prefix:
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
    if source.charsmap:
        steps.insert(0, normalizers.Precompiled(source.charsmap))
    backend.normalizer = normalizers.Sequence(steps)
    return backend
