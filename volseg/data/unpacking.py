"""Unpack the plain files of a tar archive from the web into one folder.

The files' bytes are copied. ``tarfile`` extracts nothing, so no owner, mode, link or device reaches the file system, on
Pythons with and without its extraction filters.
"""

import os
import shutil
import tarfile
import unicodedata
from pathlib import Path, PureWindowsPath

from volseg.data.download import ShowBytes, require_room
from volseg.errors import DataError
from volseg.formatting import list_duplicates

__all__ = ["unpack"]

SURPLUS = ("__MACOSX", ".DS_Store")
"""Files that macOS adds to archives, beside a ``._NAME`` for each file."""

MOST_MEMBERS = 100_000
DEEPEST = 32
LONGEST_NAME = 255
"""Bytes of a file's name on most file systems."""

OF_HEADERS = (EOFError, ValueError, OverflowError, MemoryError, RecursionError, LookupError)
"""Errors of tarfile for damaged sizes, times and extended headers."""


def unpack(archive: Path, folder: Path, *, show: ShowBytes | None = None) -> None:
    """Write the files of a tar archive into a new folder, without the files that macOS adds.

    Parameters
    ----------
    archive : Path
        An uncompressed archive.
    folder : Path
        Must not exist.
    show : callable, optional
        Called with the progress.

    Raises
    ------
    DataError
        If the archive is damaged, holds anything but files and folders, or a name outside ``folder``, or if the disk is
        full. Files that were written before stay.
    """
    try:
        with tarfile.open(archive, "r:", encoding="utf-8") as opened:
            members = _choose(opened, archive)
            total = sum(member.size for member, _ in members)
            folder.mkdir(parents=True)
            require_room(folder, total, "unpack")
            done = 0
            for member, path in members:
                _write(opened, member, folder / path)
                done += member.size
                if show is not None:
                    show("unpacking", done, total)
    except DataError:
        raise
    except OSError as fault:
        raise DataError(f"{archive} cannot be unpacked into {folder}: {fault}") from fault
    except (tarfile.TarError, *OF_HEADERS) as fault:
        raise DataError(f"{archive} is damaged, or no tar archive ({fault}); fetch it again") from fault


def _choose(opened: tarfile.TarFile, archive: Path) -> list[tuple[tarfile.TarInfo, Path]]:
    """Return the members to write, and their paths, after checks of all members."""
    size = archive.stat().st_size
    chosen: list[tuple[tarfile.TarInfo, Path]] = []
    for number, member in enumerate(opened, start=1):
        if member.size < 0 or number > MOST_MEMBERS:  # a negative size leads back to an earlier header, endlessly
            raise tarfile.ReadError(f"{number} members, the last one of {member.size} bytes")
        path = PureWindowsPath(member.name)  # splits at both kinds of slash
        is_surplus = any(part.startswith("._") or part in SURPLUS for part in path.parts)
        _require_plain(member, path, archive, is_surplus)
        if is_surplus or not path.parts:
            continue
        if member.isfile() and member.offset_data + member.size > size:
            raise tarfile.ReadError("unexpected end of data")
        chosen.append((member, Path(*path.parts)))
    opened.fileobj.seek(opened.offset)  # type: ignore[union-attr]
    if opened.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):  # type: ignore[union-attr]
        raise tarfile.ReadError("unexpected end of data")  # tarfile stops at a damaged header without an error
    _require_distinct(chosen, archive)
    return chosen


def _require_plain(member: tarfile.TarInfo, path: PureWindowsPath, archive: Path, is_surplus: bool) -> None:
    """Raise unless a member is a plain file or folder with a name inside the archive."""
    if path.anchor or ".." in path.parts or "\0" in member.name:
        raise DataError(f"{archive} holds {member.name!r}, which lies outside the archive; it is not unpacked")
    name = member.name.encode("utf-8", "surrogateescape")
    if len(path.parts) > DEEPEST or any(len(part) > LONGEST_NAME for part in name.split(b"/")):
        raise DataError(f"{archive} holds {member.name[:80]!r}..., a name of {len(name)} bytes; it is not unpacked")
    is_sparse = member.issparse() or any(key.startswith("GNU.sparse") for key in member.pax_headers)
    if (is_sparse or not (member.isfile() or member.isdir())) and not is_surplus:
        raise DataError(f"{archive} holds {member.name!r}, which is no plain file; it is not unpacked")


def _require_distinct(chosen: list[tuple[tarfile.TarInfo, Path]], archive: Path) -> None:
    """Raise if two files have one path, a file is also a folder, or two names differ only in case or composition."""
    files = [path for member, path in chosen if not member.isdir()]
    folders = {path for member, path in chosen if member.isdir()}.union(*(path.parents for _, path in chosen))
    if doubled := list_duplicates(map(str, files)):
        raise DataError(f"{archive} holds {doubled[0]!r} twice; it is not unpacked")
    if both := sorted(folders.intersection(files)):
        raise DataError(f"{archive} holds '{both[0]}' as a file and as a folder; it is not unpacked")
    names: dict[str, Path] = {}
    for path in sorted(folders.union(files)):
        if (other := names.setdefault(unicodedata.normalize("NFC", str(path)).casefold(), path)) != path:
            raise DataError(f"{archive} holds '{path}' and '{other}', which are one name on some disks")


def _write(opened: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = opened.extractfile(member)
    assert content is not None, "a plain file"
    with content, path.open("xb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())  # the folder gets its name once every byte is on the disk
