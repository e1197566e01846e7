"""Workloads: lengths, arrivals, shared prefixes, sessions, ShareGPT files."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from noria.bench.sharegpt import read_sharegpt, sharegpt_sessions
from noria.bench.workload import AT_ONCE, WorkloadSpec, arrivals, generate, random_ids, random_words
from noria.types import ConfigError

IDS = random_ids(5000)


def test_the_same_seed_gives_the_same_work() -> None:
    """Red if the content or the arrivals depend on anything but the seed."""
    spec = WorkloadSpec(num_prompts=5, range_ratio=0.5, request_rate=3.0, seed=4)
    assert generate(spec, IDS) == generate(spec, IDS)
    assert generate(spec, IDS) != generate(WorkloadSpec(num_prompts=5, range_ratio=0.5, request_rate=3.0, seed=5), IDS)


def test_lengths_stay_within_the_range() -> None:
    """Red if --random-range-ratio is ignored, or reaches 0 tokens."""
    sessions = generate(WorkloadSpec(num_prompts=200, input_len=10, output_len=1, range_ratio=0.5), IDS)
    inputs = {len(s.turns[0].prompt) for s in sessions}
    assert inputs == set(range(5, 16))
    assert {s.turns[0].max_tokens for s in sessions} == {1}


@pytest.mark.parametrize("shape", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(shape: float) -> None:
    """Red if the gamma distribution has another mean or shape: its coefficient of variation is shape^-1/2."""
    times = arrivals(20000, 8.0, shape, random.Random(1))
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(shape**-0.5, rel=0.04)


def test_an_infinite_rate_is_all_at_once() -> None:
    """Red if requests without a rate are spread over time."""
    assert set(arrivals(5, AT_ONCE, 1.0, random.Random(0))) == {0.0}


def test_shared_prefixes_are_shared_and_the_rest_is_not() -> None:
    """Red if every prompt has a prefix of its own, or all prompts are equal."""
    sessions = generate(WorkloadSpec(dataset="shared-prefix", num_prompts=6, input_len=8, prefix_len=50, num_prefixes=2), IDS)
    prompts = [s.turns[0].prompt for s in sessions]
    assert len({p[:50] for p in prompts}) == 2
    assert len(set(prompts)) == 6
    assert all(len(p) == 58 for p in prompts)


def test_sessions_have_the_turns_that_were_asked_for() -> None:
    """Red if num_prompts counts sessions instead of requests."""
    sessions = generate(WorkloadSpec(dataset="multi-turn", num_prompts=10, num_turns=4), IDS)
    assert [len(s.turns) for s in sessions] == [4, 4, 2]


def test_prompts_of_words_are_text() -> None:
    """Red if a chat endpoint is sent token ids."""
    sessions = generate(WorkloadSpec(num_prompts=2, input_len=7, prefix_len=3), random_words)
    assert all(isinstance(s.turns[0].prompt, str) and len(s.turns[0].prompt.split()) == 10 for s in sessions)


@pytest.mark.parametrize(
    "change",
    [
        {"num_prompts": 0},
        {"range_ratio": 1.0},
        {"request_rate": 0.0},
        {"burstiness": -1.0},
        {"prefix_len": -1},
        {"num_turns": 0},
    ],
)
def test_values_that_make_no_workload_are_refused(change: dict[str, Any]) -> None:
    """Red if such a value hangs, divides by zero or is ignored."""
    with pytest.raises(ConfigError):
        generate(WorkloadSpec(**change), IDS)


def turns(*texts: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": text} for text in texts]}


def test_sharegpt_takes_the_first_exchange(tmp_path: Path) -> None:
    """Red if short conversations are kept, later turns are taken, or what is not a conversation stops it."""
    file = tmp_path / "s.json"
    file.write_text(
        json.dumps([turns("only one"), turns("a question", "an answer", "more"), {"text": "no"}, {"conversations": [1, 2]}])
    )
    assert read_sharegpt(file) == [("a question", "an answer")]


def test_sharegpt_drops_what_vllm_drops(tmp_path: Path) -> None:
    """Red if prompts or answers of a few tokens, or very long ones, are kept. Four characters are a token here."""
    file = tmp_path / "s.json"
    long, fits, answer = "x" * 4 * 1025, "y" * 40, "z" * 80
    file.write_text(json.dumps([turns("hi", answer), turns(fits, "no"), turns(long, answer), turns(fits, answer)]))
    (session,) = sharegpt_sessions(file, WorkloadSpec(num_prompts=9))
    assert session.turns[0].prompt == fits
    assert session.turns[0].max_tokens == 20
    fixed = sharegpt_sessions(file, WorkloadSpec(num_prompts=9), output_len=7)
    assert [s.turns[0].max_tokens for s in fixed] == [7, 7]  # the short answer's length does not matter then


def test_sharegpt_draws_by_the_seed(tmp_path: Path) -> None:
    """Red if the first conversations of the file are always taken."""
    file = tmp_path / "s.json"
    file.write_text(json.dumps([turns(f"question number {i} please", f"the answer is number {i}") for i in range(30)]))
    chosen = [
        [s.turns[0].prompt for s in sharegpt_sessions(file, WorkloadSpec(num_prompts=5, seed=seed))] for seed in (1, 1, 2)
    ]
    assert chosen[0] == chosen[1] != chosen[2]


@pytest.mark.parametrize("content", ["{", "{}", "[]", '[{"conversations": []}]'])
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    """Red if a wrong file gives a traceback or an empty benchmark."""
    file = tmp_path / "s.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="--dataset-path"):
        read_sharegpt(file)
