"""ShareGPT files: a JSON list of conversations; the first human turn is a prompt, the answer's length the output's.

[{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}, ...]

What is dropped is what `vllm bench` drops: conversations of fewer than two turns, prompts or answers of fewer than 4 tokens,
prompts over 1,024 and pairs over 2,048 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from noria.bench.workload import Prompt, Session, Turn, WorkloadSpec, arrive
from noria.types import ConfigError

MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048
CHARACTERS_A_TOKEN = 4  # where there is no tokenizer to ask: English text

CountTokens = Callable[[str], int]


def estimate_tokens(text: str) -> int:
    """About how many tokens a text has."""
    return len(text) // CHARACTERS_A_TOKEN


def read_sharegpt(path: Path) -> list[tuple[str, str]]:
    """(prompt, answer) of each conversation that has both, in the file's order. ConfigError for another kind of file."""
    try:
        data: Any = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--dataset-path {path}: not JSON: {error}") from None
    if not isinstance(data, list):
        raise ConfigError(f"--dataset-path {path}: a ShareGPT file holds a list of conversations")
    pairs = []
    for entry in data:
        turns = entry.get("conversations") or entry.get("conversation") if isinstance(entry, dict) else None
        if isinstance(turns, list) and len(turns) >= 2:
            prompt, answer = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
            if isinstance(prompt, str) and isinstance(answer, str):
                pairs.append((prompt, answer))
    if not pairs:
        raise ConfigError(f"--dataset-path {path}: no conversation with two turns ({{'conversations': [{{'value': ...}}]}})")
    return pairs


def sharegpt_sessions(
    path: Path,
    spec: WorkloadSpec,
    *,
    output_len: int | None = None,
    encode: Callable[[str], Prompt] = lambda text: text,
    count: CountTokens = estimate_tokens,
) -> list[Session]:
    """`num_prompts` conversations drawn by the seed; `output_len` replaces the answers' lengths. `encode` makes the prompt."""
    spec.check()
    pairs = read_sharegpt(path)
    random.Random(spec.seed).shuffle(pairs)
    sessions: list[tuple[Turn, ...]] = []
    for prompt, answer in pairs:
        prompt_tokens = count(prompt)
        answer_tokens = output_len or count(answer)
        fits = prompt_tokens <= MAX_PROMPT_TOKENS and prompt_tokens + answer_tokens <= MAX_TOTAL_TOKENS
        if fits and min(prompt_tokens, answer_tokens if output_len is None else MIN_TOKENS) >= MIN_TOKENS:
            sessions.append((Turn(encode(prompt), answer_tokens),))
        if len(sessions) == spec.num_prompts:
            break
    if not sessions:
        raise ConfigError(f"--dataset-path {path}: no conversation is between {MIN_TOKENS} and {MAX_TOTAL_TOKENS} tokens")
    return arrive(sessions, spec)
