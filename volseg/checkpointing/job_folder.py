"""Share the run folder of a job between its processes: the leader writes it, the members read it.

The leader is process 0. It holds the lock of the folder, and decides whether the training resumes from a checkpoint.
Every process calls the methods in the same order; in a member they only read, or do nothing.
"""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from volseg.checkpointing.compatible import require_same_config
from volseg.checkpointing.components import write_components
from volseg.checkpointing.folder import ENVIRONMENT, RunFolder
from volseg.config.schema import ExperimentConfig
from volseg.data.json_files import read_json
from volseg.errors import CheckpointError, ConfigError, DataError
from volseg.experiment.cases import ChosenCases
from volseg.monitoring.environment import environment
from volseg.monitoring.heartbeat import Heartbeat
from volseg.monitoring.run_files import STATUS, TIMES
from volseg.parallel.devices import is_distributed, is_main_process
from volseg.parallel.processes.group import gather_over_processes
from volseg.signals import deferring_signals

logger = logging.getLogger(__name__)

LOCK = "in_use.json"

SECONDS_TO_SEE = 30.0
"""Longest time until a file from one machine is visible on the others."""


class JobFolder:
    """Run folder of a job. The leader locks an existing folder at once, and a new one before it writes.

    Parameters
    ----------
    config : ExperimentConfig
    held : ExitStack
        Context of the folder's lock; closes when the training ends in any way.
    leads : bool, optional
        Whether this process writes the folder; by default only process 0.

    Attributes
    ----------
    config : ExperimentConfig
    folder : RunFolder
    leads : bool
    is_described : bool
        Whether this process has written the config of the run.
    """

    def __init__(self, config: ExperimentConfig, held: ExitStack, *, leads: bool | None = None) -> None:
        self.config = config
        self.folder = RunFolder(config.folder)
        self.leads = is_main_process() if leads is None else leads
        self.is_described = False
        self._held = held
        self._require_lock: Callable[[], None] | None = None
        if self.leads and self.folder.path.is_dir():
            self._lock()
            self.folder.remove_partials()

    def keep_mesh(self, config: ExperimentConfig) -> None:
        """Store the mesh that the processes chose in the config of a deterministic run, which must keep it."""
        if config.training.deterministic:
            self.config = self.config.model_copy(update={"parallel": config.parallel})

    def claim(self, resume: bool) -> bool:
        """Return whether the training resumes from a checkpoint; raise if it neither resumes nor has a free folder.

        Raises
        ------
        ConfigError
            If the run may neither resume nor start, or a machine does not see its folder.
        """
        # Only the leader's answer counts: a member may look after the leader has started to write the folder.
        may_go_on = self.leads and resume and self.folder.may_go_on()
        goes_on = bool(gather_over_processes(["resume"] if may_go_on else []))
        if goes_on:
            self._require_shared_folder()
            require_same_config(self.folder, self.config)
        elif self.leads:
            self.folder.require_free()
        self._lock()
        return goes_on

    def require_folder(self) -> None:
        """Raise if the run folder was removed or replaced since this process locked it."""
        if self._require_lock is not None:
            self._require_lock()

    def begin(self, chosen: ChosenCases, files: Mapping[str, Any]) -> None:
        """Create the run folder and describe the run in it; ``files`` are contents of JSON files by name."""
        self._lock()
        self._require_shared_folder()
        if self.leads:
            write_components(self.folder, self.config, (*chosen.training, *chosen.validation))
            self.folder.begin(self.config, chosen.task, chosen.split, {ENVIRONMENT: environment(), **files})
            self.is_described = True

    def go_on(self, files: Mapping[str, Any], *, finished: bool) -> None:
        """Update the description of a resumed run; remove summaries of weights that will be replaced."""
        if not self.leads:
            return
        if not finished:  # first: a report next to a config means that this config is trained
            self.folder.forget_validation()
        for name, content in files.items():
            self.folder.write_json(name, content)
        self.folder.write_config(self.config)
        self.is_described = True

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file of the run folder."""
        if self.leads:
            self.require_folder()
            self.folder.write_json(name, content)

    def write_status(self, signs: Heartbeat, begins_again: type[Exception]) -> None:
        """Write the progress of the training into the run folder, until it ends or raises ``begins_again``."""
        if self.leads:
            self._held.callback(self._remove_status)
            self._held.enter_context(signs.writing(self.folder.path, self._holds_folder, begins_again=begins_again))

    def _remove_status(self) -> None:
        """Remove the status files if no run was started."""
        if self._holds_folder() and {file.name for file in self.folder.path.iterdir()} <= {LOCK, STATUS, TIMES}:
            self.folder.status_file.unlink(missing_ok=True)
            self.folder.times_file.unlink(missing_ok=True)

    def _holds_folder(self) -> bool:
        try:
            self.require_folder()
        except CheckpointError:  # writers of important files raise this themselves
            return False
        return True

    def _lock(self) -> None:
        if self.leads and self._require_lock is None:
            self._require_lock = self._held.enter_context(only_process_in(self.folder.path))

    def _require_shared_folder(self) -> None:
        """Raise unless all processes see the lock file of the leader.

        Every process reads checkpoints and writes its own predictions.
        """
        if not is_distributed():
            return
        lock = self.folder.path / LOCK
        (holder,) = gather_over_processes([lock.read_text(encoding="utf-8")] if self.leads else [])
        if blind := gather_over_processes([] if _sees(lock, holder) else [socket.gethostname()]):
            raise ConfigError(
                f"{', '.join(blind)} cannot see the run folder {self.folder.path.absolute()}, which process 0 "
                "writes; choose one with --output on a file system that all machines of the job share"
            )


def _sees(file: Path, content: str) -> bool:
    """Return whether a file has this content, now or within `SECONDS_TO_SEE`."""
    deadline = time.monotonic() + SECONDS_TO_SEE
    while time.monotonic() < deadline:
        # A network file system may cache the absence of a file for a while.
        with suppress(OSError, UnicodeDecodeError):
            if file.read_text(encoding="utf-8") == content:
                return True
        time.sleep(0.1)
    return False


# Lock a run folder for one process at a time.
#
# The lock is an operating system lock (``flock``) on a small file that names its holder. The system releases it when
# that process ends in any way: a killed process or a lost machine leaves no lock behind, and process ids need not be
# checked. Without such locks (on some network file systems) nothing is locked; this is logged.


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
    if is_own:
        path.unlink()  # while the lock is still held
    os.close(descriptor)
    if is_own:
        with suppress(OSError):  # it contains files, is a symbolic link, or a disk is mounted there
            path.parent.rmdir()


def _require_own(descriptor: int, path: Path) -> None:
    if not _is_at(descriptor, path):
        raise CheckpointError(
            f"{path} was removed or replaced while this training ran, perhaps by another training; this one "
            "stops writing to it. If the folder still contains this run, continue with --resume; otherwise start again"
        )


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _locked(path: Path) -> int:
    """Return the open and locked file at ``path``."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"{path.parent} is in use by {_holder(path)}; wait until it ends, or choose another --output"
            ) from None
        except OSError as fault:
            logger.info("%s cannot be locked (%s); do not start another training in it", path.parent, fault)
        # The last holder may have removed the file before the lock was taken; another process may lock a new file.
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)


def _holder(path: Path) -> str:
    try:
        holder = read_json(path)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (DataError, KeyError, TypeError):  # the holder has not written its name yet, or has just ended
        return "another process"
