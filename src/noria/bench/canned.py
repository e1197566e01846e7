"""An engine that computes nothing: the real one, before a runner that hands out the tokens of a text.

Its process is the engine process of any server, and says what that says on the same channel; each sequence goes through the
text from its own first position on. With a rate, a step ends no sooner than its tokens are due:

    step    | launch .......... sleep ....... | launch .......... sleep ....... |
    tokens                                   64                               128      at `rate` tokens a second

`python -m noria.bench.canned MODEL` is `noria serve` before this engine; of MODEL it needs the tokenizer and the shape.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from noria.config import EngineConfig, ServeConfig
from noria.core.engine import Engine
from noria.core.plan import RowResult, StepPlan, StepResult
from noria.server.wire import EngineFacts, Located
from noria.types import ConfigError

if TYPE_CHECKING:
    from noria.server.engine_process import Report
    from noria.server.loading import LocalEngine

RATE = "NORIA_CANNED_RATE"  # in the environment: tokens a second; 0: as fast as the engine can


class CannedRunner:
    """Runs plans by looking tokens up. `tokens` go round and round; `rate` in tokens a second, 0 for no limit."""

    def __init__(self, tokens: Sequence[int], rate: float) -> None:
        self._tokens = tokens
        self._rate = rate
        self._due = 0.0

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def mask(self, fill: Callable[[int, int], None]) -> None:
        """Nothing is drawn: a constrained request ends with an error as soon as its grammar does not take the text."""

    def wait(self, plan: StepPlan) -> StepResult:
        tokens, count = self._tokens, len(self._tokens)
        rows = []
        for row in plan.rows:
            # Rows begin at places of their own: no two streams say the same at once.
            first = row.row * 97 + row.start + row.count
            made = row.samples + len(row.streams)
            rows.append(RowResult(row=row.row, tokens=tuple([tokens[(first + i) % count] for i in range(made)])))
        if self._rate:
            now = time.monotonic()
            self._due = max(self._due, now - 0.05) + sum(row.samples for row in plan.rows) / self._rate
            time.sleep(max(0.0, self._due - now))
        return StepResult(step=plan.step, rows=tuple(rows))

    def close(self) -> None:
        """There is nothing to free."""


def load_engine(config: EngineConfig, report: Report) -> LocalEngine:
    """The factory of the engine process. Raises LoadError or ConfigError."""
    from noria.backends.base import BLOCK_SIZE
    from noria.bench.text import load_corpus
    from noria.models.registry import family_of
    from noria.models.spec import layer_groups
    from noria.server.loading import LocalEngine, load_text
    from noria.weights.checkpoint import open_checkpoint
    from noria.weights.hub import cache_directory, resolve_model

    cache = cache_directory(config.cache_dir)
    found = resolve_model(config.model, cache, config.offline)
    report(Located(path=str(found.path)))
    checkpoint = open_checkpoint(found.path)
    spec = family_of(checkpoint.config).spec_from_config(checkpoint.config)
    tokenizer = load_text(found.path, cache).tokenizer
    groups = layer_groups(spec)
    length = min(config.max_model_len or spec.context_length, spec.context_length)
    engine = Engine(
        config,
        max_model_len=length,
        groups=groups,
        num_blocks=1 + config.max_num_seqs * len(groups) * -(-length // BLOCK_SIZE),
        model_tag=b"canned",
        runner=CannedRunner(tokenizer.encode(load_corpus(None).text, add_special_tokens=False, parse_special=False), _rate()),
    )
    facts = EngineFacts(
        model=found.name,
        max_model_len=engine.max_model_len,
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_ids,
        fingerprint="fp_canned",
    )
    return LocalEngine(engine, facts)


def _rate() -> float:
    try:
        return float(os.environ.get(RATE, "0"))
    except ValueError:
        raise ConfigError(f"{RATE} must be a number of tokens a second") from None


def main() -> int:
    """Serve, as `noria serve` does."""
    from noria.cli.flags import add_flags, settings
    from noria.server.serve import serve

    parser = argparse.ArgumentParser(description="A server before an engine that computes nothing.")
    add_flags(parser, EngineConfig, ServeConfig)
    engine, server = settings(parser.parse_args(), EngineConfig, ServeConfig)
    assert isinstance(engine, EngineConfig)
    assert isinstance(server, ServeConfig)
    return serve(engine, server, factory="noria.bench.canned:load_engine")


if __name__ == "__main__":
    sys.exit(main())
