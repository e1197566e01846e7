"""Cross-origin requests: refused by browsers unless the operator names the origins whose pages may call us.

Never with credentials: a key is sent by the page's own code, so that no foreign page can use what a browser remembers.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp

from noria.types import ConfigError

EXPOSED = ("X-Request-Id", "Retry-After")
MAX_AGE_S = 600
ORIGIN = re.compile(r"https?://[\w.-]+(:\d+)?|https?://\[[0-9a-fA-F:]+\](:\d+)?|[a-z][a-z0-9+.-]*://[\w.-]+")


def cross_origin(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """`app`, answering preflights and naming allowed origins; itself without any. Raises ConfigError for what is no origin."""
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allowed-origins: {origin!r} is not an origin; write https://app.example, without a path, or *"
            )
    if not origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        allow_credentials=False,
        expose_headers=EXPOSED,
        max_age=MAX_AGE_S,
    )
