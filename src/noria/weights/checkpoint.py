"""One view of the two kinds of checkpoint: a GGUF file, or a folder with config.json and safetensors.

Names, shapes and the configuration are Hugging Face's in both; what differs inside (blocks, rope order, norms stored as w or
1 + w) is named by `source`, and handled where parameters are packed.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from noria.types import LoadError
from noria.weights import safetensors
from noria.weights.files import read_json
from noria.weights.gguf import GGUFFile
from noria.weights.gguf_names import hugging_face_config, hugging_face_generation_config, hugging_face_names
from noria.weights.quantize import RawTensor

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


class Checkpoint(ABC):
    """Weights and configuration of a model on disk, checked when opened. Tensors go by their Hugging Face names."""

    source: Literal["gguf", "safetensors"]
    path: Path
    config: dict[str, Any]  # as config.json; `eos_token_id` is a list here
    generation_config: dict[str, Any]  # as generation_config.json; `eos_token_id` likewise
    weight_files: tuple[Path, ...]

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """All tensors, in the order of the files."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """(outputs, inputs) or (length,). KeyError if there is no such tensor."""

    @abstractmethod
    def raw(self, name: str) -> RawTensor:
        """The tensor as it lies in the file, not copied. KeyError if there is no such tensor."""

    @cached_property
    def fingerprint(self) -> str:
        """BLAKE2b-128 of the weight files' contents, in hex. Reads them once: about a second a gigabyte."""
        digest = hashlib.blake2b(digest_size=16)
        for path in self.weight_files:
            digest.update(path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb") as file:
                while chunk := file.read(4 << 20):
                    digest.update(chunk)
        return digest.hexdigest()


class GGUFCheckpoint(Checkpoint):
    """A single GGUF file. `gguf.metadata` holds its tokenizer: see `noria.weights.gguf`."""

    source = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gguf = GGUFFile(path)
        self.config = hugging_face_config(self.gguf)
        self.generation_config = hugging_face_generation_config(self.gguf)
        self.weight_files = (path,)
        self._names = hugging_face_names(self.gguf)

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.gguf.tensors[self._names[name]].shape

    def raw(self, name: str) -> RawTensor:
        return self.gguf.raw(self._names[name])


class SafetensorsCheckpoint(Checkpoint):
    """A folder as Hugging Face writes it. `tokenizer_files`: those of `TOKENIZER_FILES` that are there, by name."""

    source = "safetensors"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = _read_config(folder)
        self.generation_config = _read_generation_config(folder, self.config)
        self.config["eos_token_id"] = self.generation_config["eos_token_id"]
        files = safetensors.open_folder(folder)
        self.weight_files = tuple(f.path for f in files)
        self._files = {name: file for file in files for name in file.tensors}
        self.tokenizer_files: Mapping[str, Path] = {n: folder / n for n in TOKENIZER_FILES if (folder / n).is_file()}

    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].tensors[name].shape

    def raw(self, name: str) -> RawTensor:
        return self._files[name].raw(name)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`: a folder with config.json and safetensors, or a GGUF file. LoadError if it cannot be loaded."""
    path = Path(path).expanduser().absolute()
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    return GGUFCheckpoint(path)


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").exists():
        raise LoadError(f"{folder}: has no config.json; name a folder that holds a Hugging Face model, or a .gguf file")
    config = read_json(folder / "config.json")
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else "unknown"
        raise LoadError(
            f"{folder / 'config.json'}: weights quantised by {method!r} are not supported; "
            "use the float checkpoint with --quantization, or a GGUF file"
        )
    return config


def _read_generation_config(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json, or nothing; its end ids are joined by those of config.json."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    ids = _token_ids(generation.get("eos_token_id"), path) + _token_ids(config.get("eos_token_id"), folder / "config.json")
    generation["eos_token_id"] = list(dict.fromkeys(ids))
    return generation


def _token_ids(value: object, path: Path) -> list[int]:
    """An `eos_token_id`: an id, a list of ids, or null."""
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise LoadError(f"{path}: eos_token_id is {value!r}; it must be an id or a list of ids")
    return ids
