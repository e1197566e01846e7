"""noria bench: one file a benchmark in `noria.bench`, of which only the named one is imported."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

# By name: its help line. `noria.bench.NAME` has `add_arguments(parser)` and `run(arguments) -> int`.
BENCHMARKS = {
    "latency": "one batch, again and again, in this process",
    "throughput": "a whole workload at once, in this process",
    "serve": "load at a rate of arrivals, on a server or an engine process",
    "soak": "random traffic with clients that leave: does memory stay flat, is all given back",
    "stream": "what the server process can stream, before an engine that computes nothing",
    "quality": "perplexity, and agreement with float32, of every weight format and KV type",
    "tune": "find the settings with the most goodput",
    "kernels": "every kernel at the model's shapes, beside the limits of this machine",
    "profile": "where the time of a step goes, op by op",
    "compare": "two settings of the engine, in interleaved pairs",
    "baseline": "the workloads, by ratio to a reference loop, beside a stored baseline",
}


class _Lazy(argparse.ArgumentParser):
    """A benchmark's parser: it gets its flags when it is the one that parses."""

    benchmark = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        module = importlib.import_module(f"noria.bench.{self.benchmark}")
        module.add_arguments(self)
        self.set_defaults(run=module.run)
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmarks as sub-commands."""
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True, parser_class=_Lazy)
    for name, text in BENCHMARKS.items():
        kinds.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".").benchmark = name


def run(arguments: argparse.Namespace) -> int:
    """Never reached: every benchmark sets its own `run`."""
    raise AssertionError("a benchmark is required")
