"""noria bench kernels: every kernel at the model's shapes, in a roofline of limits measured in the same run."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noria.bench.flags import add_engine_flags, add_result_flags, columns, described, engine_config, tell, write_json
from noria.config import EngineConfig
from noria.types import ConfigError

if TYPE_CHECKING:
    from noria.bench.limits import Limits
    from noria.models.spec import ModelSpec

ROWS = (1, 8, 64, 512)
CONTEXT = 1024
KERNELS = ("linear", "attention", "rows", "sampling")
FORMATS = ("q4", "q8", "bf16", "f32")


@dataclass(frozen=True)
class Point:
    """One kernel at one size."""

    kernel: str
    unit: str  # the dot product of its limit
    cached: bool  # its bytes come from the processor's caches
    seconds: float
    operations: float
    nbytes: float

    def share(self, limits: Limits) -> float:
        """Of what the roofline allows."""
        return limits.seconds(self.operations, self.nbytes, self.unit, cached=self.cached) / self.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--only", nargs="+", choices=KERNELS, default=KERNELS, metavar="KIND", help=f"of {', '.join(KERNELS)} [all]"
    )
    group.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="FORMAT", help=f"of {', '.join(FORMATS)} [all]"
    )
    group.add_argument("--rows", type=int, nargs="+", default=list(ROWS), metavar="N", help="tokens in a step [1 8 64 512]")
    group.add_argument("--context", type=int, default=CONTEXT, metavar="N", help=f"keys that attention sees [{CONTEXT}]")
    add_result_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure the limits, the kernels, the limits again; print, draw, save."""
    from noria.backends.cpu.backend import CpuBackend
    from noria.bench.limits import LimitProbe, better

    config = engine_config(arguments)
    if config.backend != "cpu":
        raise ConfigError("these are the kernels of the cpu backend: leave --backend out")
    if min(arguments.rows) < 1 or arguments.context < 1:
        raise ConfigError("--rows and --context must be at least 1")
    spec = shape_of(config)
    backend = CpuBackend(threads=config.threads, tier=config.cpu_tier)
    probe = LimitProbe(backend.threads, backend.tier)
    tell("limits of this machine")
    limits = probe.measure()
    points = []
    for point in measured(arguments, config, spec):
        tell(f"{point.kernel}: {1e6 * point.seconds:.0f} us")
        points.append(point)
    limits = better(limits, probe.measure())
    backend.close()
    print("\n".join(limits.lines()))
    print(table(points, limits))
    balance = turning_points(spec, arguments.formats, points, limits)
    print("\n".join(balance.lines()))
    if arguments.plot:
        draw_roofline(points, limits, arguments.plot, config.model)
    if arguments.output_json:
        result = {"limits": asdict(limits), "points": [asdict(p) | {"share": p.share(limits)} for p in points]}
        write_json(arguments.output_json, described("kernels", config.model) | result | {"compute_bound_rows": balance.rows})
    return 0


def shape_of(config: EngineConfig) -> ModelSpec:
    """The model's shape; its weights are not read."""
    from noria.models.registry import family_of
    from noria.weights.checkpoint import open_checkpoint
    from noria.weights.hub import cache_directory, resolve_model

    checkpoint = open_checkpoint(resolve_model(config.model, cache_directory(config.cache_dir), config.offline).path)
    return family_of(checkpoint.config).spec_from_config(checkpoint.config)


def linear_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's matrices, merged as the decoder merges them, and of the head."""
    h, f = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {"qkv": (q + 2 * kv, h), "o": (h, q), "gate_up": (2 * f, h), "down": (h, f), "head": (spec.vocab_size, h)}


def measured(arguments: argparse.Namespace, config: EngineConfig, spec: ModelSpec) -> Iterator[Point]:
    from noria.bench import kernel_rigs as rigs

    machine = rigs.Machine(config.threads, config.cpu_tier)
    if "linear" in arguments.only:
        for kind in arguments.formats:
            for name, (outputs, inputs) in linear_shapes(spec).items():
                yield from rigs.linear_points(machine, name, outputs, inputs, kind, arguments.rows)
    if "attention" in arguments.only:
        yield from rigs.attention_points(machine, spec, config, arguments.rows, arguments.context)
    if "rows" in arguments.only:
        yield from rigs.row_points(machine, spec, arguments.rows)
    if "sampling" in arguments.only:
        yield from rigs.sampling_points(machine, spec, [rows for rows in arguments.rows if rows <= 64] or [1])


def table(points: Sequence[Point], limits: Limits) -> str:
    lines = [("kernel", "us", "GOP/s", "GB/s", "OP/B", "of the limit")]
    for p in points:
        rate, moved = p.operations / p.seconds / 1e9, p.nbytes / p.seconds / 1e9
        intensity = f"{p.operations / max(p.nbytes, 1):.1f}"
        lines.append((p.kernel, f"{1e6 * p.seconds:.1f}", f"{rate:.1f}", f"{moved:.1f}", intensity, f"{p.share(limits):.0%}"))
    return columns(lines)


@dataclass(frozen=True)
class Balance:
    """Rows at which a step's linear layers turn from reading to computing, by format: by the roofline, and as measured."""

    rows: dict[str, dict[str, float | None]]

    def lines(self) -> list[str]:
        lines = []
        for kind, found in self.rows.items():
            seen = (
                "is not reached in what was measured" if found["measured"] is None else f"measured at {found['measured']:.0f}"
            )
            lines.append(f"{kind}: decode turns compute-bound at {found['roofline']:.0f} rows by the roofline, {seen}")
        return lines


def turning_points(spec: ModelSpec, formats: Sequence[str], points: Sequence[Point], limits: Limits) -> Balance:
    """By the roofline: where reading the weights takes as long as multiplying. Measured: where a step takes twice one row's."""
    from noria.bench.limits import UNIT_OF_KIND

    found: dict[str, dict[str, float | None]] = {}
    for kind in formats:
        totals: dict[int, list[float]] = {}  # rows: [seconds, operations, bytes]
        for p in points:
            name, _, rows = p.kernel.rpartition(" x")
            if name.startswith("linear ") and name.endswith(f" {kind}"):
                total = totals.setdefault(int(rows), [0.0, 0.0, 0.0])
                for i, value in enumerate((p.seconds, p.operations, p.nbytes)):
                    total[i] += value
        if totals:
            first = min(totals)
            operations, nbytes = totals[first][1] / first, totals[first][2]
            roofline = nbytes / limits.memory / (operations / limits.peaks[UNIT_OF_KIND[kind]])
            found[kind] = {"roofline": roofline, "measured": _doubling({rows: t[0] for rows, t in totals.items()})}
    return Balance(found)


def _doubling(seconds: dict[int, float]) -> float | None:
    """The number of rows, by linear interpolation, whose time is twice that of the fewest rows."""
    sizes = sorted(seconds)
    goal = 2 * seconds[sizes[0]]
    for low, high in itertools.pairwise(sizes):
        if seconds[high] >= goal:
            return low + (high - low) * max(0.0, goal - seconds[low]) / (seconds[high] - seconds[low])
    return None


def draw_roofline(points: Sequence[Point], limits: Limits, path: Path, title: str) -> None:
    """Operations a second over operations a byte, below the roofs. Nothing but the table where matplotlib is missing."""
    from noria.bench.plot import pyplot, save

    plt: Any = pyplot()
    if plt is None:
        print("(the roofline as text is the table above)")
        return
    figure, axis = plt.subplots(figsize=(9, 6))
    intensities = [2.0**e for e in range(-3, 13)]
    for unit, peak in limits.peaks.items():
        axis.plot(intensities, [min(peak, limits.memory * x) / 1e9 for x in intensities], label=f"limit, {unit}")
    for kind in sorted({p.kernel.rpartition(" x")[0] for p in points if p.operations}):
        own = [p for p in points if p.kernel.rpartition(" x")[0] == kind]
        xs = [p.operations / max(p.nbytes, 1) for p in own]
        axis.plot(xs, [p.operations / p.seconds / 1e9 for p in own], "o", markersize=3, label=kind)
    axis.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="GOP/s", title=title)
    axis.legend(fontsize=5, ncols=2)
    save(figure, path)
