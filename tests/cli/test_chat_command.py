"""The conversation of `noria chat`, before a model that a test can steer."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from noria.cli.chat import Conversation
from noria.types import RequestError, SamplingParams


class Model:
    """Answers "one two three ..."; interrupts itself after the second word, if told to."""

    def __init__(self, *, interrupt: bool = False, refuse: bool = False) -> None:
        self.seen: list[list[dict[str, str]]] = []
        self.closed = 0
        self._interrupt = interrupt
        self._refuse = refuse

    def stream_chat(self, messages: Sequence[dict[str, str]], params: SamplingParams) -> Generator[str]:
        self.seen.append([dict(message) for message in messages])
        if self._refuse and len(messages) > 1:
            raise RequestError("the prompt is too long")
        try:
            for i in range(3 if not self._interrupt else 10_000):
                if self._interrupt and i == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                yield f"w{i} "
        finally:
            self.closed += 1


def talk(model: Any, text: str, monkeypatch: pytest.MonkeyPatch, system: str | None = None) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return Conversation(model, SamplingParams(), system).run()


def test_history_grows_and_reset_forgets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if an answer is not remembered, or the system message is forgotten with the rest."""
    model = Model()
    assert talk(model, "a\nb\n/reset\nc\n", monkeypatch, "S") == 0
    roles = [[message["role"] for message in messages] for messages in model.seen]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert model.seen[1][2]["content"] == "w0 w1 w2 "
    assert capsys.readouterr().out == "w0 w1 w2 \n" * 3


def test_interrupt_ends_the_answer_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if Ctrl-C ends the program or raises inside a step, the request runs on, or its text is lost."""
    model = Model(interrupt=True)
    before = signal.getsignal(signal.SIGINT)
    assert talk(model, "a\nb\n", monkeypatch) == 0
    assert model.closed == 2
    assert model.seen[1][1]["content"] == "w0 w1 w2 "
    assert signal.getsignal(signal.SIGINT) is before


def test_refused_turn_is_told_and_not_remembered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a full context ends the program, or the refused message stays in the history."""
    model = Model(refuse=True)
    assert talk(model, "a\nb\nc\n", monkeypatch) == 0
    assert "too long" in capsys.readouterr().err
    assert [message["content"] for message in model.seen[2]] == ["a", "w0 w1 w2 ", "c"]
