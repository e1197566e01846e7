"""langchain-openai: messages, streams, embeddings, tools and structured output. Red if an answer does not parse there.

The model is random: tool calls and structured output are whole because the server enforces their grammar.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from harness import RunningServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with RunningServer.real(str(tiny_folder), "--kv-cache-memory-bytes", "64M", log=log) as running:
        yield running


@pytest.fixture(scope="module")
def langchain_openai() -> Any:
    return pytest.importorskip("langchain_openai", reason="langchain-openai is in the test extra")


@pytest.fixture
def chat(langchain_openai: Any, served: RunningServer) -> Any:
    return langchain_openai.ChatOpenAI(
        model=served.model, base_url=f"{served.url}/v1", api_key="none", temperature=0, max_tokens=400, max_retries=0
    )


@pytest.fixture
def enforced(served: RunningServer) -> None:
    """Skips where this server enforces no schema."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    status, out = served.call("/v1/chat/completions", served.chat("x", max_tokens=1, response_format=schema))
    if status == 400 and "not supported" in out["error"]["message"]:
        pytest.skip("this server has no structured output")


def test_invoke_and_stream(chat: Any, served: RunningServer) -> None:
    short = chat.bind(max_tokens=12)
    messages = [("system", "Be brief."), ("human", "Say hello.")]
    whole = short.invoke(messages)
    assert whole.usage_metadata["output_tokens"] <= 12
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    assert whole.response_metadata["model_name"] == served.model
    chunks = list(short.stream(messages))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.content == whole.content
    assert [answer.content for answer in short.batch([messages, messages])] == [whole.content] * 2


def test_embeddings(langchain_openai: Any, served: RunningServer) -> None:
    embeddings = langchain_openai.OpenAIEmbeddings(
        model=served.model, base_url=f"{served.url}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    direct = served.ok("/v1/embeddings", {"model": served.model, "input": ["one", "two words"]})
    assert embeddings.embed_documents(["one", "two words"]) == [item["embedding"] for item in direct["data"]]
    assert embeddings.embed_query("one") == direct["data"][0]["embedding"]


@pytest.mark.usefixtures("enforced")
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calling(chat: Any, *, stream: bool) -> None:
    """Red when a call's pieces do not join to arguments that fit the tool, or a forced tool is not the one that is called."""
    from langchain_core.tools import tool

    @tool
    def set_light(on: bool, room: str) -> str:
        """Switch the light of a room."""
        return f"{room} {on}"

    rooms = {"type": "string", "enum": ["hall", "kitchen"]}
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}, "room": rooms}, "required": ["on", "room"]}
    schema["additionalProperties"] = False
    definition = {"type": "function", "function": {"name": "set_light", "description": "d", "parameters": schema}}
    bound = chat.bind_tools([definition], tool_choice="set_light")
    if stream:
        chunks = list(bound.stream("Light on in the hall, please."))
        answer = chunks[0]
        for chunk in chunks[1:]:
            answer += chunk
    else:
        answer = bound.invoke("Light on in the hall, please.")
    (call,) = answer.tool_calls
    assert call["name"] == "set_light"
    assert set_light.invoke(call["args"]).split()[0] in ("hall", "kitchen")
    follow_up = [("human", "Light on."), answer, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
    assert chat.bind(max_tokens=4).invoke(follow_up).usage_metadata["output_tokens"] <= 4


@pytest.mark.usefixtures("enforced")
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, method: str) -> None:
    """Red when an answer that must fit a schema does not, by either way that the client asks for it."""
    from enum import StrEnum

    import pydantic

    class Mood(StrEnum):
        good = "good"
        bad = "bad"

    class Review(pydantic.BaseModel):
        """What a customer thinks."""

        mood: Mood
        again: bool

    review = chat.with_structured_output(Review, method=method).invoke("I loved it!")
    assert isinstance(review, Review)


def test_errors_are_the_official_clients(chat: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        chat.bind(temperature=9).invoke("x")
