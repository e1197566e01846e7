"""noria bench profile: one step of the model, op by op: seconds, share, and how far from the machine's limit."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from noria.bench.flags import add_engine_flags, add_result_flags, columns, described, engine_config, tell, write_json
from noria.config import EngineConfig
from noria.types import ConfigError

if TYPE_CHECKING:
    from noria.backends.cpu import _native
    from noria.bench.steps import SteppedModel

CONTEXT = 128  # tokens before the one that a decode step computes: the middle of W1's answer
STEPS = 20


@dataclass(frozen=True)
class OpTime:
    """All ops of one label in a step: how many, and their seconds."""

    label: str
    count: int
    seconds: float


@dataclass(frozen=True)
class StepProfile:
    """A step of `rows` sequences. `wall` is a call of `run`; what the ops do not account for is outside them."""

    rows: int
    wall: float
    ops: tuple[OpTime, ...]
    weight_bytes: int

    @property
    def outside(self) -> float:
        """Reading inputs, checks, making and waking: what is left of the wall time."""
        return max(0.0, self.wall - sum(op.seconds for op in self.ops))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--rows", type=int, nargs="+", default=[1, 64], metavar="N", help="sequences that decode together [1 64]"
    )
    group.add_argument("--context", type=int, default=CONTEXT, metavar="N", help=f"tokens before the new one [{CONTEXT}]")
    group.add_argument(
        "--prefill", type=int, default=0, metavar="N", help="tokens of one more sequence's prompt in the same step [0]"
    )
    group.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help=f"steps, of which the one of median time is shown [{STEPS}]"
    )
    add_result_flags(parser, plot=False)


def run(arguments: argparse.Namespace) -> int:
    """Print a table for each number of rows."""
    config = engine_config(arguments)
    if min(*arguments.rows, arguments.steps) < 1 or min(arguments.context, arguments.prefill) < 0:
        raise ConfigError("--rows and --steps must be at least 1, --context and --prefill at least 0")
    profiles, read = profiled(config, arguments.rows, arguments.context, arguments.prefill, arguments.steps)
    for profile in profiles:
        beside = f" and {arguments.prefill} prompt tokens" if arguments.prefill else ""
        print(f"\na step of {profile.rows} rows after {arguments.context} tokens{beside}: {1e3 * profile.wall:.2f} ms")
        print(table(profile))
        least = profile.weight_bytes / read
        text = f"reading the {profile.weight_bytes / 1e6:.0f} MB of weights once takes {1e3 * least:.2f} ms in the same run"
        print(f"{text}: the step takes {profile.wall / least:.2f} times that")
    if arguments.output_json:
        result = described("profile", config.model) | {"read_bytes_per_s": read, "profiles": msgspec.to_builtins(profiles)}
        write_json(arguments.output_json, result)
    return 0


def profiled(
    config: EngineConfig, rows: Sequence[int], context: int, prefill: int, steps: int
) -> tuple[list[StepProfile], float]:
    """Profiles by number of rows, and bytes a second of reading as much as the weights take, beside them."""
    from noria.backends.cpu.backend import CpuExecutable
    from noria.bench.limits import MEMORY_BYTES, LimitProbe
    from noria.bench.steps import SteppedModel

    length, tokens = max(context + 2, prefill), max(rows) + prefill
    config = msgspec.structs.replace(
        config, max_num_seqs=max(rows) + bool(prefill), max_model_len=max(config.max_model_len or 0, length)
    )
    if config.max_num_batched_tokens < tokens:
        raise ConfigError(f"a step of {tokens} tokens needs --max-num-batched-tokens {tokens}")
    stepped = SteppedModel(config)
    try:
        executable, tier = stepped.executable, getattr(stepped.backend, "tier", "")
        if not isinstance(executable, CpuExecutable):
            raise ConfigError("only the cpu backend tells the time of its ops")
        weights = stepped.model.ledger.weights
        nbytes = min(MEMORY_BYTES, max(weights >> 18 << 18, 1 << 18))
        read = LimitProbe(config.threads or stepped.backend.threads, tier).read  # type: ignore[attr-defined]
        before = read(nbytes)
        profiles = [step_profile(stepped, executable.tape, count, context, prefill, steps) for count in rows]
        return profiles, max(before, read(nbytes))
    finally:
        stepped.close()


def step_profile(stepped: SteppedModel, tape: _native.Tape, rows: int, context: int, prefill: int, steps: int) -> StepProfile:
    """A decode step of `rows` sequences of `context` tokens, greedy, perhaps with a chunk of a prompt, repeated."""
    tell(f"a step of {rows} rows")
    vocab = stepped.vocab_size
    stepped.reset()
    for row in range(rows):
        stepped.take(row, [(7 * row + 13 * i) % vocab for i in range(context + 1)])
        stepped.prefill(row)
    chunks = [(row, context, 1) for row in range(rows)]
    if prefill:
        stepped.take(rows, [11 * i % vocab for i in range(prefill)])
        chunks.append((rows, 0, prefill))
    inputs = stepped.inputs(chunks, samples=True)
    labels = tape.labels()
    samples, walls = timed_steps(lambda: stepped.executable.run(inputs), tape, steps)
    middle = sorted(range(steps), key=walls.__getitem__)[steps // 2]  # one real step, so that its parts add up
    return StepProfile(rows, walls[middle], _by_label(labels, samples[middle]), stepped.model.ledger.weights)


def timed_steps(step: Callable[[], Any], tape: _native.Tape, steps: int) -> tuple[list[list[float]], list[float]]:
    """Seconds by op of each of `steps` steps, and the steps' wall times, after a step that is not counted."""
    step()
    samples, walls = [], []
    try:
        for _ in range(steps):
            tape.set_profiling(True)
            began = time.perf_counter()
            step()
            walls.append(time.perf_counter() - began)
            samples.append(tape.seconds())
    finally:
        tape.set_profiling(False)
    return samples, walls


def _by_label(labels: Sequence[str], seconds: Sequence[float]) -> tuple[OpTime, ...]:
    """Ops of one label together, in the order in which labels first appear."""
    totals: dict[str, list[float]] = {}
    for label, value in zip(labels, seconds, strict=True):
        totals.setdefault(label, []).append(value)
    return tuple(OpTime(label, len(values), sum(values)) for label, values in totals.items())


def table(profile: StepProfile) -> str:
    """Shares of the step's wall time, which add up to all of it."""
    lines = [("op", "times", "ms", "us each", "share")]
    for op in profile.ops:
        each = 1e6 * op.seconds / op.count
        lines.append((op.label, str(op.count), f"{1e3 * op.seconds:.3f}", f"{each:.1f}", f"{op.seconds / profile.wall:.1%}"))
    outside = f"{1e3 * profile.outside:.3f}", "", f"{profile.outside / profile.wall:.1%}"
    return columns([*lines, ("outside the ops", "", *outside)])
