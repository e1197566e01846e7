"""Tenants and batches with a real engine: what a shared prefix cache gives away, and what a batch answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_client import lines, results, start, wait
from harness import RunningServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tenants(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tenants")
    keys = folder / "keys.json"
    entries = [{"key": "sk-a", "name": "a"}, {"key": "sk-b", "name": "b"}, {"key": "sk-c", "name": "c", "tenant": "a"}]
    keys.write_text(json.dumps({"keys": entries}))
    keys.chmod(0o600)
    flags = [
        "--slow-request-s",
        "0.000001",
        "--max-model-len",
        "1024",
        "--kv-cache-memory-bytes",
        "64M",
        "--data-dir",
        str(folder / "data"),
    ]
    with RunningServer.real(str(tiny_folder), "--api-key-file", str(keys), *flags, log=folder / "log") as running:
        running.key = "sk-a"
        yield running


def test_tenants_share_no_prefixes(tenants: RunningServer) -> None:
    """Red if cached tokens tell one tenant what another has asked, under any salt; or colleagues do not share."""
    prompt = "The merger is planned for the third of May. " * 8

    def cached(key: str, **fields: str) -> int:
        body = tenants.completion(prompt, max_tokens=4, ignore_eos=True, **fields)
        out = tenants.ok("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
        return int(out["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("sk-a") == 0
    assert cached("sk-a") > 0
    assert cached("sk-c") > 0, "the same tenant"
    assert cached("sk-b") == 0
    for salt in ("a", "a\0", "\0a"):
        assert cached("sk-b", cache_salt=salt) == 0
    assert cached("sk-b") > 0


def test_the_reason_of_a_miss_tells_nothing_about_others(tenants: RunningServer) -> None:
    """Red if a client can ask, with `timing`, whether another tenant has sent a text; the operator's log may know."""
    body = tenants.completion("Quarterly figures, not public yet. " * 4, max_tokens=1, timing=True)
    for _ in range(2):
        tenants.ok("/v1/completions", body)
    for fields in ({}, {"cache_salt": "x"}):
        out = tenants.ok("/v1/completions", {**body, **fields}, headers={"Authorization": "Bearer sk-b"})
        assert out["timing"]["cache"] == {"cached_tokens": 0, "miss": "never seen"}
    assert '"cache_miss":"other salt"' in tenants.errors()


def test_a_batch_answers_as_http_does_and_shares_its_tenants_prefixes(tenants: RunningServer) -> None:
    """Red if a line takes another path than a request, or works outside its tenant."""
    items = lines(tenants, 12, ignore_eos=True)
    for item in items:
        item["body"]["prompt"] = "The merger is planned for the third of May. " * 8 + item["body"]["prompt"]
    done = wait(tenants, start(tenants, items)["id"])
    assert done["status"] == "completed"
    assert done["usage"]["input_tokens_details"]["cached_tokens"] > 0
    for row, item in zip(results(tenants, done["output_file_id"]), items, strict=True):
        assert row["response"]["body"]["choices"] == tenants.ok("/v1/completions", item["body"])["choices"]
