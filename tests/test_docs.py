"""The documentation names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
FILE = re.compile(r"`((?:\w+/)+\w+\.(?:py|cpp|h))`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Red when a file that a page sends its readers to is renamed or goes."""
    named = set(FILE.findall(page.read_text()))
    assert not [name for name in named if not any((folder / name).is_file() for folder in (ROOT, ROOT / "src" / "noria"))]


def test_the_traced_request_names_files() -> None:
    """Red when the pages name files in a way that the test above does not see."""
    assert len(FILE.findall((ROOT / "docs" / "request.md").read_text())) > 40
