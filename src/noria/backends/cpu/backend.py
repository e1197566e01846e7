"""The CPU backend: native kernels over packed weights, a recorded tape, one native call a step. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from noria.backends.base import Drawn, Handle, KVCacheSpec, Ops, StepInputs
from noria.backends.cpu import _native
from noria.backends.cpu.compiler import Compiler
from noria.backends.cpu.kv import SHELF_BLOCKS, KVCache
from noria.backends.cpu.memory import address
from noria.backends.cpu.pages_ahead import PagesAhead
from noria.backends.cpu.recorder import Hidden, Rope, record
from noria.backends.cpu.topology import usable_threads
from noria.types import ConfigError


class CpuBackend:
    """Implements `backends.base.Backend`.

    `threads`: workers, the calling thread included; 0: the physical cores that affinity and control group allow.
    `tier`: the kernels' instruction set, or "auto". ConfigError if this machine cannot run it.
    """

    name = "cpu"

    def __init__(self, *, threads: int = 0, tier: str = "auto") -> None:
        if threads < 0:
            raise ConfigError(f"threads is {threads}: give 0 for the physical cores, or a positive number")
        try:
            self.tier = _native.best_tier(tier)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._pool: _native.Pool | None = _native.Pool(threads or usable_threads())
        self.threads = self._pool.threads
        self._cache: KVCache | None = None
        self._executables: list[CpuExecutable] = []

    def build(
        self,
        forward: Callable[[Ops], Handle],
        *,
        ropes: Sequence[Rope],
        kv: KVCacheSpec,
        max_tokens: int,
        max_rows: int,
        vocab_size: int,
    ) -> CpuExecutable:
        """ValueError where the shapes of the forward pass do not fit together, the cache or the rope tables."""
        if self._pool is None:
            raise ValueError("the backend is closed")
        _check_ropes(ropes)
        ops = record(forward, ropes, kv, vocab_size)
        self._cache = KVCache(kv)
        compiler = Compiler(ops, ropes, self._cache, max_tokens)
        table_positions = kv.max_blocks_per_row * 16
        tape = _native.Tape(
            pool=self._pool,
            tier=self.tier,
            max_tokens=max_tokens,
            max_rows=max_rows,
            table_width=kv.max_blocks_per_row,
            num_blocks=kv.num_blocks,
            max_positions=min((len(cosines) for cosines, _ in ropes), default=table_positions),
            vocab=vocab_size,
            windows=[group.window for group in kv.groups],
        )
        compiler.emit(tape)
        hidden_size = next((op.x.width for op in ops if isinstance(op, Hidden)), 0)
        executable = CpuExecutable(
            tape, self._cache, vocab_size, hidden_size, compiler.arena.nbytes, (compiler.kept, compiler.arena.memory)
        )
        self._executables.append(executable)
        return executable

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self._kv.copy(source, destination)

    def read_block(self, block: int) -> npt.NDArray[np.uint8]:
        return self._kv.read(block)

    def write_block(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        self._kv.write(block, data)

    def close(self) -> None:
        """Ends the executables too. May be called twice."""
        for executable in self._executables:
            executable.close()
        self._executables.clear()
        self._cache = None
        self._pool = None

    @property
    def _kv(self) -> KVCache:
        if self._cache is None:
            raise ValueError("the backend has no cache: build an executable first")
        return self._cache


class CpuExecutable:
    """A tape and everything its addresses point to."""

    def __init__(
        self,
        tape: _native.Tape,
        cache: KVCache,
        vocab_size: int,
        hidden_size: int,
        workspace_bytes: int,
        kept: object,
    ) -> None:
        self.workspace_bytes = workspace_bytes  # of activations; touched as far as steps need it
        self._tape: _native.Tape | None = tape
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size  # 0: the forward pass reports no hidden states
        self._kept = kept
        self._shelf_bytes = SHELF_BLOCKS * cache.spec.block_bytes
        self._pages: PagesAhead | None = PagesAhead(cache.memory)

    def run(self, inputs: StepInputs) -> Drawn:
        draws = inputs.draws
        count = len(draws)
        width = max(int(draws.num_top.max()), 0) if count else 0
        drawn = Drawn(
            token=np.empty(count, np.int32),
            logprob=np.empty(count, np.float32),
            top_tokens=np.empty((count, width), np.int32),
            top_logprobs=np.empty((count, width), np.float32),
            hidden=np.empty((len(inputs.hidden_rows), self._hidden_size), np.float32),
        )
        if (pages := self._pages) is None:
            raise ValueError("the executable is closed")
        pages.begin_step()
        try:
            self.tape.run(inputs, drawn, 0)
        finally:
            pages.end_step((self.tape.highest_block // SHELF_BLOCKS + 1) * self._shelf_bytes)
        return drawn

    def all_logits(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        logits = np.empty((len(inputs.logit_rows), self._vocab_size), np.float32)
        self.tape.run(inputs, None, address(logits))
        return logits

    @property
    def tape(self) -> _native.Tape:
        if self._tape is None:
            raise ValueError("the executable is closed")
        return self._tape

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
        self._pages = None
        self._tape = None
        self._kept = None


def _check_ropes(ropes: Sequence[Rope]) -> None:
    for index, (cosines, sines) in enumerate(ropes):
        if cosines.ndim != 2 or cosines.shape != sines.shape:
            raise ValueError(f"rope table {index}: cos {cosines.shape} and sin {sines.shape} must be [positions, dim / 2]")
