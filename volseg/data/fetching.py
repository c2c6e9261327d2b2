"""Fetch a public task: its archive with a check, then its folder, which appears only when complete.

Only the bytes of an archive's plain files are copied. ``tarfile`` extracts nothing, so no owner, mode, link or device
reaches the file system, on Pythons with and without its extraction filters.
"""

import logging
import os
import shutil
import tarfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

from volseg.config.catalogue import PublicTask
from volseg.data.download import ShowBytes, download, require_room, require_web
from volseg.data.layouts import find_task, load_task
from volseg.errors import DataError
from volseg.formatting import list_duplicates

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)


def fetch_task(
    task: PublicTask,
    folder: str | Path = ".",
    *,
    url: str | None = None,
    show: ShowBytes | None = None,
) -> Path:
    """Fetch a task into a folder of its name; an existing folder stays.

    After any interruption ``NAME.tar.part`` keeps the bytes so far, and the same call continues from there.

    Parameters
    ----------
    task : PublicTask
        See `volseg.config.catalogue.get_public_task`.
    folder : str or Path
        Folder for the task's folder.
    url : str, optional
        URL of a mirror; its file must have the same checksum.
    show : callable, optional
        Called with the progress.

    Returns
    -------
    Path
        The task's folder.

    Raises
    ------
    DataError
        If the task cannot be fetched, or another process fetches it; the message gives the remedy.
    """
    url = url or task.url
    require_web(url)
    folder = Path(folder)
    target = folder / task.name
    if target.exists():
        logger.info("%s exists already", target)
        return _require_whole(target)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{task.name}.tar.part"
    with _only_fetch(path) as part:
        if not target.exists():  # else another process has just fetched it
            # The unpacked files are about as large: the images in the archive are compressed.
            download(url, part, path, md5=task.md5, spare=1.0, show=show)
            _unpack_whole(path, target, show)
    path.unlink(missing_ok=True)  # closed before, as Windows removes no open file
    return _require_whole(target)


def _require_whole(target: Path) -> Path:
    """Return an existing folder, if it holds a task."""
    try:
        load_task(target)
    except DataError as fault:
        raise DataError(
            f"{target} is there and holds no whole task ({fault}); move it away, or name another folder"
        ) from fault
    return target


def _unpack_whole(archive: Path, target: Path, show: ShowBytes | None) -> None:
    """Unpack beside the target, and rename the result once it is a complete task."""
    beside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)  # left by a killed process: this process has the lock
    try:
        unpack(archive, beside, show=show)
        found = find_task(beside)
        load_task(found)
        os.replace(found, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def _only_fetch(path: Path) -> Iterator[BinaryIO]:
    """Hold the part file open and locked; the system releases the lock after any end of its holder.

    Raises
    ------
    DataError
        If another process holds it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        with open(descriptor, "r+b", buffering=0) as part:  # a write to a full disk raises
            _lock(part, path)
            if not path.exists() or not os.path.samestat(os.fstat(part.fileno()), path.stat()):
                continue  # its last holder removed it between the opening and the lock
            try:
                yield part
                return
            finally:
                if part.seek(0, os.SEEK_END) == 0:
                    with suppress(PermissionError):  # Windows removes no open file
                        path.unlink(missing_ok=True)


def _lock(part: BinaryIO, path: Path) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{path} is being fetched by another process; wait for its end") from None
    except OSError as fault:
        logger.info("%s cannot be locked (%s); start no second fetch of it", path, fault.strerror)


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
