"""Unpack a tar archive that somebody else made: plain files inside one folder, and nothing else.

The files' bytes are copied; nothing of ``tarfile``'s extraction runs, so owners, modes, links and devices have no way
into the file system, on Pythons with and without its filters.
"""

import os
import shutil
import tarfile
import unicodedata
from pathlib import Path, PureWindowsPath

from volseg.data.download import ShowBytes
from volseg.errors import DataError

__all__ = ["unpack"]

SURPLUS = ("__MACOSX", ".DS_Store")
"""What macOS leaves in archives, beside a ``._NAME`` for each file."""

MOST_MEMBERS = 100_000
DEEPEST = 32
LONGEST_NAME = 255
"""Bytes that file systems take."""

OF_HEADERS = (EOFError, ValueError, OverflowError, MemoryError, RecursionError, LookupError)
"""What tarfile raises for sizes, times and extended headers that are none."""


def unpack(archive: Path, folder: Path, *, show: ShowBytes | None = None) -> None:
    """Write the files of a tar archive into a folder, which is new.

    Parameters
    ----------
    archive : Path
        Uncompressed.
    folder : Path
        Is made; files of macOS are left out.
    show : callable, optional
        Is told of the progress.

    Raises
    ------
    DataError
        The archive is damaged, holds anything but files and folders, or something that would lie outside ``folder``;
        or the disk has no room for it. What was written until then stays.
    """
    try:
        with tarfile.open(archive, "r:", encoding="utf-8") as opened:
            members = _choose(opened, archive)
            total = sum(member.size for member, _ in members)
            folder.mkdir(parents=True)
            _require_room(folder, total)
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
    """Return the members to write and their paths; every member is looked at before the first is written."""
    size = archive.stat().st_size
    chosen: list[tuple[tarfile.TarInfo, Path]] = []
    num_seen = 0
    for member in opened:
        num_seen += 1
        if member.size < 0 or num_seen > MOST_MEMBERS:  # a negative size leads back to an earlier header, for ever
            raise tarfile.ReadError(f"{num_seen} members, the last one of {member.size} bytes")
        path = _require_plain(member, archive)
        if any(part.startswith("._") or part in SURPLUS for part in path.parts):
            continue
        if member.isfile() and member.offset_data + member.size > size:
            raise tarfile.ReadError("unexpected end of data")
        if path.parts:
            chosen.append((member, Path(*path.parts)))
    opened.fileobj.seek(opened.offset)  # type: ignore[union-attr]
    if opened.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):  # type: ignore[union-attr]
        raise tarfile.ReadError("unexpected end of data")  # behind a header that is none, tarfile ends without a word
    _require_apart(chosen, archive)
    return chosen


def _require_plain(member: tarfile.TarInfo, archive: Path) -> PureWindowsPath:
    """Return a member's path, if it is a plain file or folder inside the archive."""
    path = PureWindowsPath(member.name)  # splits at both kinds of slash
    if path.anchor or ".." in path.parts or "\0" in member.name:
        raise DataError(f"{archive} holds {member.name!r}, which lies outside the archive; it is not unpacked")
    name = member.name.encode("utf-8", "surrogateescape")
    if len(path.parts) > DEEPEST or any(len(part) > LONGEST_NAME for part in name.split(b"/")):
        raise DataError(f"{archive} holds {member.name[:80]!r}..., a name of {len(name)} bytes; it is not unpacked")
    is_sparse = member.issparse() or any(key.startswith("GNU.sparse") for key in member.pax_headers)
    is_surplus = any(part.startswith("._") or part in SURPLUS for part in path.parts)
    if (is_sparse or not (member.isfile() or member.isdir())) and not is_surplus:
        raise DataError(f"{archive} holds {member.name!r}, which is no plain file; it is not unpacked")
    return path


def _require_apart(chosen: list[tuple[tarfile.TarInfo, Path]], archive: Path) -> None:
    """Raise for a file that stands twice or holds members, and for names that only upper case tells apart."""
    names: dict[str, Path] = {}
    files: set[Path] = set()
    for member, path in chosen:
        for place in (path, *path.parents[:-1]):
            if (other := names.setdefault(_fold(place), place)) != place:
                raise DataError(f"{archive} holds '{place}' and '{other}', which are one name on some disks")
        if not member.isdir():
            if path in files:
                raise DataError(f"{archive} holds {member.name!r} twice; it is not unpacked")
            files.add(path)
    for member, path in chosen:
        for place in (path, *path.parents[:-1])[0 if member.isdir() else 1 :]:
            if place in files:
                raise DataError(f"{archive} holds '{place}' as a file and as a folder; it is not unpacked")


def _fold(path: Path) -> str:
    return unicodedata.normalize("NFC", str(path)).casefold()


def _require_room(folder: Path, needed: int) -> None:
    if needed > (free := shutil.disk_usage(folder).free):
        raise DataError(
            f"{folder} has {free / 2**30:.1f} GiB free, and {needed / 2**30:.1f} GiB are needed to unpack; free space"
        )


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
