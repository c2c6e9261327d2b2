"""Write the heartbeat of a training: ``status.json`` and ``times.json`` of its run folder.

A thread writes them every few seconds if the work has progressed; the files of a hanging training grow old. Steps
therefore cost nothing, and the preparation of cases and a long validation are visible too. Every loop already reports
its position for the supervision of processes (`volseg.parallel.processes.progress`).
"""

import logging
import math
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from volseg.checkpointing.state import EpochRecord
from volseg.monitoring import run_files
from volseg.monitoring.training_log import read_progress
from volseg.parallel.processes.first_error import await_first_error, reporting_first_error
from volseg.parallel.processes.group import get_supervision
from volseg.parallel.processes.progress import get_milestone
from volseg.signals import deferring_signals
from volseg.workflow.hooks import Hook
from volseg.workflow.training import Training

logger = logging.getLogger(__name__)

EVERY_SECONDS = 5.0
"""Seconds between two updates of the files."""


class Heartbeat(Hook):
    """Status and times of one process of a run; only the leader writes them.

    Parameters
    ----------
    every_seconds : float
        Seconds between two checks by the thread.
    """

    def __init__(self, *, every_seconds: float = EVERY_SECONDS) -> None:
        self._every_seconds = every_seconds
        self._begun, self._clock = time.time(), time.perf_counter()
        self._spans: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._turned = time.perf_counter()
        self._earlier: tuple[run_files.RunPart, ...] = ()
        self._folder: Path | None = None
        self._is_mute = False
        self._holds: Callable[[], bool] = lambda: True
        self._training: Training | None = None
        self._state: run_files.State = "preparing"
        self._message = ""
        self._waited_before = 0.0  # in the resumed epoch, by an earlier process
        self._lock = threading.Lock()

    @property
    def begun(self) -> float:
        """Start of the run, in its first process (seconds since 1970)."""
        # Of the first part, not the earliest: the start must not change if the clock was set back since.
        return self._earlier[0].begun if self._earlier else self._begun

    @property
    def seconds(self) -> float:
        """Seconds since the start of this process."""
        return time.perf_counter() - self._clock

    @contextmanager
    def writing(
        self,
        folder: str | Path,
        holds: Callable[[], bool] = lambda: True,
        *,
        begins_again: type[Exception] | tuple[()] = (),
    ) -> Iterator[None]:
        """Update the files of a run folder inside the context, and write the final state at its end.

        Requires the folder's lock. If the files cannot be written, for example on a full disk, this is logged once.

        Parameters
        ----------
        folder : path
            Folder of the run.
        holds : callable
            Returns whether this run still owns the folder; otherwise nothing is written.
        begins_again : exception type, optional
            Type of error after which the work restarts with other settings.
        """
        folder = Path(folder)
        self._earlier = tuple(
            part for part in run_files.read_times(folder / run_files.TIMES) if part.begun != self._begun
        )
        self._folder, self._holds, ended = folder, holds, threading.Event()
        self._set_state("preparing")
        thread = threading.Thread(target=self._keep_up, args=(ended,), name="volseg heartbeat", daemon=True)
        thread.start()
        state: run_files.State = "finished"
        with reporting_first_error(partial(self._set_state, "failed")):
            try:
                yield
            except begins_again:
                state = "preparing"
                raise
            except (KeyboardInterrupt, SystemExit):
                state = "interrupted"
                raise
            except BaseException as fault:
                state = "failed"
                first = self._report_failure(fault)
                if first is not fault:
                    raise first from None  # it quotes the other error; chaining it would wait for that error again
                raise
            finally:
                ended.set()
                thread.join()
                self._set_state(state, self._message if state == "failed" else "")
                self._folder = None

    def _report_failure(self, fault: BaseException) -> BaseException:
        """Write and return the cause of the job's end: a broken connection does not tell which process died."""
        with deferring_signals():
            first = await_first_error(fault, get_supervision())
            self._set_state("failed", f"{type(first).__name__}: {first}")
        return first

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count the seconds of the block under ``name``, without those of nested spans."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.remove(name)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Mark that the final validation runs inside the context, and count its seconds."""
        self._set_state("validating")
        with self.span("final validation"):
            yield

    def on_training_begin(self, training: Training) -> None:
        """Start reporting progress."""
        self._training, self._waited_before = training, training.seconds_of_epoch[1]
        self._set_state("training")

    def on_validation_begin(self, training: Training) -> None:
        """Mark the start of a validation."""
        del training
        self._set_state("validating")

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Split the epoch's time into training, waiting and validation."""
        del training
        self._take_from_training(record.seconds_waited, record.seconds_validating)
        self._waited_before = 0.0
        if self._state != "training":  # else the thread writes it, as replacing a file takes milliseconds
            self._set_state("training")

    def on_training_end(self, training: Training) -> None:
        """Split the time of an unfinished epoch."""
        self._take_from_training(training.seconds_of_epoch[1], 0.0)
        self._waited_before = training.seconds_of_epoch[1]

    def _take_from_training(self, waited: float, validating: float) -> None:
        """Move an epoch's seconds of waiting and validation from the training's span to their own spans."""
        waited -= self._waited_before
        self._turn()
        with self._lock:
            self._spans["training"] -= waited + validating
            self._spans["waiting for data"] += waited
            self._spans["validation"] += validating

    def _set_state(self, state: run_files.State, message: str = "") -> None:
        self._state, self._message = state, message
        self._write()

    def _keep_up(self, ended: threading.Event) -> None:
        seen = get_milestone().count
        while not ended.wait(self._every_seconds):
            now = get_milestone().count
            if now != seen:
                seen = now
                self._write()

    def _turn(self) -> None:
        """Add the seconds since the last turn to the innermost open span."""
        with self._lock:
            now = time.perf_counter()
            if self._open:
                self._spans[self._open[-1]] += now - self._turned
            self._turned = now

    def _write(self) -> None:
        if self._folder is None or not self._holds():
            return
        self._turn()
        with self._lock:
            if self._folder is None:  # ended by another thread
                return
            seconds, spans = self.seconds, dict(self._spans)
            if self._state in run_files.ENDED:
                spans[run_files.THE_REST] = max(seconds - math.fsum(spans.values()), 0.0)
            part = run_files.RunPart(begun=self._begun, seconds=seconds, spans=spans)
            try:
                run_files.write_status(self._folder / run_files.STATUS, self._describe())
                run_files.write_times(self._folder / run_files.TIMES, [*self._earlier, part])
            except OSError as fault:
                # The next heartbeat tries again: otherwise a running training would still look like a hanging one
                # after a full disk has space again.
                if not self._is_mute:
                    logger.warning("%s: the status cannot be written (%s); the training continues", self._folder, fault)
                self._is_mute = True
            else:
                self._is_mute = False

    def _describe(self) -> run_files.RunStatus:
        told = {} if self._training is None else read_progress(self._training)
        doing = self._message if self._state in run_files.ENDED else str(get_milestone())
        return run_files.RunStatus(
            state=self._state,
            time=time.time(),
            started=self._begun,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_space=run_files.read_process_namespace(),
            message=doing,
            **told,
        )
