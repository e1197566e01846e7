"""ChoiceText: text, tokens and offsets that fit each other, streamed or not."""

from __future__ import annotations

from typing import Any

import pytest
import text_helpers as helpers
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.text.output import ChoiceText, TextDelta, prompt_echo
from noria.text.tokenizer import Tokenizer

TEXT = "The quick brown fox — naïve 😀 — jumps over\n\n  the lazy dog."


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=True)


def run(choice: ChoiceText, ids: list[int], size: int = 1, **last: Any) -> list[TextDelta]:
    """Push `ids` in pieces until a stop string or the end."""
    deltas = []
    for start in range(0, len(ids), size):
        finished = start + size >= len(ids)
        deltas.append(choice.push(ids[start : start + size], finished=finished, **(last if finished else {})))
        if deltas[-1].stop is not None:
            break
    return deltas


def joined(deltas: list[TextDelta]) -> tuple[str, int, tuple[int, ...]]:
    return "".join(d.text for d in deltas), sum(d.tokens for d in deltas), tuple(o for d in deltas for o in d.offsets)


@pytest.mark.parametrize("tokenizer", [helpers.byte_level(), helpers.sentencepiece(False)], ids=["byte level", "spm"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_outcome_does_not_depend_on_the_steps(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Red when several tokens in a step give other text, tokens or offsets than one by one, with a stop string or without."""
    ids = encoded(tokenizer, TEXT)
    start = data.draw(st.integers(0, len(TEXT) - 1))
    stops = data.draw(st.sampled_from([[], [TEXT[start : start + 3]], [TEXT[start : start + 5], "\n\n"], ["never"]]))
    size = data.draw(st.integers(1, len(ids)))
    include = data.draw(st.booleans())
    options: dict[str, Any] = {"stops": stops, "include_stop": include, "offsets": True}
    one_by_one = run(ChoiceText(tokenizer, **options), ids)
    assert joined(run(ChoiceText(tokenizer, **options), ids, size)) == joined(one_by_one)
    text, tokens, offsets = joined(one_by_one)
    ends = [(TEXT.find(s) + len(s), len(s)) for s in stops if s in TEXT]
    end, length = min(ends, key=lambda e: (e[0], -e[1])) if ends else (len(TEXT), 0)
    assert text == TEXT[: end if include else end - length]
    # The token that completes the stop string is the last one returned.
    needed = next(n for n in range(len(ids) + 1) if len(tokenizer.decode(ids[:n]).rstrip("\ufffd")) >= end)
    assert tokens == len(offsets) == needed
    assert list(offsets) == sorted(offsets)


def test_tokens_wait_for_their_text() -> None:
    """Red when a stream shows a token, with its logprob, whose text a stop string may still swallow."""
    tokenizer = helpers.byte_level()
    choice = ChoiceText(tokenizer, stops=["abX"], offsets=True)
    a, b, c = (encoded(tokenizer, letter)[0] for letter in "abc")
    assert choice.push([c]) == TextDelta("c", 1, (0,))
    assert choice.push([a]) == TextDelta()
    assert choice.push([b]) == TextDelta()
    assert choice.push([a]) == TextDelta("ab", 2, (1, 2))
    assert choice.push([], finished=True) == TextDelta("a", 1, (3,))


def test_a_stop_string_trims_tokens_after_it() -> None:
    """Red when tokens beyond the stop string are returned, or those of the stop string are lost from the count."""
    tokenizer = helpers.byte_level()
    ids = [encoded(tokenizer, letter)[0] for letter in "cabXdd"]
    delta = ChoiceText(tokenizer, stops=["ab"], offsets=True).push(ids)
    assert delta == TextDelta("c", 3, (0, 1, 1), "ab")  # offsets never lie beyond the returned text
    delta = ChoiceText(tokenizer, stops=["ab"], include_stop=True, offsets=True).push(ids)
    assert delta == TextDelta("cab", 3, (0, 1, 2), "ab")


def test_a_stop_token_counts_and_is_not_shown() -> None:
    """Red when a stop token id of the client's choice appears in the text, or is missing from the tokens."""
    tokenizer = helpers.byte_level()
    ids = [encoded(tokenizer, letter)[0] for letter in "abc"]
    variants: list[dict[str, Any]] = [{}, {"stops": ["zz"]}, {"offsets": True}]
    for options in variants:
        assert joined(run(ChoiceText(tokenizer, **options), ids, stop_token=ids[-1]))[:2] == ("ab", 3)
        shown = ChoiceText(tokenizer, include_stop=True, **options)
        assert joined(run(shown, ids, stop_token=ids[-1]))[:2] == ("abc", 3)


def test_stop_strings_wait_for_min_tokens() -> None:
    """Red when a stop string ends a choice before its `min_tokens` tokens."""
    tokenizer = helpers.byte_level()
    ids = [encoded(tokenizer, letter)[0] for letter in "xaxbxc"]
    assert joined(run(ChoiceText(tokenizer, stops=["x"], min_tokens=3), ids))[:2] == ("xaxb", 5)
    assert joined(run(ChoiceText(tokenizer, stops=["x"]), ids))[:2] == ("", 1)


def test_held_text_comes_at_the_end() -> None:
    """Red when text that might have begun a stop string, or half a character, is lost at the end of a choice."""
    tokenizer = helpers.byte_level()
    smile = encoded(tokenizer, "😀")
    ids = [*encoded(tokenizer, "ab"), *smile[:-1]]
    stops: list[str]
    for stops in ([], ["bX"], ["b\ufffdX"]):
        assert joined(run(ChoiceText(tokenizer, stops=stops), ids))[:2] == (tokenizer.decode(ids), len(ids))


# --- echo ------------------------------------------------------------------------------------------------------------------


PROMPTS = ["The quick", " The quick ", "naïve 😀", "<s>a", ""]


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [*((kind, prompt) for kind in ("byte level", "spm") for prompt in PROMPTS), ("byte level", "中文 <|im_end|> x")],
)
def test_offsets_continue_after_the_echo(kind: str, prompt: str) -> None:
    """Red when an offset counts the prompt twice or not at all, or a token's text is elsewhere than its offset says."""
    tokenizer = helpers.byte_level() if kind == "byte level" else helpers.sentencepiece()
    ids = tokenizer.encode(prompt, add_special_tokens=True, parse_special=True)
    echo = prompt_echo(tokenizer, ids, text=prompt)
    assert echo.text == prompt
    assert len(echo.offsets) == len(ids)
    output = encoded(tokenizer, "brown fox, naïve")
    text, tokens, offsets = joined(run(ChoiceText(tokenizer, prompt=ids, echo=echo, offsets=True), output))
    assert tokens == len(output)
    full = echo.text + text
    places = [*echo.offsets, *offsets]
    assert places == sorted(places)
    for token, place in zip([*ids, *output], places, strict=True):
        shown = tokenizer.token_text(token)
        if shown.isascii() and shown.isalpha():
            assert full[place : place + len(shown)] == shown


def test_a_prompt_of_ids_is_decoded() -> None:
    """Red when an incomplete character at the end of a prompt is shown twice, or control tokens are shown unasked."""
    tokenizer = helpers.byte_level()
    smile = encoded(tokenizer, "😀")
    ids = [1, *encoded(tokenizer, "ab"), *smile[:-1]]
    echo = prompt_echo(tokenizer, ids)
    assert echo.text == "ab"
    assert echo.offsets[0] == 0
    (delta,) = run(ChoiceText(tokenizer, prompt=ids, echo=echo, offsets=True), smile[-1:])
    assert (delta.text, delta.offsets) == ("😀", (2,))
    assert prompt_echo(tokenizer, ids, skip_special_tokens=False).text == "<|im_start|>ab"
