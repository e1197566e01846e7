"""Labels and the arithmetic of typed decisions, without an engine."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from tiny_text import write_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "text"))

from text_helpers import byte_level, sentencepiece

from noria.server.decisions import LETTERS, LabelMaker, Question, answer_of, options_of
from noria.text.loader import load_tokenizer
from noria.text.tokenizer import Tokenizer
from noria.types import RequestError, TokenLogprobs


def tokenizers(folder: Path) -> list[Tokenizer]:
    return [byte_level(), sentencepiece(), sentencepiece(add_space_prefix=False), load_tokenizer(write_tokenizer(folder))]


@pytest.mark.parametrize(("kind", "count"), [("noul", 2), ("score", 9), ("score", 10), ("choice", 2), ("choice", 26)])
def test_labels_are_single_tokens_and_each_others_opposite(kind: str, count: int, tmp_path: Path) -> None:
    """Red when a label's token is only a part of it, or one token speaks for two options."""
    for tokenizer in tokenizers(tmp_path):
        labels = LabelMaker(tokenizer).labels(kind, count)
        assert len(labels.names) == len(labels.tokens) == count
        assert len(set(labels.all_tokens)) == len(labels.all_tokens)
        for name, tokens in zip(labels.names, labels.tokens, strict=True):
            assert tokens
            for token in tokens:
                assert tokenizer.token_text(token).strip(" ▁").lower() == name.lower()


def test_levels_are_digits_as_far_as_they_reach() -> None:
    """Red when ten levels are cut to nine, or a 1 could also be the beginning of 10."""
    maker = LabelMaker(byte_level())
    assert maker.labels("score", 9).names == tuple("123456789")
    assert maker.labels("score", 10).names == LETTERS[:10]


def test_a_vocabulary_without_labels_is_told() -> None:
    """Red when an option without a token of its own is answered anyhow."""
    maker = LabelMaker(byte_level())
    maker._found["B"] = ()
    with pytest.raises(RequestError, match="single tokens"):
        maker.labels("choice", 3)


def test_probabilities_are_summed_over_spellings_and_survive_tiny_values() -> None:
    """Red when a label counts one spelling only, or probabilities too small for a float become NaN."""
    question = Question(type="choice", instructions="?", criteria=["x", "y"])
    maker = LabelMaker(byte_level())
    maker._found |= {"A": (1, 2), "B": (3,)}
    labels = maker.labels("choice", 2)
    for shift in (0.0, -2000.0):
        logs = tuple(math.log(p) + shift for p in (0.1, 0.2, 0.1))
        answer = answer_of(question, ("x", "y"), labels, TokenLogprobs(1, -1.0, labels.all_tokens, logs))
        assert answer["choice"] == "x"
        assert answer["probabilities"] == pytest.approx({"x": 0.75, "y": 0.25})
        assert answer["coverage"] == pytest.approx(0.4 if shift == 0 else 0.0)


def test_meanings_of_yes_and_no() -> None:
    """Red when the descriptions of a yes/no question are dropped, or change places."""
    question = Question(type="noul", instructions="?", criteria={"no": "not at all"})
    assert options_of(question) == {"yes": "", "no": "not at all"}
