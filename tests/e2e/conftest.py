"""Servers with a real engine: a tiny random model written here, and the catalogue's SmolLM2 where it can be had."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))

from harness import CONTEXT, RunningServer
from tiny_text import BOS, IM_END, write_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights that writes printable ASCII; its ids are bytes; two end ids."""
    import torch

    import tiny

    folder = tmp_path_factory.mktemp("tiny-llama")
    model = tiny.llama(seed=3, max_position_embeddings=CONTEXT)
    with torch.no_grad():
        written = {*range(0x20, 0x7F), IM_END, BOS}
        for token in range(model.config.vocab_size):
            if token not in written:
                model.lm_head.weight[token] = 0.0  # a logit of 0, below the best of the others
    model.generation_config.eos_token_id = [IM_END, BOS]
    model.save_pretrained(folder)
    return write_tokenizer(folder)


@pytest.fixture(scope="session", params=["tiny", "smollm2-135m"])
def model_path(request: pytest.FixtureRequest, tiny_folder: Path) -> str:
    """The model that the cases run on."""
    if request.param == "tiny":
        return str(tiny_folder)
    from noria.types import LoadError
    from noria.weights.hub import cache_directory, resolve_model

    try:
        return str(resolve_model(request.param, cache_directory()).path)
    except LoadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def server(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`noria serve` with a context of 2048 tokens, a small batch and a queue that overflows."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    flags = ["--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", "256M", "--max-num-seqs", "16"]
    flags += ["--max-num-queued-reqs", "128", "--request-timeout-s", "120"]
    with RunningServer.real(model_path, *flags, log=log) as running:
        yield running


@pytest.fixture(scope="session")
def chunked_server(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The same model in chunks of 48 tokens, without the prefix cache."""
    log = tmp_path_factory.mktemp("log") / "chunked.log"
    flags = ["--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", "256M", "--max-num-seqs", "16"]
    flags += ["--max-num-batched-tokens", "48", "--no-enable-prefix-caching"]
    with RunningServer.real(model_path, *flags, log=log) as running:
        yield running
