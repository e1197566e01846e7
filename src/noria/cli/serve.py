"""noria serve: a model over HTTP."""

from __future__ import annotations

import argparse

from noria.cli.flags import add_flags, settings
from noria.config import EngineConfig, ServeConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, and a flag for every setting of the engine and the server."""
    add_flags(parser, EngineConfig, ServeConfig)


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from noria.server.serve import serve

    engine, server = settings(arguments, EngineConfig, ServeConfig)
    assert isinstance(engine, EngineConfig)
    assert isinstance(server, ServeConfig)
    return serve(engine, server)
