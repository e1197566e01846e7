"""A Hugging Face folder's tokenizer: `tokenizer.json`, or `tokenizer.model`, with `tokenizer_config.json` beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from noria.text.sentencepiece import Merge, read_sentencepiece
from noria.text.source import TokenizerSource
from noria.text.tokenizer import SPACE_MARK, TokenBytes, Tokenizer, build, byte_level_bytes, spm_bytes
from noria.types import LoadError

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_from_folder(folder: Path, merges_of: Callable[[TokenizerSource], list[Merge]]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises LoadError if it has none that can be read."""
    config = read_json(folder / "tokenizer_config.json")
    named = _named_tokens(folder, config)
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(folder / "tokenizer.json")
        token_bytes, strip_first_space = _decoding(folder, backend)
        prefix, suffix = _template_ids(folder, backend)
    elif (folder / "tokenizer.model").is_file():
        source = read_sentencepiece(folder / "tokenizer.model")
        tokenizer = build(source, merges_of)
        backend = tokenizer.backend
        token_bytes, strip_first_space = spm_bytes, tokenizer.strip_first_space
        prefix, suffix = tokenizer.prefix, tokenizer.suffix
        named = tokenizer.special_tokens | named
    else:
        raise LoadError(_no_tokenizer(folder))

    _add_tokens(backend, config, named)
    ids = {name: backend.token_to_id(text) for name, text in named.items()}
    bos_id, eos_id = ids.get("bos_token"), ids.get("eos_token")
    return Tokenizer(
        backend,
        token_bytes=token_bytes,
        strip_first_space=strip_first_space,
        first_prefix=_take_first_prefix(backend),
        bos_id=bos_id,
        eos_ids=_end_ids(folder, eos_id),
        prefix=_overridden(prefix, bos_id, config.get("add_bos_token")),
        suffix=_overridden(suffix, eos_id, config.get("add_eos_token")),
        special_tokens=named,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file does not exist. LoadError if it is damaged."""
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise LoadError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path} is not a JSON object")
    return value


def _no_tokenizer(folder: Path) -> str:
    slow = [name for name in ("vocab.json", "merges.txt", "spiece.model", "vocab.txt") if (folder / name).is_file()]
    if slow:
        return (
            f"{folder} has only the files of a slow tokenizer ({', '.join(slow)}); make tokenizer.json from them: "
            "transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return f"{folder} has no tokenizer: neither tokenizer.json nor tokenizer.model"


def _read_backend(path: Path) -> Backend:
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise LoadError(f"cannot read {path}: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


# --- special tokens --------------------------------------------------------------------------------------------------------


def _named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token, unk_token and pad_token: strings, or objects with `content`."""
    fallback = read_json(folder / "special_tokens_map.json")
    values = {name: config.get(name) or fallback.get(name) for name in _NAMED}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _add_tokens(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json knows, and mark the named ones as control tokens, as transformers does."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    more: dict[str, AddedToken] = {}
    listed = config.get("added_tokens_decoder") or {}
    for key in sorted(listed, key=int):
        entry = listed[key]
        flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
        normalized = bool(entry.get("normalized", not flags["special"]))
        more[entry["content"]] = AddedToken(entry["content"], normalized=normalized, **flags)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = [entry for entry in extra if isinstance(entry, str)] if isinstance(extra, list) else []
    for text in (*named.values(), *extra):
        token = more.get(text) or known.get(text)
        if token is None or not token.special:
            more[text] = AddedToken(text, special=True, normalized=False)
    changed = [t for t in more.values() if t.content not in known or known[t.content].special != t.special]
    backend.add_tokens(changed)


def _end_ids(folder: Path, eos_id: int | None) -> list[int]:
    """The end ids of generation_config.json and the tokenizer's own."""
    listed = read_json(folder / "generation_config.json").get("eos_token_id")
    ids = listed if isinstance(listed, list) else [listed]
    return [int(i) for i in [*ids, eos_id] if i is not None]


def _overridden(ids: tuple[int, ...], token: int | None, wanted: bool | None) -> tuple[int, ...]:
    """tokenizer.json's ids around a text; an explicit `add_bos_token` or `add_eos_token` has the last word."""
    if wanted is None or token is None:
        return ids
    if not wanted:
        return tuple(i for i in ids if i != token)
    return ids if token in ids else (token, *ids)


def _template_ids(folder: Path, backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts before and after a text, found by encoding a probe."""
    for probe in ("a", "0", "."):
        bare = backend.encode(probe, add_special_tokens=False).ids
        full = backend.encode(probe, add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if bare and full[start : start + len(bare)] == bare:
                return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise LoadError(f"{folder}: the post_processor of tokenizer.json does more than put tokens around a text")


# --- spaces ----------------------------------------------------------------------------------------------------------------


def _take_first_prefix(backend: Backend) -> str:
    """Take the rule "a space before the first text only" out of the library, which knows no text but the one it is given.

    A conversation is encoded in several pieces, and only the first of them is first.
    """
    if backend.pre_tokenizer is None:
        return ""
    found = ""
    for step in _steps(backend.pre_tokenizer):
        state = _state(step)
        if state["type"] == "Metaspace" and state.get("prepend_scheme") == "first":
            step.prepend_scheme = "never"
            found = " "
    return found


def _steps(pre_tokenizer: Any) -> Iterator[Any]:
    """A pre-tokenizer's steps; assignments to their attributes reach the tokenizer."""
    state = _state(pre_tokenizer)
    if state["type"] != "Sequence":
        yield pre_tokenizer
        return
    for i in range(len(state["pretokenizers"])):
        yield from _steps(pre_tokenizer[i])


def _state(component: Any) -> dict[str, Any]:
    """A component of the library as it would stand in tokenizer.json."""
    state: dict[str, Any] = orjson.loads(component.__getstate__())
    return state


def _decoding(folder: Path, backend: Backend) -> tuple[TokenBytes, bool]:
    """What tokenizer.json's decoder means in bytes: each token's bytes, and whether a first space is dropped."""
    if backend.decoder is None:
        raise LoadError(f"{folder}: tokenizer.json has no decoder")
    state = _state(backend.decoder)
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return byte_level_bytes, False
    strip = False
    for step in steps:
        if step["type"] == "Metaspace":
            strip |= step.get("prepend_scheme", "always") != "never"
        elif step["type"] == "Strip":
            strip |= step["content"] == " " and step["start"] > 0
        elif step["type"] == "Replace":
            if step["pattern"].get("String") != SPACE_MARK or step["content"] != " ":
                raise LoadError(f"{folder}: tokenizer.json's decoder replaces {step['pattern']}; Noria knows U+2581 only")
        elif step["type"] not in ("ByteFallback", "Fuse"):
            raise LoadError(f"{folder}: tokenizer.json's decoder has the step '{step['type']}', which Noria does not know")
    if not {"Metaspace", "Replace"} & set(kinds):
        raise LoadError(f"{folder}: tokenizer.json's decoder ({', '.join(kinds)}) is not one of a generating model")
    return spm_bytes, strip
