"""The rules that hold the architecture: who may import whom, how many settings there are, what the base install loads."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import noria
from noria.config import EngineConfig, ServeConfig

SOURCE = Path(noria.__file__).parent

# A layer may import itself and the layers named here; docs/architecture.md has the same table.
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "end_tokens": set(),
    "config": {"types"},
    "kv": {"types", "models.spec", "core.plan"},
    "core": {"types", "config", "kv", "models.spec"},
    "text": {"types", "end_tokens", "core.constraint"},
    "weights": {"types", "config", "end_tokens"},
    "models": {"types", "weights", "backends.base"},
    "backends": {"types", "config", "models.spec", "weights"},
    "runner": {"types", "config", "core.plan", "backends", "models", "weights"},
    "observe": {"types"},
}
DECISION_HALF = ("kv", "core", "text")
TENSOR_LIBRARIES = {"numpy", "torch", "noria.backends", "noria.runner"}
TORCH_ONLY_IN = "backends/torch"
HEAVY = ("torch", "transformers", "pandas", "scipy", "matplotlib", "fastapi", "pydantic")


def imports(path: Path) -> set[str]:
    """Absolute names of all modules a file imports anywhere, with the imported names appended (a.b and a.b.c)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_a_layer_imports_only_what_lies_below_it(layer: str) -> None:
    """Red when an arrow of the architecture is reversed: kv importing core.engine, core importing the runner."""
    wrong = []
    for path in (p for p in FILES if layer_of(p) == layer):
        for name in imports(path):
            if not name.startswith("noria."):
                continue
            inner = name.removeprefix("noria.")
            fine = any(inner == a or inner.startswith(a + ".") for a in ALLOWED[layer] | {layer})
            package_only = any(a.startswith(inner + ".") for a in ALLOWED[layer])  # `from noria.models import spec`
            if not fine and not package_only and inner.split(".")[0] != layer:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def test_the_decision_half_knows_no_tensors() -> None:
    """Red when kv, core or text imports numpy, torch or a backend."""
    wrong = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in FILES
        if layer_of(path) in DECISION_HALF
        for name in imports(path)
        if any(name == t or name.startswith(t + ".") for t in TENSOR_LIBRARIES)
    ]
    assert not wrong


def test_torch_is_imported_only_by_the_torch_backend() -> None:
    """Red when a base-install file imports torch, even inside a function."""
    wrong = [
        str(path.relative_to(SOURCE))
        for path in FILES
        if TORCH_ONLY_IN not in path.as_posix() and any(n == "torch" or n.startswith("torch.") for n in imports(path))
    ]
    assert not wrong


def test_the_shells_load_no_heavy_library() -> None:
    """Red when importing the server, the engine or the CLI pulls in torch, pydantic or another heavy package."""
    code = (
        "import sys, noria, noria.server.app, noria.core.engine, noria.cli.main, noria.backends.cpu.backend\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_there_are_at_most_45_settings_and_3_environment_variables() -> None:
    """Red when a knob is added past the budget."""
    settings = len(EngineConfig.__struct_fields__) + len(ServeConfig.__struct_fields__)
    assert settings <= 45
    variables = {v for path in FILES for v in re.findall(r"""["'](NORIA_[A-Z_]+)["']""", path.read_text())}
    assert len(variables) <= 3, variables


def test_no_unsafe_serialiser_is_used() -> None:
    """Red when pickle (or eval of data) enters the code base."""
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    wrong = [str(p.relative_to(SOURCE)) for p in FILES if any(n.split(".")[0] in banned for n in imports(p))]
    assert not wrong


def test_no_cuda_build_was_installed() -> None:
    """Red when a dependency brings nvidia packages into a CPU environment."""
    names = [d.metadata["Name"] or "" for d in importlib.metadata.distributions()]
    assert not [n for n in names if n.lower().startswith("nvidia-")]
