"""What each process loads of a model: the engine process its weights, the HTTP process its tokenizer and template."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from noria.config import EngineConfig
from noria.server.wire import EngineFacts, Located, Stage

if TYPE_CHECKING:
    from noria.core.engine import Engine
    from noria.server.client import EngineClient
    from noria.server.engine_process import Report
    from noria.text.loader import TextModel

SAMPLING_DEFAULTS = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})  # of generation_config.json
PROGRESS_EVERY_S = 1.0  # of a stage that counts to 100 %
_SHARE = re.compile(r"\d+ %")


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may say about the text half: settings of the same names in `ServeConfig`."""

    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


class LocalEngine:
    """An engine of `noria.assembly`, as the engine process wants it."""

    def __init__(self, engine: Engine, facts: EngineFacts) -> None:
        self.engine = engine
        self.facts = facts


def load_engine(config: EngineConfig, report: Report) -> LocalEngine:
    """Find the model, tell the parent where it is, and build the engine. Raises LoadError or ConfigError."""
    from noria.assembly import build_engine
    from noria.observe.version import version
    from noria.weights.hub import cache_directory, resolve_model

    stages = _Stages(report)

    def fetched(done: int, total: int) -> None:
        stages.tell(f"fetching {config.model}: {100 * done // max(total, 1)} % of {total / 2**20:.0f} MiB")

    found = resolve_model(config.model, cache_directory(config.cache_dir), config.offline, fetched)
    report(Located(path=str(found.path)))
    built = build_engine(msgspec.structs.replace(config, model=str(found.path)), progress=stages.tell)
    fingerprint = hashlib.blake2b(built.model_tag + version().encode(), digest_size=5).hexdigest()
    return LocalEngine(
        built.engine,
        EngineFacts(
            model=found.name,
            max_model_len=built.engine.max_model_len,
            vocab_size=built.spec.vocab_size,
            hidden_size=built.spec.hidden_size,
            eos_ids=built.eos_ids,
            fingerprint=f"fp_{fingerprint}",
            sampling_defaults={
                name: value for name, value in built.checkpoint.generation_config.items() if name in SAMPLING_DEFAULTS
            },
            ledger=tuple(str(built.ledger).splitlines()),
        ),
    )


def load_text(path: Path, cache_dir: Path, options: TextOptions | None = None) -> TextModel:
    """The text half of the model at `path`. Raises LoadError; ConfigError for an unreadable template or an unknown format."""
    from noria.text.loader import load_text_model
    from noria.text.source import TokenizerSource, source_from_gguf
    from noria.weights.gguf import GGUFFile

    options = options or TextOptions()
    source: Path | TokenizerSource = path if path.is_dir() else source_from_gguf(GGUFFile(path).metadata)
    return load_text_model(
        source,
        cache_dir=cache_dir,
        chat_template=None if options.chat_template is None else Path(options.chat_template),
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
    )


async def start(
    client: EngineClient,
    cache_dir: Path,
    options: TextOptions,
    *,
    progress: Callable[[str], None] = lambda stage: None,
) -> tuple[EngineFacts, TextModel]:
    """Load the text half here while the engine process loads the rest. Raises LoadError or ConfigError."""

    async def text() -> TextModel:
        path = Path(await client.located)
        loaded = await asyncio.get_running_loop().run_in_executor(None, load_text, path, cache_dir, options)
        progress("tokenizer loaded")
        return loaded

    loading = asyncio.create_task(text())
    try:
        return await client.start(), await loading
    finally:
        loading.cancel()


class _Stages:
    """Passes stages on, but a stage that counts up only now and then."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._last = 0.0

    def tell(self, text: str) -> None:
        """A stage of the start."""
        now = time.monotonic()
        if _SHARE.search(text) and "100 %" not in text and now - self._last < PROGRESS_EVERY_S:
            return
        self._last = now
        self._report(Stage(text=text))
