"""noria bench latency: one batch, again and again, in this process."""

from __future__ import annotations

import argparse

from noria.bench.flags import (
    add_engine_flags,
    add_result_flags,
    described,
    engine_config,
    progress_bar,
    warmed_engine,
    write_json,
)

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="prompt tokens [128]")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="output tokens [128]")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="requests at once [1]")
    parser.add_argument("--num-iters-warmup", type=int, default=1, metavar="N", help="unmeasured repetitions [1]")
    parser.add_argument("--num-iters", type=int, default=5, metavar="N", help="measured repetitions [5]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts [0]")
    add_result_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print and save; every repetition has other prompts, so that none is found in the prefix cache."""
    from noria.bench.inprocess import run_engine
    from noria.bench.plot import plot_latencies
    from noria.bench.report import percentile, series, summary, table
    from noria.bench.workload import WorkloadSpec, generate, random_ids
    from noria.types import ConfigError

    if arguments.num_iters < 1 or arguments.num_iters_warmup < 0:
        raise ConfigError("--num-iters must be at least 1 and --num-iters-warmup at least 0")
    config = engine_config(arguments)
    built = warmed_engine(config)
    make = random_ids(built.spec.vocab_size)
    iterations = arguments.num_iters_warmup + arguments.num_iters
    walls: list[float] = []
    requests = []
    try:
        with progress_bar(iterations, "iterations") as progress:
            for index in range(iterations):
                spec = WorkloadSpec(
                    num_prompts=arguments.batch_size,
                    input_len=arguments.input_len,
                    output_len=arguments.output_len,
                    seed=arguments.seed + index,
                )
                times, seconds = run_engine(built.engine, generate(spec, make))
                if index >= arguments.num_iters_warmup:
                    walls.append(seconds)
                    requests += times
                progress(index + 1)
    finally:
        built.engine.close()
    figures = {"avg_latency": sum(walls) / len(walls)}
    figures |= {f"p{p}_latency": percentile(walls, p) for p in PERCENTILES}
    per_request = summary(requests, sum(walls))
    kept = ("output_throughput", "mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_itl_ms")
    figures |= {name: per_request[name] for name in kept}
    print(table(figures))
    if arguments.plot:
        plot_latencies(series(requests), arguments.plot, f"{config.model}, batch {arguments.batch_size}")
    if arguments.output_json:
        percentiles = {str(p): figures[f"p{p}_latency"] for p in PERCENTILES}
        shape = {name: getattr(arguments, name) for name in ("input_len", "output_len", "batch_size")}
        extra = {"latencies": walls, "percentiles": percentiles}
        write_json(arguments.output_json, described("latency", config.model) | shape | figures | extra)
    return 0
