"""What the measuring commands decide: tune's search, compare's sides, baselines, turning points, quality's figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from noria.bench.baseline import read_baselines, selected, table
from noria.bench.compare import side
from noria.bench.kernels import Point, turning_points
from noria.bench.limits import Limits, better
from noria.bench.micro import random_raw
from noria.bench.quality import Comparison, choices_of, log_softmax
from noria.bench.tune import Score, Search, Setting
from noria.config import EngineConfig
from noria.models.llama import spec_from_config
from noria.types import ConfigError
from noria.weights.quantize import dequantize


def search(surface: dict[tuple[int, int], float], start: tuple[int, int]) -> tuple[dict[str, int], Score, list[str]]:
    said: list[str] = []

    def measure(candidate: dict[str, int]) -> Score | str:
        value = surface.get((candidate["max_num_seqs"], candidate["threads"]))
        return "refused" if value is None else Score(value, 1.0)

    settings = [Setting("max_num_seqs", 1, 64), Setting("threads", 1, 4, doubles=False)]
    found = Search(settings, measure, said.append)
    best, score = found.run({"max_num_seqs": start[0], "threads": start[1]})
    return best, score, said


def test_tune_climbs_to_the_best_and_says_why() -> None:
    """Red if the search stops at a worse neighbour, does not come back to a setting, or keeps its reasons to itself."""
    surface = {
        (seqs, threads): seqs * threads if seqs * threads <= 32 else 1.0 for seqs in (1, 2, 4, 8, 16, 32) for threads in (1, 2)
    }
    best, score, said = search(surface, (2, 1))
    assert score.goodput == 32
    assert best["max_num_seqs"] * best["threads"] == 32
    assert sum("kept, it beats" in line for line in said) >= 4
    assert any("not kept" in line for line in said)


def test_tune_does_not_chase_noise() -> None:
    """Red if a gain of one per cent moves a setting."""
    best, _, _ = search({(4, 1): 100.0, (8, 1): 101.0, (2, 1): 99.0}, (4, 1))
    assert best == {"max_num_seqs": 4, "threads": 1}


def test_tune_goes_round_a_refused_candidate_but_not_a_refused_start() -> None:
    """Red if a candidate that the engine refuses ends the search, or an impossible start is searched from."""
    best, _, said = search({(4, 1): 1.0, (2, 1): 5.0}, (4, 1))
    assert best["max_num_seqs"] == 2
    assert any("refused" in line for line in said)
    with pytest.raises(ConfigError, match="refused"):
        search({}, (4, 1))


def test_output_tokens_decide_between_equal_goodputs() -> None:
    """Red if a workload without objectives cannot be tuned."""
    assert Score(0.0, 110.0).beats(Score(0.0, 100.0))
    assert not Score(0.0, 101.0).beats(Score(0.0, 100.0))
    assert not Score(1.0, 999.0).beats(Score(2.0, 1.0))


def test_a_side_changes_only_what_it_names() -> None:
    """Red if a side's flags reset the common settings to their defaults."""
    common = EngineConfig(model="m", max_num_seqs=7, threads=2)
    assert side(common, "--threads 1") == EngineConfig(model="m", max_num_seqs=7, threads=1)
    assert side(common, "") == common
    assert side(common, "--no-enable-prefix-caching").enable_prefix_caching is False


@pytest.mark.parametrize("flags", ["--nonsense 1", "other-model", "--threads x", "--threads -1", "--backend gpu", "'unclosed"])
def test_a_side_with_a_wrong_flag_is_refused(flags: str) -> None:
    """Red if a misspelt flag compares a setting with itself."""
    with pytest.raises(ConfigError):
        side(EngineConfig(model="m"), flags)


def test_baselines_are_by_ratio(tmp_path: Path) -> None:
    """Red if the relative column is turned over, or a missing baseline is shown as a number."""
    lines = table({"w1": 3.0, "w9": 1.0}, {"w1": 4.0}).splitlines()
    assert lines[1].split()[-1] == "0.75"
    assert lines[2].split()[-2:] == ["-", "-"]
    assert read_baselines(tmp_path / "none.json") == {}
    (tmp_path / "list.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="--file"):
        read_baselines(tmp_path / "list.json")


def test_workloads_have_the_published_lengths() -> None:
    """Red if a workload is changed: baselines of another shape would be compared with it."""

    def make(rng: object, count: int) -> tuple[int, ...]:
        return (1,) * count

    totals = {
        w.name[:2]: [sum(map(len, p)), sum(o)] for w in selected(None) for p, o in [zip(*w.requests(make, 0), strict=True)]
    }
    assert totals["w1"] == [128, 128]
    assert totals["w4"] == [64 * 1056, 64 * 64]
    assert totals["w3"][0] == sum(len(p) for p, _ in selected(["w3"])[0].requests(make, 5))
    with pytest.raises(ConfigError):
        selected(["w7"])


LIMITS = Limits(tier="t", threads=1, peaks={"u8s8": 1000.0, "bf16": 500.0, "f32": 100.0}, memory=10.0, cache=100.0)


def test_the_roofline_takes_the_slower_of_reading_and_computing() -> None:
    """Red if a kernel that reads much is compared with the arithmetic peak, or cached bytes with memory."""
    assert LIMITS.seconds(1000.0, 1.0, "u8s8") == 1.0
    assert LIMITS.seconds(10.0, 20.0, "u8s8") == 2.0
    assert LIMITS.seconds(10.0, 20.0, "u8s8", cached=True) == 0.2
    assert Point("k", "u8s8", False, 4.0, 10.0, 20.0).share(LIMITS) == 0.5
    higher = Limits(tier="t", threads=1, peaks={"u8s8": 1.0, "bf16": 1.0, "f32": 200.0}, memory=20.0, cache=1.0)
    assert better(LIMITS, higher).peaks == {"u8s8": 1000.0, "bf16": 500.0, "f32": 200.0}
    assert better(LIMITS, higher).memory == 20.0


def test_where_decode_turns_compute_bound() -> None:
    """Red if the crossing ignores a layer's matrices, or the rows they were measured at."""
    spec = spec_from_config(
        {"vocab_size": 8, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8, "num_hidden_layers": 1}
    )
    points = [
        Point(f"linear {n} 8x8 q4 x{rows}", "u8s8", False, s, 50.0 * rows, 25.0)
        for n in ("o", "qkv")
        for rows, s in ((1, 2.5), (8, 2.5), (64, 7.5))
    ]
    found = turning_points(spec, ["q4", "q8"], points, LIMITS).rows
    assert set(found) == {"q4"}
    assert found["q4"]["roofline"] == pytest.approx(50 / 10 / (100 / 1000))  # 5 s of reading, 0.1 s a row
    assert found["q4"]["measured"] == pytest.approx(8 + 56 / 2)


def test_every_format_and_kv_type_of_the_settings_is_measured() -> None:
    """Red if a format that is added to the settings is not measured until somebody lists it here too."""
    assert {"q4", "q8", "bf16", "f32"} <= set(choices_of("quantization"))
    assert {"bf16", "f32"} <= set(choices_of("kv_cache_dtype"))
    assert "auto" not in choices_of("kv_cache_dtype")


def test_quality_figures_are_those_of_the_distributions() -> None:
    """Red if KL is turned over, perplexity is of another token, or the softmax loses a large logit."""
    rng = np.random.default_rng(0)
    p_logits, q_logits = (rng.standard_normal((6, 9)).astype(np.float32) * 3 for _ in range(2))
    p_logits[0, 0] = 300.0
    p, q = log_softmax(p_logits), log_softmax(q_logits)
    assert np.allclose(np.exp(p.astype(np.float64)).sum(axis=1), 1.0)
    targets = [0, 1, 2, 3, 4, 5]
    comparison = Comparison(reference_perplexity=2.0)
    comparison.add(targets, p, q)
    row = comparison.row("q4", "bf16")
    exact_p, exact_q = np.exp(p.astype(np.float64)), np.exp(q.astype(np.float64))
    kl = (exact_p * (np.log(np.maximum(exact_p, 1e-300)) - np.log(exact_q))).sum(axis=1)
    assert row["mean_kl"] == pytest.approx(kl.mean(), rel=1e-4)
    assert row["perplexity"] == pytest.approx(np.exp(-np.log(exact_q[range(6), targets]).mean()), rel=1e-5)
    assert row["perplexity_ratio"] == pytest.approx(row["perplexity"] / 2)
    assert row["top1_agreement"] == pytest.approx((p.argmax(1) == q.argmax(1)).mean())
    same = Comparison(reference_perplexity=2.0)
    same.add(targets, p, p)
    assert same.row("f32", "f32")["mean_kl"] == 0.0


def test_flags_of_sides_are_parsed_without_leaving_the_program() -> None:
    """Red if argparse's own exit ends a benchmark whose engines are loaded."""
    with pytest.raises(ConfigError):
        side(EngineConfig(model="m"), "--max-num-seqs")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "BF16", "F32"])
def test_random_weights_keep_the_size_of_activations(kind: str) -> None:
    """Red if a type's scale is in the wrong place: activations would overflow or vanish within a few layers."""
    weights = dequantize(random_raw(64, 256, kind, np.random.default_rng(0)))
    assert 0.4 < weights.std() * 256**0.5 < 1.2
    assert abs(weights.mean()) < 0.2 * weights.std()  # the codes 0 to 15 of Q4_0 lie around 8
    with pytest.raises(ValueError, match="multiple"):
        random_raw(1, 33, "Q8_0", np.random.default_rng(0))
