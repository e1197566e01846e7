"""Benchmarks without a server: the engine in this process, driven step by step."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence

from noria.bench.report import RequestTimes
from noria.bench.workload import AT_ONCE, Session
from noria.core.engine import Engine
from noria.types import EngineRequest, SamplingParams

Progress = Callable[[int], None]  # requests that have ended


class _Run:
    """Requests of sessions: the turns that wait for their time, and those that the engine has."""

    def __init__(self, engine: Engine, sessions: Sequence[Session], stop_ids: tuple[int, ...], began: float) -> None:
        self.engine = engine
        self.times: list[RequestTimes] = []  # by request id
        self._sessions = sessions
        self._stop_ids = stop_ids
        self._waiting = [(began + session.arrival, index, 0) for index, session in enumerate(sessions)]
        heapq.heapify(self._waiting)
        self._said: dict[int, list[int]] = {index: [] for index in range(len(sessions))}
        self._places: list[tuple[int, int]] = []  # (session, turn) by request id

    @property
    def next_due(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None

    def admit(self, now: float) -> None:
        """Give the engine every turn whose time has come."""
        while self._waiting and self._waiting[0][0] <= now:
            due, index, turn = heapq.heappop(self._waiting)
            item = self._sessions[index].turns[turn]
            assert isinstance(item.prompt, tuple), "an engine takes token ids"
            prompt = self._said[index] = [*self._said[index], *item.prompt]
            params = SamplingParams(max_tokens=item.max_tokens, temperature=0.0, ignore_eos=not self._stop_ids, seed=0)
            request = EngineRequest(
                request_id=len(self.times),
                prompt=tuple(prompt),
                params=params,
                stop_ids=self._stop_ids,
                arrival=time.monotonic(),
            )
            self.times.append(RequestTimes(scheduled=due, sent=now, input_tokens=len(prompt)))
            self._places.append((index, turn))
            self.engine.add(request)

    def step(self) -> int:
        """One step of the engine; how many requests ended in it."""
        outputs = self.engine.step()
        now, ended = time.perf_counter(), 0
        for output in outputs:
            record = self.times[output.request_id]
            index, turn = self._places[output.request_id]
            record.token_times += [now] * len(output.tokens)
            record.output_tokens += len(output.tokens)
            self._said[index] += output.tokens
            record.error = output.error
            record.ended = now
            if output.finish_reason is not None:
                ended += 1
                record.cached_tokens = output.cached_tokens
                if turn + 1 < len(self._sessions[index].turns):
                    heapq.heappush(self._waiting, (now, index, turn + 1))
        return ended


def run_engine(
    engine: Engine, sessions: Sequence[Session], *, stop_ids: tuple[int, ...] = (), progress: Progress = lambda count: None
) -> tuple[list[RequestTimes], float]:
    """Run the sessions, each turn admitted when it is due, greedily. Returns the requests' times and the wall time, seconds.

    Without `stop_ids` every answer has the length that was asked for. RequestError for a prompt that does not fit.
    """
    began = time.perf_counter()
    run, done = _Run(engine, sessions, stop_ids, began), 0
    while run.next_due is not None or engine.has_work:
        run.admit(time.perf_counter())
        if engine.has_work:
            done += run.step()
            progress(done)
        else:
            time.sleep(max(0.0, (run.next_due or AT_ONCE) - time.perf_counter()))
    return run.times, time.perf_counter() - began
