"""Drafts from the text and from earlier outputs, on a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from noria import LLM, SamplingParams

PROMPTS = ["One, two, three, one, two, three, one,", "A man, a plan, a canal:", "abcabcabcabcabc"]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("method", ["ngram", "suffix", ["ngram", "suffix"]])
def test_drafts_change_no_bit(method: Any, depth: int, tiny_folder: Path, tmp_path: Path) -> None:
    """Red when a draft changes a token or a logprob, greedy or sampled; the second round finds the first one's answers."""

    def answers(**settings: Any) -> tuple[list[Any], int]:
        llm = LLM(str(tiny_folder), cache_dir=str(tmp_path), max_num_seqs=4, **settings)
        made = []
        for temperature in (0.0, 0.7):
            for batch in (PROMPTS[:1], PROMPTS[:1], PROMPTS, PROMPTS):
                params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, logprobs=2, frequency_penalty=-0.2)
                made += [output.outputs[0] for output in llm.generate(batch, params)]
        return [(m.text, m.token_ids, m.logprobs) for m in made], llm._engine.stats().spec_accepted_tokens

    plain, none = answers()
    drafted, accepted = answers(speculative_config={"method": method}, async_depth=depth)
    assert none == 0
    assert accepted > 0
    assert drafted == plain
