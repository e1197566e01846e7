"""noria bench: latency of one stream, throughput of many, or load on a running server."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from noria.bench.workload import WorkloadSpec


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    bounds = int(low), int(high or low)
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: expected N or LOW-HIGH with 1 <= LOW <= HIGH")
    return bounds


def _workload_flags(parser: argparse.ArgumentParser, *, prompts: int, inputs: str, outputs: str) -> None:
    parser.add_argument("--num-prompts", type=int, default=prompts, help=f"requests (default {prompts})")
    parser.add_argument("--input-len", type=_range, default=_range(inputs), metavar="N|LOW-HIGH", help="prompt tokens")
    parser.add_argument("--output-len", type=_range, default=_range(outputs), metavar="N|LOW-HIGH", help="output tokens")
    parser.add_argument("--prefix-len", type=int, default=0, help="tokens that all prompts have in common")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same work")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def _spec(args: argparse.Namespace) -> WorkloadSpec:
    from noria.bench.workload import WorkloadSpec

    return WorkloadSpec(
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        prefix_len=args.prefix_len,
        request_rate=getattr(args, "request_rate", float("inf")),
        burstiness=getattr(args, "burstiness", 1.0),
        seed=args.seed,
    )


def _show(args: argparse.Namespace, figures: dict[str, float]) -> int:
    from noria.bench.report import table

    print(table(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if figures["failed"] == 0 else 1


def _in_process(args: argparse.Namespace) -> int:
    from noria.assembly import build_engine
    from noria.bench.inprocess import run_engine
    from noria.bench.report import summary
    from noria.bench.workload import WorkloadSpec, generate
    from noria.config import EngineConfig

    config = EngineConfig(model=args.model, threads=args.threads, max_num_batched_tokens=args.max_num_batched_tokens)
    built = build_engine(config)
    vocabulary = built.spec.vocab_size
    warm_up = WorkloadSpec(num_prompts=1, input_len=(32, 32), output_len=(8, 8), seed=args.seed + 1)
    run_engine(built.engine, generate(warm_up, vocabulary))
    items = generate(_spec(args), vocabulary)
    print(f"{len(items)} requests, {sum(len(i.prompt) for i in items)} tokens in", file=sys.stderr)
    times, seconds = run_engine(built.engine, items)
    return _show(args, summary(times, seconds))


def _serve(args: argparse.Namespace) -> int:
    from noria.bench.client import Target, drive
    from noria.bench.report import summary
    from noria.bench.workload import generate

    target = Target(base_url=args.base_url, model=args.model, api_key=args.api_key, max_concurrency=args.max_concurrency)
    times, seconds = asyncio.run(drive(target, generate(_spec(args), args.vocab_size)))
    for error in sorted({t.error for t in times if t.error}):
        print(f"failed: {error}", file=sys.stderr)
    return _show(args, summary(times, seconds))


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench latency | throughput | serve`; each parser sets `run(args) -> exit code`."""
    bench = subparsers.add_parser("bench", help="measure latency, throughput, or a running server")
    kinds = bench.add_subparsers(required=True, metavar="latency|throughput|serve")

    for name, help_text, shape in (
        ("latency", "one stream at a time, engine in this process", {"prompts": 1, "inputs": "128", "outputs": "128"}),
        (
            "throughput",
            "many requests at once, engine in this process",
            {"prompts": 64, "inputs": "64-512", "outputs": "32-256"},
        ),
    ):
        parser = kinds.add_parser(name, help=help_text)
        parser.add_argument("model", nargs="?", default="smollm2-135m", help="as for `noria serve`")
        parser.add_argument("--threads", type=int, default=0, help="worker threads (0: the physical cores)")
        parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="token budget of a step")
        _workload_flags(parser, **shape)  # type: ignore[arg-type]
        parser.set_defaults(run=_in_process)

    serve = kinds.add_parser("serve", help="load on an OpenAI-compatible server")
    serve.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    serve.add_argument("--model", required=True, help="the served model's name")
    serve.add_argument("--api-key", help="bearer token")
    serve.add_argument("--request-rate", type=float, default=float("inf"), help="arrivals a second (default: all at once)")
    serve.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson arrivals; below 1: burstier")
    serve.add_argument("--max-concurrency", type=int, help="most requests open at once")
    serve.add_argument("--vocab-size", type=int, default=32000, help="prompt ids are drawn below this")
    _workload_flags(serve, prompts=64, inputs="64-512", outputs="32-256")
    serve.set_defaults(run=_serve)
