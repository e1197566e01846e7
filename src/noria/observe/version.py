"""The version of this installation."""

from __future__ import annotations


def version() -> str:
    """The installed distribution's version; "0+source" when Noria runs from a source tree."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("noria")
    except PackageNotFoundError:
        return "0+source"
