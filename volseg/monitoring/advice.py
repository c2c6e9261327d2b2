"""Estimate the duration of a training, and advise if it takes hours or waits for its batches."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from logging import DEBUG, INFO
from statistics import median
from typing import Any

from volseg.checkpointing.state import EpochRecord
from volseg.config.shipped import shipped_config_path
from volseg.data.augmented import AugmentedBatches, EpochBatches, GrowingBatches
from volseg.formatting import format_duration
from volseg.workflow.distributed import GroupBatches
from volseg.workflow.hooks import Hook
from volseg.workflow.training import Training

logger = logging.getLogger(__name__)

NUM_TIMED = 5
"""Number of timed batches, after a first one that allocates memory and chooses kernels."""

SHORT_SECONDS, LONG_SECONDS = 60, 2 * 3600
"""Least durations for a message, and for advice."""

SMALL = {"training.epochs": 5, "training.iterations": 50}
"""A small plan to try first on a CPU."""


class Duration(Hook):
    """Log once how long a training on a CPU will take and, if that is hours, how to shorten it.

    On a GPU a batch is computed after its end: there the first epoch tells (`volseg.monitoring.progress`).

    Parameters
    ----------
    clock : callable
        Seconds; that of the machine by default.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: list[float] | None = None

    def on_training_begin(self, training: Training) -> None:
        """Time the first batches of this process, on a CPU."""
        self._ends = [] if training.is_main_process and training.device.type == "cpu" else None

    def on_batch_end(self, training: Training, fields: Mapping[str, Any]) -> None:
        """Record the batch's end; after the last timed batch, log the estimate for the whole training."""
        del fields
        if self._ends is None:
            return
        self._ends.append(self._clock())
        if len(self._ends) <= NUM_TIMED:
            return
        seconds = median(end - begin for begin, end in zip(self._ends, self._ends[1:], strict=False))
        left = (training.epochs - training.epoch) * training.num_batches - training.position
        self._ends = None
        told = f"{left} batches of {format_duration(seconds)} will take about {format_duration(seconds * left)}"
        small = math.prod(SMALL.values())
        if seconds * left < LONG_SECONDS or left <= small:
            logger.log(INFO if seconds * left > SHORT_SECONDS else DEBUG, "%s on this CPU, validations aside", told)
            return
        logger.warning(
            "%s on this CPU, validations aside. Take a GPU, or a small plan first: %s takes about %s; "
            "%s trains Task04 in about a quarter of an hour on two cores",
            told,
            " ".join(f"--set {key}={value}" for key, value in SMALL.items()),
            format_duration(seconds * small),
            shipped_config_path("task04_cpu"),
        )


SHARE = 0.1
"""Share of an epoch's seconds that may pass waiting without a message."""


class WaitingAdvice(Hook):
    """Log once, after the first epoch with a long wait, what to change in the config.

    The first epoch of a process is not judged: kernels are compiled and batches recorded in it.
    """

    def __init__(self) -> None:
        self._epochs_seen = 0
        self._said = False

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Check the seconds that the epoch waited."""
        self._epochs_seen += 1
        waits = record.seconds_waited > SHARE * record.seconds
        if self._said or self._epochs_seen == 1 or not waits or not training.is_main_process:
            return
        remedy = advice(training.batches)
        if remedy is None:
            return
        self._said = True
        logger.warning(
            "epoch %d waited %.1f of its %.1f s for batches; %s",
            record.epoch + 1,
            record.seconds_waited,
            record.seconds,
            remedy,
        )


def advice(batches: object) -> str | None:
    """Return what makes ``batches`` come faster, by where their cases are kept.

    None where nothing waits for anything: a CPU makes its batches and trains on them by turns.
    """
    source: object | EpochBatches | None = batches.batches if isinstance(batches, GroupBatches) else batches
    if isinstance(source, GrowingBatches):
        source = source.of_epoch(0)  # of any size: they share the cases
    if not isinstance(source, AugmentedBatches):
        return "make them in more processes, or before the training"
    lighter = "lower augmentation.margin, so that less is read per patch"
    bank = source.batches.cache
    if bank.device.type != "cuda":
        return None
    if bank.on_device:
        return f"the cases lie on the GPU already, so it is the augmentation: {lighter}"
    away = f"{len(bank) - bank.num_on_device} of {len(bank)} cases lie in main memory"
    return f"{away}: let more lie on the GPU if it has room (data.keep: auto, data.device_limit), else {lighter}"
