"""Command-line flags derived from the settings structs of `noria.config`: name, type, choices and help text.

A setting comes from the flag, else from `--config FILE` (JSON or TOML, keys spelled as the flags), else its default.
Imports no more than argparse and msgspec: `noria --help` must be quick.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from noria.types import ConfigError

SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """A number of bytes with an optional suffix: 4G, 512M, 1.5GiB. Powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512M or 4G")
    return int(float(match[1]) * SUFFIXES[match[2].upper()])


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object; its keys are checked with the other settings."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object: {error}") from None


def add_flags(parser: argparse.ArgumentParser, *structs: type[msgspec.Struct]) -> None:
    """One flag a field, grouped by struct, and `--config`. EngineConfig.model is positional."""
    parser.add_argument("--config", metavar="FILE", help="JSON or TOML file with any of the settings below")
    for struct in structs:
        group = parser.add_argument_group((struct.__doc__ or "").split(".")[0])
        kind = inspect.type_info(struct)
        assert isinstance(kind, inspect.StructType)
        for field in kind.fields:
            if field.name == "model":
                parser.add_argument("model", nargs="?", metavar="MODEL", help=_description(field))
            else:
                _add_flag(group, field)


def _description(field: inspect.Field) -> str:
    """The Meta description, which may sit on the field or on the part of it that is not None."""
    kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
    for kind in kinds:
        if isinstance(kind, inspect.Metadata) and kind.extra_json_schema:
            return str(kind.extra_json_schema["description"])
    raise TypeError(f"setting {field.name} has no description")


def _bare(kind: inspect.Type) -> inspect.Type:
    """The type without its metadata and without `| None`."""
    if isinstance(kind, inspect.Metadata):
        return _bare(kind.type)
    if isinstance(kind, inspect.UnionType):
        return next(_bare(t) for t in kind.types if not isinstance(t, inspect.NoneType))
    return kind


def _add_flag(group: argparse._ArgumentGroup, field: inspect.Field) -> None:
    """argparse's view of a field. Absent flags stay out of the namespace (SUPPRESS), so that a file can say them."""
    flag = "--" + field.name.replace("_", "-")
    kind = _bare(field.type)
    text = _description(field).replace("%", "%%")
    if field.default not in (None, (), msgspec.NODEFAULT, False):
        text += f" [{field.default}]"
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
    match kind:
        case inspect.BoolType():
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        case inspect.LiteralType(values=values):
            group.add_argument(flag, choices=[str(v) for v in values], **options)
        case inspect.IntType() if field.name.endswith("_bytes"):
            group.add_argument(flag, type=parse_bytes, metavar="SIZE", **options)
        case inspect.IntType():
            group.add_argument(flag, type=int, metavar="N", **options)
        case inspect.FloatType():
            group.add_argument(flag, type=float, metavar="X", **options)
        case inspect.StructType():
            group.add_argument(flag, type=parse_object, metavar="JSON", **options)
        case inspect.VarTupleType():
            group.add_argument(flag, nargs="+", action="extend", metavar="TEXT", **options)
        case inspect.StrType():
            group.add_argument(flag, metavar="TEXT", **options)
        case _:
            raise TypeError(f"no flag form for the type of {field.name}: {kind}")


def settings(arguments: argparse.Namespace, *structs: type[msgspec.Struct]) -> tuple[msgspec.Struct, ...]:
    """The settings structs from parsed arguments and `--config`. Raises ConfigError naming what is wrong."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    names = {field.name for struct in structs for field in msgspec.structs.fields(struct)}
    values = {**read_config(given["config"], names)} if "config" in given else {}
    values.update({name: given[name] for name in names if name in given})
    if "model" in names and "model" not in values:
        raise ConfigError("which model? name one, such as smollm2-135m (noria list shows what there is)")
    return tuple(_convert(values, struct) for struct in structs)


def read_config(path: str, names: Sequence[str] | set[str]) -> dict[str, Any]:
    """The settings in a JSON or TOML file. Dashes and underscores are the same; sizes may have suffixes."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    try:
        values = msgspec.json.decode(data) if path.endswith(".json") else _decode_toml(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"--config {path}: not valid {'JSON' if path.endswith('.json') else 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must hold an object of settings")
    settings: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in names:
            raise ConfigError(f"--config {path}: unknown setting {key!r}")
        if name.endswith("_bytes") and isinstance(value, str):
            try:
                value = parse_bytes(value)
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"--config {path}: {key}: {error}") from None
        settings[name] = value
    return settings


def _decode_toml(data: bytes) -> Any:
    import tomllib

    return tomllib.loads(data.decode())


def _convert(values: dict[str, Any], struct: type[msgspec.Struct]) -> msgspec.Struct:
    fields = {field.name for field in msgspec.structs.fields(struct)}
    try:
        return msgspec.convert({name: value for name, value in values.items() if name in fields}, struct)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        flag = "--" + re.split(r"[\[`]", path)[0].replace("_", "-") if path else "settings"
        raise ConfigError(f"{flag}: {reason[:1].lower()}{reason[1:]}") from None
