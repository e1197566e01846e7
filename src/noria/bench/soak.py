"""noria bench soak: random traffic with clients that leave, on a server of our own, and what its processes hold meanwhile.

    arrivals    Poisson at --request-rate, of the kinds in MIX
    clients     a share of them leave at a random moment: while they wait, in the prompt, in the answer
    judged      memory from when the KV pool has filled on, threads, and whether the gauges are at zero when all is over

Memory that is still growing when the pool is full, a thread that stays, or a block that nobody gives back is a leak.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noria.bench.flags import (
    Stages,
    add_engine_flags,
    add_result_flags,
    columns,
    described,
    engine_config,
    tell,
    write_json,
)
from noria.bench.workload import joined, random_ids, random_words
from noria.types import ConfigError, NoriaError

if TYPE_CHECKING:
    from noria.bench.http import HttpClient
    from noria.bench.processes import ProcessUse

BLOCK_TOKENS = 16
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
DRAIN_S = 120.0  # for the last answers, and for the gauges after them
LATE_THREADS = 3  # pools of a fixed size start their threads when they are first needed, which may be late
SHOWN = 20  # lines of the table
PREFIXES = 8  # of the requests that share one, so that blocks are shared and found again

# What is asked, and how often: (weight, kind).
MIX = ((5, "ids"), (3, "chat"), (2, "prefix"), (2, "grammar"), (1, "choices"), (1, "logprobs"), (1, "whole"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    group = parser.add_argument_group("traffic")
    group.add_argument("--duration", type=float, default=1200.0, metavar="S", help="seconds of arrivals [1200]")
    group.add_argument("--request-rate", type=float, default=1.0, metavar="R", help="arrivals a second [1]")
    group.add_argument("--abort-share", type=float, default=0.2, metavar="P", help="clients that leave early, 0 to 1 [0.2]")
    group.add_argument("--max-input-len", type=int, default=512, metavar="N", help="prompt tokens are 64 to N [512]")
    group.add_argument("--max-output-len", type=int, default=256, metavar="N", help="output tokens are 32 to N [256]")
    group.add_argument("--vocab-size", type=int, default=32000, metavar="N", help="prompt ids are drawn below this [32000]")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same traffic [0]")
    judged = parser.add_argument_group("verdict")
    judged.add_argument("--sample-s", type=float, default=5.0, metavar="S", help="seconds between two looks [5]")
    judged.add_argument(
        "--tolerance", type=float, default=1.0, metavar="P", help="per cent that memory may grow once the pool is full [1]"
    )
    add_result_flags(parser, plot=False)


@dataclass(frozen=True)
class Sample:
    """One look at the server, `at` seconds after the start of the traffic."""

    at: float
    processes: tuple[ProcessUse, ...]  # server, engine, and what they have started besides
    computed: float  # tokens that all steps computed
    capacity: float  # tokens that the KV pool holds

    @property
    def resident(self) -> int:
        return sum(process.resident for process in self.processes)

    @property
    def threads(self) -> int:
        return sum(process.threads for process in self.processes)

    @property
    def filled(self) -> bool:
        """Whether each block of the pool has been used, if every computed token took a slot of its own."""
        return self.computed >= self.capacity


@dataclass
class Counts:
    """How the requests ended."""

    answered: int = 0
    left: int = 0
    failed: int = 0


def run(arguments: argparse.Namespace) -> int:
    """0 if nothing leaked, 1 if something did, or the pool never filled."""
    import uvloop

    from noria.bench.processes import check_supported
    from noria.bench.server_child import ServerChild

    check_supported()
    if not 0 <= arguments.abort_share <= 1:
        raise ConfigError("--abort-share must be between 0 and 1")
    for name in ("duration", "request_rate", "sample_s"):
        if getattr(arguments, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be positive")
    if arguments.max_input_len < 64 or arguments.max_output_len < 32:
        raise ConfigError("--max-input-len must be at least 64 and --max-output-len at least 32")
    config = engine_config(arguments)
    with ServerChild(config, on_stage=Stages()) as server:
        soak = Soak(server.url, server.model, server.pid, arguments)
        counts, samples, gauges = uvloop.run(soak.run())
    faults = verdict(samples, gauges, arguments.tolerance)
    if counts.failed:
        faults.append(f"{counts.failed} requests failed")
    print(table(samples))
    print(f"\n{counts.answered} requests answered, {counts.left} left early, {counts.failed} failed")
    print("\n".join(faults) or "no leak was found")
    if arguments.output_json:
        rows = [
            {"at": s.at, "resident": [p.resident for p in s.processes], "threads": [p.threads for p in s.processes]}
            for s in samples
        ]
        result = {"samples": rows, "gauges": gauges, "faults": faults, **vars(counts)}
        write_json(arguments.output_json, described("soak", config.model) | result)
    return 1 if faults else 0


def verdict(samples: list[Sample], gauges: dict[str, float], tolerance: float) -> list[str]:
    """What is wrong, a line each. The first and last quarters of the samples with a full pool are compared."""
    faults = [f"{name} is {value:g} when all is over: something was not given back" for name, value in gauges.items() if value]
    full = [sample for sample in samples if sample.filled]
    if len(full) < 8:
        faults.append(
            "the KV pool was full for too short a time to judge memory: raise --duration, or lower --kv-cache-memory-bytes"
        )
        return faults
    quarter = len(full) // 4
    first, last = full[:quarter], full[-quarter:]
    growth = 100 * (_mean(s.resident for s in last) / _mean(s.resident for s in first) - 1)
    tell(f"memory once the pool was full: {growth:+.2f} %")
    if growth > tolerance:
        faults.append(f"memory grew by {growth:.2f} % after the KV pool had filled")
    if min(s.threads for s in last) > max(s.threads for s in first) + LATE_THREADS:
        faults.append(f"threads grew from {first[0].threads} to {last[-1].threads}")
    return faults


def _mean(values: Any) -> float:
    found = list(values)
    return float(sum(found) / len(found))


def table(samples: list[Sample]) -> str:
    """The samples, evenly thinned."""
    rows: list[tuple[str, ...]] = [("seconds", "server MB", "engine MB", "others MB", "threads", "pool")]
    for sample in samples[:: max(1, len(samples) // SHOWN)]:
        server, engine, *others = sample.processes
        memory = (server.resident, engine.resident, sum(p.resident for p in others))
        pool = "full" if sample.filled else f"{sample.computed / sample.capacity:.0%}"
        rows.append((f"{sample.at:.0f}", *(f"{m / 1e6:.1f}" for m in memory), str(sample.threads), pool))
    return columns(rows)


class Soak:
    """The traffic of one run."""

    def __init__(self, url: str, model: str, pid: int, arguments: argparse.Namespace) -> None:
        self._url = url
        self._model = model
        self._pid = pid
        self._arguments = arguments
        self._random = random.Random(arguments.seed)
        self._ids = random_ids(arguments.vocab_size)
        self._counts = Counts()

    async def run(self) -> tuple[Counts, list[Sample], dict[str, float]]:
        """Traffic, then quiet: (how requests ended, samples, gauges at the end)."""
        from noria.bench.http import HttpClient

        client = HttpClient(self._url)
        samples: list[Sample] = []
        looking = asyncio.create_task(self._look(client, samples))
        try:
            await self._traffic(client)
            return self._counts, samples, await self._quiet(client)
        finally:
            looking.cancel()
            client.close()

    async def _traffic(self, client: HttpClient) -> None:
        due = began = time.perf_counter()
        open_requests: set[asyncio.Task[None]] = set()
        while due < began + self._arguments.duration:
            due += self._random.expovariate(self._arguments.request_rate)
            await asyncio.sleep(due - time.perf_counter())
            request = asyncio.create_task(self._one(client, random.Random(self._random.random())))
            open_requests.add(request)
            request.add_done_callback(open_requests.discard)
        if open_requests:
            await asyncio.wait(open_requests, timeout=DRAIN_S)

    async def _one(self, client: HttpClient, rng: random.Random) -> None:
        import orjson

        path, body = self._request(rng)
        patience = rng.choice((0.05, 0.5, 2.0)) * rng.random() if rng.random() < self._arguments.abort_share else None
        try:
            async with asyncio.timeout(patience):
                await client.post(path, orjson.dumps({"model": self._model, **body}), _read)
            self._counts.answered += 1
        except TimeoutError:
            self._counts.left += 1
        except NoriaError as error:
            tell(f"failed: {error}")
            self._counts.failed += 1

    def _request(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        """(path, body without the model) of a random request."""
        from noria.bench.beside import random_schema

        weights, kinds = zip(*MIX, strict=True)
        (kind,) = rng.choices(kinds, weights)
        length = rng.randint(64, self._arguments.max_input_len)
        most = rng.randint(32, self._arguments.max_output_len)
        body: dict[str, Any] = {"max_tokens": most, "stream": kind != "whole", "temperature": rng.choice((0, 0.7, 1.0))}
        if kind in ("chat", "grammar", "logprobs"):
            body["messages"] = [{"role": "user", "content": random_words(rng, length // 2)}]
            if kind == "grammar":
                body["response_format"] = random_schema(rng)
            if kind == "logprobs":
                body |= {"logprobs": True, "top_logprobs": 5}
            return "/v1/chat/completions", body
        prompt = self._ids(rng, length)
        if kind == "prefix":
            prompt = joined(self._ids(random.Random(rng.randrange(PREFIXES)), length // 2), prompt)
        return "/v1/completions", body | {"prompt": prompt, "n": rng.randint(2, 4) if kind == "choices" else 1}

    async def _look(self, client: HttpClient, samples: list[Sample]) -> None:
        from noria.bench.processes import children, process_use

        began = time.perf_counter()
        while True:
            await asyncio.sleep(self._arguments.sample_s)
            values = await metrics(client)
            computed, capacity = values["iteration_tokens_total_sum"], BLOCK_TOKENS * values["kv_cache_blocks"]
            processes = tuple(process_use(pid) for pid in (self._pid, *children(self._pid)))
            samples.append(Sample(time.perf_counter() - began, processes, computed, capacity))

    async def _quiet(self, client: HttpClient) -> dict[str, float]:
        """The gauges, once they are at zero or have had their time."""
        ends = time.perf_counter() + DRAIN_S
        while True:
            values = await metrics(client)
            gauges = {name: values[name] for name in GAUGES}
            if not any(gauges.values()) or time.perf_counter() > ends:
                return gauges
            await asyncio.sleep(0.2)


async def metrics(client: HttpClient) -> dict[str, float]:
    """What /metrics says, by name without its prefix; samples with other labels than the model's are left out."""
    text = (await client.get("/metrics")).decode()
    found = re.findall(r'^noria_(\w+)\{model_name="[^"]*"\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def _read(line: bytes) -> None:
    """Nothing of the answer is needed."""
