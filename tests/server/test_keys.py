"""Key files and limits, without a server."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.server.keys import KeyRing, load_keys
from noria.server.limits import Bucket, CallerLimits, Limits, OverLimit
from noria.types import ConfigError

SECRET = "sk-very-secret-1234"


def ring(tmp_path: Path, name: str, text: str, *flags: str) -> KeyRing:
    path = tmp_path / name
    path.write_text(text)
    path.chmod(0o600)
    return load_keys(flags, str(path))


def test_lines_of_keys(tmp_path: Path) -> None:
    """Red if comments count, names are lost, or a prefix of a key is taken for it."""
    keys = ring(tmp_path, "keys", f"# ours\n\n{SECRET} alice\nsk-other\n", "sk-flag")
    found = [keys.find(key) for key in (SECRET.encode(), b"sk-other", b"sk-flag")]
    assert [(caller.name, caller.tenant) for caller in found if caller] == [
        ("alice", "alice"),
        ("key-3", "key-3"),
        ("key-1", ""),
    ]
    for wrong in (b"", SECRET[:-1].encode(), (SECRET + "x").encode(), SECRET.upper().encode(), b"#", b"alice"):
        assert keys.find(wrong) is None


def test_tables_of_keys(tmp_path: Path) -> None:
    """Red if TOML and JSON mean different things, or a key that is given as its hash does not work."""
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    entry = {"sha256": digest, "name": "a", "tenant": "t", "max_concurrency": 1}
    toml = "[[keys]]\n" + "\n".join(f"{name} = {json.dumps(value)}" for name, value in entry.items())
    for keys in (ring(tmp_path, "k.toml", toml), ring(tmp_path, "k.json", json.dumps({"keys": [entry]}))):
        caller = keys.find(SECRET.encode())
        assert caller is not None
        assert (caller.name, caller.tenant) == ("a", "t")
        assert keys.find(digest.encode()) is None, "the hash itself opens nothing"
        caller.limits.admit(0.0)
        with pytest.raises(OverLimit):
            caller.limits.admit(0.0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("k", ""),
        ("k", f"{SECRET} a b"),
        ("k", f"{SECRET} a\nsk-2 a"),
        ("k", f"{SECRET}\n{SECRET}"),
        ("k", f"{SECRET} bad\x01name"),
        ("k.toml", f"[[keys]\nkey = {SECRET}"),
        ("k.toml", f"[[keys]]\nkey = '{SECRET}'\nsha256 = '{'0' * 64}'"),
        ("k.toml", "[[keys]]\nname = 'x'"),
        ("k.json", f'{{"keys": [{{"key": "{SECRET}", "limit": 3}}]}}'),
        ("k.json", f'{{"keys": [{{"key": "{SECRET}", "max_concurrency": 0}}]}}'),
        ("k.json", f'["{SECRET}"]'),
        ("k.json", f'{{"keys": "{SECRET}"}}'),
    ],
)
def test_wrong_key_files_are_one_line_without_the_key(tmp_path: Path, name: str, text: str) -> None:
    """Red if a typo in a limit is ignored, or an error prints what it should guard."""
    with pytest.raises(ConfigError) as raised:
        ring(tmp_path, name, text)
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_key_file_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Red if a world-readable file of secrets goes unnoticed."""
    path = tmp_path / "keys"
    path.write_text(SECRET)
    for mode, told in ((0o600, 0), (0o644, 1)):
        path.chmod(mode)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_keys((), str(path))
        assert len(caplog.records) == told


def test_missing_key_file_and_empty_key() -> None:
    """Red if a server starts without the keys it was told to ask for."""
    with pytest.raises(ConfigError, match="No such file"):
        load_keys((), "/nonexistent/keys")
    with pytest.raises(ConfigError, match="empty"):
        load_keys(("",), None)


def test_nothing_of_a_key_is_kept() -> None:
    """Red if the ring holds keys in clear."""
    keys = load_keys((SECRET,), None)
    assert SECRET not in repr(vars(keys))
    assert SECRET not in repr([vars(caller) for caller in keys._callers.values()])


@given(st.integers(1, 200), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500)), max_size=60))
def test_a_rate_holds_over_any_stretch(per_minute: int, requests: list[tuple[float, int]]) -> None:
    """Red if more than a minute's worth, the refill, and the last request's own cost can ever be used."""
    now, used, last = 0.0, 0, 0
    bucket = Bucket(per_minute, now)
    for pause, cost in requests:
        now += pause
        if not bucket.wait(1, now):
            bucket.take(cost, now)
            used, last = used + cost, cost
            assert used - last <= per_minute * (1 + now / 60) + 1e-6
        else:
            assert bucket.wait(1, now + bucket.wait(1, now) + 1e-6) == 0, "Retry-After must be enough"


def test_refused_requests_cost_nothing() -> None:
    """Red if a client that retries too early is kept out for longer."""
    limits = CallerLimits(Limits(requests_per_minute=60), 0.0)
    for _ in range(60):
        limits.admit(0.0)
    for _ in range(100):
        with pytest.raises(OverLimit) as raised:
            limits.admit(0.5)
        assert raised.value.retry_after == pytest.approx(0.5)
    limits.admit(1.0)


def test_tokens_may_go_into_debt_once() -> None:
    """Red if one long answer lifts the limit, or its cost is forgotten."""
    limits = CallerLimits(Limits(tokens_per_minute=60), 0.0)
    limits.admit(0.0)
    limits.spend(180, 0.0)
    with pytest.raises(OverLimit) as raised:
        limits.admit(0.0)
    assert raised.value.retry_after == pytest.approx(121)
    limits.admit(121.0)
    assert dict(limits.headers(121.0))[b"x-ratelimit-remaining-tokens"] == b"1"
