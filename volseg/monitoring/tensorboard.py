"""A training in TensorBoard: numbers per epoch, and slices of a few validation cases."""

import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import image, scalar

from volseg.monitoring.pictures import draw_example
from volseg.workflow.hooks import Hook
from volseg.workflow.records import EpochRecord
from volseg.workflow.training import Training

__all__ = ["TensorBoard"]

logger = logging.getLogger(__name__)

NUMBERS = itertools.count()
"""Two trainings of one process may begin within a second."""


class TensorBoard(Hook):
    """Write scalars and images that ``tensorboard --logdir FOLDER`` shows.

    Tags: ``train/loss`` (and each further loss), ``lr``, ``val/dice_mean``, ``val/dice/LABEL`` and whatever else a
    validation measures by label, ``val/undefined/LABEL`` (cases without a distance), ``time/epoch_seconds``,
    ``time/data_wait_seconds``, ``gpu/peak_gib``, ``memory/...`` (`FirstSteps`); images ``val/CASE`` with lines around
    label and prediction, in the slice along each axis that holds most label voxels (`draw_slices`).

    Parameters
    ----------
    folder : Path
        Where the event files lie; a resumed training adds to them. Where they cannot be written, on a full disk say,
        that is said once and the training goes on without.
    more : callable, optional
        Returns further scalars by tag, after each epoch.
    """

    def __init__(self, folder: Path, *, more: Callable[[], Mapping[str, float]] = dict) -> None:
        self.folder, self._more = folder, more
        self._events: _EventFile | None = None

    def on_training_begin(self, training: Training) -> None:
        """Open the event file; events past the epoch from which a training is resumed are dropped."""
        if training.is_main_process:
            self._attempt(lambda: self._open(purge_step=training.epoch))

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Write the epoch's numbers, and pictures where it was validated."""
        if self._events is None:
            return
        summaries = [scalar(tag, value) for tag, value in {**_scalars(record), **self._more()}.items()]
        if record.score is not None:
            summaries += [
                image(f"val/{example.case}", draw_example(example), dataformats="CHW")
                for example in getattr(training.validation, "examples", ())
            ]
        self._attempt(lambda: self._write(summaries, record.epoch))

    def on_training_end(self, training: Training) -> None:
        """Close the event file."""
        del training
        if self._events is not None:
            self._attempt(self._events.close)
            self._events = None

    def _open(self, purge_step: int) -> None:
        self._events = _EventFile(self.folder, purge_step)

    def _write(self, summaries: Sequence[Any], step: int) -> None:
        assert self._events is not None
        self._events.write([Event(summary=summary, step=step) for summary in summaries])

    def _attempt(self, act: Callable[[], None]) -> None:
        """Write, or say once why it cannot be: curves are no reason to end a training."""
        try:
            act()
        except OSError as fault:
            logger.warning("%s: no more events for TensorBoard, %s; the training goes on", self.folder, fault)
            events, self._events = self._events, None
            if events is not None:
                with suppress(OSError):  # what is still in the buffer cannot be written either
                    events.close()


class _EventFile:
    """What TensorBoard reads, written at once.

    torch's ``SummaryWriter``, and the ``EventFileWriter`` of TensorBoard that it uses, write in a thread. A full disk
    ends that thread: Python prints its traceback, which only a hook for all threads could keep back, and the training
    meets the fault at some later write, or at the close. Their records and summaries are used here, the thread is not.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The name by which TensorBoard knows such files; of several in a folder it reads the latest last.
        name = (
            f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{next(NUMBERS)}"
        )
        self._file = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        begin = [Event(file_version="brain.Event:2")]
        if purge_step:
            begin.append(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        try:
            self.write(begin)
        except OSError:
            with suppress(OSError):  # what is in the buffer cannot be written either
                self.close()
            raise

    def write(self, events: Sequence[Any]) -> None:
        for event in events:
            event.wall_time = time.time()
            self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _scalars(record: EpochRecord) -> dict[str, float]:
    scalars = {f"train/{name}": value for name, value in record.losses.items()}
    scalars["lr"] = record.learning_rate
    scalars["time/epoch_seconds"] = record.seconds
    scalars["time/data_wait_seconds"] = record.seconds_waited
    if record.score is not None:
        scalars["val/dice_mean"] = record.score
    scalars |= {f"val/{name}": value for name, value in record.scores.items()}
    if record.peak_bytes is not None:
        scalars["gpu/peak_gib"] = record.peak_bytes / 2**30
    return scalars
