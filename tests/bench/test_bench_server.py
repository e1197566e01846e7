"""The benchmarks that start a server of their own: stream, serve --http, soak; and what they are made of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from noria.bench.beside import SCHEMAS, parse_beside
from noria.bench.canned import CannedRunner
from noria.bench.neighbour import Neighbour
from noria.bench.processes import ProcessUse, children, process_use, shares
from noria.bench.soak import Sample, verdict
from noria.cli.main import main
from noria.core.plan import PlanRow, StepPlan
from noria.types import ConfigError

MEGABYTE = 1 << 20
ROOM = ["--max-model-len", "1024", "--max-num-batched-tokens", "256", "--threads", "1", "--kv-cache-memory-bytes", "4M"]


def bench(*arguments: str | Path) -> int:
    return main(["bench", *map(str, arguments)])


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


# -- whole benchmarks ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_stream(tiny_gguf: Path, cache: Path, endpoint: str) -> None:
    """Red if canned tokens do not reach a client, a rate is not kept to, or the server's processor time is not counted."""
    out = cache / "out.json"
    load = ["--endpoint", endpoint, "--concurrency", "3", "--output-len", "20", "--seconds", "1", "--rates", "150", "0"]
    assert bench("stream", tiny_gguf, *ROOM, *load, "--output-json", out) == 0
    slow, fast = read(out)["points"]
    assert slow["tokens_per_s"] <= 151
    assert fast["tokens_per_s"] > slow["tokens_per_s"]
    assert fast["server_us_per_token"] > 0
    assert read(out)["engine_tokens_per_s"] > 0


@pytest.mark.slow
def test_serve_on_a_server_of_our_own_with_others_beside(tiny_gguf: Path, cache: Path) -> None:
    """Red if requests beside are measured or fail, or the server's two processes are not measured."""
    out = cache / "out.json"
    short = ["--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "6", "--vocab-size", "250"]
    beside = ["--beside", "plain:2", "--beside", "grammar:2", "--beside", "flood:1", "--flood-len", "300"]
    assert bench("serve", tiny_gguf, *ROOM, "--http", *short, *beside, "--output-json", out) == 0
    result = read(out)
    assert result["completed"] == 6
    assert result["total_output_tokens"] == 24
    for name in ("server", "engine"):
        assert result[f"{name}_memory_mb"] > 10
        assert result[f"{name}_cpu_percent"] >= 0


@pytest.mark.slow
def test_soak(tiny_gguf: Path, cache: Path) -> None:
    """Red if a kind of request is refused, nobody leaves early, or the engine holds blocks when all is over."""
    out = cache / "out.json"
    traffic = ["--duration", "5", "--request-rate", "8", "--abort-share", "0.5", "--vocab-size", "250"]
    lengths = ["--max-input-len", "64", "--max-output-len", "32", "--sample-s", "0.25", "--tolerance", "1000"]
    bench("soak", tiny_gguf, *ROOM, *traffic, *lengths, "--output-json", out)
    result = read(out)
    assert result["failed"] == 0
    assert result["answered"] > 0
    assert result["left"] > 0
    assert set(result["gauges"].values()) == {0}
    assert len(result["samples"][-1]["resident"]) >= 2


@pytest.mark.slow
def test_latency_beside_a_neighbour(tiny_gguf: Path, cache: Path) -> None:
    """Red if pairs are not taken, or the share of the speed that is left is not told."""
    out = cache / "out.json"
    shape = ["--input-len", "8", "--output-len", "8", "--neighbour"]
    assert bench("latency", tiny_gguf, "--max-model-len", "128", *shape, "--output-json", out) == 0
    result = read(out)
    assert len(result["pairs"]) == 20
    assert 0 < result["speed_left_low"] <= result["speed_left"] <= result["speed_left_high"]


# -- their parts ---------------------------------------------------------------------------------------------------------


def test_canned_tokens_do_not_depend_on_the_cut_into_steps() -> None:
    """Red if a sequence's next token depends on anything but its row and position."""

    def said(*chunks: tuple[int, int]) -> list[int]:
        runner = CannedRunner(range(1000), 0.0)
        tokens: list[int] = []
        for step, (start, count) in enumerate(chunks):
            row = PlanRow(row=3, start=start, count=count, tokens=(), samples=1)
            tokens += runner.wait(runner.launch(StepPlan(step=step, rows=(row,)))).rows[0].tokens
        return tokens

    one_by_one = said((0, 7), (7, 1), (8, 1), (9, 1))
    assert one_by_one == list(range(one_by_one[0], one_by_one[0] + 4))
    assert said((4, 3), (7, 1), (8, 1), (9, 1)) == one_by_one


def test_a_process_is_measured() -> None:
    """Red if children are not found, or time and memory are read from the wrong fields."""
    others = set(children(os.getpid()))
    with Neighbour() as neighbour:
        (child,) = set(children(os.getpid())) - others
        neighbour.go_on()
        before = process_use(child)
        while process_use(child).seconds < before.seconds + 0.05:
            pass
        use = process_use(child)
        assert MEGABYTE < use.memory <= use.resident < 100 * MEGABYTE
        assert use.threads == 1
        assert len(os.sched_getaffinity(child)) == 1
    with pytest.raises(ProcessLookupError):
        process_use(child)


def test_shares_are_per_cent_of_one_core() -> None:
    """Red if the difference of two looks is not divided by the time between them."""
    before = (ProcessUse(1, 1.0, 0, 0, 1), ProcessUse(2, 2.0, 0, 0, 1))
    after = (ProcessUse(1, 1.5, 3_000_000, 0, 1), ProcessUse(2, 12.0, 4_000_000, 0, 1))
    figures = shares(before, after, 5.0)
    assert figures["server_cpu_percent"] == 10
    assert figures["engine_cpu_percent"] == 200
    assert (figures["server_memory_mb"], figures["engine_memory_mb"]) == (3, 4)


def samples(memory: list[int], threads: list[int] | None = None, filled: bool = True) -> list[Sample]:
    counts = threads or [10] * len(memory)
    looks = zip(memory, counts, strict=True)
    return [
        Sample(float(i), (ProcessUse(1, 0.0, 0, m, t),), 100.0, 50.0 if filled else 200.0) for i, (m, t) in enumerate(looks)
    ]


@pytest.mark.parametrize(
    ("looks", "gauges", "fault"),
    [
        (samples([100] * 12), {"running": 0.0}, None),
        (samples([100] * 6 + [105] * 6), {"running": 0.0}, "memory grew by 5.00 %"),
        (samples([100] * 12, [10] * 8 + [15] * 4), {"running": 0.0}, "threads grew from 10 to 15"),
        (samples([100] * 12, [10] * 8 + [11] * 4), {"running": 0.0}, None),
        (samples([100] * 12), {"kv_cache_usage_perc": 0.25}, "kv_cache_usage_perc is 0.25"),
        (samples([100] * 12, filled=False), {"running": 0.0}, "too short a time"),
    ],
)
def test_verdict_of_a_soak(looks: list[Sample], gauges: dict[str, float], fault: str | None) -> None:
    """Red if a leak passes, or a flat run does not."""
    faults = verdict(looks, gauges, tolerance=1.0)
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]


def test_kinds_beside() -> None:
    """Red if a misspelt kind or number runs as something else."""
    assert parse_beside(["grammar:16", "flood:2"]) == (("grammar", 16), ("flood", 2))
    for text in ("gramar:16", "flood", "flood:0", "plain:x", "plain:-1"):
        with pytest.raises(ConfigError, match="--beside"):
            parse_beside([text])


def test_schemas_beside_are_taken() -> None:
    """Red if one of the schemas asks for something that is refused: the benchmark would measure refusals."""
    from noria.text.schema import checked_schema

    for schema in SCHEMAS:
        checked_schema(schema)
