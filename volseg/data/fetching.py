"""Fetch a public task: download and check its archive, then unpack it into a folder that appears only when complete.

An archive is unpacked only if its checksum is that of the task, so its members need no further checks. Only the bytes
of plain files are copied, not owners, modes and links.
"""

import fcntl
import logging
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from volseg.config.catalogue import PublicTask
from volseg.data.download import ShowBytes, download, require_web
from volseg.data.layouts import find_task, load_task
from volseg.errors import DataError

logger = logging.getLogger(__name__)


def fetch_task(
    task: PublicTask, folder: str | Path = ".", *, url: str | None = None, show: ShowBytes | None = None
) -> Path:
    """Fetch a task into a folder with its name; keep an existing folder.

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
    path.unlink(missing_ok=True)
    return _require_whole(target)


def _require_whole(target: Path) -> Path:
    """Return an existing folder, if it contains a complete task."""
    try:
        load_task(target)
    except DataError as fault:
        raise DataError(
            f"{target} exists, but does not contain a complete task ({fault}); move it away, or name another folder"
        ) from fault
    return target


def _unpack_whole(archive: Path, target: Path, show: ShowBytes | None) -> None:
    """Unpack next to the target, and rename the result once it is a complete task."""
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
    """Keep the part file open and locked; the system releases the lock however the process ends.

    Raises
    ------
    DataError
        If another process holds the lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        with open(descriptor, "r+b", buffering=0) as part:  # a write to a full disk raises
            _lock(part, path)
            if not path.exists() or not os.path.samestat(os.fstat(part.fileno()), path.stat()):
                continue  # the process that held the lock before removed the file after it was opened here
            try:
                yield part
                return
            finally:
                if part.seek(0, os.SEEK_END) == 0:
                    path.unlink(missing_ok=True)


def _lock(part: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{path} is being fetched by another process; wait until it ends") from None
    except OSError as fault:
        logger.info("%s cannot be locked (%s); do not start a second fetch of it", path, fault.strerror)


SURPLUS = ("__MACOSX", ".DS_Store")
"""Files that macOS adds to archives, in addition to a ``._NAME`` for each file."""


def unpack(archive: Path, folder: Path, *, show: ShowBytes | None = None) -> None:
    """Write the files of an uncompressed tar archive into a new folder, without the files that macOS adds.

    Raises
    ------
    DataError
        If the archive contains anything but plain files inside it, or the disk is full. Files written before the error
        are kept.
    """
    try:
        with tarfile.open(archive, "r:", encoding="utf-8") as opened:
            members = [member for member in opened if not member.isdir() and not _is_surplus(member)]
            total, done = sum(member.size for member in members), 0
            for member in members:
                _write(opened, member, folder)
                done += member.size
                if show is not None:
                    show("unpacking", done, total)
    except OSError as fault:
        raise DataError(f"{archive} cannot be unpacked into {folder}: {fault}") from fault
    except tarfile.TarError as fault:
        raise DataError(f"{archive} is not a tar archive ({fault}); name another mirror with --url") from fault


def _is_surplus(member: tarfile.TarInfo) -> bool:
    return any(part.startswith("._") or part in SURPLUS for part in PurePosixPath(member.name).parts)


def _write(opened: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    path = PurePosixPath(member.name)
    content = opened.extractfile(member) if member.isfile() else None
    if content is None or path.is_absolute() or ".." in path.parts:
        raise DataError(f"the archive contains {member.name!r}, which is not a plain file inside it")
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    with content, (folder / path).open("xb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())  # the folder gets its name once every byte is on the disk
