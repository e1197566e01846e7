"""LLM and AsyncEngine on a tiny model. Red if they answer differently from the server, or leave work behind."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from harness import CONTEXT, RunningServer

from noria import LLM, AsyncEngine, RequestOutput, SamplingParams
from noria.types import ConfigError, LoadError, RequestError, StructuredOutput

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"max_model_len": CONTEXT, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), **SETTINGS) as loaded:
        yield loaded


def test_generate_keeps_the_order_of_more_prompts_than_rows(llm: LLM) -> None:
    """Red if outputs are in the order they finished, or a prompt's answer depends on its neighbours."""
    prompts = [f"prompt number {i}" * (1 + i % 3) for i in range(20)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in alone]
    assert [o.outputs[0].logprobs for o in outputs] == [o.outputs[0].logprobs for o in alone]


def test_outputs_have_vllms_names(llm: LLM) -> None:
    """Red if a field is missing or means something else."""
    output = llm.generate([[72, 105]], GREEDY, use_tqdm=False)[0]
    assert output.prompt is None
    assert output.prompt_token_ids == (72, 105)
    assert output.finished
    choice = output.outputs[0]
    assert (choice.index, choice.finish_reason, len(choice.token_ids)) == (0, "length", 12)
    assert choice.logprobs is not None
    assert choice.text == "".join(
        entry[token].decoded_token for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)
    )
    total = sum(entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids, strict=True))
    assert choice.cumulative_logprob == pytest.approx(total)


def test_one_params_for_each_prompt(llm: LLM) -> None:
    """Red if the first one is used for all, or a wrong number is accepted."""
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (3, 5)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    with pytest.raises(RequestError):
        llm.generate(["a"], params, use_tqdm=False)


def test_stop_string_n_and_seed(llm: LLM) -> None:
    """Red if a stopped request runs on, choices are equal, or the returned seed does not repeat them."""
    text = llm.generate("stop here", GREEDY, use_tqdm=False)[0].outputs[0].text
    stopped = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=12, stop=(text[4:6],)), use_tqdm=False)[0]
    assert stopped.outputs[0].text == text[: text.index(text[4:6])]
    assert stopped.outputs[0].stop_reason == text[4:6]
    first = llm.generate("sample", SamplingParams(n=3, max_tokens=10, ignore_eos=True), use_tqdm=False)[0]
    assert len({choice.text for choice in first.outputs}) == 3
    params = SamplingParams(n=3, max_tokens=10, ignore_eos=True, seed=first.seed)
    assert [c.text for c in llm.generate("sample", params, use_tqdm=False)[0].outputs] == [c.text for c in first.outputs]
    assert not llm._engine.has_work


def test_chat_and_its_stream(llm: LLM) -> None:
    """Red if they differ, or leaving a stream early leaves the request running."""
    messages = [{"role": "user", "content": "Hello"}]
    whole = llm.chat(messages, GREEDY, use_tqdm=False)
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2
    assert "".join(llm.stream_chat(messages, GREEDY)) == whole[0].outputs[0].text
    stream = llm.stream_chat(messages, SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm._engine.has_work


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TOOL = {"type": "function", "function": {"name": "stock", "parameters": object_of(item={"enum": ["bolts", "nuts"]})}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": object_of(a={"enum": [1, 2]})}}


def test_chat_with_tools_and_formats(llm: LLM) -> None:
    """Red if a chat's calls are not parsed, its format is not held, or either is not refused as the server would."""
    messages = [{"role": "user", "content": "How many nuts?"}]
    params = SamplingParams(temperature=0, max_tokens=120)
    options: Any = {"use_tqdm": False, "tools": [TOOL]}
    called = llm.chat(messages, params, tool_choice="required", parallel_tool_calls=False, **options)[0].outputs[0]
    assert called.message is not None
    assert called.message["content"] is None
    [call] = called.message["tool_calls"]
    assert call["function"]["name"] == "stock"
    assert json.loads(call["function"]["arguments"])["item"] in ("bolts", "nuts")
    assert call["function"]["arguments"] in called.text
    held = llm.chat(messages, params, response_format=FORMAT, use_tqdm=False)[0].outputs[0]
    assert held.message is not None
    assert json.loads(held.message["content"])["a"] in (1, 2)
    assert llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].message is None
    for wrong, param in (
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ):
        with pytest.raises(RequestError) as told:
            llm.chat(messages, params, **{**options, **wrong})
        assert told.value.param == param
    twice = SamplingParams(structured_output=StructuredOutput(kind="json_object"))
    with pytest.raises(RequestError, match="both constrain"):
        llm.chat(messages, twice, response_format=FORMAT, use_tqdm=False)


def test_progress_bar_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a batch shows nothing, or writes where results go."""
    llm.generate(["a", "b"], GREEDY)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        ("", GREEDY),
        ([], GREEDY),
        ("x" * 5000, GREEDY),
        ([[9999]], GREEDY),
        ("x", SamplingParams(temperature=float("nan"))),
        ("x", SamplingParams(n=0)),
        ("x", SamplingParams(stop=("",))),
        ("x", SamplingParams(logit_bias={9999: 1.0})),
        ("x", SamplingParams(max_tokens=CONTEXT)),
    ],
)
def test_wrong_requests_raise_before_anything_runs(llm: LLM, prompts: Any, params: SamplingParams) -> None:
    """Red if a value that the server refuses reaches the engine here."""
    with pytest.raises(RequestError):
        llm.generate(prompts, params, use_tqdm=False)
    assert not llm._engine.has_work


def test_wrong_settings_and_models(tiny_folder: Path) -> None:
    """Red if an unknown setting is ignored, or a missing model is a traceback of something else."""
    with pytest.raises(ConfigError, match="max_seqs"):
        LLM(str(tiny_folder), max_seqs=4)
    with pytest.raises(LoadError):
        LLM("/nowhere/model.gguf")


async def collect(engine: AsyncEngine, prompt: str, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params)]


def test_async_engine_grows_its_outputs_and_agrees_with_llm(llm: LLM, tiny_folder: Path) -> None:
    """Red if an output is no continuation of the one before, the last is not finished, or concurrent requests mix."""
    prompts = [f"async {i}" for i in range(8)]

    async def run() -> list[list[RequestOutput]]:
        async with AsyncEngine(str(tiny_folder), **SETTINGS) as engine:
            return await asyncio.gather(*(collect(engine, prompt, GREEDY) for prompt in prompts))

    alone = [output.outputs[0].text for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    for made, text in zip(asyncio.run(run()), alone, strict=True):
        texts = [output.outputs[0].text for output in made]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert texts[-1] == text
        assert [output.finished for output in made] == [False] * (len(made) - 1) + [True]


def test_async_engine_ends_what_is_left(tiny_folder: Path) -> None:
    """Red if leaving a loop leaves the request in the engine, a stop string gives no final output, or the child stays."""

    async def run() -> int:
        async with AsyncEngine(str(tiny_folder), **SETTINGS) as engine:
            async with aclosing(engine.generate("leave", SamplingParams(max_tokens=1500, ignore_eos=True))) as outputs:
                async for _ in outputs:
                    break
            async with asyncio.timeout(5):
                while engine.stats.running:
                    await asyncio.sleep(0.01)
            text = (await collect(engine, "stop", GREEDY))[-1].outputs[0].text
            stopped = await collect(engine, "stop", SamplingParams(temperature=0, max_tokens=12, stop=(text[3:5],)))
            assert stopped[-1].finished
            assert stopped[-1].outputs[0].stop_reason == text[3:5]
            with pytest.raises(RequestError):
                await collect(engine, "x" * 5000, GREEDY)
            chat = [output async for output in engine.chat([{"role": "user", "content": "Hi"}], GREEDY)]
            assert len(chat[-1].outputs[0].token_ids) == 12
            long = SamplingParams(temperature=0, max_tokens=120)
            made = [
                o async for o in engine.chat([{"role": "user", "content": "Hi"}], long, tools=[TOOL], tool_choice="required")
            ]
            message = made[-1].outputs[0].message
            assert message is not None
            assert message["tool_calls"][0]["function"]["name"] == "stock"
            return engine._process.process.pid

    from harness import alive

    assert not alive(asyncio.run(run()))


def test_async_engine_tells_why_it_cannot_start() -> None:
    """Red if a load error in the child is lost."""

    async def run() -> None:
        async with AsyncEngine("/nowhere/model.gguf"):
            pass

    with pytest.raises(LoadError, match="nowhere"):
        asyncio.run(run())


def test_llm_and_server_agree(llm: LLM, tiny_folder: Path, tmp_path: Path) -> None:
    """Red if the same request has another answer over HTTP."""
    flags = ("--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", "64M")
    with RunningServer.real(str(tiny_folder), *flags, log=tmp_path / "log") as server:
        out = server.complete("the same", max_tokens=12, ignore_eos=True, logprobs=2)["choices"][0]
    choice = llm.generate("the same", GREEDY, use_tqdm=False)[0].outputs[0]
    assert out["text"] == choice.text
    assert choice.logprobs is not None
    own = [entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)]
    assert out["logprobs"]["token_logprobs"] == own
