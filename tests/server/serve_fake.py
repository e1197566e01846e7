"""`python serve_fake.py FACTORY ENGINE_JSON SERVE_JSON`: noria's server in front of a fake engine."""

from __future__ import annotations

import sys

import msgspec

from noria.config import EngineConfig, ServeConfig
from noria.server.serve import serve
from noria.types import NoriaError

if __name__ == "__main__":
    factory, engine, server = sys.argv[1:]
    try:
        code = serve(
            msgspec.json.decode(engine.encode(), type=EngineConfig),
            msgspec.json.decode(server.encode(), type=ServeConfig),
            factory=factory,
        )
    except NoriaError as error:
        print(f"noria: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)
