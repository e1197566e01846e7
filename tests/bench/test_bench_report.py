"""The arithmetic of a benchmark's figures."""

from __future__ import annotations

import numpy as np
import pytest

from noria.bench.plot import text_histogram
from noria.bench.report import RequestTimes, meets, most_open, parse_goodput, percentile, series, summary
from noria.types import ConfigError


def request(scheduled: float, sent: float, tokens: list[float], inputs: int = 10) -> RequestTimes:
    return RequestTimes(
        scheduled=scheduled,
        sent=sent,
        input_tokens=inputs,
        token_times=tokens,
        output_tokens=len(tokens),
        ended=tokens[-1] if tokens else sent,
        error=None if tokens else "refused",
    )


@pytest.mark.parametrize("p", [0, 1, 25, 50, 90, 99, 100])
def test_percentiles_are_numpys(p: float) -> None:
    """Red if another interpolation is used, or an unsorted list is read."""
    values = np.random.default_rng(0).random(37).tolist()
    assert percentile(values, p) == pytest.approx(float(np.percentile(values, p)))


def test_percentile_of_nothing_and_of_one() -> None:
    """Red if an empty series fails a whole report."""
    assert percentile([], 99) == 0.0
    assert percentile([3.0], 99) == 3.0


def test_latency_counts_from_the_scheduled_arrival() -> None:
    """Red if a late generator hides the wait: coordinated omission."""
    late = request(scheduled=1.0, sent=3.0, tokens=[4.0, 5.0, 7.0])
    assert late.ttft == 3.0
    assert late.e2el == 6.0
    assert late.gaps == [1.0, 2.0]
    assert late.tpot == 1.5
    assert summary([late], 10.0)["max_send_delay_ms"] == 2000.0


def test_summary_counts_only_what_was_answered() -> None:
    """Red if a failed request adds tokens or latencies, or is not counted as failed."""
    good, bad = request(0.0, 0.0, [1.0, 2.0]), request(0.0, 0.0, [])
    figures = summary([good, bad], 4.0, percentiles=(99,))
    assert figures["completed"] == 1
    assert figures["failed"] == 1
    assert figures["request_throughput"] == 0.25
    assert figures["output_throughput"] == 0.5
    assert figures["total_token_throughput"] == 3.0
    assert figures["mean_ttft_ms"] == figures["median_ttft_ms"] == figures["p99_ttft_ms"] == 1000.0
    assert figures["std_ttft_ms"] == 0.0
    assert "p90_ttft_ms" not in figures


def test_only_the_metrics_that_were_asked_for_are_reported() -> None:
    """Red if --percentile-metrics is not followed."""
    figures = summary([request(0.0, 0.0, [1.0, 2.0])], 1.0, metrics=("tpot",))
    assert "mean_tpot_ms" in figures
    assert not any("ttft" in name for name in figures)


def test_itl_is_over_all_gaps_and_tpot_over_requests() -> None:
    """Red if one long answer weighs no more in ITL than a short one, or more in TPOT."""
    both = [request(0.0, 0.0, [1.0, 2.0, 3.0, 4.0]), request(0.0, 0.0, [1.0, 6.0])]
    assert sorted(series(both)["itl"]) == [1000.0, 1000.0, 1000.0, 5000.0]
    assert sorted(series(both)["tpot"]) == [1000.0, 5000.0]


def test_goodput_needs_every_objective() -> None:
    """Red if one objective that is met is enough, or a failed request counts."""
    objectives = parse_goodput(["ttft:1500", "tpot:900"])
    quick, slow_tokens = request(0.0, 0.0, [1.0, 1.5]), request(0.0, 0.0, [1.0, 2.0])
    late, failed = request(0.0, 0.0, [2.0, 2.1]), request(0.0, 0.0, [])
    assert [meets(r, objectives) for r in (quick, slow_tokens, late, failed)] == [True, False, False, False]
    assert summary([quick, slow_tokens, late, failed], 2.0, objectives=objectives)["request_goodput"] == 0.5


def test_one_token_meets_any_tpot() -> None:
    """Red if an answer of one token, which has no time per further token, is held against the server."""
    assert meets(request(0.0, 0.0, [1.0]), {"tpot": 1.0})


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:fast", "ttft:-1", "itl:5", "ttft:nan"])
def test_goodput_objectives_are_checked(text: str) -> None:
    """Red if a misspelt objective is dropped in silence."""
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput([text])


def test_most_open_counts_overlaps() -> None:
    """Red if a request that ends when another begins counts as overlapping it."""
    assert most_open([request(0.0, 0.0, [2.0]), request(1.0, 1.0, [3.0]), request(3.0, 3.0, [4.0])]) == 2


def test_a_text_histogram_holds_every_value() -> None:
    """Red if the largest value falls out of the last bin."""
    counts = [int(line.split()[-1]) for line in text_histogram([1.0, 2.0, 3.0, 3.0, 10.0]).splitlines()]
    assert sum(counts) == 5
    assert counts[-1] == 1
    assert text_histogram([4.0, 4.0]).count("#") > 0
