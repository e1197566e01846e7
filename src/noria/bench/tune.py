"""noria bench tune: the engine's settings with the most goodput for a workload, by coordinate search.

From the settings as given, one setting at a time is moved to its neighbours (half and double, a thread more or fewer) as long
as the goodput grows by more than the noise; the round is repeated until nothing moves. Every step says what was tried and why
it was kept or not. Goodput: requests a second that met every objective; ties, and where there are none, by output tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from noria.bench.flags import (
    add_engine_flags,
    add_result_flags,
    add_workload_flags,
    columns,
    described,
    engine_config,
    ignores_eos,
    model_tokenizer,
    sessions_of,
    tell,
    warmed_engine,
    write_json,
)
from noria.bench.report import Figures, parse_goodput
from noria.bench.workload import AT_ONCE
from noria.config import EngineConfig
from noria.types import ConfigError

NOISE = 0.02  # a gain of less is none
MOST_ROUNDS = 3
GOALS = ("max_num_seqs", "max_num_batched_tokens", "itl_target_ms", "threads")  # in the order of their effect


@dataclass(frozen=True)
class Setting:
    """A setting that is searched: its smallest and largest value, and whether it moves by factors of two or by one."""

    name: str
    least: int
    most: int
    doubles: bool = True

    def neighbours(self, value: int) -> list[int]:
        near = [value * 2, value // 2] if self.doubles else [value + 1, value - 1]
        return [v for v in near if self.least <= v <= self.most and v != value]


@dataclass(frozen=True)
class Score:
    """What a candidate reached: compared by goodput, then by output tokens a second."""

    goodput: float
    output_throughput: float

    def beats(self, other: Score) -> bool:
        """By more than the noise."""
        if self.goodput != other.goodput:
            return self.goodput > other.goodput * (1 + NOISE)
        return self.output_throughput > other.output_throughput * (1 + NOISE)

    def __str__(self) -> str:
        return f"goodput {self.goodput:.2f}/s, {self.output_throughput:.0f} tok/s"


@dataclass
class Search:
    """Coordinate search. `measure` gives the score of a candidate, or a reason why there is none."""

    settings: Sequence[Setting]
    measure: Callable[[dict[str, int]], Score | str]
    say: Callable[[str], None]
    tried: dict[tuple[tuple[str, int], ...], Score | str] = field(default_factory=dict)

    def run(self, start: dict[str, int]) -> tuple[dict[str, int], Score]:
        """The best candidate found. ConfigError if not even `start` can be measured."""
        first = self._score(start)
        if isinstance(first, str):
            raise ConfigError(first)
        self.say(f"as given: {first}")
        best, score = start, first
        for _ in range(MOST_ROUNDS):
            before = best
            for setting in self.settings:
                best, score = self._climb(setting, best, score)
            if best == before:
                break
        return best, score

    def _climb(self, setting: Setting, best: dict[str, int], score: Score) -> tuple[dict[str, int], Score]:
        """Move one setting as long as it helps."""
        moved = True
        while moved:
            moved = False
            for value in setting.neighbours(best[setting.name]):
                candidate = best | {setting.name: value}
                if tuple(candidate.items()) in self.tried:
                    continue
                found = self._score(candidate)
                if isinstance(found, Score) and found.beats(score):
                    self.say(f"{setting.name} {best[setting.name]} -> {value}: {found}; kept, it beats {score}")
                    best, score, moved = candidate, found, True
                    break
                why = found if isinstance(found, str) else f"{found}; not kept, {score} is not beaten by more than {NOISE:.0%}"
                self.say(f"{setting.name} {best[setting.name]} -> {value}: {why}")
        return best, score

    def _score(self, candidate: dict[str, int]) -> Score | str:
        key = tuple(candidate.items())
        if key not in self.tried:
            self.tried[key] = self.measure(candidate)
        return self.tried[key]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    parser.add_argument("--goodput", nargs="+", default=(), metavar="NAME:MS", help="objectives: ttft:500 tpot:50 e2el:9000")
    parser.add_argument("--request-rate", type=float, default=AT_ONCE, metavar="R", help="arrivals a second [inf: all at once]")
    parser.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="gamma shape of the gaps [1]")
    add_workload_flags(parser, num_prompts=32, input_len=288, output_len=144)
    add_result_flags(parser, plot=False)


def run(arguments: argparse.Namespace) -> int:
    """Print what was tried, and the flags to use."""
    objectives = parse_goodput(arguments.goodput)
    config = engine_config(arguments)
    chosen = searched(config)
    search = Search(chosen, lambda candidate: measured(candidate, config, arguments, objectives), tell)
    start = {setting.name: start_value(setting, config) for setting in chosen}
    best, score = search.run(start)
    names = [setting.name for setting in chosen]
    rows = [(*names, "goodput/s", "output tok/s")]
    for key, found in search.tried.items():
        figures = (f"{found.goodput:.2f}", f"{found.output_throughput:.1f}") if isinstance(found, Score) else ("-", "-")
        rows.append((*(str(value) for _, value in key), *figures))
    print(columns(rows))
    print(f"best of {len(search.tried)}: {score}")
    print("use: " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in best.items()))
    if arguments.output_json:
        tried = [
            dict(key) | ({"error": s} if isinstance(s, str) else msgspec.to_builtins(s)) for key, s in search.tried.items()
        ]
        write_json(arguments.output_json, described("tune", config.model) | {"best": best, "tried": tried})
    return 0


def searched(config: EngineConfig) -> list[Setting]:
    """The settings that this version has, in the order in which they are searched."""
    from noria.backends.cpu.topology import usable_threads

    known = {
        "max_num_seqs": Setting("max_num_seqs", 1, 1024),
        "max_num_batched_tokens": Setting("max_num_batched_tokens", 16, 8192),
        "itl_target_ms": Setting("itl_target_ms", 5, 1000),
        "threads": Setting("threads", 1, usable_threads(), doubles=False),
    }
    return [known[name] for name in GOALS if name in EngineConfig.__struct_fields__]


def start_value(setting: Setting, config: EngineConfig) -> int:
    """The setting as given; 0 threads means all."""
    value = getattr(config, setting.name)
    return int(value) if value else (setting.most if setting.name == "threads" else setting.least)


def measured(
    candidate: dict[str, int], config: EngineConfig, arguments: argparse.Namespace, objectives: dict[str, float]
) -> Score | str:
    """One run of the workload with the candidate's settings; why not, where they are refused."""
    from noria.bench.inprocess import run_engine
    from noria.bench.report import summary
    from noria.bench.workload import random_ids

    try:
        own = msgspec.convert(msgspec.structs.asdict(config) | candidate, EngineConfig)
        built = warmed_engine(own, quiet=True)
    except (ConfigError, msgspec.ValidationError) as error:
        return str(error)
    try:
        tokenizer = lambda: model_tokenizer(built.checkpoint.path, own)  # noqa: E731
        sessions = sessions_of(arguments, random_ids(built.spec.vocab_size), tokenizer, as_ids=True)
        times, seconds = run_engine(built.engine, sessions, stop_ids=() if ignores_eos(arguments) else built.eos_ids)
    finally:
        built.engine.close()
    figures: Figures = summary(times, seconds, objectives=objectives)
    return Score(figures.get("request_goodput", 0.0), figures["output_throughput"])
