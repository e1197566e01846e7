"""A start token is never doubled. Red if the template's and the tokenizer's start tokens add up, or one gets lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import RunningServer
from tiny_text import BOS, write_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("bos"), bos=True)


def test_one_start_token_however_the_prompt_comes(folder: Path, tmp_path: Path) -> None:
    """Chat, the rendered template as a completion with and without special tokens, and a plain completion."""
    text = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    with RunningServer.fake(folder, log=tmp_path / "log") as server:
        messages = [{"role": "user", "content": "Who are you?"}]
        chat = server.ok("/tokenize", {"messages": messages})["tokens"]
        assert chat.count(BOS) == 1
        assert chat[0] == BOS
        usage = server.ok("/v1/chat/completions", server.chat("Who are you?"))["usage"]
        assert usage["prompt_tokens"] == len(chat)
        for prompt, special in (("<|pad|>" + text, True), ("<|pad|>" + text, False), (text, True)):
            out = server.complete(prompt, add_special_tokens=special, return_token_ids=True)
            assert out["choices"][0]["prompt_token_ids"] == chat
        assert server.complete(text, add_special_tokens=False)["usage"]["prompt_tokens"] == len(chat) - 1
        spelled = server.ok("/tokenize", {"messages": [{"role": "user", "content": "<|pad|><|im_end|>"}]})["tokens"]
        assert spelled.count(BOS) == 1
        assert len(spelled) > len(chat)
