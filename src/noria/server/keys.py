"""API keys: who may ask, and how much.

Keys come from `--api-key` and from the file of `--api-key-file`, which holds either one key a line (`KEY [NAME]`, #
comments) or, if its name ends in .toml or .json, a list `keys` of tables:

    [[keys]]
    key = "sk-..."                  # or sha256 = "..." (hex), so that the file holds no secret
    name = "alice"                  # in logs; default: key-1, key-2 ...
    tenant = "research"             # who shares cached prefixes, files and batches; default: the name
    requests_per_minute = 60
    tokens_per_minute = 100000      # prompt and completion tokens
    max_concurrency = 8             # requests open at once

In memory there are SHA-256 digests only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from noria.server.limits import CallerLimits, Limits
from noria.types import ConfigError

MAX_KEYS = 1000  # each is compared with every request's
MAX_KEY_FILE_BYTES = 1 << 20
NAME = r"^[A-Za-z0-9][\w.@:/-]{0,63}$"

log = logging.getLogger("noria")


class KeyEntry(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key as the key file spells it."""

    key: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    name: Annotated[str, Meta(pattern=NAME)] | None = None
    tenant: Annotated[str, Meta(pattern=NAME)] | None = None

    def digest(self) -> bytes:
        """SHA-256 of the key. Raises ConfigError unless the entry says it in exactly one way."""
        if (self.key is None) == (self.sha256 is None):
            raise ConfigError("a key needs either key or sha256")
        return bytes.fromhex(self.sha256) if self.sha256 is not None else hash_key((self.key or "").encode())


class Caller:
    """Who sent a request: the name of the key, the tenant it belongs to ("" for none), and what it may still do."""

    def __init__(self, name: str, tenant: str, limits: Limits) -> None:
        self.name = name
        self.tenant = tenant
        self.limits = CallerLimits(limits, time.monotonic())


class KeyRing:
    """All accepted keys. Empty: there is no authentication."""

    def __init__(self, keys: Iterable[tuple[bytes, Caller]] = ()) -> None:
        self._keys = tuple(keys)
        self._callers = {caller.name: caller for _, caller in self._keys}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: bytes) -> Caller | None:
        """The key's caller. Takes the same time wherever the key is: all digests are compared, each without leaving early."""
        digest = hash_key(key)
        found = None
        for accepted, caller in self._keys:
            if hmac.compare_digest(digest, accepted):
                found = caller
        return found

    def named(self, name: str) -> Caller | None:
        """The caller of that name, if it is still on the ring."""
        return self._callers.get(name)


def anonymous() -> Caller:
    """The caller of a server without keys: no tenant, no limits."""
    return Caller("", "", Limits())


def hash_key(key: bytes) -> bytes:
    """What is kept of a key. Keys are random, so that a plain hash is enough."""
    return hashlib.sha256(key).digest()


def load_keys(flags: Sequence[str], file: str | None) -> KeyRing:
    """The ring of `--api-key` and `--api-key-file`. Raises ConfigError, which never repeats a key."""
    entries = [KeyEntry(key=key) for key in flags]
    if any(not key for key in flags):
        raise ConfigError("--api-key: a key must not be empty")
    tenants = [""] * len(entries)  # keys on the command line are of one service: they share
    if file is not None:
        read = _read(Path(file).expanduser())
        entries += read
        tenants += [entry.tenant or "" for entry in read]
    ring: dict[bytes, Caller] = {}
    names: set[str] = set()
    for number, (entry, tenant) in enumerate(zip(entries, tenants, strict=True), 1):
        name = entry.name or f"key-{number}"
        if name in names:
            raise ConfigError(f"API keys: two keys are named {name}")
        names.add(name)
        digest = entry.digest()
        if digest in ring:
            raise ConfigError(f"API keys: {name} is the same key as {ring[digest].name}")
        ring[digest] = Caller(name, tenant if number <= len(flags) else tenant or name, entry)
    return KeyRing(ring.items())


def _read(path: Path) -> list[KeyEntry]:
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_KEY_FILE_BYTES + 1)
        shared = path.stat().st_mode & 0o077
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    if len(data) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path}: larger than {MAX_KEY_FILE_BYTES} bytes; is it a key file?")
    if shared:
        log.warning("--api-key-file %s can be read by others: chmod 600 it", path)
    try:
        entries = _tables(path.suffix, data) if path.suffix in (".toml", ".json") else _lines(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"--api-key-file {path}: {_harmless(error)}") from None
    if not entries or len(entries) > MAX_KEYS:
        raise ConfigError(f"--api-key-file {path}: must hold 1 to {MAX_KEYS} keys, not {len(entries)}")
    return entries


def _tables(suffix: str, data: bytes) -> list[KeyEntry]:
    values: Any
    if suffix == ".json":
        values = msgspec.json.decode(data)
    else:
        import tomllib

        values = tomllib.loads(data.decode())
    keys = values.get("keys") if isinstance(values, dict) else values
    return msgspec.convert(keys, list[KeyEntry])


def _lines(data: bytes) -> list[KeyEntry]:
    rows = [line.split() for line in data.decode().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if any(len(row) > 2 for row in rows):
        raise ValueError("a line is KEY or KEY NAME; for limits, use a .toml or .json file")
    return [msgspec.convert(dict(zip(("key", "name"), row, strict=False)), KeyEntry) for row in rows]


def _harmless(error: Exception) -> str:
    """The error's text if it is a message about a field; parsers of TOML and text may quote the line, which may be a key."""
    if isinstance(error, msgspec.DecodeError):
        return str(error)
    return str(error) if type(error) is ValueError else "not a valid file of keys"
