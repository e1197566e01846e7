"""Drafts from the text and from earlier outputs, on a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from noria import LLM, SamplingParams
from noria.core.asking import Asking
from noria.core.bargain import Bargain

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


@pytest.fixture(scope="module")
def other_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model of the same vocabulary, and another shape."""
    import tiny

    folder = tmp_path_factory.mktemp("tiny-gemma")
    tiny.gemma(seed=5, max_position_embeddings=160).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("own", [True, False])
def test_a_draft_model_changes_no_bit(
    own: bool, depth: int, tiny_folder: Path, other_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a draft of a model changes a token or a logprob; and when its own drafts are not those of the target."""

    def answers(**settings: Any) -> tuple[list[Any], int, int]:
        llm = LLM(str(tiny_folder), cache_dir=str(tmp_path), max_num_seqs=4, kv_cache_memory_bytes=1 << 20, **settings)
        made = []
        for temperature in (0.0, 0.7):
            for batch in (PROMPTS[:1], PROMPTS * 3):
                params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, logprobs=2, n=2)
                made += [choice for output in llm.generate(batch, params) for choice in output.outputs]
        stats = llm._engine.stats()
        return [(m.text, m.token_ids, m.logprobs) for m in made], stats.spec_draft_tokens, stats.spec_accepted_tokens

    plain, _, none = answers()
    monkeypatch.setattr(Asking, "drafts", lambda self, decodes, wishes: 3 if wishes else 0)  # a model as large does not pay
    monkeypatch.setattr(Bargain, "choose", lambda self, proposals: [len(proposal.drafts) for proposal in proposals])
    monkeypatch.setattr(Bargain, "is_off", lambda self, proposal: False)
    draft = {"method": "draft_model", "model": str(tiny_folder if own else other_folder)}
    drafted, proposed, accepted = answers(speculative_config=draft, async_depth=depth)
    assert none == 0
    assert drafted == plain
    if own:
        assert accepted > 0.9 * proposed > 100
    else:
        assert proposed > 0
        assert accepted < 0.5 * proposed
