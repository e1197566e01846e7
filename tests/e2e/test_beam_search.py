"""Beam search equals Hugging Face's beams, in Python and over HTTP: float32 weights, float32 KV, tiny random models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RunningServer, until
from tiny_text import IM_END, write_tokenizer

import tiny
from noria import LLM, BeamSearchParams, SamplingParams
from noria.types import RequestError

pytestmark = pytest.mark.slow

STOPS = (40, 201, IM_END)  # end ids, the tokenizer's own among them: random models emit them soon
PROMPTS = ([7, 8, 9, 10, 11], [120, 33, 4], [255] * 20)


class Beams:
    """The same tiny model here and in transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = tiny.llama(seed=11)
        self.model.generation_config.eos_token_id = list(STOPS)
        self.model.save_pretrained(folder)
        self.folder = write_tokenizer(folder)
        self.flags = {"quantization": "f32", "kv_cache_dtype": "f32", "kv_cache_memory_bytes": 16 << 20}

    def reference(
        self, prompt: Sequence[int], width: int, length: int, penalty: float, stops: Sequence[int] = STOPS
    ) -> tuple[list[list[int]], list[float]]:
        """(tokens behind the prompt, scores) of all beams, best first."""
        ids = torch.tensor([list(prompt)])
        out: Any = self.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=length,
            length_penalty=penalty,
            eos_token_id=list(stops) or None,
            pad_token_id=-1,
            return_dict_in_generate=True,
            output_scores=True,
        )
        beams = [[t for t in row[len(prompt) :].tolist() if t != -1] for row in out.sequences]
        return beams, out.sequences_scores.tolist()


@pytest.fixture(scope="module")
def beams(tmp_path_factory: pytest.TempPathFactory) -> Beams:
    return Beams(tmp_path_factory.mktemp("beams"))


@pytest.fixture(scope="module")
def llm(beams: Beams) -> Iterator[LLM]:
    with LLM(str(beams.folder), **beams.flags) as made:
        yield made


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize(("width", "length"), [(4, 12), (2, 8), (8, 30), (3, 1)])
def test_beams_are_those_of_transformers(beams: Beams, llm: LLM, width: int, length: int, penalty: float) -> None:
    """Red when a beam continues another one's text, an end id is taken outside the best `width`, the search ends too early
    or too late, or the length penalty counts another length."""
    params = BeamSearchParams(width, max_tokens=length, length_penalty=penalty, logprobs=0)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        expected, scores = beams.reference(prompt, width, length, penalty)
        assert [list(choice.token_ids) for choice in output.outputs] == expected
        for choice, score in zip(output.outputs, scores, strict=True):
            assert choice.cumulative_logprob == pytest.approx(score * len(choice.token_ids) ** penalty, abs=2e-4)
            assert (choice.finish_reason == "stop") == (choice.token_ids[-1] in STOPS)


def test_the_references_end_in_every_way(beams: Beams) -> None:
    """Red when the models above no longer finish beams by end ids and by length: the comparison would prove less."""
    ends = [beam[-1] in STOPS for prompt in PROMPTS for beam in beams.reference(prompt, 8, 30, 1.0)[0]]
    assert True in ends
    assert False in ends


def test_beams_over_http(beams: Beams, tmp_path: Path) -> None:
    """Red when HTTP samples instead of searching, counts other tokens, or delivers other beams in a stream, or by text."""
    flags = ("--quantization", "f32", "--kv-cache-dtype", "f32", "--kv-cache-memory-bytes", "16M")
    access = tmp_path / "access.jsonl"
    with RunningServer.real(str(beams.folder), *flags, "--access-log", str(access), log=tmp_path / "log") as server:
        expected, _ = beams.reference(PROMPTS[0], 4, 12, 1.0)
        body = server.completion([*map(list, PROMPTS)], n=4, best_of=4, use_beam_search=True, max_tokens=12)
        body |= {"return_token_ids": True, "logprobs": 2, "echo": True}
        out = server.ok("/v1/completions", body)
        assert len(out["choices"]) == 4 * len(PROMPTS)
        assert [choice["token_ids"] for choice in out["choices"][:4]] == expected
        assert out["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in out["choices"])
        assert out["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
        until(lambda: access.exists() and access.read_text())
        assert json.loads(access.read_text().splitlines()[0])["prompt_tokens"] == sum(map(len, PROMPTS))  # once, not a round
        logprobs = out["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(PROMPTS[0]) + len(expected[0])
        assert logprobs["token_logprobs"][0] is None
        _, events, done = server.stream("/v1/completions", body)
        assert done
        streamed = [choice for event in events for choice in event["choices"]]
        assert [choice["token_ids"] for choice in streamed[:4]] == expected
        assert server.metric("noria_request_success_total") == 2 * len(PROMPTS)
        asked = {"n": 3, "use_beam_search": True, "max_tokens": 6, "temperature": None, "return_token_ids": True}
        chat = server.ok("/v1/chat/completions", server.chat("Hi", **asked))
        assert len({tuple(choice["token_ids"]) for choice in chat["choices"]}) == 3
        stop = {"stop_token_ids": [5], "max_tokens": 40}
        server.ok("/v1/completions", server.completion("abc", n=2, use_beam_search=True, **stop))
        refused = {"n": {"n": 19}, "temperature": {"temperature": 0.5}, "top_p": {"top_p": 0.5}, "stop": {"stop": ["a"]}}
        refused |= {"length_penalty": {"length_penalty": 99.0}, "logit_bias": {"logit_bias": {"5": 1}}}
        refused |= {"response_format": {"response_format": {"type": "json_object"}}, "min_tokens": {"min_tokens": 1}}
        for param, fields in refused.items():
            server.refused("/v1/completions", server.completion("abc", use_beam_search=True, **fields), param=param)
        server.refused("/v1/completions", server.completion("abc", length_penalty=2.0), param="length_penalty")
        server.refused("/v1/completions", server.completion("abc", n=2, best_of=3, use_beam_search=True), param="best_of")
        assert server.idle()


def test_one_beam_is_greedy(llm: LLM) -> None:
    """Red when a single beam is anything but the likeliest tokens."""
    greedy = llm.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0.0), use_tqdm=False)
    beam = llm.beam_search(PROMPTS, BeamSearchParams(1, max_tokens=20))
    assert [out.outputs[0].token_ids for out in beam] == [out.outputs[0].token_ids for out in greedy]


def test_a_width_that_cannot_be_searched_exactly_is_refused(llm: LLM) -> None:
    """Red when beams are cut from too few candidates."""
    with pytest.raises(RequestError, match="lower n"):
        llm.beam_search("abc", BeamSearchParams(18))
