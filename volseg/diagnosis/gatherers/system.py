"""Memory, cores and limits."""

import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import volseg
from volseg.diagnosis.facts import SystemFacts
from volseg.diagnosis.gatherers.interpreter import is_in_container
from volseg.memory import available_bytes

__all__ = ["find_core_limit", "find_memory_limit", "gather"]

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is asked for its size


def gather() -> SystemFacts:
    """Return what the system says."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = find_memory_limit()
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    soft, hard = (_unlimited(count, 2**31) for count in resource.getrlimit(resource.RLIMIT_NOFILE))
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return SystemFacts(
        memory_bytes=memory,
        available_bytes=available_bytes(),
        memory_limit_bytes=limit if limit is not None and limit < memory else None,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        core_limit=find_core_limit(),
        shared_memory_bytes=shared.total if shared else None,
        shared_memory_free_bytes=shared.free if shared else None,
        open_files=soft,
        open_files_hard=hard,
        processes=None if processes == resource.RLIM_INFINITY else processes,
        in_container=is_in_container(),
        now=time.time(),
        built=max(path.stat().st_mtime for path in Path(volseg.__file__).parent.glob("*.py")),
    )


def _unlimited(count: int, instead: int) -> int:
    return instead if count == resource.RLIM_INFINITY else count


def find_memory_limit(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int | None:
    """Return the least memory that this process's group or one above it may take; None without a limit.

    Parameters
    ----------
    cgroups, own
        Where the system shows groups, and which are this process's; version 1 and version 2 of them.
    """
    limits = [
        int(text)
        for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
        for text in _read_upwards(cgroups, own, controller, name)
        if text.isdigit()
    ]
    return min(limits, default=None)


def find_core_limit(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """Return how many cores' worth of time this process's group may take; None without a limit."""
    pairs = [text.split() for text in _read_upwards(cgroups, own, "", "cpu.max")]
    quotas = _read_upwards(cgroups, own, "cpu", "cpu.cfs_quota_us")
    periods = _read_upwards(cgroups, own, "cpu", "cpu.cfs_period_us")
    pairs += [list(pair) for pair in zip(quotas, periods, strict=True)]
    return min((int(quota) / int(period) for quota, period in pairs if quota not in ("max", "-1")), default=None)


def _read_upwards(cgroups: Path, own: Path, controller: str, name: str) -> Iterator[str]:
    """Yield what stands in a file of the group of this process, and of all above it.

    In a container the group's path is often that of the outside, and its own files lie at the top.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        root = cgroups / controller
        group = root / path.strip("/")
        for folder in dict.fromkeys([group, *group.parents]):
            if folder != root and root not in folder.parents:
                break
            if (folder / name).is_file():
                yield (folder / name).read_text(encoding="utf-8").strip()
