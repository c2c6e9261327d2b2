"""The folders that volseg writes to: room, kind of file system, whether they take files, and their clock."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from volseg.diagnosis.facts import FolderFacts, FoldersFacts

__all__ = ["find_file_system", "gather", "look_at"]

MOUNTS = Path("/proc/self/mounts")


def gather(places: Mapping[str, str]) -> FoldersFacts:
    """Look at the folders of the cache, of runs, and of temporary files.

    Parameters
    ----------
    places
        ``cache`` and ``runs``, if not where volseg puts them by itself.
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
    """Write a file of a kilobyte into a folder, or the nearest one above it, and ask for its room."""
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
        # Between the two moments the file was written; the rest is the other clock's.
        skew = written - min(max(written, before), time.time())
    except OSError as fault:
        refused = fault.strerror or str(fault)
    return FolderFacts(
        role=role,
        path=str(path),
        existing=str(existing),
        file_system=find_file_system(existing),
        total_bytes=usage.total,
        free_bytes=usage.free,
        refused=refused,
        clock_skew_s=skew,
    )


def find_file_system(folder: Path, mounts: Path = MOUNTS) -> str:
    """Return the kind of file system a folder lies on, such as ``ext4`` or ``nfs4``; "unknown" without Linux."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return "unknown"
    kind, depth = "unknown", -1
    for line in lines:
        _, point, name, *_ = line.split(" ")
        mounted = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), point))
        # Of two on the same folder the later one is seen.
        if (folder == mounted or mounted in folder.parents) and len(mounted.parts) >= depth:
            kind, depth = name, len(mounted.parts)
    return kind
