"""noria bench baseline (`make bench`): the workloads in this process, beside a stored baseline.

Absolute figures mean little on a machine that others use. So each run of a workload has a reference loop run right before and
after it, and what is stored and compared is the ratio to that loop:

    bytes     of a workload that decodes one stream: reads of as much memory as the weights take, a second
    products  of the others: 8-bit dot products a second

    relative = (tokens a second / reference) / (the same in the baseline)        the median over the runs

A baseline is of a processor, an instruction-set tier, a number of threads and a model. Where there is none yet, that is said.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from noria.bench.flags import (
    add_engine_flags,
    columns,
    described,
    engine_config,
    tell,
    warmed_engine,
    write_json,
)
from noria.bench.workload import Session, Turn, random_ids
from noria.types import ConfigError

if TYPE_CHECKING:
    from noria.assembly import BuiltEngine
    from noria.bench.limits import LimitProbe

DEFAULT_FILE = Path("bench/baseline.json")
TOLERANCE = 0.10  # a ratio that is lower by more than this fails
RUNS = 5

Make = Callable[[random.Random, int], Any]


@dataclass(frozen=True)
class Workload:
    """A fixed shape: the seed of a run changes the ids, never the lengths."""

    name: str
    reference: Literal["bytes", "products"]
    counts: Literal["input", "output"]  # the tokens whose rate is compared
    requests: Callable[[Make, int], list[tuple[Any, int]]]  # (prompt, output tokens) of a run


def _w1(make: Make, run: int) -> list[tuple[Any, int]]:
    return [(make(random.Random(1000 + run), 128), 128)]


def _w2(length: int) -> Callable[[Make, int], list[tuple[Any, int]]]:
    return lambda make, run: [(make(random.Random(2000 + run * 10 + length), length), 1)]


def _w3(make: Make, run: int) -> list[tuple[Any, int]]:
    lengths, rng = random.Random(42), random.Random(3000 + run)
    return [(make(rng, lengths.randint(64, 512)), lengths.randint(32, 256)) for _ in range(64)]


def _w4(make: Make, run: int) -> list[tuple[Any, int]]:
    rng = random.Random(4000 + run)
    prefix = make(rng, 1024)
    return [(prefix + make(rng, 32), 64) for _ in range(64)]


WORKLOADS = (
    Workload("w1: one stream, 128 in, 128 out", "bytes", "output", _w1),
    Workload("w2: 512 in", "products", "input", _w2(512)),
    Workload("w2: 2048 in", "products", "input", _w2(2048)),
    Workload("w3: 64 at once, 64-512 in, 32-256 out", "products", "output", _w3),
    Workload("w4: 64 at once, 1024 shared + 32 in, 64 out", "products", "output", _w4),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    group = parser.add_argument_group("baseline")
    group.add_argument("--only", nargs="+", metavar="NAME", help="workloads whose names begin so: w1 w2 w3 w4 [all]")
    group.add_argument("--runs", type=int, default=RUNS, metavar="N", help=f"runs of each workload [{RUNS}]")
    group.add_argument("--file", type=Path, default=DEFAULT_FILE, metavar="FILE", help=f"the baselines [{DEFAULT_FILE}]")
    group.add_argument("--record", action="store_true", help="store what is measured as this machine's baseline")
    group.add_argument(
        "--tolerance", type=float, default=TOLERANCE, metavar="X", help=f"how much lower is a failure [{TOLERANCE}]"
    )


def run(arguments: argparse.Namespace) -> int:
    """1 if a workload is slower than the baseline by more than the tolerance."""
    from noria.backends.cpu.backend import CpuBackend
    from noria.backends.cpu.topology import cpu_name
    from noria.bench.limits import LimitProbe

    chosen = selected(arguments.only)
    if arguments.runs < 1:
        raise ConfigError("--runs must be at least 1")
    stored = read_baselines(arguments.file)
    built = warmed_engine(engine_config(arguments))
    try:
        backend = built.backend
        if not isinstance(backend, CpuBackend):
            raise ConfigError("the reference loops are those of the cpu backend: leave --backend out")
        key = f"{cpu_name()} | {backend.tier} | {backend.threads} threads | {built.name}"
        probe = LimitProbe(backend.threads, backend.tier)
        ratios = {w.name: measured(w, built, probe, arguments.runs) for w in chosen}
    finally:
        built.engine.close()
    baseline = stored.get(key, {}).get("ratios", {})
    print(key)
    print(table(ratios, baseline))
    if arguments.record:
        merged = {**baseline, **ratios}
        about = {name: value for name, value in described("baseline", built.name).items() if name in ("date", "noria")}
        write_json(arguments.file, {**stored, key: {**about, "ratios": merged}})
        return 0
    if missing := [name for name in ratios if name not in baseline]:
        tell(f"{arguments.file} has no baseline of {len(missing)} workloads on this machine: --record stores what was measured")
    return int(any(ratios[name] < baseline[name] * (1 - arguments.tolerance) for name in ratios if name in baseline))


def selected(names: list[str] | None) -> list[Workload]:
    """The workloads whose names begin with one of `names`. ConfigError if one begins none."""
    for name in names or ():
        if not any(w.name.startswith(name) for w in WORKLOADS):
            raise ConfigError(f"--only {name}: the workloads are w1, w2, w3, w4")
    return [w for w in WORKLOADS if names is None or w.name.startswith(tuple(names))]


def read_baselines(path: Path) -> dict[str, Any]:
    """By key; nothing where there is no file. ConfigError for a file that holds something else."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"--file {path}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--file {path}: must hold an object of baselines")
    return found


def measured(workload: Workload, built: BuiltEngine, probe: LimitProbe, runs: int) -> float:
    """The median ratio of tokens a second to the reference loop, over the runs: tokens a GB, or a 10^12 operations."""
    from noria.bench.inprocess import run_engine

    make = random_ids(built.spec.vocab_size)
    room = built.engine.max_model_len
    ratios = []
    for index in range(runs):
        items = workload.requests(make, index)
        if max(len(prompt) + tokens for prompt, tokens in items) > room:
            raise ConfigError(
                f"{workload.name} does not fit in {room} tokens: raise --max-model-len, or choose others with --only"
            )
        before = _reference(workload, probe, built.ledger.weights)
        times, seconds = run_engine(built.engine, [Session((Turn(prompt, tokens),)) for prompt, tokens in items])
        reference = (before + _reference(workload, probe, built.ledger.weights)) / 2
        tokens = sum(t.input_tokens if workload.counts == "input" else t.output_tokens for t in times)
        tell(f"{workload.name}: {tokens / seconds:.1f} tokens a second, reference {reference:.2f}")
        ratios.append(tokens / seconds / reference)
    return statistics.median(ratios)


def _reference(workload: Workload, probe: LimitProbe, weights: int) -> float:
    """GB a second of reading as much as the weights, or 10^12 operations a second.

    The median try, not the best: what a neighbour takes from the workload it should take from the reference.
    """
    from noria.bench.limits import MEMORY_BYTES

    if workload.reference == "bytes":
        return statistics.median(probe.reads(min(MEMORY_BYTES, max(weights >> 18 << 18, 1 << 18)))) / 1e9
    return statistics.median(probe.peaks("u8s8")) / 1e12


def table(ratios: Mapping[str, float], baseline: Mapping[str, float]) -> str:
    lines = [("workload", "tokens / reference", "baseline", "relative")]
    for name, ratio in ratios.items():
        before = baseline.get(name)
        relative = ("-", "-") if before is None else (f"{before:.2f}", f"{ratio / before:.2f}")
        lines.append((name, f"{ratio:.2f}", *relative))
    return columns(lines)
