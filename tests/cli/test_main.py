"""`noria` as a command: what it prints, how fast, how it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import noria
from noria.cli.main import main

PACKAGES = str(Path(noria.__file__).resolve().parents[1])


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([PACKAGES, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "noria.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=text, env=environment, timeout=120, check=False)


def test_help_lists_every_command() -> None:
    """Red if a command is missing from the overview."""
    out = run("--help")
    assert out.returncode == 0
    for command in ("serve", "chat", "run", "pull", "list", "rm", "doctor", "bench"):
        assert command in out.stdout


def test_version_is_one_line() -> None:
    """Red if --version needs a command, or prints more."""
    out = run("--version")
    assert out.returncode == 0
    assert out.stdout.startswith("noria ")
    assert out.stdout.count("\n") == 1


def test_help_loads_nothing_heavy() -> None:
    """Red if `noria --help` or a subcommand's help imports what only running needs."""
    heavy = "numpy", "tokenizers", "starlette", "uvicorn", "zmq", "rich", "jinja2", "huggingface_hub", "prometheus_client"
    code = (
        "import sys; from noria.cli.main import main\n"
        f"try: main(['serve', '--help'])\nexcept SystemExit: pass\nprint([m for m in {heavy} if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": PACKAGES}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert out.stdout.strip().endswith("[]")


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve",),
        ("serve", "no-such-model", "--offline", "--port", "0"),
        ("serve", "/nowhere/x.gguf", "--port", "0"),
        ("serve", "m", "--max-num-seqs", "0"),
        ("chat", "/nowhere/x.gguf"),
        ("run", "/nowhere/x.gguf", "/nowhere/in.jsonl", "-o", "/tmp/out.jsonl"),
        ("doctor", "/nowhere/x.gguf"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_1(arguments: tuple[str, ...]) -> None:
    """Red if a user sees a traceback, or a failure exits 0."""
    out = run(*arguments)
    assert out.returncode == 1
    assert "Traceback" not in out.stderr
    assert out.stderr.strip().splitlines()[-1].startswith("noria: ")


def test_wrong_usage_exits_2() -> None:
    """Red if argparse's errors are swallowed."""
    with pytest.raises(SystemExit) as left:
        main(["nonsense"])
    assert left.value.code == 2


def test_doctor_says_what_was_found() -> None:
    """Red if the tier, the threads or the cache is not told."""
    out = run("doctor")
    assert out.returncode == 0, out.stderr
    for word in ("kernels", "threads", "cache", "version"):
        assert word in out.stdout
