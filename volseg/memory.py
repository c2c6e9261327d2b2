"""Measure free main memory, so that volseg refuses work that cannot fit before the system kills the process."""

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def total_bytes() -> int:
    """Return the main memory of the machine, or of the container or job if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, _ = read_limits()
    return total if limit is None else min(total, limit)


def available_bytes() -> int:
    """Return the main memory that can be allocated without swapping; all of it if the system does not report it."""
    lines = read_text(_MEMINFO).splitlines()
    kibibytes = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    return total_bytes() if kibibytes is None else min(1024 * kibibytes, total_bytes())


def read_limits(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> tuple[int | None, float | None]:
    """Return the lowest limits of memory (bytes) and of CPU time (cores) of this process's cgroup and its parents.

    Parameters
    ----------
    cgroups, own
        Folder of the cgroups (version 2), and file with this process's cgroup.
    """
    # A process that cannot determine its cgroup may still be limited at the top, like a container.
    path = next((line[3:] for line in read_text(own).splitlines() if line.startswith("0::")), "")
    memory, cores = [], []
    # In a container the cgroup's path is often the host's, and its own files are at the top.
    for folder in (cgroups / path.strip("/"), *(cgroups / path.strip("/")).parents):
        if folder != cgroups and cgroups not in folder.parents:
            break
        memory += [int(text) for text in read_text(folder / "memory.max").split() if text.isdigit()]
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        cores += [int(quota) / int(period)] if quota.isdigit() else []
    return min(memory, default=None), min(cores, default=None)


def read_text(file: Path) -> str:
    """Return the text of a system file; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
