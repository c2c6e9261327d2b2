"""One line of warning where a training on a CPU will take hours: said after its first batches, not after a night."""

import logging
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from volseg.config.shipped import find_shipped
from volseg.workflow.hooks import Hook
from volseg.workflow.training import Training

__all__ = ["DurationWarning", "describe_duration"]

logger = logging.getLogger(__name__)

NUM_TIMED = 5
"""Batches, after a first one in which memory is taken and libraries choose their kernels."""

LONG_SECONDS = 2 * 3600
"""From which on it is said."""


class DurationWarning(Hook):
    """Say once how long a training on a CPU will take, if that is hours, and what to do about it.

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
        """Note when the batch was done; after the last one that is timed, say how long all will take."""
        del fields
        if self._ends is None:
            return
        self._ends.append(self._clock())
        if len(self._ends) <= NUM_TIMED:
            return
        seconds = median(end - begin for begin, end in zip(self._ends, self._ends[1:], strict=False))
        left = (training.epochs - training.epoch) * training.num_batches - training.position
        self._ends = None
        if seconds * left >= LONG_SECONDS:
            logger.warning(
                "%d batches of %.1f s will take about %s on this CPU, validations aside. Take a GPU, or fewer and "
                "smaller batches and a smaller network (training.epochs, training.iterations, patch.batch, network): "
                "%s trains Task04 in about a quarter of an hour on two cores",
                left,
                seconds,
                describe_duration(seconds * left),
                find_shipped("task04_cpu"),
            )


def describe_duration(seconds: float) -> str:
    """Return a duration in words, in the unit that suits it.

    >>> describe_duration(31 * 3600), describe_duration(40 * 60), describe_duration(300 * 3600)
    ('31 h', '40 minutes', '12 days')
    """
    hours = seconds / 3600
    if hours < 2:
        return f"{seconds / 60:.0f} minutes"
    return f"{hours:.0f} h" if hours < 72 else f"{hours / 24:.0f} days"
