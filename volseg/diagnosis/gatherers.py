"""Gather the sections of the facts: each ``gather_SECTION`` runs in its own process and returns plain values.

``python -m volseg.diagnosis.gatherers SECTION [ARGUMENT ...]`` starts such a process. It prints only the section, as
JSON, to standard output; the output of libraries (NCCL) goes to standard error.
"""

import json
import multiprocessing
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from volseg.files import choose_cache_folder
from volseg.memory import available_bytes, read_limits, read_text
from volseg.version import installed_version

Section = dict[str, Any]

PREFIXES = (
    *("CUBLAS_", "CUDA_", "CUDNN_", "GLOO_", "GOMP_", "KMP_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "OPENBLAS_"),
    *("PYTORCH_", "TORCH_", "TRITON_", "VOLSEG_"),
)
NAMES = ("CC", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONHOME", "PYTHONPATH", "RANK", "WORLD_SIZE")
"""Variables that affect torch and its subprocesses; no others are recorded, as they may hold secrets."""


def gather_python() -> Section:
    """Return the version and path of this interpreter, how it starts processes, and environment variables."""
    told = {name: value for name, value in os.environ.items() if name in NAMES or name.startswith(PREFIXES)}
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "start_method": multiprocessing.get_start_method(),
        "variables": dict(sorted(told.items())),
    }


def shorten(fault: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(fault).__name__}: {fault}".strip().splitlines()[0]


def gather_packages() -> Section:
    """Return the installed versions of volseg's requirements, and the unmet requirements.

    A checkout that is not installed has no metadata about its requirements.
    """
    if installed_version("volseg") is None:
        return {"is_installed": False, "versions": {}, "unmet": []}
    needed = [Requirement(text) for text in distribution("volseg").requires or ()]
    wanted = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    versions = {one.name: installed_version(one.name) for one in wanted}
    unmet = []
    for one in wanted:
        found = versions[one.name]
        if found is None or not one.specifier.contains(found, prereleases=True):
            has = "it is not" if found is None else f"{found} is"
            unmet.append(f"volseg needs {one.name}{one.specifier}, but {has} installed")
    return {"is_installed": True, "versions": versions, "unmet": unmet}


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only its size is read


def gather_system() -> Section:
    """Return memory, cores and limits of the machine, and of the container in it.

    An absent limit is null; ``core_limit`` is in cores.
    """
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    soft, hard = (2**31 if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    memory_limit, core_limit = read_limits()
    return {
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "available_bytes": available_bytes(),
        "memory_limit_bytes": memory_limit,
        "cores": len(os.sched_getaffinity(0)),
        "core_limit": core_limit,
        "shared_memory_bytes": shared.total if shared else None,
        "shared_memory_free_bytes": shared.free if shared else None,
        "open_files": soft,
        "open_files_hard": hard,
        "in_container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
    }


def gather_folders(*assigned: str) -> Section:
    """Inspect the folders of the cache, of runs, and of temporary files.

    Parameters
    ----------
    *assigned
        ``cache=FOLDER`` and ``runs=FOLDER``, instead of volseg's defaults.
    """
    given = dict(one.split("=", 1) for one in assigned)
    cache = choose_cache_folder("auto")
    places = {**({"cache": str(cache)} if cache else {}), "runs": "runs", "temporary": tempfile.gettempdir(), **given}
    return {"folders": [look_at(role, Path(path)) for role, path in places.items()]}


def look_at(role: str, path: Path) -> Section:
    """Inspect a folder, or its nearest existing parent: write a temporary file, and read the free space.

    ``refused`` is the reason why no file could be written.
    """
    path = path.absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
    usage = shutil.disk_usage(existing)
    refused = None
    try:
        with tempfile.NamedTemporaryFile(prefix=".volseg_doctor_", dir=existing) as file:
            file.write(bytes(1024))
            file.flush()
            os.fsync(file.fileno())
    except OSError as fault:
        refused = fault.strerror or str(fault)
    return {
        "role": role,
        "path": str(path),
        "existing": str(existing),
        "total_bytes": usage.total,
        "free_bytes": usage.free,
        "refused": refused,
    }


BUS = Path("/sys/bus/pci/devices")
MODULE = Path("/proc/driver/nvidia/version")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""PCI vendor id of NVIDIA, and first two digits of the device class of GPUs."""


def gather_driver() -> Section:
    """Return the NVIDIA driver and all GPUs on the bus, as the system lists them; torch sees only supported ones.

    ``version`` is null without a driver, ``is_open`` tells whether its kernel module is the open one, ``nodes`` are the
    names of ``/dev/nvidia0`` ..., ``refused`` is the error message of ``nvidia-smi``.
    """
    version, is_open = read_module(MODULE)
    refused = None
    program = shutil.which("nvidia-smi")
    if program is not None:
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, encoding="utf-8", errors="replace", check=False)  # noqa: S603
        first = (told.stdout + told.stderr).strip().partition("\n")[0]
        if told.returncode:
            refused = first or f"exit status {told.returncode}"
        else:
            version = version or first or None
    return {
        "version": version,
        "is_open": is_open,
        "on_bus": list(list_bus(BUS)),
        "nodes": sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*")),
        "refused": refused,
    }


def read_module(path: Path) -> tuple[str | None, bool | None]:
    """Return the version of the kernel module, and whether it is the open one; None if none is loaded."""
    if not path.is_file():
        return None, None
    text = read_text(path)
    found = re.search(r"^NVRM version:.*?\s(\d+\.[\d.]+)", text, re.MULTILINE)
    return (found[1] if found else None), "Open Kernel Module" in text


def list_bus(bus: Path) -> Iterator[Section]:
    """Yield address and device number of NVIDIA's GPUs among the devices on the bus."""
    for device in sorted(bus.iterdir()) if bus.is_dir() else ():
        vendor, kind, number = (read_text(device / name) for name in ("vendor", "class", "device"))
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            yield {"address": device.name, "device": int(number, 16)}


def _answer(name: str, *arguments: str) -> None:
    """Gather a section, and write it as JSON."""
    answer = os.dup(1)
    os.dup2(2, 1)
    # Imported by name, so that only a process that needs torch imports it.
    module = sys.modules[__name__] if f"gather_{name}" in globals() else import_module("volseg.diagnosis.trials")
    section = getattr(module, f"gather_{name}")(*arguments)
    with os.fdopen(answer, "w", encoding="utf-8") as output:
        json.dump(section, output)


if __name__ == "__main__":
    _answer(*sys.argv[1:])
