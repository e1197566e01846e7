"""Runs each kernel test on every tier that this machine can run."""

from __future__ import annotations

import pytest

from noria.backends.cpu import _native


@pytest.fixture(params=_native.available_tiers())
def tier(request: pytest.FixtureRequest) -> str:
    """Each tier that this machine can run."""
    name: str = request.param
    return name
