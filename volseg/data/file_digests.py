"""What files hold, as a SHA-256 that is remembered until somebody touches them.

A file is taken for untouched while its size, inode, modification time and change time (``ctime``) are what they were.
Who restores a file's date sets the modification time; nobody can set the change time.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, BinaryIO

from volseg.data.content import require_regular
from volseg.data.itk_headers import find_voxels
from volseg.data.json_files import parse_json
from volseg.errors import ReaderError
from volseg.files import replacing

__all__ = ["FileDigests", "find_files"]

logger = logging.getLogger(__name__)

YOUNG_NS = 3 * 10**9
"""A file that was touched so shortly before it is digested may be touched again within one tick of its file system's
clock (2 s on FAT), unseen."""

DETACHED = (".mhd", ".nhdr", ".mha", ".nrrd")
"""Suffixes of headers that may name another file."""


def find_files(path: Path) -> list[Path]:
    """Return all files on which reading an image depends: itself, the data file of its header, a series' files.

    Raises
    ------
    OSError, ReaderError
        If they cannot be found out.
    """
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    if path.name.lower().endswith(DETACHED):
        return [path, find_voxels(path)]
    return [path]


class FileDigests:
    """Digests of files, remembered in a folder for all processes.

    Parameters
    ----------
    folder : Path
        Where they are remembered. One that cannot be written to only costs time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of_images(self, paths: Sequence[Path]) -> list[list[str]]:
        """Return name and digest of each file on which reading the images depends.

        Raises
        ------
        OSError, ReaderError
            If a file cannot be read.
        """
        files = [file for path in paths for file in find_files(path)]
        if missing := [path for path in paths if not path.exists()]:  # an empty folder is what it is
            raise ReaderError(f"{missing[0]} does not exist")
        return [[file.name, self.of(file)] for file in files]

    def of(self, path: Path) -> str:
        """Return the digest of one file's bytes.

        Raises
        ------
        OSError, ReaderError
            If it cannot be read; a pipe would be waited for without end.
        """
        require_regular(path)
        path = Path(os.path.abspath(path))
        known = self.folder / f"{sha256(os.fsencode(path)).hexdigest()}.json"
        with path.open("rb") as file:
            seen = _look_at(file)  # of the open file: a network file system asks its server when one is opened
            remembered = _recall(known)
            if isinstance(remembered, dict) and remembered.get("seen") == seen:
                return str(remembered["digest"])
            begun = time.time_ns()
            digest = file_digest(file, "sha256").hexdigest()
            is_settled = _look_at(file) == seen and begun - max(seen[2:4]) > YOUNG_NS
        if is_settled and os.name != "nt":  # where ctime is the time of creation
            with (
                suppress(OSError),
                replacing(known, flush=False) as partial,
            ):  # a full or read-only disk: digested again next time
                content = {"path": os.fsdecode(path), "seen": seen, "digest": digest}
                partial.write_text(json.dumps(content), encoding="utf-8")
        return digest


def _look_at(file: BinaryIO) -> list[int]:
    found = os.fstat(file.fileno())
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _recall(known: Path) -> Any:
    try:
        return parse_json(known.read_bytes())
    except (OSError, ValueError):  # never remembered, or damaged
        return None
