"""noria bench throughput: a whole workload at once, in this process."""

from __future__ import annotations

import argparse

from noria.bench.flags import (
    add_engine_flags,
    add_result_flags,
    add_workload_flags,
    described,
    engine_config,
    ignores_eos,
    model_tokenizer,
    progress_bar,
    sessions_of,
    warmed_engine,
    write_json,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    add_workload_flags(parser, num_prompts=64, input_len=288, output_len=144)
    add_result_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 if every request was answered, else 1."""
    from noria.bench.inprocess import run_engine
    from noria.bench.plot import plot_latencies
    from noria.bench.report import series, summary, table
    from noria.bench.workload import random_ids

    config = engine_config(arguments)
    built = warmed_engine(config)
    try:
        make = random_ids(built.spec.vocab_size)
        sessions = sessions_of(arguments, make, lambda: model_tokenizer(built.checkpoint.path, config), as_ids=True)
        stop_ids = () if ignores_eos(arguments) else built.eos_ids
        with progress_bar(sum(len(s.turns) for s in sessions)) as progress:
            times, seconds = run_engine(built.engine, sessions, stop_ids=stop_ids, progress=progress)
    finally:
        built.engine.close()
    figures = summary(times, seconds)
    print(table(figures))
    if arguments.plot:
        plot_latencies(series(times), arguments.plot, f"{config.model}, {len(times)} requests")
    if arguments.output_json:
        tokens = figures["total_input_tokens"] + figures["total_output_tokens"]
        as_vllm = {
            "elapsed_time": seconds,
            "num_requests": len(times),
            "total_num_tokens": tokens,
            "requests_per_second": figures["request_throughput"],
            "tokens_per_second": tokens / seconds,
        }
        write_json(arguments.output_json, described("throughput", config.model) | as_vllm | figures)
    return 0 if figures["failed"] == 0 else 1
