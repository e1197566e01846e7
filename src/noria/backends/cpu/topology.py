"""How many threads may compute: the physical cores among the CPUs that affinity and the control group leave to this process."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

SYSTEM = Path("/")


def usable_threads(root: Path = SYSTEM) -> int:
    """At least 1. `root` stands for the file system's root in tests."""
    return max(1, int(min(physical_cores(_allowed_cpus(), root), cpu_quota(root))))


def _allowed_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores(cpus: Iterable[int], root: Path = SYSTEM) -> int:
    """Distinct (package, core) pairs of the given logical CPUs; a CPU whose topology is unknown counts by itself."""
    cores: set[tuple[str, str]] = set()
    for cpu in cpus:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            cores.add(((folder / "physical_package_id").read_text(), (folder / "core_id").read_text()))
        except OSError:
            cores.add(("cpu", str(cpu)))
    return len(cores)


def cpu_quota(root: Path = SYSTEM) -> float:
    """CPUs' worth of time that the control groups above this process grant: infinity without a limit."""
    return min((_quota_of(folder) for folder in _group_folders(root)), default=float("inf"))


def _group_folders(root: Path) -> Iterator[Path]:
    """The process's own group and all its ancestors, in version 2 (one hierarchy) and version 1 (one a controller)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = mount / path.lstrip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


def _quota_of(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return float("inf")
    if quota in ("max", "-1"):
        return float("inf")
    return int(quota) / int(period)


def cpu_name() -> str:
    """The processor's model, as the system calls it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
