"""Typed decisions equal the label probabilities that transformers computes, and share one prefill of the state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import RunningServer
from tiny_text import write_tokenizer

import tiny

PATH = "/v1/systemone"
STATE = "A customer wrote: the shirt has a hole in it, and I want my money back. "
QUESTIONS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "Is a refund wanted?"},
    "topic": {
        "type": "choice",
        "instructions": "What about?",
        "criteria": {"damage": "a broken thing", "praise": "", "other": None},
    },
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "annoyed", "furious"]},
    "stars": {"type": "score", "instructions": "How many stars?", "criteria": {"0": "bad", "2.5": "fair", "5": "good"}},
}
LABELS = {"refund": "AB", "topic": "ABC", "anger": "123", "stars": "123"}  # this tokenizer's Yes is three tokens
PROMPTS = {
    "refund": "Question: Is a refund wanted?\nA) yes\nB) no\nAnswer with one of A, B only.",
    "topic": "Question: What about?\nA) damage: a broken thing\nB) praise\nC) other\nAnswer with one of A, B, C only.",
    "anger": "Question: How angry?\n1) calm\n2) annoyed\n3) furious\nAnswer with one of 1, 2, 3 only.",
    "stars": "Question: How many stars?\n1) 0: bad\n2) 2.5: fair\n3) 5: good\nAnswer with one of 1, 2, 3 only.",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("decisions")
    made = tiny.llama(seed=9, max_position_embeddings=1024)
    made.save_pretrained(folder)
    return made, write_tokenizer(folder, chat=False)


@pytest.fixture(scope="module")
def server(model: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ("--quantization", "f32", "--kv-cache-dtype", "f32", "--kv-cache-memory-bytes", "16M")
    with RunningServer.real(str(model[1]), *flags, log=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


def shares(model: Any, text: str, labels: str) -> tuple[Sequence[float], float]:
    """(probabilities of the labels as the next byte, divided by their sum; the sum)."""
    logits = tiny.reference_logits(model, list(text.encode()))[-1].astype(np.float64)
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    found = probabilities[[ord(label) for label in labels]]
    return (found / found.sum()).tolist(), float(found.sum())


def test_answers_are_the_probabilities_of_the_labels(server: RunningServer, model: tuple[Any, Path]) -> None:
    """Red when a label is read from another token or position, an option takes another's share, or the state comes second."""
    answers = server.ok(PATH, {"model": "m", "state": STATE, "questions": QUESTIONS})["answers"]
    assert list(answers) == list(QUESTIONS)
    for name, answer in answers.items():
        expected, coverage = shares(model[0], f"{STATE}\n\n---\n{PROMPTS[name]}\nAnswer:", LABELS[name])
        assert list(answer["probabilities"].values()) == pytest.approx(expected, rel=1e-4)
        assert answer["coverage"] == pytest.approx(coverage, rel=1e-4)
        assert answer["confidence"] == max(answer["probabilities"].values())
        assert answer["type"] == QUESTIONS[name]["type"]
    yes, topic, anger, stars = (answers[name]["probabilities"] for name in QUESTIONS)
    assert answers["refund"]["noul"] == yes["yes"]
    assert answers["topic"]["choice"] == max(topic, key=topic.__getitem__)
    assert answers["anger"]["score"] == pytest.approx(anger["calm"] + 2 * anger["annoyed"] + 3 * anger["furious"])
    assert answers["stars"]["score"] == pytest.approx(2.5 * stars["2.5"] + 5 * stars["5"])


def test_the_state_is_computed_once(server: RunningServer) -> None:
    """Red when each question prefills the state again: then there is no reason to ask them together."""
    state = "0123456789 abc " * 32  # 480 tokens, unlike any state before
    usage = server.ok(PATH, {"model": "m", "state": state, "questions": QUESTIONS})["usage"]
    shared = len(f"{state}\n\n---\nQuestion: ") // 16 * 16
    assert usage["prompt_tokens_details"]["cached_tokens"] >= shared * (len(QUESTIONS) - 1)
    assert usage["completion_tokens"] == len(QUESTIONS)
    assert server.idle()


def test_a_state_may_be_json(server: RunningServer) -> None:
    """Red when an object reaches the model in another form than as JSON."""
    question = {"q": QUESTIONS["anger"]}
    value = {"a": [1, "ü"], "b": None}
    given = server.ok(PATH, {"model": "m", "state": value, "questions": question})
    spelled = server.ok(PATH, {"model": "m", "state": '{"a": [1, "ü"], "b": null}', "questions": question})
    assert given["answers"] == spelled["answers"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"state": " "}, "state"),
        ({"state": None}, "state"),
        ({"state": 5}, "state"),
        ({"state": "x" * 2000}, "state"),
        ({"questions": {}}, "questions"),
        ({"questions": {str(i): QUESTIONS["refund"] for i in range(65)}}, "questions"),
        ({"questions": {"a": {"type": "essay", "instructions": "x"}}}, "questions"),
        ({"questions": {"a": {"type": "choice", "instructions": "x"}}}, "questions"),
        ({"questions": {"a": {"type": "choice", "instructions": "x", "criteria": ["only"]}}}, "questions"),
        ({"questions": {"a": {"type": "choice", "instructions": "x", "criteria": ["b", "b"]}}}, "questions"),
        ({"questions": {"a": {"type": "score", "instructions": "x", "criteria": [str(i) for i in range(27)]}}}, "questions"),
        ({"questions": {"a": {"type": "noul", "instructions": "x", "criteria": {"maybe": "y"}}}}, "questions"),
        ({"questions": {"a": {"type": "noul"}}}, "questions"),
    ],
)
def test_what_is_refused(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    """Red when a question that cannot be answered is answered, or its fault has no name."""
    code = server.refused(PATH, {"model": "m", "state": STATE, "questions": QUESTIONS, **fields}, param=param)["code"]
    assert (code == "context_length_exceeded") == (fields.get("state") == "x" * 2000)
