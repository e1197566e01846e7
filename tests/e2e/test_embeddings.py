"""Embeddings: against transformers, and over HTTP with scores and rankings made of them."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
from harness import RunningServer
from tiny_text import write_tokenizer

import tiny
from noria import LLM
from noria.types import RequestError

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
TEXTS = ["one", "two words", "a text that is longer than a chunk of sixteen tokens, and than the window", "one"]
FLAGS = ("--quantization", "f32", "--kv-cache-dtype", "f32", "--kv-cache-memory-bytes", "16M")
Float32 = npt.NDArray[np.float32]


def reference(model: Any, text: str, pooling: str) -> Float32:
    """The pooled hidden states behind the last norm, of length 1, by transformers."""
    with torch.inference_mode():
        hidden = model.model(torch.tensor([list(text.encode())])).last_hidden_state[0]
    pooled = hidden.mean(dim=0) if pooling == "mean" else hidden[-1]
    vector: Float32 = (pooled / pooled.norm()).numpy()
    return vector


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("embedding")
    made = tiny.llama(seed=5)
    made.save_pretrained(folder)
    return made, write_tokenizer(folder)


@pytest.fixture(scope="module")
def server(model: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with RunningServer.real(str(model[1]), *FLAGS, "--max-num-seqs", "4", "--max-num-queued-reqs", "8", log=log) as running:
        yield running


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_embeddings_are_those_of_transformers(family: str, backend: str, pooling: Any, tmp_path: Path) -> None:
    """Red when hidden states are taken before the last norm, a position is left out by a chunk, or a vector is not scaled."""
    made: Any = getattr(tiny, family)(seed=5)
    made.save_pretrained(tmp_path)
    settings = {"quantization": "f32", "kv_cache_dtype": "f32", "kv_cache_memory_bytes": 16 << 20, "backend": backend}
    with LLM(str(write_tokenizer(tmp_path)), max_num_batched_tokens=16, **settings) as llm:
        vectors = llm.embed(TEXTS, pooling=pooling, use_tqdm=False)
        expected = np.stack([reference(made, text, pooling) for text in TEXTS])
        np.testing.assert_allclose(vectors, expected, atol=2e-5)
        short = llm.embed(TEXTS[1], pooling=pooling, dimensions=10, use_tqdm=False)
        cut = expected[1, :10]
        np.testing.assert_allclose(short, [cut / np.linalg.norm(cut)], atol=2e-5)
        with pytest.raises(RequestError, match="dimensions"):
            llm.embed("x", dimensions=65)


def test_every_form_of_input_and_of_output(server: RunningServer, model: tuple[Any, Path]) -> None:
    """Red when base64 is not the float32 of the numbers, an index is not the input's, or ids and text differ."""

    def embed(given: Any, **fields: Any) -> Any:
        return server.ok(EMBEDDINGS, {"model": "m", "input": given, **fields})

    out = embed(TEXTS)
    assert [(item["object"], item["index"]) for item in out["data"]] == [("embedding", i) for i in range(4)]
    assert out["usage"] == {"prompt_tokens": sum(map(len, TEXTS)), "total_tokens": sum(map(len, TEXTS))}
    vectors = [item["embedding"] for item in out["data"]]
    assert vectors[0] == vectors[3] != vectors[1]
    for vector, text in zip(vectors, TEXTS, strict=True):
        np.testing.assert_allclose(vector, reference(model[0], text, "mean"), atol=2e-5)
    for item, vector in zip(embed(TEXTS, encoding_format="base64")["data"], vectors, strict=True):
        assert list(struct.unpack(f"<{len(vector)}f", base64.b64decode(item["embedding"]))) == vector
    ids = [list(text.encode()) for text in TEXTS]
    assert [item["embedding"] for item in embed(ids)["data"]] == vectors
    assert embed(ids[2])["data"][0]["embedding"] == embed(TEXTS[2])["data"][0]["embedding"] == vectors[2]
    cut = embed(TEXTS[2], dimensions=4)["data"][0]["embedding"]
    assert math.fsum(x * x for x in cut) == pytest.approx(1, abs=1e-6)
    assert cut == pytest.approx([x / math.dist(vectors[2][:4], [0] * 4) for x in vectors[2][:4]], abs=1e-6)
    last = embed(TEXTS[1], pooling="last")["data"][0]["embedding"]
    np.testing.assert_allclose(last, reference(model[0], TEXTS[1], "last"), atol=2e-5)
    plain = embed("<|im_end|>")
    assert plain["usage"]["prompt_tokens"] == len("<|im_end|>")  # text that spells a control token


def test_more_inputs_than_the_queue_holds(server: RunningServer) -> None:
    """Red when one call's inputs overflow the engine's queue, or are answered in another order."""
    texts = [f"text {i}" for i in range(60)]
    many = server.ok(EMBEDDINGS, {"model": "m", "input": texts})
    for i in (0, 31, 59):
        one = server.ok(EMBEDDINGS, {"model": "m", "input": texts[i]})
        assert one["data"][0]["embedding"] == many["data"][i]["embedding"]
    assert server.idle()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 65}, "dimensions"),
        ({"dimensions": "4"}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [259]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": None}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [7] * 257}, "input"),
        ({"priority": 1}, "priority"),
    ],
)
def test_what_is_refused(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    """Red when a wrong field costs the engine work, or is told as another one's fault."""
    server.refused(EMBEDDINGS, {"model": "m", "input": "x", **fields}, param=param)


def test_a_text_beyond_the_context(server: RunningServer) -> None:
    """Red when a long text is cut in silence, or cannot be cut when that is asked for."""
    text = "x" * 300
    error = server.refused(EMBEDDINGS, {"model": "m", "input": text})
    assert error["code"] == "context_length_exceeded"
    whole = server.ok(EMBEDDINGS, {"model": "m", "input": text, "truncate_prompt_tokens": -1})
    assert whole["usage"]["prompt_tokens"] == 256
    server.refused(EMBEDDINGS, {"model": "other", "input": "x"}, status=404)


def test_scores_are_cosines(server: RunningServer) -> None:
    """Red when a pair is scored with another pair's text, or a text with itself is not 1."""
    vectors = [np.array(item["embedding"]) for item in server.ok(EMBEDDINGS, {"model": "m", "input": TEXTS})["data"]]
    out = server.ok(SCORE, {"model": "m", "text_1": TEXTS[0], "text_2": TEXTS})
    assert [item["index"] for item in out["data"]] == [0, 1, 2, 3]
    scores = [item["score"] for item in out["data"]]
    assert scores == pytest.approx([float(vectors[0] @ vector) for vector in vectors], abs=1e-6)
    assert scores[0] == scores[3] == pytest.approx(1, abs=1e-6)
    pairs = server.ok(SCORE, {"model": "m", "text_1": TEXTS[:2], "text_2": [TEXTS[2], TEXTS[1]]})
    assert [item["score"] for item in pairs["data"]] == pytest.approx([scores[2], 1.0], abs=1e-6)
    server.refused(SCORE, {"model": "m", "text_1": TEXTS[:2], "text_2": TEXTS}, param="text_1")
    server.refused(SCORE, {"model": "m", "text_1": "a", "text_2": []}, param="text_2")


def test_documents_are_ranked(server: RunningServer) -> None:
    """Red when the order is not by falling score, an index is not the document's, or top_n cuts the best."""
    body = {"model": "m", "query": TEXTS[1], "documents": TEXTS}
    results = server.ok(RERANK, body)["results"]
    scores = server.ok(SCORE, {"model": "m", "text_1": TEXTS[1], "text_2": TEXTS})["data"]
    assert sorted(result["index"] for result in results) == [0, 1, 2, 3]
    assert [result["relevance_score"] for result in results] == sorted((s["score"] for s in scores), reverse=True)
    assert results[0]["index"] == 1
    assert all(result["document"] == {"text": TEXTS[result["index"]]} for result in results)
    assert [r["index"] for r in results if r["index"] in (0, 3)] == [0, 3]  # equal scores
    short = server.ok(RERANK, {**body, "top_n": 2, "return_documents": False})["results"]
    assert short == [{k: v for k, v in result.items() if k != "document"} for result in results[:2]]
    server.refused(RERANK, {**body, "documents": []}, param="documents")


def test_the_official_client_decodes_them(server: RunningServer) -> None:
    """Red when the client, which asks for base64 by itself, reads other numbers than it was sent."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        decoded = client.embeddings.create(model="m", input=TEXTS)
        floats = client.embeddings.create(model="m", input=TEXTS, encoding_format="float")
        assert [item.embedding for item in decoded.data] == [item.embedding for item in floats.data]
        with pytest.raises(openai.BadRequestError) as told:
            client.embeddings.create(model="m", input="x" * 300)
        assert told.value.code == "context_length_exceeded"
