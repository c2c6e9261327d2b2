"""Record versions, devices and git commit of a run, so that results can be traced to a machine and code."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from volseg.parallel.devices import list_gpus
from volseg.version import __version__, installed_version

LIBRARIES = ("torch", "monai", "numpy", "nibabel", "SimpleITK", "pydantic")


def environment() -> dict[str, Any]:
    """Return versions, devices, driver and git commit, ready for JSON."""
    devices = [torch.cuda.get_device_properties(gpu) for gpu in list_gpus()]
    return {
        "volseg": __version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "libraries": {name: installed_version(name) for name in LIBRARIES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in devices],
        "driver": _driver() if devices else None,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
    }


def _git_commit() -> str | None:
    """Return the commit of the source tree, with ``+changes`` if it was edited; None for an installed package."""
    folder = Path(__file__).parent
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    tracked = _output("git", "-C", str(folder), "ls-files", Path(__file__).name)
    if not commit or not tracked:
        return None
    return commit + ("+changes" if _output("git", "-C", str(folder), "status", "--porcelain", "-uno") else "")


def _driver() -> str | None:
    answer = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0] if answer else None


def _output(*command: str) -> str | None:
    """Return a command's output; None if the command is absent or fails, and the value therefore unknown."""
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
