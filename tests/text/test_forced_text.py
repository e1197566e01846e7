"""What a grammar forces, how it is spelt, and that looking ahead leaves the grammar where it is."""

from __future__ import annotations

import json

import pytest
from grammar_helpers import constraint, masks, vocabulary

from noria.text.constraint import AllowedTokens
from noria.text.forced import Foresight

# In the order of an encoder's merges: na comes before am, so "name" is never spelt with it.
WORDS = vocabulary("na", "me", "name", '":', '":"', "am", '{"', ',"', "x" * 8, ends=2)
SIZE = len(WORDS.tokens)
OBJECT = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["ann", "bob"]}, "namexyz": {"type": "integer"}},
        "required": ["name", "namexyz"],
        "additionalProperties": False,
    }
)


def text(tokens: tuple[int, ...]) -> bytes:
    return b"".join(WORDS.tokens[token] for token in tokens)


def test_keys_are_foreseen_up_to_the_next_choice() -> None:
    """Red when a forced run is missed, goes on beyond a choice, or is not followed while it is being said."""
    one = constraint(WORDS, "json_schema", OBJECT)
    seen = []
    for byte in b'{"name":"ann","namexyz":7}':
        one.accept(byte)
        seen.append(text(one.forced))
    assert seen[0] == b'"name":"'
    assert seen[7] == b'"'
    assert seen[8] == b""  # ann or bob
    assert seen[9] == b'nn","namexyz":'
    assert seen[-3:] == [b"", b"", b""]  # the number's first digit, its next, the end


def test_a_run_is_spelt_as_the_encoder_would() -> None:
    """Red when the longest token is taken where an earlier merge comes first, or a byte of no token is left out silently."""
    spell = Foresight(WORDS).spell
    place = WORDS.tokens.index
    assert spell(b'{"name":"') == (place(b'{"'), place(b"name"), place(b'":"'))
    assert spell(b"ame") == (ord("a"), place(b"me"))
    assert spell("é".encode()) == tuple("é".encode())
    bare = vocabulary("ab")
    holed = Foresight(type(bare)(tuple(b"" if data == b"c" else data for data in bare.tokens), bare.control, bare.ends))
    assert holed.spell(b"abcab") == (bare.tokens.index(b"ab"),)


def test_of_two_tokens_with_the_same_bytes_the_text_has_the_later() -> None:
    """Red when a byte-fallback token is guessed for a character that has a token."""
    doubled = vocabulary("a")
    assert Foresight(doubled).spell(b"aa") == (256, 256)


def test_looking_ahead_changes_no_mask() -> None:
    """Red when the look ahead moves, ends or breaks the matcher that masks are made with."""
    one = constraint(WORDS, "regex", "a(name){300}(x|yz)")
    one.accept(ord("a"))
    plain = constraint(WORDS, "regex", "a(name){300}(x|yz)")
    plain._foresight.text = lambda matcher: b""  # type: ignore[method-assign]
    plain.accept(ord("a"))
    for _ in range(300):
        for token in (WORDS.tokens.index(b"na"), ord("m"), ord("e")):
            assert masks(one, SIZE) == masks(plain, SIZE)
            one.accept(token)
            plain.accept(token)
    assert masks(one, SIZE) == masks(plain, SIZE) == [{ord("x"), ord("y")}]
    assert one.failure is None


def test_the_look_ahead_is_bounded() -> None:
    """Red when a text of a million characters is built whole because a client's grammar forces it."""
    one = constraint(WORDS, "regex", "ax{900000}b")
    one.accept(ord("a"))
    assert text(one.forced) == b"x" * 8 * 32


@pytest.mark.parametrize("expression", ["a[bc]", "a(b|)", "ab?", "a[é-ü]", "a."])
def test_nothing_is_foreseen_where_more_than_one_text_may_follow(expression: str) -> None:
    """Red when a choice, or a possible end, counts as forced."""
    one = constraint(WORDS, "regex", expression)
    one.accept(ord("a"))
    assert text(one.forced) in (b"", "é".encode()[:1])  # the letters from é to ü share their first byte


def test_the_only_allowed_token_is_foreseen() -> None:
    """Red when a list of one token is not, or one of two is."""
    assert set(AllowedTokens([3, 3]).forced) == {3}
    assert AllowedTokens([3, 4]).forced == ()
