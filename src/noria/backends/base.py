"""The op protocol: what a model's forward pass is written against.

Model code calls these methods once, in order, with opaque handles; it never sees a device, a weight format, a batch size or
an adapter. A backend may run each op at once (torch) or record it and replay the tape every step (cpu).

Two row domains: TOKENS, all tokens of the step, and, after `gather_logit_rows`, LOGITS, the positions whose logits are wanted
and, behind them, those of which only the final hidden state is.
Activations are float32 [rows, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NewType, Protocol

import numpy as np
import numpy.typing as npt

from noria.models.spec import LayerGroup
from noria.weights.formats import LinearWeight, VectorWeight

Handle = NewType("Handle", object)  # an activation; meaningful only to the backend that made it

BLOCK_SIZE = 16
KVType = Literal["bf16", "f32", "int8"]


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention: where its K and V live and what a query may see."""

    layer: int
    group: int  # index into the layer groups
    slot: int  # the layer's place inside a block of that group
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # 0: full; else keys in (p - window, p]
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap) before the mask


@dataclass(frozen=True)
class KVCacheSpec:
    """The paged cache a backend allocates: `num_blocks` blocks (block 0 is the null block), all of the same size.

    Interchange form of a block (little-endian): [layer slot][k|v][kv head][16][head_dim] of `dtype`. With int8 each
    head's codes are followed by float32 scales [16], one a token: value = code * scale.
    """

    groups: tuple[LayerGroup, ...]
    num_kv_heads: int
    head_dim: int
    dtype: KVType
    num_blocks: int
    max_blocks_per_row: int  # width of a block table

    @property
    def block_bytes(self) -> int:
        return len(self.groups[0].layers) * 2 * self.num_kv_heads * self.head_bytes

    @property
    def head_bytes(self) -> int:
        """Of K or V of one head in a block."""
        return BLOCK_SIZE * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Of K or V of one head of one token."""
        match self.dtype:
            case "bf16":
                return 2 * self.head_dim
            case "f32":
                return 4 * self.head_dim
            case "int8":
                return self.head_dim + 4


@dataclass
class StepInputs:
    """One step's inputs as flat arrays, filled by runner.inputs. Sizes vary from step to step; nothing else does.

    tokens / positions        [T]      token ids and absolute positions, rows one after the other
    row_offsets               [R + 1]  tokens of row r are [row_offsets[r], row_offsets[r + 1])
    row_slots                 [R]      index of row r in `block_tables`
    block_tables              [groups][max_num_seqs, max_blocks_per_row]  block ids by absolute block index
    logit_rows                [L]      indices into [0, T): positions whose logits are wanted, ascending
    hidden_rows               [H]      indices into [0, T): positions whose final hidden state is wanted; L + H <= max_tokens
    draws                     structured array, one a token to be drawn or scored: see runner.draws.DRAW
    """

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    row_offsets: npt.NDArray[np.int32]
    row_slots: npt.NDArray[np.int32]
    block_tables: tuple[npt.NDArray[np.int32], ...]
    logit_rows: npt.NDArray[np.int32]
    draws: Draws
    hidden_rows: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass
class Masks:
    """Which tokens the draws of a step may take, as bit masks that another thread fills while the forward pass runs."""

    index: npt.NDArray[np.int32]  # [D] the mask of each draw, a row of `words`; -1: none
    words: npt.NDArray[np.uint32]  # [M, ceil(vocab / 32)] bit `token % 32` of word `token // 32`: the token may be drawn
    ready: npt.NDArray[np.int32]  # [1] 1 once `words` is filled; whoever draws waits for it


@dataclass
class Draws:
    """What to do with the logits: D draws, each reading one logit row. All arrays are C-contiguous.

    Adjustments are applied to a copy of the row in this order: repetition penalty, presence and frequency, bias, bans, mask;
    then temperature, top_k, top_p, min_p (each on what the one before left; ties by lower id first), then
    arg max of logit / temperature + Gumbel noise(seed, position, stream, token). Temperature 0: arg max, lowest id on ties.
    The noise is the same on every backend: Philox4x32-10, key the seed, counter (position low, position high, stream,
    token / 4), gives the words of four tokens; u = (word + 1/2) / 2^32; noise = -log(-log(u)).
    `target` >= 0 scores that token instead of drawing.

    Sparse lists in compressed rows: draw d owns entries [offsets[d], offsets[d + 1]).
    """

    logit_row: npt.NDArray[np.int32]  # [D] index into the step's logit rows
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]  # 0: no limit
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]  # absolute position of the drawn token
    stream: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32]  # -1: draw
    num_top: npt.NDArray[np.int32]  # how many most likely tokens to report; -1: no logprobs at all
    repetition: npt.NDArray[np.float32]  # 1: off
    presence: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]
    history_offsets: npt.NDArray[np.int64]  # [D + 1]
    history_tokens: npt.NDArray[np.int32]  # distinct ids seen in the prompt or the output
    history_counts: npt.NDArray[np.int32]  # times in the output; 0: only in the prompt
    bias_offsets: npt.NDArray[np.int64]  # [D + 1]
    bias_tokens: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]
    ban_offsets: npt.NDArray[np.int64]  # [D + 1]
    ban_tokens: npt.NDArray[np.int32]
    masks: Masks | None = None  # None: no draw of the step has a mask

    def __len__(self) -> int:
        return len(self.logit_row)


@dataclass
class Drawn:
    """The outcome of `Draws`. Logprobs are of the raw distribution, natural, finite (at least -1e9)."""

    token: npt.NDArray[np.int32]  # [D]
    logprob: npt.NDArray[np.float32]  # [D]; 0 where num_top is -1
    top_tokens: npt.NDArray[np.int32]  # [D, max num_top], most likely first, ties by lower id; -1 beyond num_top
    top_logprobs: npt.NDArray[np.float32]
    hidden: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [H, hidden size]


class Ops(Protocol):
    """The ops of a forward pass. All handles are float32 [rows, width] activations."""

    def embed(self, weight: LinearWeight, scale: float) -> Handle:
        """[T, inputs]: the rows of the embedding matrix [vocab, width] for the step's tokens, times `scale`."""

    def linear(self, x: Handle, weight: LinearWeight) -> Handle:
        """x W^T + bias, [rows, outputs]."""

    def rms_norm(self, x: Handle, weight: VectorWeight, eps: float, residual: Handle | None = None) -> tuple[Handle, Handle]:
        """(normed, sum): sum = residual + x (or x), normed = sum / sqrt(mean(sum^2) + eps) * weight. In place on `residual`."""

    def head_norm(
        self, qkv: Handle, q_weight: VectorWeight, k_weight: VectorWeight, eps: float, attention: AttentionSpec
    ) -> Handle:
        """RMS norm of each query head and each key head of q|k|v, in place."""

    def rope(self, qkv: Handle, rope: int, attention: AttentionSpec) -> Handle:
        """Rotate the query and key heads of q|k|v by the positions, with rope table `rope`; halves, not pairs. In place."""

    def attend(self, qkv: Handle, attention: AttentionSpec) -> Handle:
        """Write K and V of the step's tokens into the paged cache, then attend: [T, num_heads * head_dim]."""

    def gated(self, gate_up: Handle, activation: Literal["silu", "gelu_tanh"]) -> Handle:
        """gate|up [rows, 2 f] -> activation(gate) * up [rows, f]."""

    def add(self, x: Handle, y: Handle) -> Handle:
        """x + y, in place on x."""

    def gather_logit_rows(self, x: Handle) -> Handle:
        """TOKENS -> LOGITS: the rows named by StepInputs.logit_rows, then those named by StepInputs.hidden_rows."""

    def hidden_states(self, x: Handle) -> None:
        """Report x of the rows named by StepInputs.hidden_rows, as Drawn.hidden. At most once, before `logits`."""

    def logits(self, x: Handle, weight: LinearWeight, softcap: float) -> Handle:
        """[L, vocab], of the rows named by StepInputs.logit_rows.

        Processed in tiles of rows and reduced by the step's draws, so that [L, vocab] need not exist at once.
        """


class Executable(Protocol):
    """A recorded forward pass, ready to run step after step."""

    def run(self, inputs: StepInputs) -> Drawn:
        """One step: forward and draw. Releases the interpreter lock while it works."""

    def all_logits(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """One step, returning the logits [L, vocab] themselves (tests, quality measurements)."""


class Backend(Protocol):
    """A device: allocates the cache, builds executables, moves blocks."""

    name: str

    def build(
        self,
        forward: Any,  # Callable[[Ops], Handle]: the model's forward pass; returns what `logits` returned
        *,
        ropes: Sequence[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]],  # (cos, sin) [max_len, dim / 2] each
        kv: KVCacheSpec,
        max_tokens: int,
        max_rows: int,
        vocab_size: int,
    ) -> Executable:
        """Record `forward` and allocate the cache and workspace for steps of at most max_tokens tokens in max_rows rows."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks inside the cache (source, destination)."""

    def read_block(self, block: int) -> npt.NDArray[np.uint8]:
        """One block in the interchange form."""

    def write_block(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Set one block from the interchange form."""

    def close(self) -> None:
        """Stop threads and free memory."""
