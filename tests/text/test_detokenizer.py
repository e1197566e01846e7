"""Incremental decoding: whatever the cut, the deltas joined are the whole text."""

from __future__ import annotations

import pytest
import text_helpers as helpers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_helpers import TEXTS

from noria.text.detokenizer import Detokenizer
from noria.text.tokenizer import Tokenizer

KINDS = {
    "byte level": helpers.byte_level(),
    "prefix space": helpers.sentencepiece(),
    "spm": helpers.sentencepiece(False),
}


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """`ids` cut into pieces of the lengths `cuts`, again and again; empty pieces included."""
    found, start, i = [], 0, 0
    while start < len(ids):
        length = cuts[i % len(cuts)] if any(cuts) else 1
        found.append(ids[start : start + length])
        start, i = start + length, i + 1
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_cut_of_any_ids_gives_the_whole_text(kind: str, skip: bool, data: st.DataObject) -> None:
    """Red when a delta depends on the cut: half characters, replacement characters too early, the first space."""
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    deltas = [detokenizer.push(piece) for piece in pieces(ids, data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5)))]
    assert "".join(deltas) + detokenizer.finish() == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_prompt_and_its_continuation_are_one_text(kind: str, data: st.DataObject) -> None:
    """Red when a continuation loses its space, repeats the prompt's end, or breaks a character that the prompt began."""
    tokenizer = KINDS[kind]
    text = data.draw(st.text(alphabet="ab é中😀\n<", max_size=12))
    ids = tokenizer.encode(text, add_special_tokens=True, parse_special=False)
    cut = data.draw(st.integers(0, len(ids)))
    before = Detokenizer(tokenizer)
    shown = before.push(ids[:cut])  # without finish: an incomplete character is not the prompt's to show
    after = Detokenizer(tokenizer, prompt=ids[:cut])
    deltas = [after.push([token]) for token in ids[cut:]] + [after.finish()]
    assert shown + "".join(deltas) == tokenizer.decode(ids)


def bytes_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Ids of the single bytes of `data`."""
    single = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size)) if len(tokenizer.token_bytes(i)) == 1}
    return [single[bytes([byte])] for byte in data]


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_appears_when_its_last_byte_does(kind: str) -> None:
    """Red when an incomplete character is shown as U+FFFD in a delta, or is never given up."""
    tokenizer = KINDS[kind]
    detokenizer = Detokenizer(tokenizer)
    smile = bytes_of(tokenizer, "😀".encode())
    assert [detokenizer.push([token]) for token in smile] == ["", "", "", "😀"]
    assert detokenizer.push(smile[:2]) == ""
    assert detokenizer.push(bytes_of(tokenizer, b"a")) == "\ufffda"
    assert detokenizer.push(smile[:3]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_is_two_replacement_characters(kind: str) -> None:
    """Red when ED A0, which a decoder holds back although nothing can complete it, is one broken character at the end."""
    tokenizer = KINDS[kind]
    half = bytes_of(tokenizer, b"\xed\xa0")
    for ids in (half, [*half, *half], [*half, *bytes_of(tokenizer, b"a")]):
        detokenizer = Detokenizer(tokenizer)
        assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish() == tokenizer.decode(ids)


def test_an_incomplete_character_of_the_prompt_belongs_to_the_prompt() -> None:
    """Red when the prompt's broken character is shown with the output, or swallows some of it."""
    tokenizer = helpers.byte_level()
    smile = bytes_of(tokenizer, "😀".encode())
    broken = Detokenizer(tokenizer, prompt=smile[:2])
    assert broken.push(bytes_of(tokenizer, b"a")) == "a"
    assert broken.push(smile[:1]) + broken.finish() == "\ufffd"
    assert Detokenizer(tokenizer, prompt=smile[:3]).push(smile[3:]) == "😀"
    unused = Detokenizer(tokenizer, prompt=smile[:2])
    assert unused.push([]) + unused.finish() == ""
    half = bytes_of(tokenizer, b"\xed\xa0")
    assert Detokenizer(tokenizer, prompt=half).push(bytes_of(tokenizer, b"a")) == "a"
    mark = bytes_of(tokenizer, "\ufffd".encode())  # a real U+FFFD, begun in the prompt
    assert Detokenizer(tokenizer, prompt=mark[:1]).push(mark[1:]) == "\ufffd"


def test_the_first_space_is_kept_after_a_prompt() -> None:
    """Red when "▁world" after "Hello" loses its space, or keeps it where it begins the text."""
    tokenizer = helpers.sentencepiece()
    the = helpers.token(tokenizer, "▁the")
    hello = tokenizer.encode("fox", add_special_tokens=True, parse_special=False)
    assert Detokenizer(tokenizer, prompt=hello).push([the]) == " the"
    assert Detokenizer(tokenizer).push([the]) == "the"
    assert Detokenizer(tokenizer, prompt=[1]).push([the]) == "the"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_the_real_vocabularies_stream_every_text(name: str) -> None:
    """Red when a token of a real vocabulary has other bytes than the text it came from."""
    tokenizer = helpers.pulled(name)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=True, parse_special=False)
        detokenizer = Detokenizer(tokenizer)
        assert "".join([detokenizer.push([token]) for token in ids]) + detokenizer.finish() == text
