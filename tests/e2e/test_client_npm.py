"""npm's `openai`: the answers that JavaScript sees are those that Python sees. Needs node, npm and its registry."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import RunningServer

pytestmark = pytest.mark.slow

SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const asked = { model: "m", messages: [{ role: "user", content: "Say hello." }], max_tokens: 12, temperature: 0 };
const whole = await client.chat.completions.create(asked);
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
let text = "", usage = null;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const prompt = { model: "m", prompt: "The sky is", max_tokens: 8, temperature: 0, logprobs: 1 };
const completion = await client.completions.create(prompt);
const embedding = await client.embeddings.create({ model: "m", input: ["one", "two words"] });
let error = null;
try {
  await client.chat.completions.create({ ...asked, temperature: 9 });
} catch (e) {
  error = [e.constructor.name, e.status, e.param];
}
console.log(JSON.stringify({
  chat: whole.choices[0].message.content,
  streamed: text,
  total: [whole.usage.total_tokens, usage.total_tokens],
  text: completion.choices[0].text,
  models: (await client.models.list()).data.map((m) => m.id),
  embeddings: embedding.data.map((d) => Array.from(d.embedding)),
  error,
}));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node project with `openai` installed; skips where that cannot be had."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not on this machine")
    made = tmp_path_factory.mktemp("npm")
    (made / "package.json").write_text('{"type": "module"}')
    (made / "client.js").write_text(SCRIPT)
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "openai"]
    try:
        done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not install openai within a minute: is its registry in reach?")
    if done.returncode:
        pytest.skip(f"npm cannot install openai: {(done.stderr.strip().splitlines() or ['?'])[0]}")
    return made


@pytest.fixture(scope="module")
def served(folder: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with RunningServer.real(str(tiny_folder), "--kv-cache-memory-bytes", "64M", log=log) as running:
        yield running


def test_javascript_sees_what_python_sees(folder: Path, served: RunningServer) -> None:
    """Red if the JavaScript client cannot parse an answer, joins a stream to another text, or decodes other numbers."""
    command = ["node", "client.js", served.url]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    chat = served.ok("/v1/chat/completions", served.chat("Say hello.", max_tokens=12))
    vectors = served.ok("/v1/embeddings", {"model": "m", "input": ["one", "two words"]})["data"]
    assert seen["chat"] == seen["streamed"] == chat["choices"][0]["message"]["content"]
    assert seen["total"] == [chat["usage"]["total_tokens"]] * 2
    assert seen["text"] == served.complete("The sky is", max_tokens=8)["choices"][0]["text"]
    assert seen["models"] == ["m"]
    assert seen["embeddings"] == [item["embedding"] for item in vectors]
    assert seen["error"] == ["BadRequestError", 400, "temperature"]
