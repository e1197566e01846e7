"""Flags that several benchmarks share, and what becomes of their results."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noria.bench.workload import AT_ONCE, DATASETS, MakePrompt, Session, WorkloadSpec, generate
from noria.cli.flags import add_flags, settings
from noria.config import EngineConfig
from noria.types import ConfigError

if TYPE_CHECKING:
    from noria.assembly import BuiltEngine
    from noria.text.tokenizer import Tokenizer

DEFAULT_MODEL = "smollm2-135m"


# -- the engine ----------------------------------------------------------------------------------------------------------


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL and every setting of the engine."""
    add_flags(parser, EngineConfig)


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The settings; the model of the README where none is named."""
    if arguments.model is None and getattr(arguments, "config", None) is None:
        arguments.model = DEFAULT_MODEL
    (config,) = settings(arguments, EngineConfig)
    assert isinstance(config, EngineConfig)
    return config


def tell(text: str) -> None:
    """A line for the person who waits. Results go to stdout, this does not."""
    print(f"noria: {text}", file=sys.stderr, flush=True)


class Stages:
    """Tells the stages of a start; of one that counts up in per cent, a line a second. `only_long`: nothing but those."""

    def __init__(self, *, only_long: bool = False) -> None:
        self._only_long = only_long
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        counts = " %" in text
        if (counts and now - self._last < 1.0) or (self._only_long and not counts):
            return
        self._last = now
        tell(text)


def warmed_engine(config: EngineConfig, *, quiet: bool = False) -> BuiltEngine:
    """An engine in this process that has run a prompt, so that the first measured step is like the others."""
    from noria.assembly import build_engine
    from noria.bench.inprocess import run_engine
    from noria.bench.workload import random_ids

    built = build_engine(config, progress=Stages(only_long=quiet))
    room = built.engine.max_model_len
    spec = WorkloadSpec(num_prompts=1, input_len=min(32, max(room // 2, 1)), output_len=min(8, max(room // 4, 1)), seed=-1)
    run_engine(built.engine, generate(spec, random_ids(built.spec.vocab_size)))
    return built


# -- the workload --------------------------------------------------------------------------------------------------------


def add_workload_flags(parser: argparse.ArgumentParser, *, num_prompts: int, input_len: int, output_len: int) -> None:
    """The data set, its lengths, and the seed. Names as vLLM's."""
    group = parser.add_argument_group("workload")
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="what is asked [random]")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="a ShareGPT JSON file, for sharegpt")
    group.add_argument("--num-prompts", type=int, default=num_prompts, metavar="N", help=f"requests in all [{num_prompts}]")
    group.add_argument("--random-input-len", type=int, default=input_len, metavar="N", help=f"prompt tokens [{input_len}]")
    group.add_argument("--random-output-len", type=int, default=output_len, metavar="N", help=f"output tokens [{output_len}]")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths vary by this share either way, in [0, 1) [0]",
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts of random have in common [0]"
    )
    group.add_argument(
        "--prefix-repetition-prefix-len", type=int, default=256, metavar="N", help="of shared-prefix: a prefix's tokens [256]"
    )
    group.add_argument(
        "--prefix-repetition-num-prefixes", type=int, default=1, metavar="N", help="of shared-prefix: prefixes [1]"
    )
    group.add_argument("--num-turns", type=int, default=4, metavar="N", help="of multi-turn: turns of a session [4]")
    group.add_argument(
        "--sharegpt-output-len", type=int, metavar="N", help="of sharegpt: this many tokens instead of the answer's length"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="go on past the end of an answer [yes, but not with sharegpt]",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same work [0]")


def workload_spec(arguments: argparse.Namespace) -> WorkloadSpec:
    """The flags as a value."""
    shared = arguments.dataset_name == "shared-prefix"
    return WorkloadSpec(
        dataset=arguments.dataset_name,
        num_prompts=arguments.num_prompts,
        input_len=arguments.random_input_len,
        output_len=arguments.random_output_len,
        range_ratio=arguments.random_range_ratio,
        prefix_len=arguments.prefix_repetition_prefix_len if shared else arguments.random_prefix_len,
        num_prefixes=arguments.prefix_repetition_num_prefixes if shared else 1,
        num_turns=arguments.num_turns,
        request_rate=getattr(arguments, "request_rate", AT_ONCE),
        burstiness=getattr(arguments, "burstiness", 1.0),
        seed=arguments.seed,
    )


def ignores_eos(arguments: argparse.Namespace) -> bool:
    """Synthetic prompts get answers of the length that was asked for; real ones may end."""
    if arguments.ignore_eos is None:
        return bool(arguments.dataset_name != "sharegpt")
    return bool(arguments.ignore_eos)


def sessions_of(
    arguments: argparse.Namespace, make: MakePrompt, tokenizer: Callable[[], Tokenizer | None], *, as_ids: bool
) -> list[Session]:
    """The workload that the flags describe. `tokenizer` is asked for only where there are texts."""
    spec = workload_spec(arguments)
    if (arguments.dataset_name == "sharegpt") != (arguments.dataset_path is not None):
        raise ConfigError("--dataset-name sharegpt and --dataset-path FILE go together: give both, or neither")
    if arguments.dataset_name != "sharegpt":
        return generate(spec, make)
    from noria.bench.sharegpt import estimate_tokens, sharegpt_sessions

    found = tokenizer()

    def ids(text: str) -> list[int]:
        assert found is not None
        return found.encode(text, add_special_tokens=True, parse_special=False)

    if found is None:
        return sharegpt_sessions(arguments.dataset_path, spec, output_len=arguments.sharegpt_output_len, count=estimate_tokens)
    return sharegpt_sessions(
        arguments.dataset_path,
        spec,
        output_len=arguments.sharegpt_output_len,
        encode=(lambda text: tuple(ids(text))) if as_ids else (lambda text: text),
        count=lambda text: len(ids(text)),
    )


def model_tokenizer(path: Path, config: EngineConfig) -> Tokenizer:
    """The tokenizer of a model on this machine."""
    from noria.server.loading import load_text
    from noria.weights.hub import cache_directory

    return load_text(path, cache_directory(config.cache_dir)).tokenizer


@contextmanager
def progress_bar(total: int, what: str = "requests") -> Generator[Callable[[int], None]]:
    """A bar on stderr; yields what is to be told how many are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


# -- results -------------------------------------------------------------------------------------------------------------


def add_result_flags(parser: argparse.ArgumentParser, *, plot: bool = True) -> None:
    """Where figures go besides the terminal."""
    group = parser.add_argument_group("results")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="also write the figures to this file")
    if plot:
        group.add_argument("--plot", type=Path, metavar="FILE", help="draw them to an image file (extra `plot`: matplotlib)")


def described(benchmark: str, model: str) -> dict[str, Any]:
    """What every result says about itself."""
    from noria.backends.cpu.topology import cpu_name
    from noria.observe.version import version

    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        "model_id": model,
        "noria": version(),
        "machine": f"{cpu_name()}, {platform.system()} {platform.machine()}",
    }


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """ConfigError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    tell(f"results written to {path}")


def columns(rows: Sequence[Sequence[str]]) -> str:
    """A table: the first row is the header, the first column is text, the others are figures."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
