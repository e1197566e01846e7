"""Prometheus metrics. Names follow vLLM's after the prefix `noria_`; every sample carries `model_name`.

Two sources: what the engine says after each step and each abort (gauges, which so fall to zero without new traffic, and its
own counters), and what the shell delivered (tokens and requests as clients were told of them).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from noria.types import EngineStats, FinishReason, Phase

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Families that vLLM has under the same name after its own prefix, `vllm:`, for what reads those: dashboards, autoscalers.
VLLM_FAMILIES = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "iteration_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "lora_requests_info",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
    }
)


class Metrics:
    """The metrics of one served model. With `vllm_names`, those that vLLM has come under its names too."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats], *, vllm_names: bool = False) -> None:
        self._vllm_names = vllm_names
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(model_name, stats))

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"noria_{name}", text, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, text: str) -> Histogram:
            made = Histogram(f"noria_{name}", text, ("model_name",), registry=self._registry, buckets=SECONDS)
            return made.labels(model_name)

        self._prompt_tokens = counter("prompt_tokens", "prompt tokens whose prefill finished").labels(model_name)
        self._generation_tokens = counter("generation_tokens", "generated tokens, as usage counts them").labels(model_name)
        success = counter("request_success", "requests by the way they ended", ["finished_reason"])
        self._finished = {reason: success.labels(model_name, reason.value) for reason in FinishReason}
        self._unknown_fields = counter("unknown_fields", "request fields that were ignored").labels(model_name)
        self._http = counter("http_requests", "HTTP responses by status", ["status"])
        self._model_name = model_name
        self.time_to_first_token = histogram("time_to_first_token_seconds", "arrival to first token")
        self.inter_token_latency = histogram("inter_token_latency_seconds", "time between tokens of one choice")
        self._e2e = histogram("e2e_request_latency_seconds", "arrival to last token")
        self._phases = {
            Phase.QUEUE: histogram("request_queue_time_seconds", "time in the waiting queue"),
            Phase.PREFILL: histogram("request_prefill_time_seconds", "time in prefill"),
            Phase.DECODE: histogram("request_decode_time_seconds", "time in decode"),
        }

    def prefilled(self, prompt_tokens: int, seconds: float) -> None:
        """A request's first token came `seconds` after its arrival."""
        self._prompt_tokens.inc(prompt_tokens)
        self.time_to_first_token.observe(seconds)

    def generated(self, tokens: int, seconds: float | None) -> None:
        """`tokens` more tokens of a choice, `seconds` after its last ones (None: these are its first)."""
        self._generation_tokens.inc(tokens)
        if seconds is not None:
            for _ in range(tokens):
                self.inter_token_latency.observe(seconds / tokens)

    def finished(self, reason: FinishReason, seconds: float, phases: Sequence[float]) -> None:
        """A request ended, `seconds` after its arrival. Called exactly once a request."""
        self._finished[reason].inc()
        self._e2e.observe(seconds)
        for phase, histogram in self._phases.items():
            if phase < len(phases):
                histogram.observe(phases[phase])

    def ignored_fields(self, count: int) -> None:
        """A request had fields that we do not know."""
        self._unknown_fields.inc(count)

    def responded(self, status: int) -> None:
        """A response was begun."""
        self._http.labels(self._model_name, str(status)).inc()

    def exposition(self) -> bytes:
        """Everything, in Prometheus's text format 0.0.4."""
        text = generate_latest(self._registry)
        return text + vllm_aliases(text) if self._vllm_names else text


def vllm_aliases(text: bytes) -> bytes:
    """The lines of an exposition that are about a family of vLLM's, under its name."""
    lines = []
    for line in text.splitlines(keepends=True):
        start, prefix, rest = line.partition(b"noria_")
        name = re.match(rb"\w+", rest)
        if prefix and start in (b"", b"# HELP ", b"# TYPE ") and name is not None:
            family = re.sub(r"_(bucket|sum|count)$", "", name[0].decode())
            if family in VLLM_FAMILIES:
                lines.append(start + b"vllm:" + rest)
    return b"".join(lines)


class _EngineCollector(Collector):
    """Reads the latest EngineStats at scrape time."""

    GAUGES = (
        ("num_requests_running", "requests that run", "running"),
        ("num_requests_waiting", "requests that wait for admission", "waiting"),
        ("kv_cache_usage_perc", "share of KV blocks that sequences hold, 0 to 1", "kv_usage"),
        ("kv_cache_blocks", "KV blocks in all", "kv_blocks"),
    )
    COUNTERS = (
        ("num_preemptions", "times a running sequence gave its blocks back", "preemptions"),
        ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", "prefix_queries"),
        ("prefix_cache_hits", "prompt tokens found in the prefix cache", "prefix_hits"),
        ("spec_decode_num_drafts", "times that drafts of a sequence were verified", "spec_drafts"),
        ("spec_decode_num_draft_tokens", "draft tokens that were verified", "spec_draft_tokens"),
        ("spec_decode_num_accepted_tokens", "draft tokens that were accepted", "spec_accepted_tokens"),
        ("engine_steps", "steps the engine ran", "steps"),
    )

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._labels = [model_name]
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """One family a gauge or counter."""
        stats = self._stats()
        for name, text, field in self.GAUGES:
            gauge = GaugeMetricFamily(f"noria_{name}", text, labels=["model_name"])
            gauge.add_metric(self._labels, getattr(stats, field))
            yield gauge
        for name, text, field in self.COUNTERS:
            counter = CounterMetricFamily(f"noria_{name}", text, labels=["model_name"])
            counter.add_metric(self._labels, getattr(stats, field))
            yield counter
        yield self._iterations(stats)

    def _iterations(self, stats: EngineStats) -> HistogramMetricFamily:
        """Tokens a step, in the engine's buckets."""
        histogram = HistogramMetricFamily("noria_iteration_tokens_total", "tokens computed by a step", labels=["model_name"])
        bounds = [str(2.0**i) for i in range(len(stats.iterations))]
        counts = list(accumulate(stats.iterations))
        buckets = [*zip(bounds, counts, strict=True), ("+Inf", counts[-1] if counts else 0)]
        histogram.add_metric(self._labels, buckets, sum_value=stats.step_tokens)
        return histogram
