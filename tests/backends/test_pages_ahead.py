"""Pages of the KV cache are made ahead of use, and no others."""

from __future__ import annotations

import sys
import time

import pytest

from noria.backends.cpu import pages_ahead
from noria.backends.cpu.memory import address, anonymous
from noria.backends.cpu.pages_ahead import PagesAhead

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are made ahead on Linux only")
MB = 1 << 20


def resident(start: int) -> int:
    """Bytes of the mapping that begins at an address, or holds it, which have pages."""
    within = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            bounds = line.split(" ", 1)[0].split("-")
            if len(bounds) == 2:
                within = int(bounds[0], 16) <= start < int(bounds[1], 16)
            elif within and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    return 0


def wait_for(start: int, least: int) -> int:
    deadline = time.monotonic() + 20
    while (found := resident(start)) < least and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_ahead, "_START_S", 0.0)


def test_pages_keep_ahead_of_what_is_reached() -> None:
    """Red when none are made, when all are, or when a step that reaches further does not move the target."""
    memory = anonymous(128 * MB)
    start = address(memory)
    pages = PagesAhead(memory, ahead=8 * MB)
    assert 8 * MB <= wait_for(start, 8 * MB) < 32 * MB
    pages.begin_step()
    pages.end_step(40 * MB)
    assert 16 * MB <= wait_for(start, 16 * MB) < 64 * MB  # 40 MB were reached without being written here
    pages.close()


def test_nothing_is_made_while_a_step_runs() -> None:
    """Red when the thread takes a core, and the memory's locks, from a step."""
    memory = anonymous(64 * MB)
    pages = PagesAhead(memory, ahead=32 * MB)
    pages.begin_step()
    time.sleep(0.05)  # the piece at hand is finished
    before = resident(address(memory))
    time.sleep(0.2)
    assert resident(address(memory)) == before
    pages.end_step(0)
    assert wait_for(address(memory), 32 * MB) >= 32 * MB
    pages.close()


def test_a_thread_that_has_nothing_to_do_ends() -> None:
    """Red when an executable that nobody closed is kept alive by its thread."""
    pages = PagesAhead(anonymous(4 * MB), ahead=2 * MB)
    deadline = time.monotonic() + 20
    while pages._thread is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pages._thread is None
