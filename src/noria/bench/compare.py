"""noria bench compare: two settings of the engine over one workload, in this process, in interleaved pairs.

noria bench compare MODEL --a '--threads 1' --b '--threads 2'
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import msgspec

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
from noria.bench.pairs import LEAST_PAIRS
from noria.cli.flags import add_flags, settings
from noria.config import EngineConfig
from noria.types import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    parser.add_argument("--a", required=True, metavar="'FLAGS'", help="settings of side A, on top of the others")
    parser.add_argument("--b", required=True, metavar="'FLAGS'", help="settings of side B ('' for none)")
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS, metavar="N", help=f"pairs of runs, at least [{LEAST_PAIRS}]")
    add_workload_flags(parser, num_prompts=1, input_len=128, output_len=64)
    add_result_flags(parser, plot=False)


def run(arguments: argparse.Namespace) -> int:
    """Print the median ratio of the wall times, A / B: below 1, A is quicker."""
    from noria.bench.pairs import interleave, median_ratio

    if arguments.pairs < LEAST_PAIRS:
        raise ConfigError(f"--pairs must be at least {LEAST_PAIRS}")
    config = engine_config(arguments)
    sides = {"A": side(config, arguments.a), "B": side(config, arguments.b)}
    if sides["A"] == sides["B"]:
        raise ConfigError("both sides have the same settings: say what differs with --a and --b")
    engines: dict[str, Any] = {}
    try:
        for name, settings_of_side in sides.items():
            engines[name] = warmed_engine(settings_of_side)
        with progress_bar(arguments.pairs, "pairs") as progress:
            measured = interleave(
                lambda index: _seconds(engines["A"], sides["A"], arguments, index),
                lambda index: _seconds(engines["B"], sides["B"], arguments, index),
                arguments.pairs,
                progress,
            )
    finally:
        for built in engines.values():
            built.engine.close()
    ratio = median_ratio(measured)
    verdict = ("A is quicker" if ratio.median < 1 else "B is quicker") if ratio.differs else "no difference is shown"
    print(f"A: {arguments.a or '(as given)'}\nB: {arguments.b or '(as given)'}\nseconds A / B: {ratio}; {verdict}")
    if arguments.output_json:
        about = {"a": arguments.a, "b": arguments.b, "seconds": measured, "verdict": verdict}
        write_json(arguments.output_json, described("compare", config.model) | about | msgspec.to_builtins(ratio))
    return 0


def side(config: EngineConfig, flags: str) -> EngineConfig:
    """The common settings with `flags` over them. ConfigError for a flag that the engine does not have."""
    parser = argparse.ArgumentParser(prog="the settings of a side", add_help=False, exit_on_error=False)
    add_flags(parser, EngineConfig)
    try:
        given, unknown = parser.parse_known_args(shlex.split(flags))
    except (argparse.ArgumentError, ValueError) as error:
        raise ConfigError(f"{flags!r}: {error}") from None
    if unknown or given.model is not None:
        raise ConfigError(f"{flags!r}: {' '.join(unknown) or given.model} is no setting of the engine")
    given.model = config.model
    (own,) = settings(given, EngineConfig)
    changed = {name: getattr(own, name) for name in vars(given) if name in EngineConfig.__struct_fields__}
    return msgspec.structs.replace(config, **changed)


def _seconds(built: Any, config: EngineConfig, arguments: argparse.Namespace, index: int) -> float:
    """Wall time of the workload. Every pair has other prompts, the same for both sides: no prefix is found again."""
    from noria.bench.inprocess import run_engine
    from noria.bench.workload import random_ids

    own = argparse.Namespace(**{**vars(arguments), "seed": arguments.seed + index})
    make = random_ids(built.spec.vocab_size)
    sessions = sessions_of(own, make, lambda: model_tokenizer(built.checkpoint.path, config), as_ids=True)
    _, seconds = run_engine(built.engine, sessions, stop_ids=() if ignores_eos(arguments) else built.eos_ids)
    return seconds
