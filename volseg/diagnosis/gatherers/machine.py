"""Gather memory, cores, limits, folders and the NVIDIA driver, without importing torch."""

import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import volseg
from volseg.diagnosis.facts import DriverFacts, FolderFacts, FoldersFacts, PciGpu, SystemFacts
from volseg.diagnosis.gatherers.software import is_in_container
from volseg.memory import available_bytes

# Memory, cores and limits.


CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is asked for its size


def gather_system() -> SystemFacts:
    """Return the system's memory, cores and limits."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = read_memory_limit()
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    soft, hard = (2**31 if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return SystemFacts(
        memory_bytes=memory,
        available_bytes=available_bytes(),
        memory_limit_bytes=limit if limit is not None and limit < memory else None,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        core_limit=read_core_limit(),
        shared_memory_bytes=shared.total if shared else None,
        shared_memory_free_bytes=shared.free if shared else None,
        open_files=soft,
        open_files_hard=hard,
        processes=None if processes == resource.RLIM_INFINITY else processes,
        in_container=is_in_container(),
        now=time.time(),
        built=max(path.stat().st_mtime for path in Path(volseg.__file__).parent.glob("*.py")),
    )


def read_memory_limit(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int | None:
    """Return the least memory limit of this process's cgroup and its parents; None without a limit.

    Parameters
    ----------
    cgroups, own
        Folder of the cgroups, and file with this process's; versions 1 and 2.
    """
    limits = [
        int(text)
        for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
        for text in _read_upwards(cgroups, own, controller, name)
        if text.isdigit()
    ]
    return min(limits, default=None)


def read_core_limit(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """Return the limit of CPU time of this process's cgroup, in cores; None without a limit."""
    pairs = [text.split() for text in _read_upwards(cgroups, own, "", "cpu.max")]
    quotas = _read_upwards(cgroups, own, "cpu", "cpu.cfs_quota_us")
    periods = _read_upwards(cgroups, own, "cpu", "cpu.cfs_period_us")
    pairs += [list(pair) for pair in zip(quotas, periods, strict=True)]
    return min((int(quota) / int(period) for quota, period in pairs if quota not in ("max", "-1")), default=None)


def _read_upwards(cgroups: Path, own: Path, controller: str, name: str) -> Iterator[str]:
    """Yield the content of a file in this process's cgroup and in all its parents.

    In a container the cgroup's path is often the host's, and its own files are at the top.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # not Linux
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


# The folders that volseg writes to: room, kind of file system, write access, and clock.


MOUNTS = Path("/proc/self/mounts")


def gather_folders(places: Mapping[str, str]) -> FoldersFacts:
    """Inspect the folders of the cache, of runs, and of temporary files.

    Parameters
    ----------
    places
        ``cache`` and ``runs``, instead of volseg's defaults.
    """
    cache = places.get("cache") or os.environ.get("VOLSEG_CACHE") or str(Path.home() / ".cache" / "volseg")
    return FoldersFacts(
        folders=(
            look_at("cache", Path(cache)),
            look_at("runs", Path(places.get("runs") or "runs")),
            look_at("temporary", Path(tempfile.gettempdir())),
        )
    )


def look_at(role: Literal["cache", "runs", "temporary"], path: Path) -> FolderFacts:
    """Inspect a folder, or its nearest existing parent: write a temporary file, and read the free space."""
    path = path.absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
    usage = shutil.disk_usage(existing)
    refused, skew = None, 0.0
    before = time.time()
    try:
        with tempfile.NamedTemporaryFile(prefix=".volseg_doctor_", dir=existing) as file:
            file.write(bytes(1024))
            file.flush()
            os.fsync(file.fileno())
            written = os.stat(file.name).st_mtime
        # The file was written between the two times; the remaining difference is the other clock's.
        skew = written - min(max(written, before), time.time())
    except OSError as fault:
        refused = fault.strerror or str(fault)
    return FolderFacts(
        role=role,
        path=str(path),
        existing=str(existing),
        file_system=read_file_system(existing),
        total_bytes=usage.total,
        free_bytes=usage.free,
        refused=refused,
        clock_skew_s=skew,
    )


def read_file_system(folder: Path, mounts: Path = MOUNTS) -> str:
    """Return the kind of a folder's file system, such as ``ext4`` or ``nfs4``; "unknown" without Linux."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return "unknown"
    kind, depth = "unknown", -1
    for line in lines:
        _, point, name, *_ = line.split(" ")
        mounted = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), point))
        # Of two mounts on the same folder the later is visible.
        if (folder == mounted or mounted in folder.parents) and len(mounted.parts) >= depth:
            kind, depth = name, len(mounted.parts)
    return kind


# The NVIDIA driver and the GPUs on the bus, from the system: torch sees only GPUs that the driver supports.


BUS = Path("/sys/bus/pci/devices")
MODULE = Path("/proc/driver/nvidia/version")
NVIDIA = "0x10de"
DISPLAY = "0x03"
"""First two digits of the device class of GPUs."""


def gather_driver() -> DriverFacts:
    """Return the driver and GPUs from the kernel, ``/dev`` and ``nvidia-smi``."""
    version, is_open = read_module(MODULE)
    modes: tuple[str, ...] = ()
    refused = None
    program = shutil.which("nvidia-smi")
    if program is not None:
        query = [program, "--query-gpu=driver_version,compute_mode", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, encoding="utf-8", errors="replace", check=False)  # noqa: S603
        if told.returncode:
            refused = (told.stdout + told.stderr).strip().partition("\n")[0] or f"exit status {told.returncode}"
        else:
            rows = [line.split(", ") for line in told.stdout.splitlines() if line.strip()]
            version = version or next((row[0] for row in rows), None)
            modes = tuple(row[-1] for row in rows)
    nodes = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return DriverFacts(
        version=version, is_open=is_open, on_bus=list_bus(BUS), nodes=tuple(nodes), compute_modes=modes, refused=refused
    )


def read_module(path: Path) -> tuple[str | None, bool | None]:
    """Return the version of the kernel module, and whether it is the open one; None if none is loaded."""
    if not path.is_file():
        return None, None
    text = path.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^NVRM version:.*?\s(\d+\.[\d.]+)", text, re.MULTILINE)
    return (found[1] if found else None), "Open Kernel Module" in text


def list_bus(bus: Path) -> tuple[PciGpu, ...]:
    """Return NVIDIA's GPUs among the devices on the bus."""
    found = []
    for device in sorted(bus.iterdir()) if bus.is_dir() else ():
        vendor, kind, number = (
            (device / name).read_text(encoding="ascii").strip() if (device / name).is_file() else ""
            for name in ("vendor", "class", "device")
        )
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            found.append(PciGpu(address=device.name, device=int(number, 16)))
    return tuple(found)
