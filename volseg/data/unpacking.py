"""Unpack a tar archive that somebody else made: plain files inside one folder, and nothing else.

The files' bytes are copied; nothing of ``tarfile``'s extraction runs, so owners, modes, links and devices have no way
into the file system, on Pythons with and without its filters.
"""

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

from volseg.data.download import ShowBytes
from volseg.errors import DataError

__all__ = ["unpack"]

SURPLUS = ("__MACOSX", ".DS_Store")
"""What macOS leaves in archives, beside a ``._NAME`` for each file."""


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
            members = list(_choose(opened, archive))
            total = sum(member.size for member, _ in members)
            folder.mkdir(parents=True)
            _require_room(folder, total)
            done = 0
            for member, path in members:
                _write(opened, member, folder / path)
                done += member.size
                if show is not None:
                    show("unpacking", done, total)
    except (tarfile.TarError, EOFError) as fault:
        raise DataError(f"{archive} is damaged, or no tar archive ({fault}); fetch it again") from fault


def _choose(opened: tarfile.TarFile, archive: Path) -> Iterator[tuple[tarfile.TarInfo, Path]]:
    """Yield the members to write and their paths; every member is looked at before the first is written."""
    for member in opened:
        path = PureWindowsPath(member.name)  # splits at both kinds of slash
        if path.anchor or ".." in path.parts or "\0" in member.name:
            raise DataError(f"{archive} holds {member.name!r}, which lies outside the archive; it is not unpacked")
        if any(part.startswith("._") or part in SURPLUS for part in path.parts):
            continue
        if not (member.isfile() or member.isdir()) or member.issparse():
            raise DataError(f"{archive} holds {member.name!r}, which is no plain file; it is not unpacked")
        if path.parts:
            yield member, Path(*path.parts)


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
    try:
        with content, path.open("xb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())  # the folder gets its name once every byte is on the disk
    except FileExistsError:
        raise DataError(f"the archive holds {member.name!r} twice; it is not unpacked") from None
