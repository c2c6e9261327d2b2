"""Free main memory, so that volseg refuses work that cannot fit before the system kills the process."""

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Memory limit of a container, in cgroup 2."""


def total_bytes() -> int:
    """Return the main memory of the machine, or of the container if less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _LIMIT.read_text(encoding="ascii").strip()
    except OSError:  # no container, or not Linux
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def available_bytes() -> int:
    """Return the main memory that can be allocated without swapping; all of it if the system does not report it."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return total_bytes()
    kibibytes = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    return total_bytes() if kibibytes is None else min(1024 * kibibytes, total_bytes())
