"""A model driven step by step, below the engine: for measurements that want logits, or the time of single ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from noria.backends.base import BLOCK_SIZE, Drawn, StepInputs
from noria.bench.flags import Stages
from noria.config import EngineConfig
from noria.core.plan import NewRow, PlanRow, StepPlan
from noria.models.spec import layer_groups
from noria.runner.build import build_executable, load_model, step_tables
from noria.runner.inputs import step_inputs
from noria.types import ConfigError, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class SteppedModel:
    """A loaded model with rows that are filled by hand. LoadError or ConfigError as `build_engine`.

    Blocks are handed out in order; `reset` takes them all back.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model = load_model(config, Stages(only_long=True))
        self.executable, self.backend = build_executable(config, self.model)
        self.rows = step_tables(config, self.model)
        self._groups = len(layer_groups(self.model.spec))
        self._next_block = 1
        self._lengths: dict[int, int] = {}

    @property
    def vocab_size(self) -> int:
        return self.model.spec.vocab_size

    def reset(self) -> None:
        """Free all rows and blocks."""
        for row in self._lengths:
            self.rows.free(row)
        self._lengths.clear()
        self._next_block = 1

    def take(self, row: int, tokens: Sequence[int], params: SamplingParams = GREEDY) -> None:
        """Give a row these tokens, all known, none computed. ConfigError if the cache has no room for them."""
        blocks = -(-len(tokens) // BLOCK_SIZE)
        last = self._next_block + blocks * self._groups
        if last > self.model.ledger.num_blocks:
            raise ConfigError(f"the KV cache has no room for row {row}: raise --kv-cache-memory-bytes")
        ids = iter(range(self._next_block, last))
        self._next_block = last
        self._lengths[row] = len(tokens)
        self.rows.take(
            NewRow(
                row=row,
                tokens=tuple(tokens),
                prompt_length=len(tokens),
                blocks=tuple(tuple(next(ids) for _ in range(blocks)) for _ in range(self._groups)),
                params=params,
                seed=0,
                stop_ids=(),
            )
        )

    def inputs(self, chunks: Sequence[tuple[int, int, int]], *, samples: bool) -> StepInputs:
        """The inputs of a step of (row, start, count) chunks; with `samples`, each draws a token after its last position."""
        rows = tuple(PlanRow(row=r, start=start, count=count, tokens=(), samples=int(samples)) for r, start, count in chunks)
        return step_inputs(StepPlan(step=0, rows=rows), self.rows)[0]

    def run(self, chunks: Sequence[tuple[int, int, int]], *, samples: bool) -> Drawn:
        return self.executable.run(self.inputs(chunks, samples=samples))

    def prefill(self, row: int) -> None:
        """Compute all of a row's tokens but the last, in steps of the token budget."""
        end, budget = self._lengths[row] - 1, self.config.max_num_batched_tokens
        for start in range(0, end, budget):
            self.run([(row, start, min(budget, end - start))], samples=False)

    def logits(self, row: int, start: int, count: int) -> npt.NDArray[np.float32]:
        """[count, vocab] after each of the positions [start, start + count), which are computed by this."""
        inputs = self.inputs([(row, start, count)], samples=False)
        return self.executable.all_logits(dataclasses.replace(inputs, logit_rows=np.arange(count, dtype=np.int32)))

    def close(self) -> None:
        self.backend.close()
