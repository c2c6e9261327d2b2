"""Send the numbers of a training to loggers through one interface.

A custom logger derives from `Logger`, overrides the events of interest, and is registered like any component (kind
``logger``). Packages that only one logger needs are imported when that logger is made.
"""

import itertools
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard.summary import hparams, image, scalar
from torch.utils.tensorboard.summary import text as make_text

from volseg.config.registry import Registry
from volseg.errors import ConfigError
from volseg.monitoring.run_files import HISTORY, EpochLine, append_history, begin_history


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """Description of a training, which a logger receives before the first number."""

    name: str
    id: str = field(default_factory=lambda: uuid4().hex[:12])
    """Equal for all parts of a resumed training."""
    folder: Path | None = None
    """The run folder; None for a `Training` without one."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Every setting as plain values, in the sections of the YAML file."""
    batches: int = 0
    """Batches per epoch."""
    epoch: int = 0
    """Completed epochs; more than 0 if the training is resumed."""

    def require_folder(self, logger: str) -> Path:
        """Return the run folder, or raise a `ConfigError` if the training has none."""
        if self.folder is None:
            raise ConfigError(f"logger {logger} writes to the run folder, but this training has none; set its path")
        return self.folder


class Logger:
    """Base of loggers; override the events of interest.

    Only the leading process of a job calls a logger. An error before the first batch ends the training; a later error
    is logged once, the logger is closed, and the training continues without it.
    """

    def begin(self, run: LoggedRun) -> None:
        """Start logging, before the first batch; a resumed training repeats the numbers after ``run.epoch``."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers of an epoch by tag, after its end; ``step`` is the epoch, counted from 1."""

    def images(self, pictures: Mapping[str, Tensor], step: int) -> None:
        """Log pictures by tag (uint8, ``(3, height, width)``), before the first batch and after each validation."""

    def text(self, name: str, text: str) -> None:
        """Log a text in Markdown, such as the network or the config."""

    def end(self, scores: Mapping[str, float]) -> None:
        """Log the final scores by tag, after the last event; empty if the training did not reach its end.

        Called once after every successful `begin`, also after an error of the logger.
        """


class History(Logger):
    """Write the numbers of each epoch as a line of JSON, by default to ``history.jsonl`` of the run folder.

    Parameters
    ----------
    file : path, optional
        Replaces the file in the run folder.
    """

    def __init__(self, file: str | Path | None = None) -> None:
        self.file = None if file is None else Path(file)
        self._batches = 0
        self._lines: TextIO | None = None

    def begin(self, run: LoggedRun) -> None:
        """Drop the lines of epochs that will be trained again."""
        self._batches = run.batches
        # Set for every training, so that a logger of a second training does not change the file of the first.
        file = run.require_folder("history") / HISTORY if self.file is None else self.file
        file.parent.mkdir(parents=True, exist_ok=True)
        begin_history(file, run.epoch)
        # Kept open: if the folder was removed and now belongs to another run, it gets no line of this run.
        self._lines = file.open("a", encoding="utf-8")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write the line of an epoch."""
        assert self._lines is not None, "begin was not called"
        line = EpochLine(epoch=step, step=step * self._batches, time=time.time(), scalars=dict(values))
        append_history(self._lines, line)

    def end(self, scores: Mapping[str, float]) -> None:
        """Close the file."""
        del scores
        if self._lines is not None:
            self._lines.close()


def flatten(settings: Mapping[str, Any], path: str = "") -> dict[str, bool | int | float | str]:
    """Return nested settings by dotted names, with values that every logger can show.

    >>> flatten({"name": "a", "patch": {"size": (8, 8, 8)}, "losses": [{"name": "Dice"}], "clip": None})
    {'name': 'a', 'patch.size': '(8, 8, 8)', 'losses.0.name': 'Dice', 'clip': 'None'}
    """
    flat: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, Sequence) and value and all(isinstance(one, Mapping) for one in value):
            flat |= flatten({str(number): one for number, one in enumerate(value)}, f"{name}.")
        else:
            flat[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


NUMBERS = itertools.count()
"""Distinguishes trainings that one process starts within the same second."""

FINAL, SHOWN = "final/dice_mean", ("val/dice_mean", "train/loss")
"""Scalars next to the settings in the tab HPARAMS."""


class TensorBoard(Logger):
    """Write event files for ``tensorboard --logdir FOLDER``.

    They contain scalars, images with lines around label and prediction, texts, and the settings with the final scores
    (tab HPARAMS). docs/monitoring.md lists the tags.

    Parameters
    ----------
    folder : path, optional
        Folder of the event files, instead of the run folder's ``tensorboard``; a resumed training adds to them.
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
        """Open the event file; drop events after the epoch from which a training is resumed."""
        # Set for every training, so that a logger of a second training does not change the curves of the first.
        self._place = run.require_folder("tensorboard") / "tensorboard" if self.folder is None else self.folder
        self._settings, self._epoch = flatten(run.config), run.epoch
        self._events = _EventFile(self._place, purge_step=run.epoch + 1 if run.epoch else 0)
        if self._settings:  # now, so that a killed training has settings too
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
        """Write the final scores next to the settings, and close the event file."""
        if self._events is not None and self._events.is_open:
            ended = [hparams(self._settings, {})[2]] if self._settings else []
            self._write([*(scalar(tag, value) for tag, value in scores.items()), *ended], self._epoch)
            self._events.close()
        self._events = None

    def _write(self, summaries: Sequence[Any], step: int) -> None:
        assert self._events is not None, "begin was not called"
        self._events.write(summaries, step)


class _EventFile:
    """An event file of TensorBoard, written without a thread.

    torch's ``SummaryWriter``, and the ``EventFileWriter`` of TensorBoard that it uses, write in a thread. A full disk
    ends that thread: Python prints its traceback, which only a hook for all threads could suppress, and the training
    sees the error at a later write or at the close. This class uses their records and summaries without the thread.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard recognises event files by this name, and reads the latest of a folder last.
        name = (
            f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{next(NUMBERS)}"
        )
        self._file = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        begin = [Event(file_version="brain.Event:2")]
        if purge_step:
            begin.append(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self._write(begin)

    @property
    def is_open(self) -> bool:
        return not self._file.closed

    def write(self, summaries: Sequence[Any], step: int) -> None:
        self._write([Event(summary=summary, step=step) for summary in summaries])

    def _write(self, events: Sequence[Any]) -> None:
        try:
            for event in events:
                event.wall_time = time.time()
                self._records.write(event.SerializeToString())
            self._file.flush()
        except OSError:
            with suppress(OSError):  # the buffer cannot be written either
                self.close()
            raise

    def close(self) -> None:
        self._file.close()


class MLflow(Logger):
    """Send numbers, pictures and texts to an MLflow server, or to a folder.

    Parameters
    ----------
    experiment : str
        Experiment of the run.
    uri : str, optional
        Address of the server or the store, such as ``http://127.0.0.1:5000``; default ``$MLFLOW_TRACKING_URI``, else a
        local store of MLflow.
    """

    def __init__(self, experiment: str = "volseg", uri: str | None = None) -> None:
        self._client = import_module("mlflow").MlflowClient(tracking_uri=uri)
        self._experiment = experiment
        self._epoch = 0

    def begin(self, run: LoggedRun) -> None:
        """Start a run, or continue the run with this id."""
        found = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        before = self._client.search_runs([number], f"tags.volseg = '{run.id}'")
        begun = before or [self._client.create_run(number, run_name=run.name, tags={"volseg": run.id})]
        self._id, self._epoch = begun[0].info.run_id, run.epoch
        for key, value in {} if before else flatten(run.config).items():
            self._client.log_param(self._id, key, value)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Send the epoch's numbers, without NaN, which SQL stores reject."""
        self._epoch = step
        for tag, value in values.items():
            if math.isfinite(value):
                self._client.log_metric(self._id, tag, value, step=step)

    def images(self, pictures: Mapping[str, Tensor], step: int) -> None:
        """Send pictures."""
        for tag, picture in pictures.items():
            self._client.log_image(self._id, picture.permute(1, 2, 0).numpy(), f"{tag}_{step:05d}.png")

    def text(self, name: str, text: str) -> None:
        """Send a text."""
        self._client.log_text(self._id, text, f"{name}.md")

    def end(self, scores: Mapping[str, float]) -> None:
        """Send the final scores; a training without them failed or was interrupted."""
        self.scalars(scores, self._epoch)
        self._client.set_terminated(self._id, "FINISHED" if scores else "KILLED")


class WeightsAndBiases(Logger):
    """Send numbers, pictures and texts to Weights & Biases, or keep them in the run folder (``mode: offline``).

    Parameters
    ----------
    project : str
        Project of the run.
    settings
        Other arguments of ``wandb.init``: ``mode``, ``entity``, ``tags``, ``group`` ...
    """

    def __init__(self, project: str = "volseg", **settings: Any) -> None:
        self._wandb = import_module("wandb")
        self._settings = {"project": project, **settings}

    def begin(self, run: LoggedRun) -> None:
        """Start a run, or continue the run with this id."""
        named = {"name": run.name, "id": run.id, "resume": "allow", "dir": run.folder, "config": dict(run.config)}
        self._run = self._wandb.init(**{**named, **self._settings})

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Send the epoch's numbers."""
        self._run.log({**values, "epoch": step})

    def images(self, pictures: Mapping[str, Tensor], step: int) -> None:
        """Send pictures."""
        drawn = {tag: self._wandb.Image(picture.permute(1, 2, 0).numpy()) for tag, picture in pictures.items()}
        self._run.log({**drawn, "epoch": step})

    def text(self, name: str, text: str) -> None:
        """Store a text next to the settings."""
        self._run.config.update({f"text/{name}": text}, allow_val_change=True)

    def end(self, scores: Mapping[str, float]) -> None:
        """Send the final scores, and wait until all data have arrived."""
        self._run.summary.update(dict(scores))
        self._run.finish()


LOGGERS = Registry(
    "logger", {"tensorboard": TensorBoard, "history": History, "wandb": WeightsAndBiases, "mlflow": MLflow}
)
"""Loggers that ``logging.loggers`` in a config may name."""


def build_logger(spec: Mapping[str, Any]) -> Logger:
    """Return the logger that a config names.

    Raises
    ------
    ConfigError
        For an unknown name or parameter, a package that is not installed, or a component that is not a `Logger`.
    """
    logger = LOGGERS.build(spec)
    if not isinstance(logger, Logger):
        raise ConfigError(
            f"logger {spec['name']} must be a volseg.monitoring.loggers.Logger, got a {type(logger).__name__}; derive "
            "its class"
        )
    return logger
