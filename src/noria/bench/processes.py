"""What the processes of a server use, as Linux counts it: processor time, memory, threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from noria.bench.report import Figures
from noria.types import ConfigError


@dataclass(frozen=True)
class ProcessUse:
    """Of one process: seconds of processor time since it began, memory in bytes, threads.

    `memory` divides pages between all processes that share them, so it adds up; but it moves when another program opens the
    same weights. `resident` counts all pages of this process whole.
    """

    pid: int
    seconds: float
    memory: int  # proportional set size
    resident: int
    threads: int


def check_supported() -> None:
    """ConfigError where the system does not tell these figures."""
    if not Path("/proc/self/smaps_rollup").exists():
        raise ConfigError("this needs Linux, whose /proc tells what a process uses")


def children(pid: int) -> list[int]:
    """The processes that a process has started and that have not ended."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return sorted(found)


def process_use(pid: int) -> ProcessUse:
    """The figures of a process now. ProcessLookupError if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        lines = (folder / "smaps_rollup").read_text().splitlines()
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    user, system, threads = int(fields[11]), int(fields[12]), int(fields[17])
    sizes = {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss:", "Rss:"))}
    return ProcessUse(pid, (user + system) / os.sysconf("SC_CLK_TCK"), sizes["Pss"], sizes["Rss"], threads)


def server_use(pid: int) -> tuple[ProcessUse, ProcessUse]:
    """Of a server's two processes: the HTTP process `pid`, and the engine, which it started first."""
    return process_use(pid), process_use(children(pid)[0])


def shares(before: tuple[ProcessUse, ProcessUse], after: tuple[ProcessUse, ProcessUse], wall: float) -> Figures:
    """Both processes between two looks, `wall` seconds apart: per cent of one core, and memory at the end in MB."""
    figures: Figures = {}
    for name, then, now in zip(("server", "engine"), before, after, strict=True):
        figures[f"{name}_cpu_percent"] = 100 * (now.seconds - then.seconds) / wall
        figures[f"{name}_memory_mb"] = now.memory / 1e6
    return figures
