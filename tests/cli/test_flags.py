"""Flags and config files derive from the settings structs. Red if a setting has no flag, or a wrong one is not told."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from noria.cli.flags import add_flags, parse_bytes, settings
from noria.config import EngineConfig, ServeConfig
from noria.types import ConfigError

STRUCTS = (EngineConfig, ServeConfig)


def parsed(*arguments: str) -> tuple[Any, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser, *STRUCTS)
    engine, server = settings(parser.parse_args(arguments), *STRUCTS)
    return engine, server


def test_every_setting_has_a_flag_with_help() -> None:
    """Red if a new field of config.py cannot be said on the command line."""
    parser = argparse.ArgumentParser()
    add_flags(parser, *STRUCTS)
    text = parser.format_help()
    for struct in STRUCTS:
        for field in msgspec.structs.fields(struct):
            flag = "MODEL" if field.name == "model" else "--" + field.name.replace("_", "-")
            assert flag in text


def test_flags_reach_their_fields() -> None:
    """Red if a type, a suffix, a list or a switch is lost."""
    flags = "--max-num-seqs 8 --kv-cache-memory-bytes 1.5G --no-enable-prefix-caching --request-timeout-s 2.5"
    flags += " --served-model-name a b --api-key k --api-key l --port 0 --quantization q8"
    engine, server = parsed("m", *flags.split())
    assert (engine.model, engine.max_num_seqs, engine.kv_cache_memory_bytes) == ("m", 8, 3 << 29)
    assert (engine.enable_prefix_caching, engine.request_timeout_s, engine.quantization) == (False, 2.5, "q8")
    assert (server.served_model_name, server.api_key, server.port) == (("a", "b"), ("k", "l"), 0)


def test_defaults_are_those_of_the_structs() -> None:
    """Red if argparse invents a default."""
    assert parsed("m") == (EngineConfig(model="m"), ServeConfig())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("m", "--max-num-seqs", "0"), "--max-num-seqs"),
        (("m", "--max-num-batched-tokens", "1"), "--max-num-batched-tokens"),
        (("m", "--port", "70000"), "--port"),
        (("m", "--request-timeout-s", "0"), "--request-timeout-s"),
        ((), "which model"),
    ],
)
def test_wrong_values_name_the_flag(arguments: tuple[str, ...], told: str) -> None:
    """Red if a range of config.py is not checked, or the message does not say which flag."""
    with pytest.raises(ConfigError, match=told):
        parsed(*arguments)


@pytest.mark.parametrize("flag", ["--no-such-flag", "--quantization=q3", "--max-num-seqs=many", "--kv-cache-memory-bytes=big"])
def test_unknown_flags_and_choices_are_usage_errors(flag: str) -> None:
    """Red if one is ignored."""
    with pytest.raises(SystemExit) as left:
        parsed("m", flag)
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("text", "value"), [("512", 512), ("1K", 1024), ("2k", 2048), ("4G", 4 << 30), ("1.5MiB", 3 << 19), ("1TB", 1 << 40)]
)
def test_sizes(text: str, value: int) -> None:
    """Red if a suffix means something else."""
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "G", "-1", "4X", "1e9", "4 G B"])
def test_wrong_sizes(text: str) -> None:
    """Red if nonsense is a size."""
    with pytest.raises(argparse.ArgumentTypeError):
        parse_bytes(text)


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_config_file_says_what_flags_say_and_flags_win(tmp_path: Path, suffix: str) -> None:
    """Red if a setting cannot be in a file, dashes or sizes are not understood, or a file overrides a flag."""
    values = {"model": "m", "max-num-seqs": 4, "kv_cache_memory_bytes": "1G", "port": 1234, "api_key": ["a"], "offline": True}
    path = tmp_path / f"c.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(values))
    else:
        path.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items()))
    engine, server = parsed("--config", str(path), "--port", "99")
    assert (engine.model, engine.max_num_seqs, engine.kv_cache_memory_bytes, engine.offline) == ("m", 4, 1 << 30, True)
    assert (server.port, server.api_key) == (99, ("a",))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("c.json", '{"model": "m", "max_seqs": 4}', "unknown setting 'max_seqs'"),
        ("c.json", '{"model": "m", "max_num_seqs": "4"}', "--max-num-seqs"),
        ("c.json", "{", "not valid JSON"),
        ("c.toml", "= 4", "not valid TOML"),
        ("c.json", "[1]", "object of settings"),
        ("c.json", '{"model": "m", "kv_cache_memory_bytes": "much"}', "not a size"),
    ],
)
def test_wrong_config_files(tmp_path: Path, name: str, content: str, told: str) -> None:
    """Red if a misspelt setting is ignored, or the fault is a traceback."""
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=told):
        parsed("--config", str(path))


def test_missing_config_file() -> None:
    """Red if a missing file means no settings."""
    with pytest.raises(ConfigError, match="No such file"):
        parsed("m", "--config", "/nowhere/c.json")
