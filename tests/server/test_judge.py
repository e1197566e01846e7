"""The judge's process: there while grammars come, gone when none do."""

from __future__ import annotations

import time

import pytest

from noria.server.judge import Judge
from noria.text.grammar import Vocabulary
from noria.types import RequestError, StructuredOutput

VOCABULARY = Vocabulary((*(bytes([b]) for b in range(256)), b""), (256,), (256,))


def regex(value: str) -> StructuredOutput:
    return StructuredOutput(kind="regex", value=value)


@pytest.mark.slow
def test_an_idle_process_is_ended_and_the_next_question_starts_another() -> None:
    """Red when it holds its memory for ever, ends while questions come, or is not started again."""
    judge = Judge(lambda: VOCABULARY, idle_s=0.5)
    try:
        judge.check(regex("[ab]+"))
        first = judge._process
        assert first is not None
        judge.check(regex("[ab]+"))  # known: asks nobody
        deadline = time.monotonic() + 30
        while judge._process is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert judge._process is None
        assert first.wait(10) != 0  # killed
        with pytest.raises(RequestError, match="regular expression"):
            judge.check(regex("[ab"))
        assert judge._process is not None
        assert judge._process.pid != first.pid
    finally:
        judge.close()


@pytest.mark.slow
def test_questions_put_the_end_off() -> None:
    """Red when the process is ended so long after its first question, instead of its last."""
    judge = Judge(lambda: VOCABULARY, idle_s=5.0)
    try:
        judge.check(regex("a"))
        timer = judge._idle
        judge.check(regex("b"))
        assert timer is not None
        assert timer is not judge._idle
        judge._end_if_idle(timer)  # it fires while the second question is on its way
        assert judge._process is not None
    finally:
        judge.close()
    assert judge._idle is not None
    assert judge._idle.finished.is_set()
