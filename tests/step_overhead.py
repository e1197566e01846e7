"""What a step costs beside the model: microseconds a running request, by part.

    PYTHONPATH=src:tests python tests/step_overhead.py [running] [--instructions]

Everything but the forward pass is real: scheduler, block pool, the runner's tables and inputs, commit, outputs, and the message
to the server. Each part is timed by itself, in processor time of the thread, and its median step is printed.

With `--instructions` nothing is timed and two rounds are run for callgrind, which counts instead, without noise:

    valgrind --tool=callgrind python tests/step_overhead.py 256 --instructions
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from fakes import FULL, make_request
from noria.backends.base import Drawn, StepInputs
from noria.config import EngineConfig
from noria.core.engine import Engine
from noria.runner.rows import Rows
from noria.runner.runner import Runner
from noria.server.wire import Outputs, encode

PROMPT, OUTPUT = 64, 100_000
ROUNDS = 200


class NoModel:
    """An executable that draws token 7 for everybody, at once."""

    def run(self, inputs: StepInputs) -> Drawn:
        draws = len(inputs.draws)
        return Drawn(
            token=np.full(draws, 7, np.int32),
            logprob=np.zeros(draws, np.float32),
            top_tokens=np.zeros((draws, 0), np.int32),
            top_logprobs=np.zeros((draws, 0), np.float32),
        )

    def all_logits(self, inputs: StepInputs) -> Any:
        raise NotImplementedError


class NoDevice:
    """A backend that holds nothing."""

    def copy_blocks(self, pairs: Any) -> None:
        """No blocks are copied here."""

    def close(self) -> None:
        """Nothing to free."""


def busy_engine(running: int) -> Engine:
    """An engine in which `running` requests decode."""
    length = PROMPT + 4096
    config = EngineConfig(model="none", max_num_seqs=running, max_num_batched_tokens=4096, itl_target_ms=0)
    rows = Rows(running, length, 1, length // 16)
    engine = Engine(
        config,
        max_model_len=length,
        groups=(FULL,),
        num_blocks=1 + running * length // 16,
        model_tag=b"",
        runner=Runner(NoModel(), NoDevice(), rows),  # type: ignore[arg-type]
    )
    for i in range(running):
        engine.add(make_request([i] * PROMPT, max_tokens=OUTPUT))
    while len(engine.scheduler.running) < running or any(s.computed < PROMPT for s in engine.scheduler.running):
        engine.step()
    for _ in range(20):
        engine.step()
    return engine


def timed(parts: dict[str, list[float]], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose calls' seconds go to `parts[name]`."""

    def call(*args: Any) -> Any:
        begin = time.thread_time()
        result = function(*args)
        parts[name].append(time.thread_time() - begin)
        return result

    return call


def measure(running: int) -> dict[str, float]:
    """Median seconds of a step, by part."""
    engine = busy_engine(running)
    parts: dict[str, list[float]] = defaultdict(list)
    scheduler: Any = engine.scheduler
    runner: Any = engine._runner
    whole: Any = engine
    scheduler.schedule = timed(parts, "schedule", scheduler.schedule)
    runner.launch = timed(parts, "inputs", runner.launch)
    runner.wait = timed(parts, "results", runner.wait)
    whole._commit = timed(parts, "commit", whole._commit)
    message = timed(parts, "message", lambda outputs: encode(Outputs(outputs=tuple(outputs), stats=engine.stats())))
    step = timed(parts, "step", engine.step)
    for _ in range(ROUNDS):
        message(step())
    return {name: statistics.median(seconds) for name, seconds in parts.items()}


def main() -> None:
    """Print the table, or run what callgrind is to count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("running", type=int, nargs="?", default=256)
    parser.add_argument("--instructions", action="store_true")
    args = parser.parse_args()
    if args.instructions:
        engine = busy_engine(args.running)
        engine.step()
        engine.step()
        return
    for name, seconds in measure(args.running).items():
        print(f"{name:10} {seconds * 1e6:8.0f} us {seconds * 1e6 / args.running:6.2f} us a request")


if __name__ == "__main__":
    main()
