"""An engine without a model: the same interface, tokens by a rule, optional slowness. For tests of the shells around it.

The n-th token of choice i is a function of (prompt, seed, i, n), so a request's answer can be predicted and does not depend
on what runs beside it; with temperature 0 the seed and the choice do not count.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import time
from pathlib import Path

import msgspec

from noria.config import EngineConfig
from noria.core.queue import QueueFull
from noria.server.engine_process import Report
from noria.server.wire import EngineFacts, Located, Stage
from noria.types import (
    EngineRequest,
    EngineStats,
    FinishReason,
    LoadError,
    Phase,
    RequestError,
    SequenceOutput,
    TokenLogprobs,
)

VOCAB = 260
EOS = 257
WORDS = ["alpha ", "bé ", "漢字 ", "🙂 ", "one two, ", "x", "\n", "Łódź ", "  ", "end. "]


def token_at(prompt: tuple[int, ...], seed: int, index: int, position: int) -> int:
    """The fake model: byte `position` of an endless text of words, wide characters among them."""
    written = 0
    for word in itertools.count():
        data = WORDS[_hash((prompt, seed, index, word)) % len(WORDS)].encode()
        if position < written + len(data):
            return data[position - written]
        written += len(data)
    raise AssertionError


@functools.cache
def _hash(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


class Running:
    """One choice."""

    def __init__(self, request: EngineRequest, index: int, limit: int) -> None:
        self.request = request
        self.index = index
        self.limit = limit
        self.count = 0
        self.admitted = 0.0


class FakeEngine:
    """add / abort / step / has_work / stats, as `noria.core.engine.Engine`."""

    def __init__(self, config: EngineConfig, delay: float, max_len: int) -> None:
        self._config = config
        self._delay = delay
        self._max_len = max_len
        self._waiting: list[EngineRequest] = []
        self._running: list[Running] = []
        self._counts = {"steps": 0, "prompt_tokens": 0, "generated_tokens": 0}
        self._finished: dict[str, int] = {}

    def add(self, request: EngineRequest) -> None:
        free_rows = self._config.max_num_seqs - len(self._running)
        if len(self._waiting) - free_rows >= self._config.max_num_queued_reqs:
            raise QueueFull(len(self._waiting), 2.0)
        if len(request.prompt) == 3 and request.prompt == (1, 2, 3):
            raise RequestError("the fake engine refuses 1 2 3", param="prompt")
        self._waiting.append(request)

    def abort(self, request_id: int, index: int | None = None) -> list[SequenceOutput]:
        return self._end([request_id], FinishReason.ABORT, index)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[SequenceOutput]:
        time.sleep(self._delay)
        now = time.monotonic()
        timeout = self._config.request_timeout_s
        late = [r.request_id for r in self._requests() if timeout is not None and now >= r.arrival + timeout]
        late += [r.request_id for r in self._requests() if r.deadline is not None and now >= r.deadline]
        outputs = self._end(late, FinishReason.TIMEOUT)
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            request = self._waiting.pop(0)
            limit = self._max_len - len(request.prompt)
            if request.params.max_tokens is not None:
                limit = min(limit, request.params.max_tokens)
            for index in range(request.params.n):
                self._running.append(Running(request, index, limit))
                self._running[-1].admitted = now
            self._counts["prompt_tokens"] += len(request.prompt)
        for choice in list(self._running):
            outputs.append(self._advance(choice, now))
        self._counts["steps"] += 1
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage=min(1.0, len(self._running) / self._config.max_num_seqs),
            kv_blocks=100,
            finished=dict(self._finished),
            **self._counts,
        )

    def close(self) -> None:
        pass

    def _requests(self) -> list[EngineRequest]:
        return self._waiting + [c.request for c in self._running]

    def _advance(self, choice: Running, now: float) -> SequenceOutput:
        request, params = choice.request, choice.request.params
        random = (0, 0) if params.greedy else (params.seed or 0, choice.index)
        biased = [t for t, b in params.logit_bias.items() if b == 100]
        token = biased[0] if biased else token_at(request.prompt, *random, choice.count)
        if token in request.stop_ids and choice.count < params.min_tokens:
            token = ord("m")
        first = choice.count == 0
        scoring = choice.limit == 0
        choice.count += 1
        self._counts["generated_tokens"] += not scoring
        reason = None
        if token in request.stop_ids and choice.count > params.min_tokens and not scoring:
            reason = FinishReason.STOP
        elif choice.count >= choice.limit:
            reason = FinishReason.LENGTH
        logprobs: tuple[TokenLogprobs, ...] = ()
        if params.logprobs is not None and not scoring:
            logprobs = (self._logprob(token, params.logprobs),)
        prompt_logprobs = None
        if first and choice.index == 0 and params.prompt_logprobs is not None:
            prompt_logprobs = tuple(self._logprob(t, params.prompt_logprobs) for t in request.prompt[1:])
        output = SequenceOutput(
            request_id=request.request_id,
            index=choice.index,
            tokens=() if scoring else (token,),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token=token if reason is FinishReason.STOP else None,
            cached_tokens=0,
            cache_miss="never seen",
            phases=self._phases(choice, now) if reason else (),
        )
        if reason is not None:
            self._running.remove(choice)
            if not any(c.request is request for c in self._running):
                self._finished[reason.value] = self._finished.get(reason.value, 0) + 1
        return output

    def _phases(self, choice: Running, now: float) -> tuple[float, ...]:
        parts = [0.0] * len(Phase)
        parts[Phase.QUEUE] = max(0.0, choice.admitted - choice.request.arrival)
        parts[Phase.DECODE] = max(0.0, now - choice.admitted)
        return tuple(parts)

    def _logprob(self, token: int, top: int) -> TokenLogprobs:
        others = tuple((token + i) % 256 for i in range(top))
        return TokenLogprobs(token, -0.25, others, tuple(-0.25 - i for i in range(top)))

    def _end(self, ids: list[int], reason: FinishReason, only: int | None = None) -> list[SequenceOutput]:
        ended = [c for c in self._running if c.request.request_id in ids and only in (None, c.index)]
        if only is None:
            ended += [Running(r, i, 0) for r in self._waiting if r.request_id in ids for i in range(r.params.n)]
            self._waiting = [r for r in self._waiting if r.request_id not in ids]
        self._running = [c for c in self._running if c not in ended]
        for _ in {c.request.request_id for c in ended} - {c.request.request_id for c in self._running}:
            self._finished[reason.value] = self._finished.get(reason.value, 0) + 1
        return [
            SequenceOutput(
                request_id=c.request.request_id,
                index=c.index,
                finish_reason=reason,
                phases=self._phases(c, time.monotonic()),
            )
            for c in ended
        ]


class Loaded:
    """What a factory returns."""

    def __init__(self, config: EngineConfig, delay: float) -> None:
        max_len = config.max_model_len or 512
        self.engine = FakeEngine(config, delay, max_len)
        self.facts = EngineFacts(
            model="fake",
            max_model_len=max_len,
            vocab_size=VOCAB,
            eos_ids=(EOS,),
            fingerprint="fp_fake",
            ledger=("fake ledger: nothing needs memory",),
        )


def fast(config: EngineConfig, report: Report) -> Loaded:
    """No delay to speak of."""
    report(Stage(text="loading the fake engine"))
    report(Located(path=config.model))
    return Loaded(config, 0.0005)


def slow(config: EngineConfig, report: Report) -> Loaded:
    """A step takes 50 ms."""
    report(Located(path=config.model))
    return Loaded(config, 0.05)


def broken(config: EngineConfig, report: Report) -> Loaded:
    """Cannot load."""
    raise LoadError("tensor blk.0.attn_q.weight has shape 3x4, expected 4x4")


def crashing(config: EngineConfig, report: Report) -> Loaded:
    """Dies without a word while it loads."""
    os._exit(7)


def buggy(config: EngineConfig, report: Report) -> Loaded:
    """A bug in the loader."""
    return Loaded(config, 1 / 0)


def late(config: EngineConfig, report: Report) -> Loaded:
    """Takes three seconds to load."""
    report(Located(path=config.model))
    time.sleep(3)
    return Loaded(config, 0.0005)


def stuck(config: EngineConfig, report: Report) -> Loaded:
    """A step takes longer than streams stay silent."""
    report(Located(path=config.model))
    return Loaded(config, 3.5)


def faulty(config: EngineConfig, report: Report) -> Loaded:
    """The fifth step breaks an invariant."""
    report(Located(path=config.model))
    loaded = Loaded(config, 0.001)
    sound = loaded.engine.step

    def step() -> list[SequenceOutput]:
        if loaded.engine.stats().steps == 4:
            raise RuntimeError("invariant broken: 3 blocks are free twice")
        return sound()

    loaded.engine.step = step  # type: ignore[method-assign]
    return loaded


def recording(config: EngineConfig, report: Report) -> Loaded:
    """Appends what it was told of each request, less the prompt, to requests.jsonl in the model's folder."""
    loaded = fast(config, report)
    add = loaded.engine.add

    def recorded(request: EngineRequest) -> None:
        with (Path(config.model) / "requests.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(msgspec.structs.replace(request, prompt=())) + b"\n")
        add(request)

    loaded.engine.add = recorded  # type: ignore[method-assign]
    return loaded


def paced(config: EngineConfig, report: Report) -> Loaded:
    """A step takes 10 ms: what a small model does."""
    report(Located(path=config.model))
    return Loaded(config, 0.01)
