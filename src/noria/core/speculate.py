"""Speculation: which drafts a step verifies beside the tokens that it has to compute.

A draft is a guess of a token that is not known yet. The runner draws the target token of each drafted position with the noise
of that position, as it would without drafts, and a draft counts if it is equal: drafts change when a token is made,
never which.

How many are worth it is a matter of measured rates. A step of R decodes takes T seconds; with k drafts of one more sequence it
takes T(k), and makes s1 + s1 s2 + ... more tokens on average, where s is how often guesses like these came true:

    tokens a second    (R + E + s1 + s1 s2 + ...) / T(k)      is to be highest, and higher than without by `_LEAST_GAIN`

That is the rate of all rows together. But a longer step is longer for everybody: a row without good guesses would pay for the
drafts of its neighbours, and a batch ends with its slowest row. So no row's own rate may fall below what it is without drafts,
by more than `_MOST_HARM`:

    T(k) <= (1 + g) T * _MOST_HARM      for the row whose drafts bring least, g; 0 if it has none

Alone, a row drafts as far as it pays. Among others it does if they all do, or where drafts are nearly free.
"""

from __future__ import annotations

from typing import NamedTuple

from noria.config import SpeculativeConfig
from noria.core.costs import CostModel, Work
from noria.core.drafter import Drafter, Tally
from noria.core.forced import Forced
from noria.core.lookup import OwnText, Prediction, Source
from noria.core.outputs import Outputs, SuffixLookup
from noria.core.sequence import Sequence
from noria.core.verification import VerificationCost
from noria.types import ConfigError

UNASKED = 16  # drafts at once from a prediction or a grammar, where no setting says how many
_LEAST_GAIN = 1.02  # of the rate; less would be lost in what is not predicted
_MOST_HARM = 1.03  # of a step's time, for a row that gains nothing


class Proposal(NamedTuple):
    """Drafts that a row could have."""

    context: int  # tokens before them
    drafts: list[int]
    runs: list[float]  # how likely the first, the first two, ... come true


class Bargain:
    """Chooses the drafts of one step by what they are expected to bring, and to cost."""

    def __init__(self, cost: VerificationCost, decodes: Work, seconds: float) -> None:
        """`decodes`: the tokens of the step that are no prompt's, one a row; `seconds`: that drafts may add to it."""
        self._cost = cost
        self._decodes = decodes
        self._plain = cost.seconds(decodes)
        self._latest = self._plain + seconds
        self._all = self._needs_all()
        self._needed = max(0.0, self._seconds(decodes.tokens) / (self._plain * _MOST_HARM) - 1) if self._all else 0.0

    def is_off(self, proposal: Proposal | None) -> bool:
        """Whether no row can have drafts as this one gains too little: nearly always, where decodes fill the machine."""
        return self._all and (proposal is None or sum(proposal.runs) < self._needed)

    def _needs_all(self) -> bool:
        """Whether drafts that no row is harmed by do not pay, even if they are sure to come true: so all rows must have some."""
        rows = self._decodes.tokens
        drafts = 1
        while (seconds := self._seconds(drafts)) <= self._plain * _MOST_HARM:
            if (rows + drafts) * self._plain >= _LEAST_GAIN * rows * seconds:
                return False
            drafts += 1
        return True

    def _seconds(self, drafts: int) -> float:
        """Of the step with so many drafts of average rows."""
        tokens, pairs, context, logits = self._decodes
        behind = context // max(tokens, 1)
        return self._cost.seconds(Work(tokens + drafts, pairs + drafts * behind, context + drafts, logits + drafts))

    def choose(self, proposals: list[Proposal]) -> list[int]:
        """How many drafts of each proposal to take."""
        least = self._least([(proposal, len(proposal.runs)) for proposal in proposals])
        while True:
            fair = self._plain * (1 + least) * _MOST_HARM
            counts, seconds = self._take(proposals, min(fair, self._latest))
            got = self._least(list(zip(proposals, counts, strict=True)))
            if seconds <= self._plain * (1 + got) * _MOST_HARM:
                return counts
            least = got if got < least / 2 else 0.0

    def _least(self, chosen: list[tuple[Proposal, int]]) -> float:
        """What the row gains on average that gains least."""
        if len(chosen) < max(self._decodes.tokens, 1):
            return 0.0
        return min([sum(proposal.runs[:count]) for proposal, count in chosen])

    def _take(self, proposals: list[Proposal], latest: float) -> tuple[list[int], float]:
        """(drafts of each proposal, seconds of the step) with the highest rate in that time, the likeliest rows first."""
        counts = [0] * len(proposals)
        work, made, spent = self._decodes, float(self._decodes.tokens), self._plain
        for place in sorted(range(len(proposals)), key=lambda place: -proposals[place].runs[0]):
            context, _, runs = proposals[place]
            base, base_made, best = work, made, _LEAST_GAIN * made / spent
            pairs = base.pairs
            for count, run in enumerate(runs, 1):
                base_made += run
                pairs += context + count
                more = Work(base.tokens + count, pairs, base.context + count, base.logits + count)
                seconds = self._cost.seconds(more)
                if seconds > latest:
                    break
                if base_made > best * seconds:
                    counts[place], best, work, made, spent = count, base_made / seconds, more, base_made, seconds
        return counts, spent


class Speculator:
    """Proposes drafts for the sequences of one engine. `config` None: only from predictions and grammars."""

    def __init__(self, config: SpeculativeConfig | None, costs: CostModel) -> None:
        """ConfigError for a method that this engine has not."""
        self._methods = () if config is None else config.methods
        if "draft_model" in self._methods or (config is not None and config.model is not None):
            raise ConfigError("--speculative-config: a draft model is not supported by this engine; use ngram, suffix or both")
        self.cost = VerificationCost(costs)
        self.drafts = 0  # rows that had some
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.active = config is not None  # for every sequence, not only for those with a prediction or a grammar
        self._most = UNASKED if config is None else config.num_speculative_tokens
        self._outputs = (
            None if config is None or "suffix" not in config.methods else Outputs(config.suffix_decoding_max_cached_requests)
        )
        self._tallies: dict[str, Tally] = {}
        self._objector: Sequence | None = None  # whose guesses were too poor for anybody to have drafts

    def serves(self, sequence: Sequence) -> bool:
        """Whether a sequence has sources of drafts."""
        return self.active or sequence.constraint is not None or bool(sequence.request.prediction)

    def drafter(self, sequence: Sequence) -> Drafter | None:
        """The drafter of a sequence that decodes, up to date; None if it is to have none."""
        if not self.serves(sequence):
            return None
        if sequence.drafter is None:
            sequence.drafter = self._new_drafter(sequence)
        sequence.drafter.follow(sequence.tokens)
        return sequence.drafter

    def _new_drafter(self, sequence: Sequence) -> Drafter:
        prediction = Prediction(sequence.request.prediction) if sequence.request.prediction else None
        sources: list[Source] = [] if prediction is None else [prediction]
        if sequence.constraint is not None:
            sources.append(Forced(sequence.constraint))
        if self.active and "ngram" in self._methods:
            sources.append(OwnText(sequence.tokens, sequence.prompt_length))
        if self.active and self._outputs is not None:
            sources.append(SuffixLookup(self._outputs, sequence.request.cache_salt))
        return Drafter(sources, self._tallies, sequence.prompt_length, prediction)

    def drafts_for(self, rows: list[tuple[Sequence, int]], bargain: Bargain) -> list[tuple[int, ...]]:
        """The drafts of a step's rows, each at most so many: the one place where proposals come from."""
        proposals = self._proposals(rows, bargain)
        counts = iter(bargain.choose([proposal for proposal in proposals if proposal is not None]))
        return [() if proposal is None else tuple(proposal.drafts[: next(counts)]) for proposal in proposals]

    def _proposals(self, rows: list[tuple[Sequence, int]], bargain: Bargain) -> list[Proposal | None]:
        """What each row could have; nothing if one of them rules it out: most often the same one as in the step before."""
        proposals: list[Proposal | None] = [None] * len(rows)
        places = range(len(rows))
        for place in sorted(places, key=lambda place: rows[place][0] is not self._objector):
            sequence, most = rows[place]
            proposals[place] = proposal = self._proposal(sequence, most)
            if bargain.is_off(proposal):
                self._objector = sequence
                return [None] * len(rows)
        return proposals

    def _proposal(self, sequence: Sequence, most: int) -> Proposal | None:
        drafter = self.drafter(sequence)
        if drafter is None:
            return None
        drafts, runs = drafter.propose(min(most, self._most))
        return Proposal(len(sequence.tokens), drafts, runs) if runs else None

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence with a token in flight should wait for it, as good guesses can go on from there."""
        drafter = self.drafter(sequence)
        return drafter is not None and drafter.eager

    def foreseen(self, sequence: Sequence) -> int:
        """How many tokens of an output the request's prediction foresaw, drafted or not: the same at any load."""
        if not sequence.request.prediction:
            return 0
        drafter = self.drafter(sequence)
        return 0 if drafter is None or drafter.prediction is None else drafter.prediction.foreseen

    def begin_step(self) -> None:
        """A step is planned."""
        if self._outputs is not None:
            self._outputs.take_in()

    def ended(self, sequence: Sequence) -> None:
        """A sequence has its last token."""
        if self._outputs is not None:
            self._outputs.add(sequence.request.cache_salt, sequence.tokens[sequence.prompt_length :])

    def verified(self, drafted: int, accepted: int) -> None:
        """So many drafts of a row came true."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
