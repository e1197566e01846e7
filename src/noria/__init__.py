"""Noria: an engine that serves large language models.

The public names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from noria.async_engine import AsyncEngine
    from noria.core.engine import Engine
    from noria.llm import LLM, BeamSearchParams, CompletionOutput, RequestOutput
    from noria.types import SamplingParams

__all__ = ["LLM", "AsyncEngine", "BeamSearchParams", "CompletionOutput", "Engine", "RequestOutput", "SamplingParams"]

_MODULES = {
    "LLM": "noria.llm",
    "RequestOutput": "noria.llm",
    "CompletionOutput": "noria.llm",
    "BeamSearchParams": "noria.llm",
    "SamplingParams": "noria.types",
    "Engine": "noria.core.engine",
    "AsyncEngine": "noria.async_engine",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
