"""Types of the native module (native/bindings.cpp). Addresses are integers; the caller keeps the memory alive."""

from typing import Any

from noria.backends.base import Drawn, StepInputs

class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class Tape:
    def __init__(
        self,
        pool: Pool,
        tier: str,
        max_tokens: int,
        max_rows: int,
        table_width: int,
        num_blocks: int,
        max_positions: int,
        vocab: int,
        windows: list[int],
    ) -> None: ...
    def begin_rows(self, logits: bool) -> None: ...
    def embed(
        self,
        data: int,
        kind: str,
        group: int,
        half_scales: bool,
        has_minimum: bool,
        outputs: int,
        inputs: int,
        scale: float,
        y: int,
    ) -> None: ...
    def gather(self, x: int, y: int, width: int) -> None: ...
    def norm(self, x: int, residual: int, weight: int, normed: int, width: int, eps: float) -> None: ...
    def add(self, x: int, y: int, width: int) -> None: ...
    def gated(self, gate_up: int, y: int, width: int, gelu: bool, workspace: int = 0, rows: int = 0) -> None:
        """With `y` 0 the result is only quantised, to a workspace of so many rows."""

    def head_norm(
        self,
        qkv: int,
        stride: int,
        q_weight: int,
        k_weight: int,
        heads: int,
        kv_heads: int,
        dim: int,
        eps: float,
    ) -> None: ...
    def rope(self, qkv: int, stride: int, cosines: int, sines: int, half: int, heads: int, kv_heads: int, dim: int) -> None: ...
    def write_kv(
        self,
        qkv: int,
        stride: int,
        heads: int,
        cache: int,
        block_bytes: int,
        slot: int,
        group: int,
        kv_heads: int,
        dim: int,
        f32: bool,
    ) -> None: ...
    def quantize(self, x: int, width: int, workspace: int, rows: int) -> None: ...
    def round_bf16(self, x: int, width: int, pairs: int) -> None: ...
    def softcap(self, x: int, width: int, cap: float) -> None: ...
    def hidden(self, x: int, width: int) -> None: ...
    def begin_linear(
        self,
        logits: bool,
        inputs: int,
        x: int,
        pairs: int,
        quantized: int,
        quantized_rows: int,
        bias: int,
        y: int,
        outputs: int,
    ) -> None: ...
    def segment(
        self,
        data: int,
        kind: str,
        group: int,
        half_scales: bool,
        has_minimum: bool,
        outputs: int,
        inputs: int,
        first_column: int,
    ) -> None: ...
    def attention(
        self,
        qkv: int,
        stride: int,
        out: int,
        heads: int,
        scale: float,
        softcap: float,
        window: int,
        cache: int,
        block_bytes: int,
        slot: int,
        group: int,
        kv_heads: int,
        dim: int,
        f32: bool,
        quantized: int,
        rows: int,
        pairs: int,
    ) -> None: ...
    def begin_logits(self, chunk_rows: int) -> None: ...
    def draw(self, logits: int) -> None: ...
    def finish(self) -> None: ...
    def run(self, inputs: StepInputs, drawn: Drawn | None, all_logits: int) -> None:
        """Releases the interpreter lock. ValueError or TypeError for inputs that break the contract."""

    @property
    def highest_block(self) -> int:
        """The highest block that any step has named for a position that it sees."""

    def set_profiling(self, on: bool) -> None: ...
    def decode_reads(self, worker: int) -> list[int]: ...
    def labels(self) -> list[str]: ...
    def seconds(self) -> list[float]:
        """By op, summed over the steps since profiling was set."""

linear: Any  # kernels one by one, for tests

def available_tiers() -> list[str]:
    """The best last."""

def best_tier(tier: str) -> str:
    """A tier's name, with "auto" resolved. ValueError if this machine cannot run it."""

def quantized_bytes(rows: int, inputs: int) -> int: ...
def probe_pool(
    pool: Pool,
    steps: int,
    ops: int,
    tiles: int,
    passes: int = 1,
    work: int = 0,
    slow_tile: int = -1,
    bad_tile: int = -1,
    gap: int = -1,
) -> tuple[int, int, float]:
    """(tiles run, order errors, seconds); the op `gap` has tiles in even steps only."""

def map(tier: str, function: str, x: int, y: int, count: int) -> None: ...
def noise(tier: str, seed: int, position: int, stream: int, noise: int, count: int) -> None: ...
def peak(pool: Pool, tier: str, unit: str, rounds: int) -> tuple[int, float]:
    """(operations, seconds) of dot products from registers; unit u8s8, bf16 or f32."""

def read(pool: Pool, tier: str, data: int, bytes: int, repeats: int) -> float:
    """Seconds of reading `bytes`, a multiple of 256 KiB, at an address `repeats` times."""
