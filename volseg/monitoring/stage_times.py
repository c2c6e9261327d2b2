"""Record when each GPU of a pipeline works: draw three steps of a training, and log their idle shares."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from volseg.checkpointing.state import EpochRecord
from volseg.monitoring.training_log import TrainingLog
from volseg.parallel import ModelParallel
from volseg.parallel.pipeline import PipelineStrategy
from volseg.parallel.timeline import Interval, Timeline, compute_idle_shares
from volseg.workflow.hooks import Hook
from volseg.workflow.training import Training

logger = logging.getLogger(__name__)

FIRST, COUNT = 40, 3
"""Of the batches that are watched: kernels are chosen, and stages recorded, by then."""

WIDTH, ROW, LEFT = 1100, 34, 130
"""Of the picture, in pixels."""

COLOURS = {"forward": (70, 130, 190), "backward": (215, 120, 60)}


class StageTimes(Hook):
    """Watch a few steps of a pipeline in its first epoch, and show the working times of each GPU.

    Scalars ``gpu/N/idle_share``, the mean over the steps; the picture ``timeline`` of the last one. Steps that
    are watched wait for the devices; no other step does anything for it. Of other strategies nothing is shown, see
    `volseg.parallel.timeline`.

    Parameters
    ----------
    log : TrainingLog
        Where the picture goes.
    """

    def __init__(self, log: TrainingLog) -> None:
        self._log = log
        log.ask(self.scalars)
        self._watched: list[list[Interval]] = []
        self._watching: AbstractContextManager[Timeline] | None = None
        self._timeline: Timeline | None = None
        self._first_epoch = 0

    def on_training_begin(self, training: Training) -> None:
        """Watch this part's first epoch."""
        self._first_epoch = training.epoch

    def on_batch_begin(self, training: Training, batch: Mapping[str, Any]) -> None:
        """Watch the step, if it is one of those."""
        del batch
        first = max(0, min(FIRST, training.num_batches - COUNT))
        due = training.epoch == self._first_epoch and first <= training.position < first + COUNT
        if not due or not training.is_main_process:
            return
        strategy = training.network.strategy if isinstance(training.network, ModelParallel) else None
        if isinstance(strategy, PipelineStrategy):
            self._timeline = Timeline(strategy.devices)
            self._watching = self._timeline.watching()
            self._watching.__enter__()

    def on_batch_end(self, training: Training, fields: Mapping[str, Any]) -> None:
        """Read what the devices noted."""
        del training, fields
        if self._watching is not None and self._timeline is not None:
            self._watching.__exit__(None, None, None)
            self._watching = None
            if intervals := self._timeline.read():
                self._watched.append(intervals)

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Show the last of the watched steps, once."""
        del training
        if not self._watched or record.epoch != self._first_epoch:
            return
        try:
            picture = draw_intervals(self._watched[-1])
        except Exception as fault:  # whatever it is, a picture is no reason to end a training
            logger.warning("no timeline of the pipeline (%s: %s)", type(fault).__name__, fault)
            return
        self._log.add_images({"timeline": picture}, record.epoch + 1)

    def on_training_end(self, training: Training) -> None:
        """Watch no longer, where a step failed."""
        del training
        if self._watching is not None:
            self._watching.__exit__(None, None, None)
            self._watching = None

    def scalars(self) -> dict[str, float]:
        """Return the idle share of each GPU, the mean over the watched steps."""
        shares = [compute_idle_shares(intervals) for intervals in self._watched]
        return {
            f"gpu/{stage}/idle_share": sum(share[stage] for share in shares) / len(shares)
            for stage in (shares[0] if shares else ())
        }


def draw_intervals(intervals: Sequence[Interval]) -> Tensor:
    """Return a picture ``(3, height, width)`` of uint8: a row for each stage, a box for each micro-batch."""
    stages = sorted({interval.stage for interval in intervals})
    places = {interval.stage: interval.device for interval in intervals}
    first, last = min(one.begin for one in intervals), max(one.end for one in intervals)
    scale = (WIDTH - LEFT - 10) / max(last - first, 1e-9)
    picture = Image.new("RGB", (WIDTH, ROW * (len(stages) + 1)), "white")
    drawn = ImageDraw.Draw(picture)
    for row, stage in enumerate(stages):
        drawn.text((8, row * ROW + 10), f"stage {stage}, {places[stage]}", fill="black")
    for one in intervals:
        top = stages.index(one.stage) * ROW
        left, right = (LEFT + (moment - first) * scale for moment in (one.begin, one.end))
        drawn.rectangle((left, top + 3, max(right, left + 1), top + ROW - 3), fill=COLOURS[one.what], outline="white")
        if right - left > 16:
            drawn.text((left + 3, top + 10), str(one.micro_batch), fill="white")
    drawn.text((LEFT, ROW * len(stages) + 10), f"{last - first:.2f} ms; blue forward, orange backward", fill="black")
    size = (picture.height, picture.width, 3)
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).reshape(size).permute(2, 0, 1)
