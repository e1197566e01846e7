"""Single kernels, through the op protocol: a forward pass that holds little else, its ops timed one by one.

    embed (a few rows, narrow) -> the op under test, over several weights or layers -> gather -> a head of a few rows

Going through `Backend.build` keeps the measurement honest and indifferent to layouts: the same packing, fusing, tiling and
threads as in a model. Weights and keys are so many copies that the processor's caches do not hold them, as in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.backends.base import BLOCK_SIZE, Handle, KVCacheSpec, Ops, StepInputs
from noria.backends.cost.backend import CostBackend
from noria.backends.cpu.backend import CpuBackend, CpuExecutable
from noria.backends.cpu.memory import anonymous
from noria.bench.profile import timed_steps
from noria.core.plan import NewRow, PlanRow, StepPlan
from noria.models.spec import LayerGroup
from noria.runner.inputs import step_inputs
from noria.runner.rows import Rows
from noria.types import SamplingParams
from noria.weights.formats import LinearWeight, PackedMatrix, VectorWeight, WeightFormat
from noria.weights.pack import pack
from noria.weights.quantize import BLOCKS, RawTensor, natural_format, to_bf16

COLD_BYTES = 128 << 20  # of weights or keys: more than a core's share of any last-level cache
MOST_COPIES = 512
SMALL_VOCAB = 17  # of heads that are not under test
STEP_S = 0.15  # of measuring, about
MOST_STEPS = 50
RAW_TYPES = {"q4": "Q4_1", "q8": "Q8_0", "bf16": "BF16", "f32": "F32"}  # a file's type of each kind of format

Chunk = tuple[int, int, int]  # (row, start, count)


@dataclass(frozen=True)
class Measured:
    """One op (or all its copies): its seconds in a step, and what the cost backend counts of it."""

    seconds: float
    operations: float
    nbytes: float


class Rig:
    """A forward pass on a backend of its own, and the same one on the cost backend."""

    def __init__(
        self,
        forward: Callable[[Ops], Handle],
        *,
        threads: int,
        tier: str,
        kv: KVCacheSpec,
        max_rows: int,
        max_tokens: int,
        vocab_size: int = SMALL_VOCAB,
        ropes: Sequence[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = (),
    ) -> None:
        self.kv = kv
        self.backend = CpuBackend(threads=threads, tier=tier)
        options: dict[str, Any] = {"kv": kv, "max_tokens": max_tokens, "max_rows": max_rows, "vocab_size": vocab_size}
        self.executable: CpuExecutable = self.backend.build(forward, ropes=ropes, **options)
        self._costs = CostBackend().build(forward, ropes=(), **options)
        length = kv.max_blocks_per_row * BLOCK_SIZE
        self._rows = Rows(max_rows, length, len(kv.groups), kv.max_blocks_per_row)

    def fill(self, rows: int, length: int, params: SamplingParams, *, shared: bool = False) -> None:
        """Give each of the first `rows` rows `length` tokens and blocks of its own; `shared`: only the last is its own."""
        blocks = -(-length // BLOCK_SIZE)
        for row in range(rows):
            first = 1 + row * blocks
            own = tuple(range(first, first + blocks))
            table = (*range(1, blocks), own[-1]) if shared else own
            self._rows.take(
                NewRow(
                    row=row,
                    tokens=tuple((row + i) % SMALL_VOCAB for i in range(length)),
                    prompt_length=length,
                    blocks=(table,) * len(self.kv.groups),
                    params=params,
                    seed=row,
                    stop_ids=(),
                )
            )

    def inputs(self, chunks: Sequence[Chunk], *, samples: bool = False) -> StepInputs:
        rows = tuple(PlanRow(row=r, start=s, count=c, tokens=(), samples=int(samples)) for r, s, c in chunks)
        return step_inputs(StepPlan(step=0, rows=rows), self._rows)[0]

    def measure(self, inputs: StepInputs, label: str, cost: str, *, last: bool = False) -> Measured:
        """The ops whose label begins with `label`, all but the last of them (`last`: only that one), in the quickest step."""
        tape = self.executable.tape
        places = [i for i, text in enumerate(tape.labels()) if text.startswith(label)]
        places = places[-1:] if last else places[:-1] if label == "linear" else places
        began, _ = timed_steps(lambda: self.executable.run(inputs), tape, 1)
        steps = int(min(MOST_STEPS, max(3, STEP_S / max(sum(began[0]), 1e-6))))
        samples, walls = timed_steps(lambda: self.executable.run(inputs), tape, steps)
        # Of one whole step: an op alone looks too quick in a step where the thread that reads the clock was off its core.
        quickest = samples[walls.index(min(walls))]
        seconds = sum(quickest[i] for i in places)
        operations, nbytes = self._costs.cost(inputs).by_op.get(cost, (0, 0))
        return Measured(seconds, operations, nbytes)

    def close(self) -> None:
        self.backend.close()


def no_cache(max_rows: int, length: int) -> KVCacheSpec:
    """A cache that no op touches: one block of one layer for each 16 positions."""
    blocks = -(-length // BLOCK_SIZE)
    return KVCacheSpec(
        groups=(LayerGroup(window=0, layers=(0,)),),
        num_kv_heads=1,
        head_dim=16,
        dtype="bf16",
        num_blocks=max_rows * blocks + 1,
        max_blocks_per_row=blocks,
    )


# -- random weights ------------------------------------------------------------------------------------------------------


def random_matrix(outputs: int, inputs: int, kind: str, rng: np.random.Generator) -> PackedMatrix:
    """A matrix of random blocks of a file's type, packed as that file would be."""
    raw = random_raw(outputs, inputs, RAW_TYPES[kind], rng)
    matrix = pack([raw], WeightFormat(kind="f32") if kind == "f32" else natural_format(raw.type))
    return aligned(matrix)


def aligned(matrix: PackedMatrix) -> PackedMatrix:
    """The same in memory that begins at a page, in huge pages where there are any: as packed files are mapped."""
    data = anonymous(matrix.data.nbytes)
    data[:] = matrix.data
    return PackedMatrix(matrix.outputs, matrix.inputs, matrix.format, data)


def random_raw(outputs: int, inputs: int, kind: str, rng: np.random.Generator) -> RawTensor:
    """Weights that keep the size of what they multiply, in one of the types Q4_0, Q4_1, Q8_0, BF16 and F32.

    ValueError for inputs that the type's blocks do not divide.
    """
    block = BLOCKS[kind]
    if inputs % block.elements:
        raise ValueError(f"{kind} comes in blocks of {block.elements}, and {inputs} inputs are no multiple of that")
    scale = np.float32(inputs**-0.5)
    if kind in ("F32", "BF16"):
        values = rng.standard_normal((outputs, inputs), np.float32) * scale
        data = values.view(np.uint8) if kind == "F32" else to_bf16(values).view(np.uint8)
        return RawTensor("random", (outputs, inputs), kind, data)
    blocks = rng.integers(0, 256, (outputs, inputs // block.elements, block.nbytes), np.uint8)
    # A block begins with its half-precision scale; Q4_1's codes 0 to 15 are centred by the minimum behind it.
    steps = 254 if kind == "Q8_0" else 15
    header = [2 * scale / steps, -scale] if kind == "Q4_1" else [2 * scale / steps]
    blocks[:, :, : 2 * len(header)] = np.array(header, np.float16).view(np.uint8)
    return RawTensor("random", (outputs, inputs), kind, blocks.reshape(outputs, -1))


def linear(name: str, matrix: PackedMatrix) -> LinearWeight:
    return LinearWeight(name, (matrix,))


def vector(width: int) -> VectorWeight:
    return VectorWeight("norm", np.ones(width, np.float32))
