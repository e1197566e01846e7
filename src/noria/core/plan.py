"""StepPlan and StepResult: the only two values that pass between the decision half and the tensor half.

    tokens of one sequence, by absolute position
    0                 computed           computed + count            known
    |-- KV committed --|-- this step's chunk --|-- later steps' chunks --|
                       ^ start                 ^ the last `samples` positions of the chunk are sampled

With drafts, the last `samples` - 1 ids of the chunk are guesses. A token is drawn behind each of the last `samples` positions;
the result has those up to and with the first that is not the next position's draft:

    chunk      t  d1 d2 d3        samples = 4, drafts d1 d2 d3
    drawn      d1 d2 x  y         result d1 d2 x: the KV of d3 is garbage beyond what is computed, and is written again

A plan is a value: it names rows, blocks and token counts, holds no reference to engine state, and can be written to disk
and replayed. Rows are places in the runner's tables, in [0, max_num_seqs); a sequence keeps its row while it runs.
"""

from __future__ import annotations

import msgspec

from noria.types import SamplingParams, TokenLogprobs

NULL_BLOCK = 0  # never allocated; stands in a block table where a window group has given its block back


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence takes a row (admission or resume): everything the runner has to remember about it."""

    row: int
    tokens: tuple[int, ...]  # all tokens known so far, prompt and output
    prompt_length: int
    blocks: tuple[tuple[int, ...], ...]  # by layer group: block ids of positions [0, 16 * len)
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]  # banned while fewer than params.min_tokens tokens are out
    stream: int = 0  # the choice: part of the noise counter


class PlanRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The part of one sequence that this step computes."""

    row: int
    start: int  # first position of the chunk
    count: int  # tokens in the chunk, at least 1
    tokens: tuple[int, ...]  # the chunk's ids that the runner has not seen yet (last sampled token, drafts); usually 0 or 1
    new_blocks: tuple[tuple[int, ...], ...] = ()  # by layer group: block ids appended to the row's table; () is none at all
    samples: int = 0  # 0: nothing sampled (an inner chunk of a prompt); k: a token behind the chunk and k - 1 drafts before it
    masked: bool = False  # the row's draws take only tokens of masks that are asked for after launch: one for each sample
    streams: tuple[int, ...] = ()  # more choices drawn from the last position (n > 1): one further token for each stream
    prompt_logprobs_from: int | None = None  # positions >= this in the chunk report the logprob of the next prompt token
    draft_tokens: int = 0  # the draft model is asked for so many tokens behind the newest one
    hidden_from: int | None = None  # final hidden states of positions >= this in the chunk join the row's mean


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Executed in the order of the fields: free rows, take rows, edit tables, copy blocks, forward, sample.

    `replaced` points a row to a cached block that holds the same bits as its own; a full block, so the row never writes it.
    """

    step: int
    freed_rows: tuple[int, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    released: tuple[tuple[int, int, int], ...] = ()  # (row, group, blocks): table entries [0, blocks) become NULL_BLOCK
    replaced: tuple[tuple[int, int, int, int], ...] = ()  # (row, group, index, block): table entry `index` becomes `block`
    copies: tuple[tuple[int, int], ...] = ()  # (source block, destination block), before the forward pass
    rows: tuple[PlanRow, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(r.count for r in self.rows)


class RowResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What was sampled for one PlanRow: accepted drafts and the token behind them, then one for each further stream."""

    row: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # beside `tokens`, if the row's params ask
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for the chunk's positions from prompt_logprobs_from on
    drafts: tuple[int, ...] = ()  # what the draft model says comes behind `tokens`: at most `draft_tokens`
    embedding: bytes = b""  # with the end of the prompt: the mean over all `hidden_from` positions, little-endian float32


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the plan with the same step id; rows in the plan's order."""

    step: int
    rows: tuple[RowResult, ...]
    seconds: float = 0.0  # time the device worked on the plan
    draft_seconds: float = 0.0  # that a pass of the draft model took, of one token a row that asked; 0: there was none
