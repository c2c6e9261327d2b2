"""Pack files into a zip archive with a manifest of their hashes; equal files give equal bytes.

::

    manifest.json            format, version, kind of content, SHA-256 of every other member
    0/config.yaml ...        the members, uncompressed

Members are stored uncompressed: weights hardly compress, the bytes do not depend on zlib's version, and no member is
larger than the file. All hashes are compared before any member is used. Members are returned as bytes by name, so
an archive cannot choose paths on the disk.
"""

import hashlib
import json
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from volseg.data.json_files import parse_json
from volseg.errors import CheckpointError
from volseg.files import replacing
from volseg.version import __version__

FORMAT = {"format": "volseg-model", "version": 2}

MANIFEST = "manifest.json"

DAMAGES = (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError, OverflowError, MemoryError, struct.error)
"""Errors of zipfile for damaged archives: a wrong version number, name, offset or length."""

LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The earliest date in a zip file. It is constant, so that equal members give equal bytes."""


def write_archive(path: str | Path, about: Mapping[str, Any], members: Mapping[str, bytes]) -> Path:
    """Write members and their manifest atomically; equal members give equal bytes.

    Parameters
    ----------
    path : path
        Path of the archive.
    about : mapping
        Further values of the manifest; JSON.
    members : mapping
        Names, with ``/`` between folders, to bytes.
    """
    manifest = {**FORMAT, "volseg": __version__, **about, "files": _digest(members)}
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        for name, content in {MANIFEST: text.encode(), **dict(sorted(members.items()))}.items():
            entry = zipfile.ZipInfo(name, LONG_AGO)
            entry.create_system, entry.external_attr = 3, 0o644 << 16  # the same on every system
            archive.writestr(entry, content)
    return Path(path)


def _digest(members: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in members.items()}


def is_archive(path: str | Path) -> bool:
    """Return whether a file is a zip archive with a manifest."""
    try:
        with zipfile.ZipFile(path) as archive:
            return MANIFEST in archive.namelist()
    except DAMAGES:
        return False


def read_archive(path: str | Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the manifest and the members of an archive, after comparing their hashes.

    Raises
    ------
    CheckpointError
        If the archive is damaged, was changed, has an unknown version, or `write_archive` did not write it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            if not is_stored or sum(entry.file_size for entry in entries) > Path(path).stat().st_size:
                raise ValueError("its members are compressed or overlap")
            members = {entry.filename: archive.read(entry) for entry in entries}
        manifest = parse_json(members.pop(MANIFEST, b"null"))
    except DAMAGES as fault:
        raise CheckpointError(
            f"{path} is damaged, or volseg export did not write it ({fault}); copy it again"
        ) from fault
    if not isinstance(manifest, dict) or {key: manifest.get(key) for key in FORMAT} != FORMAT:
        raise CheckpointError(
            f"{path} is not an archive of volseg export in the format that volseg {__version__} reads ({FORMAT}); "
            "export the model again, or install the version that wrote it"
        )
    if manifest.get("files") != _digest(members):
        raise CheckpointError(f"{path} does not match the hashes in its manifest; copy it again")
    return manifest, members
