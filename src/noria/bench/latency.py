"""noria bench latency: one batch, again and again, in this process; with --neighbour, beside a busy program in turn."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from noria.bench.flags import (
    add_engine_flags,
    add_result_flags,
    described,
    engine_config,
    progress_bar,
    warmed_engine,
    write_json,
)
from noria.bench.pairs import LEAST_PAIRS
from noria.types import ConfigError

if TYPE_CHECKING:
    from noria.assembly import BuiltEngine
    from noria.bench.report import Figures, RequestTimes

PERCENTILES = (10, 25, 50, 75, 90, 99)
ITERATIONS = 5
Batch = Callable[
    [int], tuple[list["RequestTimes"], float]
]  # by the number of the repetition: its requests' times, wall seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="prompt tokens [128]")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="output tokens [128]")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="requests at once [1]")
    parser.add_argument("--num-iters-warmup", type=int, default=1, metavar="N", help="unmeasured repetitions [1]")
    parser.add_argument(
        "--num-iters", type=int, metavar="N", help=f"measured repetitions [{ITERATIONS}], or pairs of them [{LEAST_PAIRS}]"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts [0]")
    parser.add_argument(
        "--neighbour",
        action="store_true",
        help="measure pairs, one of each beside an endless loop pinned to a core: the speed of decoding that is left",
    )
    add_result_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print and save; every repetition has other prompts, so that none is found in the prefix cache."""
    from noria.bench.report import table

    least = LEAST_PAIRS if arguments.neighbour else 1
    if arguments.num_iters is None:
        arguments.num_iters = LEAST_PAIRS if arguments.neighbour else ITERATIONS
    if arguments.num_iters < least or arguments.num_iters_warmup < 0:
        raise ConfigError(f"--num-iters must be at least {least} and --num-iters-warmup at least 0")
    if arguments.neighbour and (arguments.plot or arguments.output_len < 2):
        raise ConfigError("--neighbour compares decode steps: it has no --plot, and needs an --output-len of at least 2")
    config = engine_config(arguments)
    built = warmed_engine(config)
    batch = _batches(built, arguments)
    try:
        for index in range(arguments.num_iters_warmup):
            batch(-1 - index)
        figures, extra = (_beside_neighbour if arguments.neighbour else _alone)(batch, arguments)
    finally:
        built.engine.close()
    print(table(figures))
    if arguments.output_json:
        shape = {name: getattr(arguments, name) for name in ("input_len", "output_len", "batch_size")}
        write_json(arguments.output_json, described("latency", config.model) | shape | figures | extra)
    return 0


def _batches(built: BuiltEngine, arguments: argparse.Namespace) -> Batch:
    from noria.bench.inprocess import run_engine
    from noria.bench.workload import WorkloadSpec, generate, random_ids

    make = random_ids(built.spec.vocab_size)

    def batch(index: int) -> tuple[list[RequestTimes], float]:
        spec = WorkloadSpec(
            num_prompts=arguments.batch_size,
            input_len=arguments.input_len,
            output_len=arguments.output_len,
            seed=arguments.seed + index,
        )
        return run_engine(built.engine, generate(spec, make))

    return batch


def _alone(batch: Batch, arguments: argparse.Namespace) -> tuple[Figures, dict[str, object]]:
    """The figures, and what only the file gets."""
    from noria.bench.plot import plot_latencies
    from noria.bench.report import percentile, series, summary

    walls: list[float] = []
    requests = []
    with progress_bar(arguments.num_iters, "iterations") as progress:
        for index in range(arguments.num_iters):
            times, seconds = batch(index)
            walls.append(seconds)
            requests += times
            progress(index + 1)
    figures = {"avg_latency": sum(walls) / len(walls)}
    figures |= {f"p{p}_latency": percentile(walls, p) for p in PERCENTILES}
    per_request = summary(requests, sum(walls))
    kept = ("output_throughput", "mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_itl_ms")
    figures |= {name: per_request[name] for name in kept}
    if arguments.plot:
        plot_latencies(series(requests), arguments.plot, f"{arguments.model}, batch {arguments.batch_size}")
    return figures, {"latencies": walls, "percentiles": {str(p): figures[f"p{p}_latency"] for p in PERCENTILES}}


def _beside_neighbour(batch: Batch, arguments: argparse.Namespace) -> tuple[Figures, dict[str, object]]:
    """The time of a decode step, quiet and beside the neighbour, and the share of the quiet speed that is left."""
    from noria.bench.neighbour import Neighbour
    from noria.bench.pairs import interleave, median_ratio
    from noria.bench.report import percentile

    def step(index: int) -> float:
        times, _ = batch(index)
        return sum(t.tpot or 0.0 for t in times) / len(times)

    def beside(index: int) -> float:
        neighbour.go_on()
        try:
            return step(2 * index + 1)
        finally:
            neighbour.pause()

    with Neighbour() as neighbour, progress_bar(arguments.num_iters, "pairs") as progress:
        measured = interleave(lambda index: step(2 * index), beside, arguments.num_iters, progress)
    left = median_ratio(measured)
    figures = {
        "quiet_tpot_ms": 1e3 * percentile([quiet for quiet, _ in measured], 50),
        "neighbour_tpot_ms": 1e3 * percentile([busy for _, busy in measured], 50),
        "speed_left": left.median,
        "speed_left_low": left.low,
        "speed_left_high": left.high,
    }
    return figures, {"pairs": measured}
