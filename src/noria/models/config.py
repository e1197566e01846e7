"""Typed reading of a model's configuration: a dictionary with the keys of Hugging Face's `config.json`.

Every error is a `LoadError` that names the key. `null` and an absent key are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noria.types import LoadError


@dataclass(frozen=True)
class ConfigReader:
    """Reads keys of one configuration. Methods without a default raise `LoadError` where the key is absent."""

    values: Mapping[str, Any]

    def _get(self, key: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise LoadError(f"the model's config has no '{key}'")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise LoadError(f"'{key}' in the model's config must be {what}, not {value!r}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value: int = self._get(key, (int,), "a positive integer", default)
        if value < 1:
            raise LoadError(f"'{key}' in the model's config must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, (int, float), "a number", default))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, (bool,), "true or false", default))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, (str,), "a string", default))

    def table(self, key: str) -> dict[str, Any]:
        return dict(self._get(key, (dict,), "a table", {}))

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(float(v) for v in self._get(key, (list, tuple), "a list of numbers", ()))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or none at all."""
        value = self._get(key, (int, list, tuple), "a token id or a list of them", ())
        ids = (value,) if isinstance(value, int) else tuple(value)
        if any(not isinstance(i, int) or i < 0 for i in ids):
            raise LoadError(f"'{key}' in the model's config must be a token id or a list of them, not {value!r}")
        return ids

    def require(self, key: str, allowed: Mapping[Any, Any], default: Any) -> Any:
        """`allowed[value of key]`; another value is an error that lists what is supported."""
        value = self.values.get(key)
        value = default if value is None else value
        if value not in allowed:
            known = ", ".join(repr(a) for a in allowed)
            raise LoadError(f"'{key}' of {value!r} in the model's config is not supported; supported: {known}")
        return allowed[value]
