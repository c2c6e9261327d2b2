"""A training in TensorBoard: numbers per epoch, slices of a few validation cases, settings with their final scores."""

import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard.summary import hparams, image, scalar
from torch.utils.tensorboard.summary import text as make_text

from volseg.monitoring.loggers import LoggedRun, Logger, flatten

__all__ = ["TensorBoard"]

NUMBERS = itertools.count()
"""Two trainings of one process may begin within a second."""

FINAL, SHOWN = "final/dice_mean", ("val/dice_mean", "train/loss")
"""Scalars that the tab HPARAMS shows beside the settings."""


class TensorBoard(Logger):
    """Write what ``tensorboard --logdir FOLDER`` shows.

    Scalars, images with lines around label and prediction, texts, and the settings with the final scores in the tab
    HPARAMS; which tags there are says docs/monitoring.md.

    Parameters
    ----------
    folder : path, optional
        Where the event files lie, in place of the run folder's ``tensorboard``; a resumed training adds to them.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._place = self.folder
        self._settings: dict[str, Any] = {}
        self._epoch = 0
        self._events: _EventFile | None = None

    def __str__(self) -> str:
        return f"TensorBoard ({self._place})"

    def begin(self, run: LoggedRun) -> None:
        """Open the event file; events past the epoch from which a training is resumed are dropped."""
        # Found anew for every training: a logger that hears of a second one leaves the first one's curves alone.
        self._place = run.require_folder("tensorboard") / "tensorboard" if self.folder is None else self.folder
        self._settings, self._epoch = flatten(run.config), run.epoch
        self._events = _EventFile(self._place, purge_step=run.epoch + 1 if run.epoch else 0)
        if self._settings:  # at once: a training that is killed has settings too
            self._write(hparams(self._settings, dict.fromkeys((FINAL, *SHOWN), 0.0))[:2], 0)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write the epoch's numbers."""
        self._epoch = step
        self._write([scalar(tag, value) for tag, value in values.items()], step)

    def images(self, pictures: Mapping[str, Tensor], step: int) -> None:
        """Write pictures."""
        self._write([image(tag, picture, dataformats="CHW") for tag, picture in pictures.items()], step)

    def text(self, name: str, text: str) -> None:
        """Write a text for the tab TEXT."""
        self._write([make_text(name, text)], 0)

    def end(self, scores: Mapping[str, float]) -> None:
        """Write the final scores beside the settings, and close the event file."""
        if self._events is None:
            return
        ended = [hparams(self._settings, {})[2]] if self._settings else []
        self._write([*(scalar(tag, value) for tag, value in scores.items()), *ended], self._epoch)
        self._events.close()
        self._events = None

    def _write(self, summaries: Sequence[Any], step: int) -> None:
        assert self._events is not None, "begin was not called"
        try:
            self._events.write([Event(summary=summary, step=step) for summary in summaries])
        except OSError:
            with suppress(OSError):  # what is still in the buffer cannot be written either
                self._events.close()
            self._events = None
            raise


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
