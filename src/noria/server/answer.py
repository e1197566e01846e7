"""Answer: one request's choices as they grow, from the engine's outputs to text. Shared by the server, LLM and AsyncEngine.

Pure bookkeeping: no clock, no channel. A choice ends when the engine says so, or earlier when a stop string appears in its
text; what the engine made after that is dropped, and counts nowhere.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from noria.server.validate import SEED_BITS, check_room
from noria.text.events import Content, Event
from noria.text.output import ChoiceText, Echo, prompt_echo
from noria.text.parsing import ParsePlan, Parser
from noria.text.tokenizer import Tokenizer
from noria.types import EngineRequest, FinishReason, SamplingParams, SequenceOutput, TokenLogprobs

T = TypeVar("T")

# Ends that are failures of the request, not of one choice: they are told as an error, not as a finish reason.
FAILURES = frozenset({FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT})


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a step added to one choice, as far as it may be shown."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one a token, if asked for
    offsets: tuple[int, ...]  # of the tokens, in characters of the choice's text, if asked for
    finish_reason: FinishReason | None = None  # STOP or LENGTH, with the last delta of the choice
    stop_reason: str | int | None = None  # the stop string or the client's stop token id that ended it
    events: tuple[Event, ...] = ()  # of a chat: what the text is. Calls and reasoning are in here only as far as they are sure
    calls: int = 0  # complete tool calls of the choice so far


class _Choice:
    """One choice: its text, and the tokens whose text may not be shown yet."""

    __slots__ = ("ended", "held", "held_logprobs", "parser", "reasoning_tokens", "text", "tokens")

    def __init__(self, text: ChoiceText, parser: Parser | None) -> None:
        self.text = text
        self.parser = parser
        self.reasoning_tokens = 0
        self.tokens = 0  # returned so far
        self.held: deque[int] = deque()
        self.held_logprobs: deque[TokenLogprobs] = deque()
        self.ended = False

    def events(self, text: str, tokens: int, *, last: bool) -> tuple[Event, ...]:
        """What more text is; `tokens` came with it."""
        parser = self.parser
        if parser is None:
            return (Content(text),) if text else ()
        reasoning = parser.reasoning
        events = parser.push(text)
        if reasoning or parser.reasoning:
            self.reasoning_tokens += tokens
        return events + parser.finish() if last else events


class Answer:
    """The choices of one EngineRequest.

    `text` is the prompt as the client wrote it, None if it came as ids. With `echo` the choices begin with the prompt (see
    `self.echo`); `offsets` asks for the place of each token in the text. `plan`: what to look for in a chat's text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: EngineRequest,
        *,
        text: str | None = None,
        echo: bool = False,
        offsets: bool = False,
        plan: ParsePlan | None = None,
    ) -> None:
        params = request.params
        shown = frozenset[int]() if plan is None else tokenizer.shown_in(plan.texts)
        self.request = request
        self.text = text
        self.echo: Echo | None = None
        if echo:
            self.echo = prompt_echo(tokenizer, request.prompt, text=text, skip_special_tokens=params.skip_special_tokens)
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.embedding = b""  # of a request with pooling
        self.cached_tokens = 0
        self.cache_miss = ""  # why no more of the prompt was
        self.phases: tuple[float, ...] = ()
        self.preemptions = 0
        self.predicted_tokens = 0  # of ended choices, that the request's prediction foresaw
        self.unused_prediction_tokens = 0  # of the prediction, that ended choices did not say
        self.reason = FinishReason.STOP  # how the choice that ended last did
        self._open = params.n  # choices that the engine has not closed
        self._unended = params.n  # choices that have no end in the text either
        self.failure: FinishReason | None = None
        self.failure_text: str | None = None
        self._choices = [
            _Choice(
                ChoiceText(
                    tokenizer,
                    stops=params.stop,
                    include_stop=params.include_stop_str_in_output,
                    skip_special_tokens=params.skip_special_tokens,
                    shown=shown,
                    min_tokens=params.min_tokens,
                    prompt=request.prompt,
                    echo=self.echo,
                    offsets=offsets,
                ),
                None if plan is None else Parser(plan),
            )
            for _ in range(params.n)
        ]

    @property
    def ended(self) -> bool:
        """Whether every choice has its end; the engine may not know it yet (a stop string): abort the request then."""
        return self._unended == 0

    @property
    def closed(self) -> bool:
        """Whether the engine has closed every choice: counts, phases and cached tokens are final."""
        return self._open == 0

    @property
    def completion_tokens(self) -> int:
        """Tokens returned so far, of all choices."""
        return sum(choice.tokens for choice in self._choices)

    @property
    def reasoning_tokens(self) -> int:
        """Those of them that are reasoning, its marks included."""
        return sum(choice.reasoning_tokens for choice in self._choices)

    def take(self, output: SequenceOutput) -> Delta | None:
        """One output of the engine. The delta for its choice, None if there is nothing to show."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.embedding = output.embedding or self.embedding
        if output.finish_reason is not None:
            self._open -= 1
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
            self.cache_miss = output.cache_miss
            self.phases = output.phases
            self.preemptions += output.preemptions
            self.predicted_tokens += output.predicted_tokens
            self.unused_prediction_tokens += max(0, len(self.request.prediction) - output.predicted_tokens)
        choice = self._choices[output.index]
        if choice.ended:
            return None
        if output.finish_reason in FAILURES:
            self._end(choice)
            self.failure, self.failure_text = output.finish_reason, output.error
            return None
        if choice.parser is None or len(output.tokens) < 2:
            return self._show(choice, output)
        # One token after the other, so that each is counted as what it is: reasoning may end inside a step.
        deltas = [delta for part in _single(output) if not choice.ended and (delta := self._show(choice, part)) is not None]
        return merge(deltas) if deltas else None

    def _show(self, choice: _Choice, output: SequenceOutput) -> Delta | None:
        reason = output.finish_reason
        stop_reason: str | int | None = self._stop_token(output)
        shown = choice.text.push(output.tokens, finished=reason is not None, stop_token=output.stop_token)
        choice.held.extend(output.tokens)
        choice.held_logprobs.extend(output.logprobs)
        if shown.stop is not None:
            reason, stop_reason = FinishReason.STOP, shown.stop
        events = choice.events(shown.text, shown.tokens, last=reason is not None)
        if reason is None and choice.parser is not None and choice.parser.ended:
            reason = FinishReason.STOP
        if reason is not None:
            self._end(choice)
            self.reason = reason
        choice.tokens += shown.tokens
        if not shown.text and not shown.tokens and reason is None:
            return None
        return Delta(
            index=output.index,
            text=shown.text,
            tokens=_popped(choice.held, shown.tokens),
            logprobs=_popped(choice.held_logprobs, shown.tokens),
            offsets=shown.offsets,
            finish_reason=reason,
            stop_reason=stop_reason,
            events=events,
            calls=0 if choice.parser is None else choice.parser.calls,
        )

    def _end(self, choice: _Choice) -> None:
        choice.ended = True
        self._unended -= 1

    def _stop_token(self, output: SequenceOutput) -> int | None:
        """The id that ended the choice, if the client chose it: the model's own end is nothing to report."""
        return output.stop_token if output.stop_token in self.request.params.stop_token_ids else None


def _popped(held: deque[T], count: int) -> tuple[T, ...]:
    """Take the first `count` of `held`, or as many as there are."""
    if count >= len(held):
        whole = tuple(held)
        held.clear()
        return whole
    return tuple(held.popleft() for _ in range(count))


def _single(output: SequenceOutput) -> Iterator[SequenceOutput]:
    """An output of several tokens as one for each; what ends the choice comes with the last."""
    last = len(output.tokens) - 1
    for i, token in enumerate(output.tokens):
        logprobs = output.logprobs[i : i + 1]
        if i < last:
            yield SequenceOutput(request_id=output.request_id, index=output.index, tokens=(token,), logprobs=logprobs)
        else:
            yield msgspec.structs.replace(output, tokens=(token,), logprobs=logprobs)


def merge(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one choice as one."""
    last = deltas[-1]
    return Delta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        offsets=tuple(offset for delta in deltas for offset in delta.offsets),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        events=tuple(event for delta in deltas for event in delta.events),
        calls=last.calls,
    )


def engine_request(
    request_id: int,
    prompt: tuple[int, ...],
    params: SamplingParams,
    *,
    eos_ids: Sequence[int],
    max_model_len: int,
    arrival: float,
    cache_salt: str = "",
    priority: int = 0,
) -> EngineRequest:
    """A request for the engine from checked parameters. Raises RequestError if it does not fit in the context.

    Draws the seed where there is none. What ends a choice are the model's end ids, unless they are to be ignored, and the
    client's ids besides.
    """
    check_room(len(prompt), params.max_tokens, max_model_len)
    if params.seed is None:
        params = msgspec.structs.replace(params, seed=secrets.randbits(SEED_BITS))
    return EngineRequest(
        request_id=request_id,
        prompt=prompt,
        params=params,
        stop_ids=tuple(dict.fromkeys((*(() if params.ignore_eos else eos_ids), *params.stop_token_ids))),
        cache_salt=cache_salt,
        priority=priority,
        arrival=arrival,
    )
