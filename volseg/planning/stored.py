"""The fingerprint of a data set as it was taken before, as long as no file has changed since.

It lies as JSON in ``.volseg`` of the data set's folder, or, where that cannot be written to, in the user's cache
folder. A file counts as changed with its size, its time of change, or its first or last bytes: a compressed file ends
with the checksum of what it holds, so a copy that keeps times is noticed too. Of a file that is not compressed the
inode's time of change (``ctime``) counts as well, which nobody can put back. Names are relative to the folder, which
may move.
"""

import json
import logging
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from volseg.data.cache_folder import choose_cache_folder
from volseg.data.cases import Case, Task
from volseg.data.file_digests import find_files
from volseg.data.json_files import read_json
from volseg.data.readers import list_files
from volseg.errors import DataError, ReaderError
from volseg.files import replacing
from volseg.planning.facts import Fingerprint
from volseg.planning.fingerprint import Taken

__all__ = ["find_places", "keep_fingerprint", "load_fingerprint"]

logger = logging.getLogger(__name__)

VERSION = 1
"""Of what is stored; grows with any change of what a fingerprint says."""

ENDS = 4096
"""Bytes of a file that are looked at, at either end."""


def load_fingerprint(task: Task, *, skip_bad: bool = False) -> Taken | None:
    """Return the fingerprint of a data set if it was taken before and nothing has changed since.

    Parameters
    ----------
    task, skip_bad
        As for `take_fingerprint`.
    """
    for place in find_places(task):
        if not place.is_file():
            continue
        try:
            content = read_json(place)
            if content["key"] == describe_files(task, skip_bad=skip_bad):
                return Taken(fingerprint=Fingerprint.from_json(content["fingerprint"]), left_out=content["left_out"])
        except (DataError, KeyError, TypeError, AttributeError, ValueError) as fault:
            logger.warning("%s is no fingerprint (%s); the data set is read again", place, fault)
    return None


def keep_fingerprint(taken: Taken, task: Task, *, skip_bad: bool = False) -> Path | None:
    """Write a fingerprint where `load_fingerprint` finds it; None, and a warning, where nothing can be written."""
    content = {
        "version": VERSION,
        "key": describe_files(task, skip_bad=skip_bad),
        "left_out": list(taken.left_out),
        "fingerprint": taken.fingerprint.to_json(),
    }
    refused: OSError | None = None
    for place in find_places(task):
        try:
            with replacing(place) as partial:
                partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            return place
        except OSError as fault:  # a folder on a read-only disk, or of somebody else
            refused = fault
    logger.warning("the fingerprint of %s cannot be kept (%s); the next plan reads all cases again", task.name, refused)
    return None


def find_places(task: Task) -> list[Path]:
    """Return where the fingerprint of a data set may lie, in the order of preference."""
    folder = choose_cache_folder("auto")
    assert folder is not None
    root = Path(os.path.abspath(task.root))
    root = root if root.is_dir() else root.parent  # a table of paths
    called = sha256(os.fsencode(root)).hexdigest()[:16]
    return [root / ".volseg" / "fingerprint.json", folder / "fingerprints" / f"{called}.json"]


def describe_files(task: Task, *, skip_bad: bool) -> str:
    """Return what changes with anything that a fingerprint follows from; no image is decompressed."""
    described = {
        "version": VERSION,
        "skip_bad": skip_bad,
        "task": [task.name, task.modalities, sorted(task.labels.items()), list(task.regions.items()), task.ignore],
        "cases": [[case["case"], case.get("labelled"), list(_describe_case(case, task))] for case in task.training],
    }
    return sha256(json.dumps(described).encode()).hexdigest()


def _describe_case(case: Case, task: Task) -> Iterator[list[Any]]:
    for path in (*list_files(case["image"]), *list_files(case["label"])):
        for file in _find_files(path):
            yield [os.path.relpath(file, task.root), *_describe_file(file)]


def _find_files(path: Path) -> list[Path]:
    try:
        return find_files(path)
    except (OSError, ReaderError):  # absent or damaged: a bad case, which is told by who reads it
        return [path]


def _describe_file(file: Path) -> list[Any]:
    try:
        told = file.stat()
        with file.open("rb") as opened:
            ends = opened.read(ENDS)
            opened.seek(max(0, told.st_size - ENDS))
            ends += opened.read(ENDS)
    except OSError as fault:  # absent or unreadable: a bad case, which is told by who reads it
        return [type(fault).__name__]
    # A copy of a data set of compressed files, as most are, need not be read again.
    times = [told.st_mtime_ns] if file.suffix == ".gz" else [told.st_mtime_ns, told.st_ctime_ns]
    return [told.st_size, *times, sha256(ends).hexdigest()]
