"""litellm through its `openai/` provider. Red if an answer does not parse there, or an error loses its class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import RunningServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with RunningServer.real(str(tiny_folder), "--kv-cache-memory-bytes", "64M", log=log) as running:
        yield running


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    """The package, without its look at GitHub for prices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield pytest.importorskip("litellm", reason="litellm is in the test extra")


def options(server: RunningServer) -> dict[str, Any]:
    return {"model": f"openai/{server.model}", "api_base": f"{server.url}/v1", "api_key": "none", "max_retries": 0}


def test_chat_streamed_and_not(litellm: Any, served: RunningServer) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    asked = {**options(served), "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = litellm.completion(**asked, logprobs=True, top_logprobs=2)
    direct = served.ok("/v1/chat/completions", {**served.chat("Say hello.", max_tokens=12)})
    assert whole.choices[0].message.content == direct["choices"][0]["message"]["content"]
    assert whole.usage.completion_tokens == direct["usage"]["completion_tokens"]
    assert whole.choices[0].logprobs.content[0].top_logprobs
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    rebuilt = litellm.stream_chunk_builder(chunks, messages=messages)
    assert rebuilt.choices[0].finish_reason == whole.choices[0].finish_reason


def test_text_completion(litellm: Any, served: RunningServer) -> None:
    asked = {**options(served), "model": f"text-completion-openai/{served.model}", "max_tokens": 8, "temperature": 0}
    out = litellm.text_completion(prompt="The sky is", **asked)
    assert out.choices[0].text == served.complete("The sky is", max_tokens=8)["choices"][0]["text"]


def test_embeddings(litellm: Any, served: RunningServer) -> None:
    texts = ["one", "two words"]
    out = litellm.embedding(input=texts, **options(served))
    direct = served.ok("/v1/embeddings", {"model": served.model, "input": texts})
    assert [item["embedding"] for item in out.data] == [item["embedding"] for item in direct["data"]]
    assert out.usage.prompt_tokens == direct["usage"]["prompt_tokens"]


def test_errors_have_litellms_classes(litellm: Any, served: RunningServer) -> None:
    asked = options(served) | {"messages": [{"role": "user", "content": "x" * 5000}], "max_tokens": 4}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked)
    asked |= {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**asked, temperature=9)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "openai/nobody"})
