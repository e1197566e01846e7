"""The draft model: what it says, whatever was said before, and what it costs in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tiny
from noria.assembly import build_engine
from noria.config import EngineConfig
from noria.core.plan import NewRow
from noria.runner.build import build_draft_model, load_model
from noria.runner.draft_model import Ask, DraftModel
from noria.types import ConfigError, EngineRequest, LoadError, SamplingParams

PROMPT = tuple(range(40, 70))
Make = Callable[..., DraftModel]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "target"
    tiny.gemma().save_pretrained(path)  # window layers too
    return path


def config(folder: Path, draft: Path | None = None, **settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    if draft is not None:
        defaults["speculative_config"] = {"method": "draft_model", "model": str(draft)}
    values = {"model": str(folder), "cache_dir": str(folder.parent / "cache"), **defaults, **settings}
    return msgspec.convert(values, EngineConfig)


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    """Draft models, closed at the end."""
    made = []

    def build(**settings: Any) -> DraftModel:
        own = config(folder, folder, **settings)
        model = load_model(own, lambda stage: None).draft
        assert model is not None
        made.append(build_draft_model(own, model))
        return made[-1]

    yield build
    for draft in made:
        draft.close()


def new_row(row: int, **params: Any) -> NewRow:
    sampling = SamplingParams(**{"temperature": 0.0} | params)
    return NewRow(row=row, tokens=PROMPT, prompt_length=len(PROMPT), blocks=(), params=sampling, seed=9, stop_ids=())


def ask(row: int, *tokens: int, drafts: int = 5) -> Ask:
    return Ask(row, np.array([*PROMPT, *tokens], np.int32), drafts)


def said_by_the_target(folder: Path, tokens: tuple[int, ...], count: int, **params: Any) -> tuple[int, ...]:
    """What the model itself says behind the prompt and some tokens of its own output."""
    engine = build_engine(config(folder)).engine
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": len(tokens) + count, "seed": 9} | params)
    engine.add(EngineRequest(request_id=1, prompt=PROMPT, params=sampling))
    made: list[int] = []
    while engine.has_work:
        made += [token for output in engine.step() for token in output.tokens]
    engine.close()
    assert tuple(made[: len(tokens)]) == tokens
    return tuple(made[len(tokens) :])


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.7, "top_k": 9, "min_tokens": 12}])
def test_it_says_what_the_same_model_says(params: dict[str, Any], folder: Path, make: Make) -> None:
    """Red when a draft is drawn with another noise, position, stream or other parameters than the token that it guesses."""
    draft = make()
    draft.take(new_row(3, **params))
    expected = said_by_the_target(folder, (), 12, **params)
    first = draft.propose([ask(3)]).tokens[0]
    assert first == expected[:5]
    assert draft.propose([ask(3, *expected[:6], drafts=6)]).tokens[0] == expected[6:]


def test_rejected_drafts_and_rows_that_change_hands_leave_nothing_behind(make: Make) -> None:
    """Red when KV of a guess that did not come true, or of the row's last owner, is read."""
    draft = make()
    draft.take(new_row(0, temperature=1.0))
    draft.propose([ask(0)])
    other = draft.propose([ask(0, 5, 200, 7)]).tokens[0]
    draft.take(new_row(0, temperature=1.0))  # another sequence of the same prompt has the row now
    assert draft.propose([ask(0, 5, 201)]).tokens[0]
    again = draft.propose([ask(0, 5, 200, 7)]).tokens[0]
    fresh = make()
    fresh.take(new_row(0, temperature=1.0))
    assert other == again == fresh.propose([ask(0, 5, 200, 7)]).tokens[0]


def test_rows_together_are_as_rows_alone(make: Make) -> None:
    """Red when rows are mixed up, or one that is asked for fewer drafts cuts the others short."""
    draft, apart = make(max_num_batched_tokens=128), make()
    for row in range(3):
        draft.take(new_row(row, temperature=1.0))
        apart.take(new_row(row, temperature=1.0))
    asks = [ask(0, 9, drafts=1), ask(1, 8, 7, drafts=4), ask(2, drafts=3)]
    together = draft.propose(asks)
    assert [len(d) for d in together.tokens] == [1, 4, 3]
    assert together.tokens == [apart.propose([one]).tokens[0] for one in asks]
    assert together.pass_seconds > 0


def test_who_asks_last_finds_a_row_and_too_many_at_once_do_not(make: Make) -> None:
    """Red when its few rows are a limit for more than the present moment, or a row is taken from another ask."""
    draft = make()
    for row in range(6):
        draft.take(new_row(row))
    drafts = [draft.propose([ask(row)]).tokens[0] for row in range(6)]
    assert len(set(drafts)) == 1
    assert drafts[0]
    many = draft.propose([ask(row) for row in range(6)]).tokens
    assert sorted(map(len, many)) == [0, 0, 5, 5, 5, 5]
    assert set(many) == {(), drafts[0]}


def test_a_long_way_is_gone_in_parts_and_beyond_the_context_nothing_is_said(make: Make) -> None:
    """Red when a pass computes more tokens than its buffers have room for, or a position beyond its tables."""
    draft, whole = make(max_num_batched_tokens=16), make()
    draft.take(new_row(0))
    whole.take(new_row(0))
    answers = [draft.propose([ask(0)]).tokens[0] for _ in range(3)]
    assert answers == [(), whole.propose([ask(0)]).tokens[0], whole.propose([ask(0)]).tokens[0]]
    long = Ask(0, np.resize(np.array(PROMPT, np.int32), 253), 5)
    assert whole.propose([long]).tokens == [()]


def test_it_is_in_the_ledger(folder: Path) -> None:
    """Red when the KV cache is given memory that the draft model takes, or the ledger does not show it."""
    plain, drafted = (load_model(config(folder, draft), lambda stage: None).ledger for draft in (None, folder))
    assert drafted.draft_model > drafted.weights
    assert "draft model" in str(drafted)
    assert "draft model" not in str(plain)
    assert drafted.total >= drafted.kv_cache + drafted.weights + drafted.draft_model


def test_another_vocabulary_and_a_model_that_is_not_there_are_refused(folder: Path, tmp_path: Path) -> None:
    """Red when drafts are ids of another tokenizer, or the fault shows only with the first request."""
    tiny.llama(vocab_size=300).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"300 tokens.* 259.*same vocabulary"):
        build_engine(config(folder, tmp_path / "other"))
    with pytest.raises(LoadError, match="no such file"):
        build_engine(config(folder, tmp_path / "nowhere"))
