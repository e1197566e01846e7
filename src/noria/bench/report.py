"""From the times of single requests to the figures people compare: TTFT, ITL, TPOT, end to end, throughput, goodput.

    scheduled        sent   first token                    last token
        |-- delay ----|         |--gap--|--gap--| ... --gap--|
        |------------ ttft -----|        tpot = (last - first) / (tokens - 1)
        |------------------------ e2el ----------------------|

Latencies count from the *scheduled* arrival: a load generator that falls behind, or waits for a free connection, must not
hide the time its requests would have waited (coordinated omission).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from noria.types import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")
Figures = dict[str, float]


@dataclass
class RequestTimes:
    """When one request was due, was sent, and got its tokens, in seconds on one clock."""

    scheduled: float
    sent: float
    input_tokens: int
    token_times: list[float] = field(default_factory=list)  # when tokens came; several of one step count once over HTTP
    output_tokens: int = 0
    cached_tokens: int = 0
    ended: float = 0.0
    error: str | None = None
    answer: tuple[int, ...] | str = ()  # what the next turn of a session needs to know

    @property
    def good(self) -> bool:
        return self.error is None and bool(self.token_times)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.scheduled

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def e2el(self) -> float:
        return self.ended - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        if self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)


def percentile(values: Sequence[float], p: float) -> float:
    """Linear interpolation between the closest ranks, as numpy's default; 0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` -> objectives in milliseconds. ConfigError for anything else."""
    objectives = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = math.nan
        if name not in ("ttft", "tpot", "e2el") or not value > 0:
            raise ConfigError(f"--goodput {text}: write ttft:MS, tpot:MS or e2el:MS")
        objectives[name] = value
    return objectives


def meets(request: RequestTimes, objectives: Mapping[str, float]) -> bool:
    """Whether a request was answered within every objective. One without a second token meets any tpot."""
    if not request.good:
        return False
    measured = {"ttft": request.ttft, "tpot": request.tpot or 0.0, "e2el": request.e2el}
    return all(1e3 * measured[name] <= limit for name, limit in objectives.items())


def series(requests: Sequence[RequestTimes]) -> dict[str, list[float]]:
    """Milliseconds by metric, over the requests that were answered; ITL over all gaps of all of them."""
    good = [r for r in requests if r.good]
    seconds = {
        "ttft": [r.ttft for r in good],
        "tpot": [t for r in good if (t := r.tpot) is not None],
        "itl": [gap for r in good for gap in r.gaps],
        "e2el": [r.e2el for r in good],
    }
    return {name: [1e3 * s for s in values] for name, values in seconds.items()}


def summary(
    requests: Sequence[RequestTimes],
    seconds: float,
    *,
    objectives: Mapping[str, float] | None = None,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (90, 99),
) -> Figures:
    """One flat dictionary, with the field names of `vllm bench serve` where the figure is the same. Times in milliseconds."""
    good = [r for r in requests if r.good]
    outputs, inputs = sum(r.output_tokens for r in good), sum(r.input_tokens for r in good)
    figures: Figures = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(requests) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "cached_input_tokens": sum(r.cached_tokens for r in good),
        "request_throughput": len(good) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_send_delay_ms": 1e3 * max((r.sent - r.scheduled for r in requests), default=0.0),
        "max_concurrent_requests": most_open(requests),
    }
    if objectives:
        figures["request_goodput"] = sum(meets(r, objectives) for r in requests) / seconds
    for name, values in series(requests).items():
        if name in metrics:
            figures |= _statistics(name, values, percentiles)
    return figures


def _statistics(name: str, milliseconds: Sequence[float], percentiles: Sequence[float]) -> Figures:
    count = len(milliseconds)
    mean = sum(milliseconds) / count if count else 0.0
    variance = sum((v - mean) ** 2 for v in milliseconds) / count if count else 0.0
    figures = {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(milliseconds, 50),
        f"std_{name}_ms": math.sqrt(variance),
    }
    return figures | {f"p{p:g}_{name}_ms": percentile(milliseconds, p) for p in percentiles}


def most_open(requests: Sequence[RequestTimes]) -> int:
    """The most requests that were sent and not yet answered at one time."""
    changes = sorted([(r.sent, 1) for r in requests] + [(r.ended, -1) for r in requests])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def table(figures: Mapping[str, float]) -> str:
    """The figures as aligned lines for a terminal."""
    width = max(len(k) for k in figures)
    return "\n".join(f"{k:<{width}}  {v:>12,.2f}" for k, v in figures.items())
