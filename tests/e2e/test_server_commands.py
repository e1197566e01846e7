"""`noria chat`, `noria run` and `noria doctor MODEL` on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import PACKAGES, RunningServer, text_of

pytestmark = pytest.mark.slow

FLAGS = ["--kv-cache-memory-bytes", "64M", "--max-num-seqs", "4"]


def noria(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "noria.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=text, env=environment(), timeout=120, check=False)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")])}


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def test_run_answers_in_order_and_keeps_going_after_wrong_lines(tiny_folder: Path, tmp_path: Path) -> None:
    """Red if lines are reordered or lost, a wrong one stops the rest, or an answer differs from the server's."""
    messages = [{"role": "user", "content": "Hi"}]
    good = [line(f"good-{i}", prompt=f"line {i}", max_tokens=6, temperature=0, ignore_eos=True) for i in range(12)]
    lines = [
        *good,
        line("chat", "/v1/chat/completions", messages=messages, max_tokens=6),
        line("hot", prompt="x", temperature=9),
        line("stream", prompt="x", stream=True),
        line("where", "/v1/nothing", prompt="x"),
        "not json",
        '{"custom_id": "empty"}',
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines) + "\n\n")
    out = noria("run", str(tiny_folder), str(source), "-o", str(target), *FLAGS)
    assert out.returncode == 1, out.stderr
    assert "5 of 18" in out.stderr
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    assert [a["custom_id"] for a in answers[:16]] == [*(f"good-{i}" for i in range(12)), "chat", "hot", "stream", "where"]
    assert all(a["response"]["status_code"] == 200 for a in answers[:13])
    assert answers[13]["response"]["body"]["error"]["param"] == "temperature"
    assert answers[14]["response"]["body"]["error"]["param"] == "stream"
    assert all(a["error"]["message"] and a["response"] is None for a in answers[15:])
    with RunningServer.real(str(tiny_folder), *FLAGS, log=tmp_path / "log") as server:
        for i, answer in enumerate(answers[:12]):
            body = answer["response"]["body"]
            assert text_of(body) == text_of(server.complete(f"line {i}", max_tokens=6, ignore_eos=True))


def test_run_of_good_lines_exits_0(tiny_folder: Path, tmp_path: Path) -> None:
    """Red if success is not told by the exit status."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", prompt="x", max_tokens=2))
    out = noria("run", str(tiny_folder), str(source), "-o", str(target), *FLAGS)
    assert out.returncode == 0, out.stderr
    assert out.stdout == ""


def test_chat_answers_remembers_and_repeats_with_a_seed(tiny_folder: Path) -> None:
    """Red if history is lost, /reset keeps it, or a seeded conversation differs the next time."""
    talk = "Hello\nAnd again\n/reset\nHello\n/exit\nnever read\n"
    flags = ("--max-tokens", "12", "--seed", "4", *FLAGS)
    first, second = (noria("chat", str(tiny_folder), *flags, text=talk) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    answers = first.stdout.splitlines()
    assert len(answers) >= 3
    assert first.stdout.startswith(answers[0])


def test_chat_with_a_base_model_is_one_line(tiny_folder: Path, tmp_path: Path) -> None:
    """Red if a model without a template is prompted with something invented."""
    base = tmp_path / "base"
    base.mkdir()
    for path in tiny_folder.iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    config = json.loads((base / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    out = noria("chat", str(base), *FLAGS, text="Hi\n")
    assert out.returncode == 1
    assert "chat template" in out.stderr.strip().splitlines()[-1]


def test_doctor_shows_a_models_memory_and_operations(tiny_folder: Path) -> None:
    """Red if the ledger or the op table is missing."""
    out = noria("doctor", str(tiny_folder), *FLAGS)
    assert out.returncode == 0, out.stderr
    for word in ("KV cache", "weights", "linear", "attend", "logits", "llama, 2 layers"):
        assert word in out.stdout
