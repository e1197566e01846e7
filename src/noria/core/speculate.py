"""Speculation: which drafts a step verifies beside the tokens that it has to compute.

A draft is a guess of a token that is not known yet. The runner draws the target token of each drafted position with the noise
of that position, as it would without drafts, and a draft counts if it is equal: drafts change when a token is made,
never which.

How many are worth it is a matter of measured rates. A step of R decodes takes T seconds; with k drafts of one more sequence it
takes T(k), and makes s1 + s1 s2 + ... more tokens on average, where s is how often guesses like these came true:

    tokens a second    (R + E + s1 + s1 s2 + ...) / T(k)      is to be highest, and higher than without by `_LEAST_GAIN`
"""

from __future__ import annotations

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


class Bargain:
    """The drafts of one step: what they are expected to bring, and to cost."""

    def __init__(self, cost: VerificationCost, decodes: Work, seconds: float) -> None:
        """`decodes`: the tokens of the step that are no prompt's; `seconds`: that drafts may add to it."""
        self._cost = cost
        self._work = decodes
        self._made = float(decodes.tokens)
        self._spent = cost.seconds(decodes)
        self._latest = self._spent + seconds

    def worth(self, context: int, runs: list[float]) -> int:
        """How many drafts behind `context` tokens to take, as the rate says; they are taken."""
        best, best_rate, chosen = 0, _LEAST_GAIN * self._made / self._spent, (self._work, self._made, self._spent)
        made, base = self._made, self._work
        pairs = base.pairs
        for count, run in enumerate(runs, 1):
            made += run
            pairs += context + count
            work = Work(base.tokens + count, pairs, base.context + count, base.logits + count)
            seconds = self._cost.seconds(work)
            if seconds > self._latest:
                break
            if made > best_rate * seconds:
                best, best_rate, chosen = count, made / seconds, (work, made, seconds)
        self._work, self._made, self._spent = chosen
        return best


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

    def drafts_for(self, sequence: Sequence, most: int, bargain: Bargain) -> tuple[int, ...]:
        """The drafts of one row, at most `most`: the one place where proposals come from."""
        drafter = self.drafter(sequence)
        if drafter is None:
            return ()
        drafts, runs = drafter.propose(min(most, self._most))
        return tuple(drafts[: bargain.worth(len(sequence.tokens), runs)]) if runs else ()

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
