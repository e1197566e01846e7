"""A tiny random GGUF model, written by the tool that writes the big ones, and a place for what is packed of it."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))

from tiny_text import byte_characters

import random_gguf


@pytest.fixture(scope="session")
def tokenizer_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with a byte-level tokenizer and nothing else."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.gguf"
    tokens = [*byte_characters(), "th", "<|im_start|>", "<|im_end|>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(258)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny_gguf(tokenizer_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random Q4_1."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    random_gguf.write(path, random_gguf.SHAPES["tiny"], "Q4_1", tokenizer_gguf)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packed weights of a test are its own."""
    monkeypatch.setenv("NORIA_CACHE", str(tmp_path / "cache"))
    return tmp_path
