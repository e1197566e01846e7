"""Distributions as a picture, or as text where matplotlib is not installed (the extra `plot`)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BINS = 12
BAR = 50  # characters of the longest bar
LABELS = {"ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency", "e2el": "end to end"}


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files; None, with a message, where it is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        print("noria: a plot needs matplotlib: pip install 'noria[plot]'; as text instead:", file=sys.stderr)
        return None
    matplotlib.use("agg")
    return importlib.import_module("matplotlib.pyplot")


def plot_latencies(series: Mapping[str, Sequence[float]], path: Path, title: str) -> None:
    """Histograms of the metrics (milliseconds) to an image file, or to the terminal."""
    shown = {name: values for name, values in series.items() if values}
    plt = pyplot()
    if plt is None:
        for name, values in shown.items():
            print(f"\n{LABELS.get(name, name)}, ms")
            print(text_histogram(values))
        return
    figure, axes = plt.subplots(1, max(len(shown), 1), figsize=(4 * max(len(shown), 1), 3.2), squeeze=False)
    for axis, (name, values) in zip(axes[0], shown.items(), strict=False):
        axis.hist(values, bins=40)
        axis.set_title(LABELS.get(name, name))
        axis.set_xlabel("ms")
    figure.suptitle(title)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format that the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path)
    print(f"noria: plot written to {path}", file=sys.stderr)


def text_histogram(values: Sequence[float], bins: int = BINS) -> str:
    """Counts by value, a bar a line; the last bin holds the largest value."""
    low, high = min(values), max(values)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / width), bins - 1)] += 1
    longest = max(counts)
    return "\n".join(
        f"{low + i * width:>10.1f} {'#' * round(BAR * count / longest):<{BAR}} {count}" for i, count in enumerate(counts)
    )
