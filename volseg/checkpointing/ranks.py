"""Share the run folder of a job between its processes: the leader writes it, the members read it.

The leader is process 0. It holds the lock of the folder, and decides whether the training resumes from a checkpoint.
Every process calls the methods in the same order; in a member they only read, or do nothing.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from volseg.checkpointing.compatible import require_same_config
from volseg.checkpointing.components import write_components
from volseg.checkpointing.folder import ENVIRONMENT, RunFolder
from volseg.checkpointing.lock import LOCK, only_process_in
from volseg.config.schema import ExperimentConfig
from volseg.errors import CheckpointError, ConfigError
from volseg.experiment.cases import ChosenCases
from volseg.monitoring.environment import environment
from volseg.monitoring.heartbeat import Heartbeat
from volseg.monitoring.run_files import STATUS, TIMES
from volseg.parallel.devices import is_distributed, is_main_process
from volseg.parallel.processes.group import gather_over_processes

SECONDS_TO_SEE = 30.0
"""Longest time until a file from one machine is visible on the others."""


class JobFolder:
    """The run folder of a job. The leader locks an existing folder at once, otherwise before it writes.

    Parameters
    ----------
    config : ExperimentConfig
    held : ExitStack
        Holds the lock of the folder; closed when the training ends in any way.
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
        """Store the mesh that the processes have chosen in the config of a deterministic run, which must keep it."""
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
        if not finished:  # first: a report beside a config means that this config is trained
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
                f"{', '.join(blind)} does not see the run folder {self.folder.path.absolute()}, which process 0 "
                "writes; choose one by --output on a file system that all machines of the job share"
            )


def _sees(file: Path, content: str) -> bool:
    """Return whether a file has this content, now or within `SECONDS_TO_SEE`."""
    deadline = time.monotonic() + SECONDS_TO_SEE
    while time.monotonic() < deadline:
        # A network file system may cache the absence of a file for a while.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if file.read_text(encoding="utf-8") == content:
                return True
        time.sleep(0.1)
    return False
