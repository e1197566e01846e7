"""The official client must not notice the difference. Red if a response does not parse, or an error's class changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from harness import RunningServer
from tiny_text import write_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").owned_by == "noria"


def test_completion_streamed_and_not(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="m", prompt="The sky is", max_tokens=12, temperature=0, logprobs=2)
    assert whole.usage is not None
    assert whole.choices[0].logprobs is not None
    stream = client.completions.create(model="m", prompt="The sky is", max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_chat_streamed_and_not(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    options = {"model": "m", "messages": messages, "max_completion_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)  # type: ignore[call-overload]
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.choices[0].logprobs.content[0].top_logprobs
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options=usage))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    )
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_errors_have_the_clients_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as told:
        client.completions.create(model="m", prompt="x" * 100_000)
    assert told.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as told:
        client.completions.create(model="m", prompt="x", temperature=5)
    assert told.value.param == "temperature"


async def _stream(url: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        parts = []
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=8, stream=True
        )
        async for chunk in stream:
            parts.append(chunk.choices[0].delta.content or "")
        return "".join(parts)


def test_async_client(server: RunningServer) -> None:
    import asyncio

    assert asyncio.run(_stream(server.url))


def test_error_inside_a_stream_is_raised(tmp_path: Path) -> None:
    """Red if the client takes a broken stream for a complete answer."""
    folder = write_tokenizer(tmp_path / "text")
    with (
        RunningServer.fake(folder, "faulty", log=tmp_path / "log") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(model="fake", prompt="x", max_tokens=50, stream=True)
        with pytest.raises(openai.APIError, match="invariant"):
            list(stream)
