"""Who keeps the run folder of a training: one process leads its job, the others are members.

The leader holds the folder's lock and writes into it. A member only reads what must agree with it. A training in one
process is led and has no other member.
"""

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from shlex import quote
from typing import Any

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Case
from volseg.errors import CheckpointError, ConfigError
from volseg.experiment.building import choose_channel
from volseg.experiment.cases import ChosenCases
from volseg.experiment.component_record import write_components
from volseg.experiment.folder_lock import LOCK, only_process_in
from volseg.experiment.network_plan import NetworkPlan
from volseg.experiment.overlays import draw_overlays
from volseg.experiment.placed_network import choose_device
from volseg.experiment.report import Outcome, attempt, tell_outcome
from volseg.experiment.run_folder import RunFolder
from volseg.experiment.same_run import require_same_config
from volseg.monitoring.environment import environment
from volseg.monitoring.heartbeat import Heartbeat
from volseg.monitoring.run_files import STATUS, TIMES
from volseg.parallel.devices import is_distributed, is_main_process
from volseg.parallel.processes.group import gather_over_processes, largest_over_processes
from volseg.reporting import NAME, write_brief, write_report
from volseg.reporting.reading import TOLD
from volseg.workflow.interrupts import StopRequested

__all__ = ["Leader", "Member", "choose_role"]

SEEN = "seen_by_all"
"""File of the run folder by which machines find out whether they share it."""

SECONDS_TO_SEE = 30.0
"""In which a file of one machine must have come into sight on the others."""


def choose_role(config: ExperimentConfig, held: ExitStack) -> "Member":
    """Return what this process is in the training; the leader's lock is released with ``held``."""
    return Leader(config, held) if is_main_process() else Member(config)


class Member:
    """A process of a training that leaves the run folder to the leader.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config
        self.folder = RunFolder(config.folder)

    def settle(self, config: ExperimentConfig) -> None:
        """Take what the processes have come to for what the config left open, where that is part of the run."""
        if config.training.deterministic:
            self.config = self.config.model_copy(update={"parallel": config.parallel})

    def claim(self, resume: bool) -> bool:
        """Return whether the training goes on from a checkpoint, which the leader decides.

        Raises
        ------
        ConfigError
            If the run may neither go on nor begin, or a machine does not see its folder.
        """
        # The leader looks, and tells: a member may come when the leader has begun the folder already.
        goes_on = bool(largest_over_processes(int(self._goes_on(resume)), choose_device(self.config)))
        if goes_on:
            self._require_shared_folder()
            require_same_config(self.folder, self.config)
        return goes_on

    def _goes_on(self, resume: bool) -> bool:
        del resume
        return False

    def _require_shared_folder(self) -> None:
        """Raise unless the machines of all processes see the folder that the leader writes; every process calls it.

        Checkpoints are read by every process, and predictions written by the one that made them.
        """
        if not is_distributed():
            return
        sees = self._sees(largest_over_processes(self._leave_token(), choose_device(self.config)))
        blind = gather_over_processes([] if sees else [socket.gethostname()])
        self._remove_token()
        if blind:
            raise ConfigError(
                f"{', '.join(blind)} does not see the run folder {self.folder.path.absolute()}, which process 0 "
                "writes; choose one by --output on a file system that all machines of the job share"
            )

    def _sees(self, token: int) -> bool:
        deadline = time.monotonic() + SECONDS_TO_SEE
        while time.monotonic() < deadline:
            # Not there, or not yet: a network file system may remember its absence for a while.
            with contextlib.suppress(OSError):
                if (self.folder.path / SEEN).read_text(encoding="utf-8") == str(token):
                    return True
            time.sleep(0.1)
        return False

    def _leave_token(self) -> int:
        return 0

    def _remove_token(self) -> None:
        """Take the token away, when all have looked for it."""

    def require_folder(self) -> None:
        """Raise if the run folder is no longer the one that this job locked."""

    def begin(
        self,
        chosen: ChosenCases,
        fingerprints: Mapping[str, str | None] | None = None,
        plan: NetworkPlan | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Describe the new run; see `PreparedCases.fingerprints`. ``more`` are JSON files by name."""
        del chosen, fingerprints, plan, more
        self._require_shared_folder()

    def go_on(self, *, finished: bool, more: Mapping[str, Any] | None = None) -> None:
        """Describe the run as it goes on. ``more`` are JSON files by name."""

    def put_down(self, name: str, content: Mapping[str, Any]) -> None:
        """Write what is known by now into a JSON file of the run folder."""

    def show_life(self, signs: Heartbeat, begins_again: type[Exception]) -> None:
        """Let others see in the run folder how far the training is, until it ends, or ``begins_again``."""

    def abandon(self) -> None:
        """Leave no run behind, as it failed before its first step."""

    def forget_validation(self) -> None:
        """Remove what was written about weights on the way, by somebody who looked in."""

    def report(self, outcome: Outcome, cases: Sequence[Case]) -> None:
        """Write what the training came to; ``cases`` are those of `draw_overlays`."""

    def show_end(self, kind: type[BaseException] | None, *ended: object) -> None:
        """Write the page about the run, however it ended; for ``ExitStack.push``."""


class Leader(Member):
    """The process that writes the run folder, which it locks: at once where it is there.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training.
    held : ExitStack
        Takes the folder's lock, and is closed when the training ends in any way.
    """

    def __init__(self, config: ExperimentConfig, held: ExitStack) -> None:
        super().__init__(config)
        self._held = held
        self._require_lock: Callable[[], None] | None = None
        self._is_described = False
        if self.folder.path.is_dir():
            self._lock()
            self.folder.remove_partials()

    def require_folder(self) -> None:
        """Raise if the run folder is no longer the one that this job locked."""
        if self._require_lock is not None:
            self._require_lock()

    def claim(self, resume: bool) -> bool:
        """Return whether the training goes on from a checkpoint; else its folder is free."""
        goes_on = super().claim(resume)
        if not goes_on:
            self.folder.require_free()
        self._lock()
        return goes_on

    def show_life(self, signs: Heartbeat, begins_again: type[Exception]) -> None:
        """Let others see in the run folder how far the training is, until it ends, or ``begins_again``."""
        self._held.callback(self._forget_signs)
        self._held.enter_context(signs.writing(self.folder.path, self._holds_folder, begins_again=begins_again))

    def _forget_signs(self) -> None:
        """Leave nothing behind where no run was begun."""
        if self._holds_folder() and {file.name for file in self.folder.path.iterdir()} <= {LOCK, STATUS, TIMES}:
            self.folder.status_file.unlink(missing_ok=True)
            self.folder.times_file.unlink(missing_ok=True)

    def _holds_folder(self) -> bool:
        try:
            self.require_folder()
        except CheckpointError:  # told, and raised, by whoever writes what must not be lost
            return False
        return True

    def _lock(self) -> None:
        if self._require_lock is None:
            self._require_lock = self._held.enter_context(only_process_in(self.folder.path))

    def _goes_on(self, resume: bool) -> bool:
        return resume and self.folder.may_go_on()

    def _leave_token(self) -> int:
        token = secrets.randbits(62)
        self.folder.write_text(SEEN, str(token))
        return token

    def _remove_token(self) -> None:
        (self.folder.path / SEEN).unlink(missing_ok=True)

    def begin(
        self,
        chosen: ChosenCases,
        fingerprints: Mapping[str, str | None] | None = None,
        plan: NetworkPlan | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the run folder and describe the run in it."""
        self._lock()
        self._require_shared_folder()
        write_components(self.folder.path, self.config, chosen)
        for name, content in (more or {}).items():
            self.folder.write_json(name, content)
        self.folder.begin(self.config, chosen.task, chosen.split, environment(), fingerprints, plan)
        self._is_described = True

    def go_on(self, *, finished: bool, more: Mapping[str, Any] | None = None) -> None:
        """Describe the run as it goes on; summaries of weights that will be replaced are removed."""
        if not finished:  # first: a report beside a config says that this has been trained
            self.folder.forget_validation()
        for name, content in (more or {}).items():
            self.folder.write_json(name, content)
        self.folder.go_on(self.config)
        self._is_described = True

    def put_down(self, name: str, content: Mapping[str, Any]) -> None:
        """Write what is known by now into a JSON file of the run folder."""
        self.require_folder()
        self.folder.write_json(name, content)

    def abandon(self) -> None:
        """Leave no run behind, as it failed before its first step."""
        self.folder.abandon()

    def forget_validation(self) -> None:
        """Remove what was written about weights on the way, by somebody who looked in."""
        self.folder.forget_validation()

    def report(self, outcome: Outcome, cases: Sequence[Case]) -> None:
        """Draw the best and the worst cases, and write the short report."""
        self.require_folder()
        self.folder.write_json(TOLD, tell_outcome(outcome))
        if outcome.validated is not None:
            channel = choose_channel(self.config, outcome.task)
            attempt(
                "no pictures of cases were drawn",
                lambda: draw_overlays(self.folder, outcome.task, cases, channel=channel),
            )
        attempt("report.md was not written", self._write_brief)

    def _write_brief(self) -> None:
        self.folder.write_text("report.md", write_brief(self.folder.path, state="finished"))

    def show_end(self, kind: type[BaseException] | None, *ended: object) -> None:
        """Write the page about the run, if this process has begun it or gone on with it."""
        del ended
        if not self._is_described or not self.folder.exists:
            return
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit | StopRequested)
        state = "finished" if kind is None else "interrupted" if stopped else "failed"
        again = f"{NAME} was not written, `volseg report {quote(str(self.folder.path))}` tries again"
        attempt(again, lambda: write_report(self.folder.path, state=state))
