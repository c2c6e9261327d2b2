"""Show the progress of a training as a bar or as a line per epoch, and of lists of cases as a bar."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from volseg.checkpointing.state import EpochRecord
from volseg.formatting import format_duration
from volseg.monitoring.console import FIELDS, Bar, shows_bars
from volseg.monitoring.run_files import format_speed
from volseg.monitoring.training_log import list_scalars, read_progress
from volseg.workflow.hooks import Hook
from volseg.workflow.training import Training

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

EVERY_SECONDS = 1.0
"""Seconds between two updates of the text after the training's bar."""


def progress(items: Iterable[Item], title: str, total: int | None = None) -> Iterator[Item]:
    """Yield ``items`` while a bar called ``title`` counts them."""
    with Bar(title, total) as bar:
        for item in items:
            yield item
            bar.advance()


@contextmanager
def count_up(total: int, title: str, *, done: int = 0) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each of ``total`` cases, of which ``done`` are complete."""
    with Bar(title, total, done=done) as bar:
        yield bar.advance


@contextmanager
def show_bytes() -> Iterator[Callable[[str, int, int | None], None]]:
    """Yield a function that shows a bar per task, given its name, the bytes done and their total."""
    bar: Bar | None = None

    def show(title: str, done: int, total: int | None) -> None:
        nonlocal bar
        if bar is None or bar.title != title:
            if bar is not None:
                bar.close()
            bar = Bar(title, total, done=done, unit="B")
        bar.set(done, total=total)  # less than before if a server starts again

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


class Progress(Hook):
    """Show a training's progress: a bar on a terminal, elsewhere a line per epoch in the log of this module.

    It shows epoch and batch, the newest loss, Dice, voxels per second, the time left, and the memory of the fullest GPU
    of this process. It never waits for a device.
    """

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._next = 0.0
        self._began, self._batches = 0.0, 0

    def on_training_begin(self, training: Training) -> None:
        """Open the bar at the training's position."""
        if not training.is_main_process:
            return
        self._bar = Bar(_name_epoch(training), training.num_batches, done=training.position, unit="batch")

    def on_epoch_begin(self, training: Training) -> None:
        """Restart the measurement of the speed, which excludes validations."""
        del training
        self._began, self._batches = time.perf_counter(), 0

    def on_batch_end(self, training: Training, fields: Mapping[str, Any]) -> None:
        """Count the batch."""
        del fields
        self._batches += 1
        now = time.perf_counter()
        if self._bar is None or now < self._next:
            return
        self._next = now + EVERY_SECONDS
        self._show(training, self._batches / max(now - self._began, 1e-9))

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Show the newest score; log a line if there is no bar."""
        if self._bar is None:
            return
        self._show(training, record.batches / max(record.seconds, 1e-9))
        if not shows_bars():
            fields = {"epoch": record.epoch + 1, "epochs": training.epochs, "scalars": list_scalars(record)}
            logger.info("%s", self._describe(training, record), extra={FIELDS: fields})

    def on_training_end(self, training: Training) -> None:
        """Close the bar."""
        del training
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, training: Training, batches_per_second: float) -> None:
        assert self._bar is not None
        progress = read_progress(training)
        told = [f"{name} {value:.3f}" for name, value in training.latest_losses.items()]
        told += _describe_scores(progress)
        if training.voxels_per_batch is not None:
            told.append(format_speed(training.voxels_per_batch * batches_per_second))
        told += _describe_left(progress)
        is_over = training.epoch >= training.epochs
        done = training.num_batches if is_over else training.position
        self._bar.set(done, title=_name_epoch(training), told=", ".join(told))

    def _describe(self, training: Training, record: EpochRecord) -> str:
        """Return the line of an epoch."""
        progress = read_progress(training)
        told = [f"{name} {value:.4f}" for name, value in record.losses.items()]
        told += [] if record.soft_dice is None else [f"soft Dice {record.soft_dice:.4f}"]
        told += [] if record.score is None else _describe_scores(progress)
        if record.voxels_per_second is not None:
            told.append(format_speed(record.voxels_per_second))
        parts = [f"{record.seconds_waited:.1f} s waiting"]
        parts += [f"{record.seconds_validating:.1f} s validating"] if record.score is not None else []
        told.append(f"{record.seconds + record.seconds_validating:.1f} s ({', '.join(parts)})")
        told += _describe_left(progress)
        return f"epoch {record.epoch + 1}/{training.epochs}: {', '.join(told)}"


def _name_epoch(training: Training) -> str:
    return f"epoch {min(training.epoch + 1, training.epochs)}/{training.epochs}"


def _describe_scores(progress: Mapping[str, Any]) -> list[str]:
    """Return the score of the last validation and the best score."""
    score, best = progress["score"], progress["best"]
    return [] if score is None else [f"Dice {score:.4f} (best {score if best is None else best:.4f})"]


def _describe_left(progress: Mapping[str, Any]) -> list[str]:
    """Return the remaining time of the training, and the reserved memory of the fullest GPU."""
    left = [f"{format_duration(progress['seconds_left'])} left"] if progress["seconds_left"] else []
    return [*left, *([f"{progress['memory_gib']:.1f} GiB"] if progress["memory_gib"] else [])]
