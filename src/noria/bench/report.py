"""From the times of single requests to the figures people compare: TTFT, ITL, TPOT, end to end, throughput."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PERCENTILES = (50, 90, 99)


@dataclass
class RequestTimes:
    """When one request was sent and when its tokens came, in seconds on one clock."""

    sent: float
    input_tokens: int
    token_times: list[float] = field(default_factory=list)
    output_tokens: int = 0
    ended: float = 0.0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        if self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)


def percentile(values: Sequence[float], p: float) -> float:
    """Linear interpolation between the closest ranks."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def summary(requests: Sequence[RequestTimes], seconds: float) -> dict[str, float]:
    """One flat dictionary, with the field names of `vllm bench serve` where the figure is the same. Times in milliseconds."""
    good = [r for r in requests if r.error is None and r.token_times]
    outputs, inputs = sum(r.output_tokens for r in good), sum(r.input_tokens for r in good)
    figures = {
        "completed": float(len(good)),
        "failed": float(len(requests) - len(good)),
        "duration": seconds,
        "total_input_tokens": float(inputs),
        "total_output_tokens": float(outputs),
        "request_throughput": len(good) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    series: dict[str, Iterable[float]] = {
        "ttft": (r.ttft for r in good),
        "itl": (g for r in good for g in r.gaps),
        "tpot": (t for r in good if (t := r.tpot) is not None),
        "e2el": (r.ended - r.sent for r in good),
    }
    for name, values in series.items():
        milliseconds = [1e3 * v for v in values]
        figures[f"mean_{name}_ms"] = sum(milliseconds) / len(milliseconds) if milliseconds else 0.0
        for p in PERCENTILES:
            figures[f"p{p}_{name}_ms"] = percentile(milliseconds, p)
    return figures


def table(figures: dict[str, float]) -> str:
    """The figures as aligned lines for a terminal."""
    width = max(len(k) for k in figures)
    return "\n".join(f"{k:<{width}}  {v:>12,.2f}" for k, v in figures.items())
