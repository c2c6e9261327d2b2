"""Lock a run folder for one process at a time.

The lock is an operating system lock (``flock``) on a small file that names its holder. The system releases it when that
process ends in any way: a killed process or a lost machine leaves no lock behind, and process ids need not be checked.
Without such locks (some network file systems, and Windows) nothing is locked; this is logged.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from volseg.data.json_files import read_json
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.signals import deferring_signals

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = "in_use.json"


@contextmanager
def only_process_in(folder: Path) -> Iterator[Callable[[], None]]:
    """Hold the lock of ``folder``, creating the folder if needed; remove the lock and an empty folder afterwards.

    Yields a function that raises a ``CheckpointError`` if the locked folder was removed; another run may have started
    in its place.

    Raises
    ------
    ConfigError
        If another process holds the lock; the message has its id, its host and the time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    descriptor: int | None = None
    try:
        with deferring_signals():  # a signal in between would leave the file behind
            descriptor = _locked(path)
        held = descriptor
        os.ftruncate(held, 0)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.write(held, json.dumps(holder).encode())
        yield lambda: _require_own(held, path)
    finally:
        if descriptor is not None:
            _release(descriptor, path)


def _release(descriptor: int, path: Path) -> None:
    """Release the lock, and remove its file and an empty folder."""
    is_own = _is_at(descriptor, path)
    if fcntl is None:  # Windows cannot remove an open file
        os.close(descriptor)
    if is_own:
        path.unlink()  # while the lock is still held
    if fcntl is not None:
        os.close(descriptor)
    if is_own and not any(path.parent.iterdir()):
        path.parent.rmdir()


def _require_own(descriptor: int, path: Path) -> None:
    if not _is_at(descriptor, path):
        raise CheckpointError(
            f"{path} was removed or replaced while this training ran, by somebody who may train there now; nothing "
            "more is written to that folder. If it still holds this run go on by --resume, else begin again"
        )


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _locked(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, path)
            # The last holder may have removed the file before the lock was taken; another process may hold a new file.
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    if fcntl is None:
        _log_unlocked(path, "Windows")
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path.parent} is in use by {_holder(path)}; wait for its end, or choose another folder by --output"
        ) from None
    except OSError as fault:
        _log_unlocked(path, f"its file system: {fault.strerror}")


def _log_unlocked(path: Path, cause: str) -> None:
    logger.info("%s cannot be locked (%s); start no second training in it", path.parent, cause)


def _holder(path: Path) -> str:
    try:
        holder = read_json(path)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (DataError, KeyError, TypeError):  # the holder has not written its name yet, or has just ended
        return "another process"
