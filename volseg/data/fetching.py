"""Fetch a public task: its archive with a check, then its folder, which appears only when complete."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from volseg.config.catalogue import PublicTask
from volseg.data.download import PATIENT, Persistence, ShowBytes, download, require_web
from volseg.data.layouts import find_task, load_task
from volseg.data.unpacking import unpack
from volseg.errors import DataError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["fetch_task"]

logger = logging.getLogger(__name__)


def fetch_task(
    task: PublicTask,
    folder: str | Path = ".",
    *,
    url: str | None = None,
    persistence: Persistence = PATIENT,
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
    persistence : Persistence
        Retries of a server that fails.
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
            download(url, part, path, md5=task.md5, spare=1.0, persistence=persistence, show=show)
            _unpack_whole(path, target, show)
    _remove(path)  # closed before, as Windows removes no open file
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


def _remove(path: Path) -> None:
    path.with_name(f"{path.name}.json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


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
            if not _is_at(part, path):  # its last holder removed it between the opening and the lock
                continue
            try:
                yield part
                return
            finally:
                if part.seek(0, os.SEEK_END) == 0:
                    with suppress(PermissionError):  # Windows removes no open file
                        path.unlink(missing_ok=True)


def _is_at(part: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(part.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(part: BinaryIO, path: Path) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{path} is being fetched by another process; wait for its end") from None
    except OSError as fault:
        logger.info("%s cannot be locked (%s); start no second fetch of it", path, fault.strerror)
