"""Benchmarks without a server: the engine in this process, driven step by step."""

from __future__ import annotations

import time

from noria.bench.report import RequestTimes
from noria.bench.workload import WorkItem
from noria.core.engine import Engine
from noria.types import EngineRequest, SamplingParams


def run_engine(engine: Engine, items: list[WorkItem]) -> tuple[list[RequestTimes], float]:
    """Run the items, each admitted at its arrival time; returns the times and the wall time in seconds."""
    began = time.perf_counter()
    waiting = list(reversed(items))
    times: dict[int, RequestTimes] = {}
    while waiting or engine.has_work:
        now = time.perf_counter()
        while waiting and began + waiting[-1].arrival <= now:
            item = waiting.pop()
            request_id = len(times)
            times[request_id] = RequestTimes(sent=began + item.arrival, input_tokens=len(item.prompt))
            params = SamplingParams(max_tokens=item.max_tokens, temperature=0.0, ignore_eos=True, seed=0)
            engine.add(EngineRequest(request_id=request_id, prompt=item.prompt, params=params, arrival=time.monotonic()))
        if not engine.has_work:
            time.sleep(max(0.0, began + waiting[-1].arrival - time.perf_counter()))
            continue
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            record = times[output.request_id]
            record.token_times += [now] * len(output.tokens)
            record.output_tokens += len(output.tokens)
            record.error = output.error
            record.ended = now
    return list(times.values()), time.perf_counter() - began
