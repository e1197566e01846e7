"""Fixtures: tokenizer folders, and servers before a fake engine, one of each kind for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import RunningServer
from tiny_text import write_tokenizer


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("base"), chat=False)


@pytest.fixture(scope="session")
def server(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A fast fake engine with a context of 512 tokens."""
    with RunningServer.fake(chat_folder, log=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


@pytest.fixture(scope="session")
def slow_server(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Steps of 50 ms, eight sequences at once, a queue of eight."""
    log = tmp_path_factory.mktemp("log") / "slow.log"
    with RunningServer.fake(chat_folder, "slow", log=log, max_num_seqs=8, max_num_queued_reqs=8) as running:
        yield running
