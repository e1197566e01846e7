"""Every benchmark from its command line, on a tiny random model; and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import RunningServer

from noria.bench import plot
from noria.bench.quality import choices_of
from noria.cli.main import main

TINY = ["--max-model-len", "128", "--max-num-batched-tokens", "64", "--threads", "1"]
SHORT = ["--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "6"]


def bench(*arguments: str | Path) -> int:
    return main(["bench", *map(str, arguments)])


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.slow
def test_latency(tiny_gguf: Path, cache: Path) -> None:
    """Red if the command fails, or its JSON lacks vLLM's fields."""
    out = cache / "out.json"
    shape = ["--input-len", "8", "--output-len", "4", "--batch-size", "2", "--num-iters", "3"]
    assert bench("latency", tiny_gguf, *TINY, *shape, "--output-json", out) == 0
    result = read(out)
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["random", "shared-prefix", "multi-turn"])
def test_throughput(tiny_gguf: Path, cache: Path, dataset: str) -> None:
    """Red if a data set fails, or prefixes and sessions find nothing in the prefix cache."""
    out = cache / "out.json"
    prefix = ["--prefix-repetition-prefix-len", "32"]
    assert bench("throughput", tiny_gguf, *TINY, *SHORT, *prefix, "--dataset-name", dataset, "--output-json", out) == 0
    result = read(out)
    assert result["completed"] == result["num_requests"] == 6
    assert result["total_output_tokens"] == 24
    assert (result["cached_input_tokens"] > 0) == (dataset != "random")


@pytest.mark.slow
def test_throughput_on_sharegpt_ends_where_the_model_ends(tiny_gguf: Path, cache: Path) -> None:
    """Red if texts are not tokenised by the model, or the answers' lengths are not asked for."""
    talk = [{"conversations": [{"value": "what is it then"}, {"value": "an answer of this length"}]}] * 3
    (cache / "s.json").write_text(json.dumps(talk))
    out = cache / "out.json"
    arguments = ["--dataset-name", "sharegpt", "--dataset-path", cache / "s.json", "--sharegpt-output-len", "5"]
    assert bench("throughput", tiny_gguf, *TINY, *arguments, "--ignore-eos", "--output-json", out) == 0
    assert read(out)["total_output_tokens"] == 15
    assert read(out)["total_input_tokens"] == 3 * 14  # a byte a token, and "th" of "then" is one


@pytest.mark.slow
def test_serve_in_a_process_of_our_own(tiny_gguf: Path, cache: Path) -> None:
    """Red if the open loop, goodput, the saved file or the plot fails."""
    load = ["--request-rate", "100", "--burstiness", "0.5", "--max-concurrency", "2", "--goodput", "ttft:60000", "tpot:60000"]
    save = ["--save-detailed", "--result-dir", cache, "--result-filename", "out.json", "--plot", cache / "plot.png"]
    assert bench("serve", tiny_gguf, *TINY, *SHORT, *load, *save, "--metric-percentiles", "95") == 0
    result = read(cache / "out.json")
    assert result["completed"] == 6
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["max_concurrent_requests"] <= 2
    assert result["output_lens"] == [4] * 6
    assert "p95_ttft_ms" in result
    assert "p99_ttft_ms" not in result


@pytest.mark.slow
def test_serve_against_a_url(tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a server of the same protocol cannot be driven through either endpoint, or a refusal is not told."""
    with RunningServer.real(str(tiny_gguf), *TINY) as server:
        out = cache / "out.json"
        common = ["--base-url", server.url, *SHORT, "--vocab-size", "250", "--output-json", out]
        assert bench("serve", *common) == 0
        assert read(out)["model_id"] == "m"
        assert read(out)["total_output_tokens"] == 24
        chat = [
            "--endpoint",
            "/v1/chat/completions",
            "--dataset-name",
            "multi-turn",
            "--num-turns",
            "2",
            "--random-input-len",
            "2",
        ]
        assert bench("serve", *common, *chat) == 0
        assert read(out)["completed"] == 6
        assert bench("serve", *common, "--model", "other") == 1
    assert "the first request failed: HTTP 404" in capsys.readouterr().err


@pytest.mark.slow
def test_quality(tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if float32 is not its own reference to the last bit, a coarser format is as good, or a KV type is missing."""
    (cache / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    out = cache / "out.json"
    slices = ["--num-slices", "2", "--slice-len", "40", "--text", cache / "text.txt", "--kv-types", "bf16", "f32"]
    assert bench("quality", tiny_gguf, "--threads", "1", *slices, "--output-json", out) == 0
    rows = {(r["weights"], r["kv"]): r for r in read(out)["rows"]}
    assert len(rows) == 2 * (1 + len(choices_of("quantization")))
    assert rows["f32", "f32"]["mean_kl"] == 0.0
    assert rows["f32", "f32"]["top1_agreement"] == 1.0
    assert 0 < rows["f32", "bf16"]["mean_kl"] < rows["q8", "bf16"]["mean_kl"]
    assert "as-is" in capsys.readouterr().out


@pytest.mark.slow
def test_tune(tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if the search cannot run an engine, or does not say which flags to use."""
    out = cache / "out.json"
    start = ["--max-model-len", "64", "--threads", "1", "--max-num-seqs", "2", "--max-num-batched-tokens", "32"]
    assert bench("tune", tiny_gguf, *start, *SHORT, "--goodput", "ttft:60000", "--output-json", out) == 0
    assert "use: --max-num-seqs" in capsys.readouterr().out
    assert len(read(out)["tried"]) >= 3


@pytest.mark.slow
def test_kernels(tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a kernel is not measured, or has no operations or bytes to compare with the limits."""
    monkeypatch.setattr("noria.bench.kernel_rigs.COLD_BYTES", 1 << 16)
    monkeypatch.setattr("noria.bench.micro.STEP_S", 0.005)
    monkeypatch.setattr("noria.bench.limits.TRY_S", 0.002)
    out = cache / "out.json"
    arguments = ["--threads", "1", "--rows", "1", "2", "65", "--context", "32", "--formats", "q4", "bf16"]
    assert bench("kernels", tiny_gguf, *arguments, "--output-json", out, "--plot", cache / "roof.png") == 0
    points = {p["kernel"]: p for p in read(out)["points"]}
    for part in (
        "linear qkv",
        "linear down",
        "attention full x1",
        "full shared x2",
        "prefill at 0",
        "rms_norm",
        "rope",
        "gated",
        "draw greedy",
    ):
        assert any(part in name for name in points), part
    assert all(p["seconds"] > 0 and p["nbytes"] > 0 for p in points.values())
    gate_up = points["linear gate_up 192x64 q4 x65"]
    assert gate_up["operations"] == 2 * 192 * 64 * 65
    assert set(read(out)["compute_bound_rows"]) == {"q4", "bf16"}
    assert (cache / "roof.png").stat().st_size > 0


@pytest.mark.slow
def test_profile(tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if shares do not add up to the step, or an op is not named."""
    arguments = ["--rows", "1", "4", "--context", "20", "--steps", "3", "--threads", "1"]
    assert bench("profile", tiny_gguf, *arguments, "--output-json", cache / "out.json") == 0
    profiles = read(cache / "out.json")["profiles"]
    assert [p["rows"] for p in profiles] == [1, 4]
    for profile in profiles:
        assert sum(op["seconds"] for op in profile["ops"]) <= profile["wall"]
        labels = {op["label"] for op in profile["ops"]}
        assert {"attention", "draw"} <= labels
        assert any(label.startswith("linear") for label in labels)
    text = capsys.readouterr().out
    shares = [float(line.split()[-1][:-1]) for line in text.split("\n\n")[-1].splitlines() if line.endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=0.6)


@pytest.mark.slow
def test_compare(tiny_gguf: Path, cache: Path) -> None:
    """Red if two engines cannot be compared in one process, or fewer than 20 pairs are taken."""
    out = cache / "out.json"
    sides = ["--a", "--max-num-seqs 2", "--b", "--max-num-seqs 4"]
    assert bench("compare", tiny_gguf, *TINY, *SHORT, *sides, "--output-json", out) == 0
    result = read(out)
    assert len(result["seconds"]) == result["pairs"] == 20
    assert result["low"] <= result["median"] <= result["high"]


@pytest.mark.slow
def test_baseline(tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a missing baseline is not told, a recorded one is not found again, or a much slower run passes."""
    file = cache / "baseline.json"
    arguments = [tiny_gguf, "--threads", "1", "--only", "w1", "--runs", "1", "--file", file]
    assert bench("baseline", *arguments) == 0
    assert "--record" in capsys.readouterr().err
    assert bench("baseline", *arguments, "--record") == 0
    (entry,) = read(file).values()
    (name,) = entry["ratios"]
    assert bench("baseline", *arguments, "--tolerance", "0.99") == 0
    entry["ratios"][name] *= 1000
    key = next(iter(read(file)))
    file.write_text(json.dumps({key: entry}))
    assert bench("baseline", *arguments) == 1


@pytest.mark.slow
def test_doctor_tells_where_a_start_goes(tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a stage of the start is no longer told, or the child survives."""
    assert main(["doctor", str(tiny_gguf), "--startup", *TINY]) == 0
    out = capsys.readouterr().out
    for stage in ("accepting connections", "loading weights", "building the model", "tokenizer loaded", "first token"):
        assert stage in out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "bf16"])
def test_random_models_of_every_type_load(kind: str, tokenizer_gguf: Path, cache: Path) -> None:
    """Red if the tool writes a file that Noria cannot serve, or without its tokenizer."""
    import random_gguf
    from noria import LLM, SamplingParams

    path = cache / f"{kind}.gguf"
    assert random_gguf.main([str(path), "--shape", "tiny", "--type", kind, "--tokenizer-from", str(tokenizer_gguf)]) == 0
    with LLM(str(path), max_model_len=64) as llm:
        (output,) = llm.generate("the end", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
        assert len(output.prompt_token_ids) == 6  # "th" is one token


def test_without_matplotlib_a_plot_is_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a missing matplotlib is a traceback, or silence."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot.plot_latencies({"ttft": [1.0, 2.0, 2.0]}, Path("unused.png"), "title")
    shown = capsys.readouterr()
    assert "noria[plot]" in shown.err
    assert "time to first token" in shown.out
    assert "##" in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--base-url", "nowhere"], "--base-url"),
        (["serve", "--base-url", "http://127.0.0.1:1"], "cannot connect"),
        (["serve", "m", "--base-url", "http://127.0.0.1:1"], "--model"),
        (["serve", "m", "--api-key", "k"], "--base-url"),
        (["serve", "m", "--endpoint", "/v1/chat/completions"], "--base-url"),
        (["serve", "--base-url", "http://127.0.0.1:1", "--dataset-name", "multi-turn"], "/v1/chat/completions"),
        (["serve", "m", "--goodput", "ttft"], "--goodput"),
        (["serve", "m", "--percentile-metrics", "ttfb"], "--percentile-metrics"),
        (["serve", "m", "--metric-percentiles", "101"], "--metric-percentiles"),
        (["serve", "m", "--max-concurrency", "0"], "--max-concurrency"),
        (["serve", "m", "--beside", "plain:2"], "--http"),
        (["serve", "m", "--http", "--beside", "plain"], "--beside"),
        (["serve", "--http", "--base-url", "http://127.0.0.1:1"], "--http"),
        (["serve", "/nowhere/x.gguf", "--http"], "no such file"),
        (["throughput", "/nowhere/x.gguf"], "no such file"),
        (["latency", "m", "--num-iters", "0"], "--num-iters"),
        (["latency", "m", "--neighbour", "--num-iters", "5"], "--num-iters"),
        (["latency", "m", "--neighbour", "--output-len", "1"], "--neighbour"),
        (["stream", "m", "--concurrency", "0"], "--concurrency"),
        (["stream", "m", "--rates", "-1"], "--rates"),
        (["soak", "m", "--abort-share", "2"], "--abort-share"),
        (["soak", "m", "--duration", "0"], "--duration"),
        (["soak", "m", "--max-input-len", "1"], "--max-input-len"),
        (["quality", "m", "--quantization", "q4"], "--weights"),
        (["compare", "m", "--a", "", "--b", ""], "same settings"),
        (["compare", "m", "--a", "", "--b", "--threads 1", "--pairs", "5"], "--pairs"),
        (["kernels", "m", "--backend", "torch"], "--backend"),
        (["profile", "m", "--rows", "0"], "--rows"),
        (["baseline", "m", "--only", "w9"], "--only"),
        (["tune", "m", "--goodput", "speed:1"], "--goodput"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    """Red if a wrong option is ignored, or told by a traceback."""
    assert bench(*arguments) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("noria: ")
    assert message in last


@pytest.mark.slow
def test_a_data_set_without_its_file_is_refused(tiny_gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if sharegpt runs on something else, or a file is ignored by another data set."""
    assert bench("throughput", tiny_gguf, *TINY, "--dataset-name", "sharegpt") == 1
    assert bench("throughput", tiny_gguf, *TINY, "--dataset-path", "x.json") == 1
    assert capsys.readouterr().err.count("go together") == 2


def test_every_benchmark_explains_itself_without_loading_anything_heavy() -> None:
    """Red if a benchmark's flags cannot be built, or `--help` waits for numpy, an engine or matplotlib."""
    code = (
        "import sys\nfrom noria.cli.main import main\nfrom noria.cli.bench import BENCHMARKS\n"
        "for name in BENCHMARKS:\n"
        "    try: main(['bench', name, '--help'])\n"
        "    except SystemExit as left: assert left.code == 0, name\n"
        "print([m for m in ('numpy', 'orjson', 'rich', 'uvloop', 'httptools', 'matplotlib', 'zmq') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")
