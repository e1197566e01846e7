"""Beam search over the engine: pure bookkeeping of one prompt's beams, for HTTP and for `LLM.beam_search`.

    live beams ── one token each, with the most likely ones ──► candidates, best first
                                                                │ end here: among the best `width`, they are finished
                                                                └ go on: the best `width` of the others live

It is Hugging Face's `generate(num_beams=width, num_return_sequences=width, do_sample=False, early_stopping=False)`: a score is
the sum of the log probabilities over length ** length_penalty, the search ends when the best live beam cannot beat the
worst finished one at its present length. Each step asks the engine for one token of each live beam, as a request of its own:
the beams' common blocks come from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from noria.server.validate import MAX_TOP_LOGPROBS, check_number
from noria.types import EngineRequest, FinishReason, RequestError, SamplingParams, SequenceOutput, TokenLogprobs

# What a request with beam search may ask for; anything else would have to change the search.
ALLOWED = frozenset(
    {
        *("n", "max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
        *("skip_special_tokens", "logprobs", "prompt_logprobs"),
    }
)
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True)
class Beam:
    """Tokens behind the prompt, with the log probability of each, and their sum."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0


class BeamSearch:
    """The beams of one request, whose `n` is their number. `done` when `outputs` can be asked for."""

    def __init__(self, request: EngineRequest, *, max_model_len: int, length_penalty: float) -> None:
        params = request.params
        room = max_model_len - len(request.prompt)
        self.done = False
        self._request = request
        self._width = params.n
        self._stop_ids = frozenset(request.stop_ids)
        self._longest = room if params.max_tokens is None else min(params.max_tokens, room)
        self._penalty = length_penalty
        self._live = [Beam()]
        self._finished: list[tuple[float, Beam]] = []  # best first

    def requests(self) -> list[tuple[tuple[int, ...], SamplingParams]]:
        """The prompt and the parameters of a request for each live beam. The first round also scores the prompt."""
        # Among a beam's `width` + stop ids most likely tokens are its `width` most likely that do not end it.
        top = self._width + len(self._stop_ids)
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            seed=0,
            logprobs=max(top, self._request.params.logprobs or 0),
            prompt_logprobs=self._request.params.prompt_logprobs if not self._live[0].tokens else None,
        )
        return [(self._request.prompt + beam.tokens, params) for beam in self._live]

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """One token for each live beam is back, in their order."""
        candidates = [
            (beam.total + logprob, place, token, logprob)
            for place, (beam, entry) in enumerate(zip(self._live, entries, strict=True))
            for token, logprob in zip(entry.top_tokens, entry.top_logprobs, strict=True)
        ]
        candidates.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))
        length = len(self._live[0].tokens) + 1
        scale: float = length**self._penalty
        live: list[Beam] = []
        for rank, (total, place, token, logprob) in enumerate(candidates):
            ends = token in self._stop_ids or length == self._longest
            if (ends and rank >= self._width) or (not ends and len(live) == self._width):
                continue
            parent, entry = self._live[place], entries[place]
            chosen = msgspec.structs.replace(entry, token=token, logprob=logprob)
            beam = Beam((*parent.tokens, token), (*parent.logprobs, chosen), total)
            if ends:
                self._finished.append((total / scale, beam))
            else:
                live.append(beam)
        self._finished.sort(key=lambda finished: -finished[0])
        del self._finished[self._width :]
        self._live = live
        full = len(self._finished) == self._width
        self.done = not live or (full and live[0].total / scale <= self._finished[-1][0])

    def outputs(
        self, prompt_logprobs: tuple[TokenLogprobs, ...] | None, cached_tokens: int, phases: tuple[float, ...]
    ) -> list[SequenceOutput]:
        """The finished beams as the choices of the request, best first."""
        outputs = []
        top = self._request.params.logprobs
        for index, (_, beam) in enumerate(self._finished):
            last = beam.tokens[-1]
            stopped = last in self._stop_ids
            outputs.append(
                SequenceOutput(
                    request_id=self._request.request_id,
                    index=index,
                    tokens=beam.tokens,
                    logprobs=() if top is None else tuple(_shown(entry, top) for entry in beam.logprobs),
                    prompt_logprobs=prompt_logprobs if index == 0 else None,
                    finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
                    stop_token=last if stopped else None,
                    cached_tokens=cached_tokens,
                    phases=phases,
                )
            )
        return outputs


def _shown(entry: TokenLogprobs, top: int) -> TokenLogprobs:
    """With as many most likely tokens as the client asked for."""
    return TokenLogprobs(entry.token, entry.logprob, entry.top_tokens[:top], entry.top_logprobs[:top])


def check_beams(params: SamplingParams, stop_ids: Sequence[int], length_penalty: float) -> None:
    """Raise RequestError for what beam search cannot honour. `params` are checked for everything else."""
    default = SamplingParams()
    for name in params.__struct_fields__:
        same = getattr(params, name) == getattr(default, name) or (name == "top_k" and params.top_k == -1)
        if name not in ALLOWED and not same:
            field = "response_format" if name == "structured_output" else name
            raise RequestError(f"{field} cannot be used with beam search; leave it out", param=field)
    if params.temperature not in (0.0, 1.0):
        raise RequestError("beam search does not sample: leave temperature out, or set it to 0", param="temperature")
    if params.max_tokens == 0:
        raise RequestError("max_tokens must be at least 1 with beam search", param="max_tokens")
    if params.n + len(stop_ids) > MAX_TOP_LOGPROBS:
        raise RequestError(
            f"beam search looks at the n + (ids that end a beam) most likely tokens, here {params.n} + {len(stop_ids)}, and at "
            f"most {MAX_TOP_LOGPROBS} are reported: lower n",
            param="n",
        )
    check_number("length_penalty", length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
