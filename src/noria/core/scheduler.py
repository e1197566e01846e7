"""The scheduler: which tokens of which sequences the next step computes, within one token budget.

A step is planned in four passes over one budget of tokens, and, beside decodes, over the time that is left until their target
(`core/costs.py`):

    1. decodes       every running sequence with one token left to compute gets it, or loses its place to make room
    2. prefills      running sequences with more left get a chunk, in the policy's order
    3. admissions    waiting sequences get a row and a first chunk, in the policy's order, if all they know will fit
    4. drafts        decodes get guesses to verify, out of what the others left, and ask the draft model for the next step's
                     (`core/speculate.py`)

Memory decides between sequences only through `_grow` (pass 1 and 2: somebody is preempted) and `_fits` (pass 3: wait).

Waiting is bounded. Nobody overtakes a sequence that waits for memory, and the running sequence that is first in the
policy's order is never the victim while another runs: so it ends, and then the next is first. A sequence that waits for a
block which another is computing, or for its grammar, is passed over, but keeps its place. Background sequences are outside
of this promise: they run on what the others leave, and lose their places to them.
"""

from __future__ import annotations

from itertools import chain

from noria.core.bargain import Bargain
from noria.core.costs import CostModel, Room, Work
from noria.core.growth import Growth
from noria.core.queue import WaitingQueue
from noria.core.sequence import Sequence, State
from noria.core.speculate import Speculator
from noria.core.step import Planned, Step, StepWriter
from noria.core.victims import choose_victim, inherited, worst
from noria.kv.cache import Blocks, Hit, KVCache
from noria.kv.keys import BLOCK_SIZE
from noria.types import Phase


class Scheduler:
    """Owns which sequences run, their rows, and what the runner has yet to learn. Reads no clock: `now` is an argument."""

    def __init__(
        self,
        cache: KVCache,
        queue: WaitingQueue,
        *,
        max_rows: int,
        max_tokens: int,
        max_chunk: int,
        max_len: int,
        costs: CostModel | None = None,
        itl_target: float = 0.0,
        speculator: Speculator | None = None,
    ) -> None:
        """`itl_target`: the most seconds that a step with decodes should take, by `costs`; 0: as long as its tokens take."""
        self.cache = cache
        self.queue = queue
        self.costs = costs or CostModel()
        self.speculator = speculator or Speculator(None, self.costs)
        self.growth = Growth(len(cache.full_groups), max_len)
        self.running: dict[Sequence, None] = {}  # in order of admission
        self.background: dict[Sequence, None] = {}  # those of the running that are background
        self.leaving: dict[Sequence, None] = {}  # preempted or finished, with a step in flight
        self.free_rows = list(range(max_rows - 1, -1, -1))  # a stack: low rows first
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._max_tokens = max_tokens
        self._max_chunk = max_chunk
        self._itl_target = itl_target
        self.writer = StepWriter(cache)
        self._short = False  # this step lacked a block: it admits nobody

    # One step

    def schedule(self, now: float) -> Step | None:
        """Plan a step; None if there is nothing to compute now."""
        self._short = False
        self.speculator.begin_step()
        if self.background and len(self.queue):
            self._make_way(now)
        planned: list[Planned] = []
        prefills = self._plan_decodes(planned, now)
        room = self._room(planned) if prefills or len(self.queue) else Room(self.costs, 0)
        self._plan_prefills(prefills, room, planned, now)
        if self._short:
            room.tokens = 0
        if (room.tokens > 0 and self.free_rows) or self.cache.marks:
            self._admit(room, planned, now)
        self._plan_drafts(planned, room)
        if self.speculator.asks:
            self._plan_asks(planned)
        return self.writer.write(planned) if planned else None

    def _plan_decodes(self, planned: list[Planned], now: float) -> list[Sequence]:
        """Plan one token for each sequence that has one left to compute; returns those with more."""
        prefills = []
        for sequence in list(self.running):
            if sequence.state is not State.RUNNING:
                continue  # the victim of one before it
            start = sequence.computed + sequence.in_flight
            pending = sequence.pending
            if pending > 1 or (pending and (sequence.asked or self.speculator.waits(sequence))):
                continue  # with drafts in flight its length is not known; and with good guesses it waits for the last token
            known = len(sequence.tokens) + pending
            if known - start > 1:
                prefills.append(sequence)
            elif known > start and not (pending and known >= sequence.limit):
                blocks: Blocks | None = ()
                if start >= sequence.kv.capacity:
                    blocks = self._grow(sequence, start + 1, now)
                if blocks is not None:
                    planned.append((sequence, start, 1, blocks))
        return prefills

    def _room(self, decodes: list[Planned]) -> Room:
        """What is left for prefill beside the planned decodes. Nobody waits for the tokens of background ones."""
        tokens = self._max_tokens - len(decodes)
        if not self._itl_target or all(sequence.request.background for sequence, *_ in decodes):
            return Room(self.costs, tokens)
        count = len(decodes)
        context = sum([start for _, start, _, _ in decodes]) + count
        return Room.beside(self.costs, tokens, self._itl_target, Work(count, context, context, count))

    def _plan_prefills(self, prefills: list[Sequence], room: Room, planned: list[Planned], now: float) -> None:
        """Plan chunks, as far as there is room."""
        if len(prefills) > 1:
            wanted, order = inherited(self.queue, self.cache), self.queue.order
            prefills.sort(key=lambda s: min(order(s), wanted[s.kv][1]) if s.kv in wanted else order(s))
        for sequence in prefills:
            if sequence.state is not State.RUNNING:
                continue  # the victim of one before it
            start = sequence.computed + sequence.in_flight
            count = room.chunk(start, min(len(sequence.tokens) - start, self._max_chunk))
            if not count:
                break
            blocks = self.cache.allocate(sequence.kv, start + count)
            if blocks is None:
                count = max(1, min(count, self.cache.room(sequence.kv) - start))
                blocks = self._grow(sequence, start + count, now)
            if blocks is not None:
                planned.append((sequence, start, count, blocks))
                room.take(start, count)

    def _plan_drafts(self, planned: list[Planned], room: Room) -> None:
        """Give decodes drafts, out of tokens, blocks and time that nobody else has a use for."""
        left = self._max_tokens - sum([count for _, _, count, _ in planned])
        if left <= 0 or not self.speculator.considers([sequence for sequence, *_ in planned]):
            return
        decodes = [start for _, start, count, _ in planned if count == 1]
        context = sum(decodes) + len(decodes)
        bargain = Bargain(self.speculator.cost, Work(len(decodes), context, context, len(decodes)), room.seconds)
        places = []
        rows = []
        for place, (sequence, start, count, _) in enumerate(planned):
            if count == 1 and not (sequence.pending or sequence.streams) and start + 1 == len(sequence.tokens):
                most = min(self._max_chunk - 1, sequence.limit - len(sequence.tokens) - 1, self._places(sequence, start))
                if most > 0:
                    places.append(place)
                    rows.append((sequence, most))
        for place, drafts in zip(places, self.speculator.drafts_for(rows, bargain), strict=True):
            drafts = drafts[:left]
            if drafts:
                sequence, start, _, blocks = planned[place]
                more = self.cache.allocate(sequence.kv, start + 1 + len(drafts)) or ()
                sequence.drafts = drafts
                planned[place] = (sequence, start, 1 + len(drafts), _joined(blocks, more))
                left -= len(drafts)

    def _plan_asks(self, planned: list[Planned]) -> None:
        """Have the draft model asked what comes behind the decodes of this step, if nothing else of their prompts is left."""
        rows = []
        context = 0
        for sequence, start, count, _ in planned:
            known = len(sequence.tokens) + sequence.pending
            if sequence.state is State.RUNNING and start + count - len(sequence.drafts) == known and not sequence.streams:
                context += known + 1
                rows.append((sequence, max(0, min(self._max_chunk - 1, sequence.limit - start - count - 2))))
        decodes = Work(len(rows), context, context, len(rows))
        for (sequence, _), asks in zip(rows, self.speculator.asks_for(rows, decodes), strict=True):
            sequence.asks = asks

    def _places(self, sequence: Sequence, start: int) -> int:
        """How many drafts behind `start` have places in blocks: a new block, if all running sequences could have one."""
        groups, kv = len(self.cache.windows), sequence.kv
        spare = BLOCK_SIZE if self.cache.pool.available > groups * (len(self.running) + len(self.leaving)) else 0
        return kv.capacity + spare - start - 1

    def _grow(self, sequence: Sequence, upto: int, now: float) -> Blocks | None:
        """Blocks for positions [.., upto), preempting for them; None: it waits for blocks in flight, or was the victim."""
        while True:
            blocks = self.cache.allocate(sequence.kv, upto)
            if blocks is not None:
                return blocks
            self._short = True
            if self.leaving or sequence.state is not State.RUNNING:
                return None
            self._preempt(choose_victim(self.running, self.queue, self.cache), now)

    # Admission

    def _make_way(self, now: float) -> None:
        """Preempt background sequences until the first of the others that waits finds a row and memory."""
        first = next((s for s in self.queue if s.blocked_on not in self.cache.marks), None)
        while self.background and first is not None and not first.request.background and not self.leaving:
            if self.free_rows and self._fits(first, self.cache.lookup(first.kv, first.tokens, first.hit_limit)):
                return
            self._preempt(worst(self.background, self.queue, self.cache), now)

    def _admit(self, room: Room, planned: list[Planned], now: float) -> None:
        """Give rows and first chunks to waiting sequences in their order, until one does not fit.

        Without room or rows it only finds out who waits for a producer, which then inherits the waiter's priority.
        """
        cache = self.cache
        admitted = []
        for sequence in self.queue:
            if sequence.blocked_on in cache.marks or sequence.state is State.WAITING_GRAMMAR:
                continue
            limit = sequence.hit_limit
            hit = cache.lookup(sequence.kv, sequence.tokens, limit)
            sequence.blocked_on = cache.producing(sequence.kv, hit.blocks, limit)
            if sequence.phase is not Phase.PREEMPTED:
                sequence.stamp(Phase.QUEUE if sequence.blocked_on is None else Phase.KV, now)
            if sequence.blocked_on is not None:
                continue
            start = hit.blocks * BLOCK_SIZE
            count = room.chunk(start, min(len(sequence.tokens) - start, self._max_chunk))
            if not count or not self.free_rows or not self._fits(sequence, hit):
                break
            planned.append((sequence, start, count, self._start(sequence, hit, count, now)))
            room.take(start, count)
            admitted.append(sequence)
        self.queue.remove(admitted)

    def _fits(self, sequence: Sequence, hit: Hit) -> bool:
        """Whether all it knows fits beside what is promised to running prompts and their expected growth."""
        cache = self.cache
        need = max(0, cache.peak_blocks(len(sequence.tokens)) - hit.shared)
        if self.running or self.leaving:
            for other in self.running:
                if other.kv.capacity < len(other.tokens):  # a prompt of which a part has no blocks yet
                    need += max(0, cache.peak_blocks(len(other.tokens)) - other.kv.held)
            if need + self.growth.bound(len(self.running) + 1) > cache.pool.available:
                need += self.growth.peak(chain(self.running, (sequence,)))
        return need <= cache.pool.available

    def _start(self, sequence: Sequence, hit: Hit, count: int, now: float) -> Blocks:
        """Let a sequence that fits run, with a first chunk of `count` tokens behind the hit: the chunk's blocks."""
        cache = self.cache
        cache.acquire(sequence.kv, hit)
        start = hit.blocks * BLOCK_SIZE
        blocks = cache.allocate(sequence.kv, start + count)
        assert blocks is not None, "a sequence was admitted that does not fit"
        cache.mark(sequence.kv, sequence.tokens)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = start
            sequence.cache_miss = cache.explain(sequence.kv, sequence.prompt_length, hit.blocks, sequence.hit_limit)
            self.prefix_queries += sequence.prompt_length
            self.prefix_hits += start
            self.queue.charge_prompt(sequence, sequence.prompt_length - start)
        sequence.computed = start
        sequence.stamp(Phase.PREFILL, now)
        self._run(sequence)
        return blocks

    def _run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        sequence.kv.row = self.free_rows.pop()
        self.running[sequence] = None
        self.writer.fresh[sequence] = None
        if sequence.request.background:
            self.background[sequence] = None

    def fork(self, parent: Sequence, child: Sequence, now: float) -> None:
        """Let a further choice go on from the parent's KV, or wait for a row and blocks and go on from a prefix hit."""
        if self.free_rows and self.cache.fork(parent.kv, child.kv, parent.computed):
            child.computed = parent.computed
            child.stamp(Phase.DECODE, now)
            self._run(child)
        else:
            child.stamp(Phase.QUEUE, now)
            self.queue.push(child)

    # Leaving

    def _preempt(self, victim: Sequence, now: float) -> None:
        """Take a running sequence's place away, now or when its step in flight is back. It waits again, in its order."""
        del self.running[victim]
        self.background.pop(victim, None)
        victim.state = State.LEAVING
        victim.stamp(Phase.PREEMPTED, now)
        victim.preemptions += 1
        self.preemptions += 1
        self.growth.preempted()
        self.leaving[victim] = None
        self.settle(victim)

    def finish(self, sequence: Sequence, now: float) -> None:
        """End a sequence in any state. What it holds is freed when nothing of it is in flight."""
        if sequence.state in (State.WAITING, State.WAITING_GRAMMAR):
            self.queue.remove((sequence,))
        elif sequence.state is State.RUNNING:
            del self.running[sequence]
            self.background.pop(sequence, None)
            self.leaving[sequence] = None
        sequence.state = State.FINISHED
        sequence.stamp(Phase.DELIVERY, now)
        self.speculator.ended(sequence)
        self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Free what a leaving sequence holds, if nothing of it is in flight; a preempted one waits again."""
        if sequence.in_flight or sequence not in self.leaving:
            return
        del self.leaving[sequence]
        row = sequence.kv.row
        if sequence in self.writer.fresh:
            del self.writer.fresh[sequence]  # the runner never heard of it
        else:
            self.writer.freed_rows.append(row)
        self.free_rows.append(row)
        self.cache.free(sequence.kv)
        if sequence.state is State.LEAVING:
            sequence.state = State.WAITING
            sequence.computed = sequence.sent = sequence.furthest = 0
            self.queue.push(sequence)


def _joined(blocks: Blocks, more: Blocks) -> Blocks:
    """What two allocations gave, by group."""
    if not blocks or not more:
        return blocks or more
    return tuple([(*old, *new) for old, new in zip(blocks, more, strict=True)])
