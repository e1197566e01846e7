"""noria bench stream: what the server process can stream, and what it costs a token, before an engine that computes nothing.

    load generator  ⇄ HTTP, SSE ⇄  server process  ⇄ ZeroMQ ⇄  engine process, canned tokens at a rate
    (this process)                 (measured)

The real engine is run first, in this process, at the same number of streams: what it makes is what the server has to keep up
with. Of the server the processor time counts, which other programs on the machine change little.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from noria.bench.flags import add_engine_flags, add_result_flags, columns, described, engine_config, write_json
from noria.bench.workload import random_words
from noria.config import EngineConfig
from noria.types import ConfigError, NoriaError

if TYPE_CHECKING:
    from noria.bench.http import HttpClient

ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PROMPT_WORDS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--endpoint", choices=tuple(ENDPOINTS), default="chat", help="what is asked [chat]")
    group.add_argument("--concurrency", type=int, default=64, metavar="N", help="streams at once [64]")
    group.add_argument("--output-len", type=int, default=200, metavar="N", help="tokens of an answer [200]")
    group.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[1500.0, 6000.0, 0.0],
        metavar="R",
        help="tokens a second that the canned engine makes; 0: as fast as it can [1500 6000 0]",
    )
    group.add_argument("--seconds", type=float, default=8.0, metavar="S", help="about how long each rate is measured [8]")
    group.add_argument(
        "--engine-rate", type=float, metavar="R", help="tokens a second of the real engine [measured before the server is]"
    )
    add_result_flags(parser, plot=False)


@dataclass(frozen=True)
class Streamed:
    """What one rate came to. Seconds are of processor time; the gaps are a client's, between events."""

    rate: float  # asked of the canned engine, tokens a second
    tokens: int
    wall: float
    server_s: float
    engine_s: float
    load_s: float  # of the load generator: where it is near `wall`, it is what was measured
    gap_p50_ms: float
    gap_p99_ms: float

    @property
    def per_second(self) -> float:
        return self.tokens / self.wall

    @property
    def server_us(self) -> float:
        """Microseconds of the server process a token."""
        return 1e6 * self.server_s / self.tokens

    @property
    def capacity(self) -> float:
        """Tokens a second of a server process that has a core to itself."""
        return self.tokens / self.server_s


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each rate, and how the server compares with the engine."""
    import uvloop

    from noria.bench.processes import check_supported

    check_supported()
    if min(arguments.concurrency, arguments.output_len) < 1 or arguments.seconds <= 0 or min(arguments.rates) < 0:
        raise ConfigError("--concurrency and --output-len must be at least 1, --seconds positive, --rates not negative")
    config = engine_config(arguments)
    made = arguments.engine_rate or real_rate(config, arguments.concurrency)
    measured = [uvloop.run(measure(config, arguments, rate)) for rate in arguments.rates]
    rows = [("engine", "tok/s", "server us/tok", "of a core", "at 100 %", "x engine", "gap p50 ms", "p99 ms", "load")]
    for m in measured:
        name = f"{m.rate:,.0f} tok/s" if m.rate else "unlimited"
        shares = (f"{m.server_s / m.wall:.0%}", f"{m.capacity:,.0f}", f"{m.capacity / made:.1f}")
        gaps = (f"{m.gap_p50_ms:.1f}", f"{m.gap_p99_ms:.1f}", f"{m.load_s / m.wall:.0%}")
        rows.append((name, f"{m.per_second:,.0f}", f"{m.server_us:.1f}", *shares, *gaps))
    print(f"the real engine makes {made:,.0f} tokens a second with {arguments.concurrency} streams\n")
    print(columns(rows))
    if arguments.output_json:
        points = [_point(m) for m in measured]
        about = {"concurrency": arguments.concurrency, "endpoint": ENDPOINTS[arguments.endpoint]}
        figures = {"engine_tokens_per_s": made, "points": points}
        write_json(arguments.output_json, described("stream", config.model) | about | figures)
    return 0


def _point(m: Streamed) -> dict[str, float]:
    return {
        "rate": m.rate,
        "tokens_per_s": m.per_second,
        "server_us_per_token": m.server_us,
        "server_share": m.server_s / m.wall,
        "capacity_tokens_per_s": m.capacity,
        "engine_share": m.engine_s / m.wall,
        "load_share": m.load_s / m.wall,
        "gap_p50_ms": m.gap_p50_ms,
        "gap_p99_ms": m.gap_p99_ms,
    }


def real_rate(config: EngineConfig, streams: int) -> float:
    """Tokens a second that the engine of `config` decodes with so many streams, in this process."""
    import msgspec

    from noria.bench.flags import warmed_engine
    from noria.bench.inprocess import run_engine
    from noria.bench.workload import WorkloadSpec, generate, random_ids

    config = msgspec.structs.replace(config, max_num_seqs=max(config.max_num_seqs, streams))
    built = warmed_engine(config, quiet=True)
    try:
        spec = WorkloadSpec(num_prompts=streams, input_len=32, output_len=96, seed=0)
        times, _ = run_engine(built.engine, generate(spec, random_ids(built.spec.vocab_size)))
    finally:
        built.engine.close()
    begin = max(t.token_times[0] for t in times)  # from here on all of them decode
    end = min(t.token_times[-1] for t in times)
    return sum(begin < at <= end for t in times for at in t.token_times) / (end - begin)


async def measure(config: EngineConfig, arguments: argparse.Namespace, rate: float) -> Streamed:
    """One rate, on a server of its own. Raises NoriaError if a request fails."""
    import msgspec

    from noria.bench.canned import RATE
    from noria.bench.http import HttpClient
    from noria.bench.processes import server_use
    from noria.bench.report import percentile
    from noria.bench.server_child import ServerChild

    config = msgspec.structs.replace(config, max_num_seqs=max(config.max_num_seqs, arguments.concurrency))
    with ServerChild(config, command=("noria.bench.canned",), environment={RATE: str(rate)}) as server:
        client = HttpClient(server.url)
        load = _Load(client, server.model, arguments)
        try:
            await load.one()  # what is loaded with a first request is not measured
            before, began, own = server_use(server.pid), time.perf_counter(), time.process_time()
            answers = await load.run(began + arguments.seconds)
            after, wall, own = server_use(server.pid), time.perf_counter() - began, time.process_time() - own
        finally:
            client.close()
    gaps = [gap for answer in answers for gap in answer.gaps]
    return Streamed(
        rate=rate,
        tokens=sum(answer.tokens() for answer in answers),
        wall=wall,
        server_s=after[0].seconds - before[0].seconds,
        engine_s=after[1].seconds - before[1].seconds,
        load_s=own,
        gap_p50_ms=1e3 * percentile(gaps, 50),
        gap_p99_ms=1e3 * percentile(gaps, 99),
    )


class _Load:
    """So many streams at once, for a while, each followed by another."""

    def __init__(self, client: HttpClient, model: str, arguments: argparse.Namespace) -> None:
        self._client = client
        self._path = ENDPOINTS[arguments.endpoint]
        self._streams = arguments.concurrency
        self._random = random.Random(0)
        self._common = {
            "model": model,
            "max_tokens": arguments.output_len,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def run(self, ends: float) -> list[_Answer]:
        """Streams until `ends` (time.perf_counter()) and those that run then."""
        answers: list[_Answer] = []

        async def stream() -> None:
            while time.perf_counter() < ends:
                answers.append(await self.one())

        await asyncio.gather(*(stream() for _ in range(self._streams)))
        return answers

    async def one(self) -> _Answer:
        import orjson

        text = random_words(self._random, PROMPT_WORDS)
        chat = self._path == ENDPOINTS["chat"]
        asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        answer = _Answer()
        await self._client.post(self._path, orjson.dumps(self._common | asked), answer.take_line)
        return answer


class _Answer:
    """A stream of which only the last event is read: reading them all would be the larger part of the load's work."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self._usage = b""
        self._then: float | None = None

    def take_line(self, line: bytes) -> None:
        if not line.startswith(b"data: {"):
            return
        self._usage = line
        now = time.perf_counter()
        if self._then is not None:
            self.gaps.append(now - self._then)
        self._then = now

    def tokens(self) -> int:
        """NoriaError if the answer did not end with its usage."""
        import orjson

        event = orjson.loads(self._usage[6:] or b"{}")
        if not event.get("usage"):
            raise NoriaError(f"a stream did not end well: {self._usage[:200].decode(errors='replace')}")
        return int(event["usage"]["completion_tokens"])
