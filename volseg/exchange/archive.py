"""Pack files into a zip archive with a manifest of their hashes; equal files give equal bytes.

::

    manifest.json            format, version, what it is, SHA-256 and length of every other member
    0/config.yaml ...        the members, stored as they are

Members are stored uncompressed: weights hardly compress, the bytes do not depend on zlib's version, and no member is
larger than the file. Every hash is compared before a member is used. Members are returned as bytes by name, so an
archive chooses no path on the disk.
"""

import hashlib
import json
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from volseg.data.json_files import parse_json
from volseg.errors import CheckpointError
from volseg.files import replacing
from volseg.version import __version__

FORMAT = "volseg-model"

VERSION = 1

MANIFEST = "manifest.json"

MOST_MANIFEST = 1 << 24
MOST_MEMBERS = 10_000

DAMAGES = (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError, OverflowError, MemoryError, struct.error)
"""Errors of zipfile for damaged archives: a wrong version number, name, offset or length."""

LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The earliest date in a zip file. It is constant, so that equal members give equal bytes."""


def write_archive(path: str | Path, about: Mapping[str, Any], members: Mapping[str, bytes]) -> Path:
    """Write members and their manifest in one step; equal members give equal bytes.

    Parameters
    ----------
    path : path
        Path of the archive.
    about : mapping
        Further values of the manifest; JSON.
    members : mapping
        Names, with ``/`` between folders, to bytes.
    """
    path = Path(path)
    for name in members:
        _require_plain(name, path)
    files = {name: _identify(content) for name, content in members.items()}
    manifest = {"format": FORMAT, "version": VERSION, "volseg": __version__, **about, "files": files}
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        for name, content in {MANIFEST: text.encode(), **dict(sorted(members.items()))}.items():
            entry = zipfile.ZipInfo(name, LONG_AGO)
            entry.create_system, entry.external_attr = 3, 0o644 << 16  # the same on every system
            archive.writestr(entry, content)
    return path


def _identify(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def is_archive(path: str | Path) -> bool:
    """Say whether a file is a zip archive with a manifest."""
    try:
        with zipfile.ZipFile(path) as archive:
            return MANIFEST in archive.namelist()
    except DAMAGES:
        return False


def read_archive(path: str | Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the manifest, and the members after their hashes were compared.

    Raises
    ------
    CheckpointError
        If the archive is damaged, was changed, has an unknown version, or `write_archive` did not write it.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = _list_entries(archive, path)
            manifest = _read_manifest(archive, entries, path)
            files = manifest["files"]
            if surplus := sorted(entries.keys() ^ (files.keys() | {MANIFEST})):
                raise CheckpointError(
                    f"{path} and its manifest differ in {surplus[0]!r}; it was changed: copy it again"
                )
            return manifest, {name: _read_member(archive, entries[name], files[name], path) for name in sorted(files)}
    except CheckpointError:
        raise
    except DAMAGES as fault:
        raise CheckpointError(f"{path} is damaged, or no file of volseg export ({fault}); copy it again") from fault


def _list_entries(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return the members by name, after checks of all of them."""
    listed = archive.infolist()
    if len(listed) > MOST_MEMBERS:
        raise CheckpointError(f"{path} has {len(listed)} members; a file of volseg export has a few")
    for entry in listed:
        _require_plain(entry.filename, path)
        stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
        if not stored or entry.is_dir() or entry.flag_bits & 1:
            raise CheckpointError(f"{path} holds {entry.filename!r} compressed or encrypted; volseg export stores it")
    entries = {entry.filename: entry for entry in listed}
    if len(entries) < len(listed) or sum(entry.file_size for entry in listed) > path.stat().st_size:
        raise CheckpointError(f"{path} holds a member twice, or members larger than the file; it was changed")
    return entries


def _require_plain(name: str, path: Path) -> None:
    parts = PurePosixPath(name).parts
    if not parts or name != "/".join(parts) or {"..", ".", "/"}.intersection(parts) or set(name) & set("\\:\0"):
        raise CheckpointError(f"{path} holds {name!r}, which is not a plain relative name; it is not read")


def _read_manifest(archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], path: Path) -> dict[str, Any]:
    if MANIFEST not in entries or entries[MANIFEST].file_size > MOST_MANIFEST:
        raise CheckpointError(f"{path} has no {MANIFEST}; name a file that volseg export wrote")
    try:
        manifest = parse_json(archive.read(MANIFEST))
    except ValueError as fault:
        raise CheckpointError(f"{path}: {MANIFEST} cannot be read ({fault}); copy it again") from fault
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: {MANIFEST} is not of the format {FORMAT}; name a file that volseg export wrote")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of version {manifest.get('version')!r}, this volseg {__version__} reads {VERSION}; it was "
            f"written by volseg {manifest.get('volseg')}: install that one"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(one, dict) and isinstance(one.get("sha256"), str) and isinstance(one.get("bytes"), int)
        for one in files.values()
    ):
        raise CheckpointError(f"{path}: {MANIFEST} should give the length and hash of each file; copy it again")
    return manifest


def _read_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, said: Mapping[str, Any], path: Path) -> bytes:
    if entry.file_size != said["bytes"]:
        raise CheckpointError(
            f"{path}: {entry.filename} has {entry.file_size} bytes, not {said['bytes']}; copy it again"
        )
    content = archive.read(entry)
    if hashlib.sha256(content).hexdigest() != said["sha256"]:
        raise CheckpointError(f"{path}: {entry.filename} has another SHA-256 than when it was exported; copy it again")
    return content
