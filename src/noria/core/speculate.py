"""Speculation: which drafts a step verifies beside the tokens that it has to compute.

A draft is a guess of a token that is not known yet. The runner draws the target token of each drafted position with the noise
of that position, as it would without drafts, and a draft counts if it is equal: drafts change when a token is made,
never which.

    sources       a prediction, a grammar, the text itself, earlier outputs      `lookup`, `forced`, `outputs`
                  a smaller model, where it is worth asking                      `model_drafts`, `asking`
    drafter       the best source of a sequence, by how often each was right     `drafter`
    bargain       how many drafts of each sequence the step is worth             `bargain`, `verification`

Where nothing has been worth it, up to `_LONGEST_REST` steps pass before guesses are looked at again: beside many decodes,
speculation costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from noria.config import SpeculativeConfig
from noria.core.asking import Asking, DraftFacts, Wish
from noria.core.bargain import Bargain, Proposal
from noria.core.costs import CostModel, Work
from noria.core.drafter import Drafter, Tally
from noria.core.forced import Forced
from noria.core.lookup import OwnText, Prediction, Source
from noria.core.model_drafts import ModelDrafts
from noria.core.outputs import Outputs, SuffixLookup
from noria.core.sequence import Sequence
from noria.core.verification import VerificationCost
from noria.types import ConfigError

UNASKED = 16  # drafts at once from a prediction or a grammar, where no setting says how many
_LONGEST_REST = 8  # steps, after some in which no draft was worth it; a sequence that decodes alone never rests
_LONGEST_AFTER_WAITING = 63  # the same where a sequence has left out a step for drafts that it was not given


class Speculator:
    """Proposes drafts for the sequences of one engine. `config` None: only from predictions and grammars."""

    def __init__(self, config: SpeculativeConfig | None, costs: CostModel, draft_model: DraftFacts | None = None) -> None:
        """`draft_model`: what the runner has of that kind; None: nothing.

        ConfigError for a method that this engine has not.
        """
        self._methods = () if config is None else config.methods
        if ("draft_model" in self._methods) != (draft_model is not None):
            raise ConfigError("the runner has a draft model if, and only if, the method draft_model is asked for")
        self.cost = VerificationCost(costs)
        self._asking = None if draft_model is None else Asking(self.cost, costs, draft_model)
        self._asked_rest = self._asking_rests = (
            0  # steps let pass behind one in which nothing was asked, and those still to come
        )
        self._heard = False  # whether the draft model has said something since drafts were chosen last
        self.drafts = 0  # rows that had some
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.active = config is not None  # for every sequence, not only for those with a prediction or a grammar
        self._most = UNASKED if config is None else config.num_speculative_tokens
        self._outputs = (
            None if config is None or "suffix" not in config.methods else Outputs(config.suffix_decoding_max_cached_requests)
        )
        self._tallies: dict[str, Tally] = {}
        self._waiting = self._waited = (
            False  # whether a sequence leaves out this step to have drafts in the next; the one before
        )
        self._rest = self._resting = 0  # steps that are let pass behind one that had no drafts, and those still to come

    @property
    def asks(self) -> bool:
        """Whether there is a draft model."""
        return self._asking is not None

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
        prediction = Prediction(sequence.request.prediction, sequence.prompt_length) if sequence.request.prediction else None
        sources: list[Source] = [] if prediction is None else [prediction]
        if sequence.constraint is not None:
            sources.append(Forced(sequence.constraint, sequence.prompt_length))
        if self.active and "ngram" in self._methods:
            sources.append(OwnText(sequence.tokens, sequence.prompt_length))
        if self.active and self._outputs is not None:
            sources.append(SuffixLookup(self._outputs, sequence.request.cache_salt, sequence.prompt_length))
        model = ModelDrafts(sequence.prompt_length) if self.active and self._asking is not None else None
        if model is not None:
            sources.append(model)
        return Drafter(sources, self._tallies, sequence.prompt_length, prediction, model)

    def considers(self, sequences: Iterable[Sequence]) -> bool:
        """Whether to think about drafts in a step of these; asked once a step."""
        if self._resting and not self._heard:
            self._resting -= 1
            return False
        return any(map(self.serves, sequences))

    def drafts_for(self, rows: list[tuple[Sequence, int]], bargain: Bargain) -> list[tuple[int, ...]]:
        """The drafts of a step's rows, each at most so many: the one place where proposals come from."""
        self._heard = False
        proposals = self._proposals(rows, bargain)
        counts = bargain.choose([proposal for proposal in proposals if proposal is not None])
        self._judge(any(counts), bargain.rows)
        chosen = iter(counts)
        return [() if proposal is None else tuple(proposal.drafts[: next(chosen)]) for proposal in proposals]

    def _judge(self, drafted: bool, decodes: int) -> None:
        """Rest after a step without drafts, but not in the one that a sequence leaves out for the sake of the next."""
        waited, self._waited, self._waiting = self._waited, self._waiting, False
        if drafted or decodes <= 1:
            self._rest = 0
        elif waited or not self._waited:
            longest = _LONGEST_AFTER_WAITING if waited else min(_LONGEST_REST, 2 * (decodes - 1))
            self._rest = self._resting = min(2 * self._rest + 1, longest)

    def _proposals(self, rows: list[tuple[Sequence, int]], bargain: Bargain) -> list[Proposal | None]:
        """What each row could have; nothing if one of them rules it out for all."""
        proposals = []
        for sequence, most in rows:
            proposals.append(self._proposal(sequence, most))
            if len(rows) > 1 and bargain.is_off(proposals[-1]):
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
        drafter = None if self._resting else self.drafter(sequence)
        waits = drafter is not None and drafter.eager
        self._waiting |= waits
        return waits

    # The draft model

    def asks_for(self, rows: list[tuple[Sequence, int]], decodes: Work) -> list[int]:
        """How many drafts each row is to ask the draft model for, at most so many: verified by the step behind this one.

        `decodes`: what that step will compute without them.
        """
        asking, places, wishes = self._asking, [], []
        if asking is None or not 0 < len(rows) <= asking.most_rows or self._asking_rests:
            self._asking_rests = max(0, self._asking_rests - 1)
            return [0] * len(rows)
        for place, (sequence, most) in enumerate(rows):
            drafter = self.drafter(sequence)
            runs = [] if drafter is None else drafter.prospects(min(most, self._most))
            if drafter is not None and drafter.model is not None and runs:
                known = len(sequence.tokens)
                places.append(place)
                wishes.append(Wish(runs, known - drafter.model.followed, sequence.limit - known))
        count = asking.drafts(decodes, wishes)
        self._asked_rest = 0 if count else min(2 * self._asked_rest + 1, _LONGEST_REST)
        self._asking_rests = self._asked_rest
        return [min(count, most) if place in places else 0 for place, (_, most) in enumerate(rows)]

    def receive(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """The draft model has answered."""
        drafter = self.drafter(sequence)
        if drafter is not None and drafter.model is not None:
            drafter.model.receive(len(sequence.tokens), drafts)
            self._heard = True

    def learn_pass(self, rows: Work, seconds: float) -> None:
        """A pass of the draft model over such rows took so long."""
        if self._asking is not None:
            self._asking.learn(rows, seconds)

    # Ends

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
