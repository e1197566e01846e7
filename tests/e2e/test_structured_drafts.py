"""Structured output and speculation at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from noria import LLM, SamplingParams
from noria.core.speculate import Speculator
from noria.types import StructuredOutput

ITEM = {
    "type": "object",
    "properties": {"name": {"enum": ["alpha", "beta"]}, "value": {"enum": [1, 2]}},
    "required": ["name", "value"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "minItems": 6, "maxItems": 6, "items": ITEM}


@pytest.mark.slow
def test_drafts_under_a_grammar_change_no_bit(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a mask behind a draft is another than the one behind the same token decoded alone, a constraint is not rolled
    back to what was accepted, or forced text is taken without being drawn. Without a setting all drafts are the grammar's."""
    wanted = StructuredOutput(kind="json_schema", value=json.dumps(SCHEMA))

    def answers(speculative: dict[str, Any] | None, **settings: Any) -> tuple[list[Any], int]:
        llm = LLM(str(tiny_folder), cache_dir=str(tmp_path), speculative_config=speculative, max_num_seqs=4, **settings)
        made = []
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                max_tokens=240, temperature=temperature, seed=7, logprobs=1, structured_output=wanted, presence_penalty=0.1
            )
            made += [output.outputs[0] for output in llm.generate(["List:", "Another list of things:"], params)]
        return [(m.text, m.token_ids, m.logprobs) for m in made], llm._engine.stats().spec_accepted_tokens

    with monkeypatch.context() as patches:
        patches.setattr(Speculator, "drafts_for", lambda _, rows, bargain: [()] * len(rows))
        plain, none = answers(None)
    assert none == 0
    for speculative in (None, {"method": "ngram", "num_speculative_tokens": 8}):
        for depth in (0, 1):
            drafted, accepted = answers(speculative, async_depth=depth)
            assert accepted > 0
            assert drafted == plain
    for text, _, _ in plain:
        assert len(json.loads(text)) == 6
