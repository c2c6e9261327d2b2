"""Pass the numbers of a training to loggers; all loggers receive the same numbers."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from torch import Tensor

from volseg.checkpointing.state import EpochRecord
from volseg.errors import ConfigError
from volseg.monitoring.loggers import LoggedRun, Logger
from volseg.monitoring.memory import GIB, DeviceMemory, GpuMeter, gather_memory
from volseg.monitoring.pictures import draw_example, draw_patches
from volseg.workflow.hooks import Hook
from volseg.workflow.training import Training

logger = logging.getLogger(__name__)


class TrainingLog(Hook):
    """Log a training: numbers after each epoch, pictures after each validation, texts before the first epoch.

    Every process of a job needs one, as it logs the memory of all GPUs; only the leader calls its loggers. Of the
    batches, it logs only the patches of the first one.

    Parameters
    ----------
    loggers : Logger or sequence of Logger
        Called in this order.
    run : LoggedRun, optional
        Description of the run, sent first. The training gives the first step.
    texts : mapping
        Markdown by name.
    meter : GpuMeter, optional
        Meter of this process's GPUs.
    channel : int
        Channel of the images that pictures show.
    ends : bool
        Whether the loggers end with the training. Otherwise `end` is called later, with the scores of a final
        validation.
    """

    def __init__(
        self,
        loggers: Logger | Sequence[Logger],
        run: LoggedRun | None = None,
        *,
        texts: Mapping[str, str] | None = None,
        meter: GpuMeter | None = None,
        channel: int = 0,
        ends: bool = True,
    ) -> None:
        self._loggers = [loggers] if isinstance(loggers, Logger) else list(loggers)
        for one in self._loggers:
            if not isinstance(one, Logger):
                raise ConfigError(f"loggers must derive from volseg.monitoring.loggers.Logger, got {one!r}")
        self._run = run or LoggedRun(name="training")
        self._texts = dict(texts or {})
        self._meter = meter or GpuMeter()
        self._channel = channel
        self._ends = ends
        self._heard: list[Logger] = []
        self._shows_patches = False

    def on_training_begin(self, training: Training) -> None:
        """Begin every logger; loggers drop events after the epoch from which a training is resumed."""
        if not training.is_main_process:
            return
        run = replace(self._run, epoch=training.epoch, batches=training.num_batches)
        self._heard = []
        for one in self._loggers:
            self._heard.append(one)
            try:
                # A full disk must not end a training, now or later; other errors can be fixed now.
                self._tell(one, "begin", run, forgives=OSError)
            except BaseException:
                self._heard.remove(one)
                self.end()  # the loggers that have begun: otherwise a server would show a run that never ends
                raise
        for name, text in self._texts.items():
            self._tell_all("text", name, text)
        self._shows_patches = any(type(one).images is not Logger.images for one in self._heard)

    def on_batch_begin(self, training: Training, batch: Mapping[str, Any]) -> None:
        """Show the augmented patches of this process's first batch, with their labels."""
        if not self._shows_patches:
            return
        self._shows_patches = False
        # Only all processes together can gather a volume that is cut over them, but this hook runs in one.
        if "image" in batch and "label" in batch and not hasattr(batch["image"], "full_tensor"):
            try:
                picture = draw_patches(batch["image"], batch["label"], channel=self._channel)
            except Exception as fault:  # a failing picture must not end a training
                logger.warning("the first batch cannot be drawn (%s: %s)", type(fault).__name__, fault)
            else:
                self._tell_all("images", {"train/patches": picture}, training.epoch)

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Log the epoch's numbers, and pictures if it was validated."""
        memory = gather_memory(self._meter)
        if not self._heard:
            return
        values = {**list_scalars(record), **_list_memory(memory)}
        self._tell_all("scalars", values, record.epoch + 1)
        if record.score is not None and (pictures := self._draw(training)):
            self._tell_all("images", pictures, record.epoch + 1)

    def on_training_end(self, training: Training) -> None:
        """End the loggers, unless `end` is called later."""
        if self._ends:
            self.end(list_final(training.history[-1]) if training.finished and training.history else None)

    def end(self, scores: Mapping[str, float] | None = None) -> None:
        """End the loggers, with the final scores if there are any; a second call does nothing."""
        self._tell_all("end", dict(scores or {}))
        self._heard = []

    def _draw(self, training: Training) -> dict[str, Tensor]:
        """Return the pictures of the validated cases; results of a custom reader may be impossible to draw."""
        pictures = {}
        for example in getattr(training.validation, "examples", ()):
            try:
                pictures[f"val/{example.case}"] = draw_example(example, channel=self._channel)
            except Exception as fault:  # a failing picture must not end a training
                logger.warning("%s cannot be drawn (%s: %s)", example.case, type(fault).__name__, fault)
        return pictures

    def _tell_all(self, event: str, *arguments: Any) -> None:
        for one in list(self._heard):
            self._tell(one, event, *arguments)

    def _tell(self, one: Logger, event: str, *arguments: Any, forgives: type[Exception] = Exception) -> None:
        """Call one logger; if it fails, log the reason once and drop it, as a logger must not end a training."""
        try:
            # Each gets a copy: changes by one logger must not reach the others.
            getattr(one, event)(*(dict(told) if isinstance(told, Mapping) else told for told in arguments))
        except forgives as fault:
            self._heard.remove(one)
            told = f"{type(fault).__name__}: {fault}"
            if event not in ("begin", "end"):  # it has begun, and has open files or a run on a server
                told += _end_after_fault(one)
            logger.warning("logging by %s stopped after an error (%s); the training continues", one, told)


def _end_after_fault(one: Logger) -> str:
    """End a failed logger; return an addition to the message if that fails too."""
    try:
        one.end({})
    except Exception as fault:  # reported with the first error
        return f", and its end() failed: {type(fault).__name__}: {fault}"
    return ""


def list_scalars(record: EpochRecord) -> dict[str, float]:
    """Return the numbers of an epoch by tag, the same in TensorBoard, in ``history.jsonl`` and elsewhere."""
    scalars = {f"train/{name}": value for name, value in record.losses.items()}
    scalars["lr"] = record.learning_rate
    optional = {
        "train/soft_dice": record.soft_dice,
        "train/gradient_norm": record.gradient_norm,
        "val/dice_mean": record.score,
        "voxels_per_second": record.voxels_per_second,
        "gpu/peak_gib": None if record.peak_bytes is None else record.peak_bytes / GIB,
    }
    scalars |= {tag: value for tag, value in optional.items() if value is not None}
    scalars |= {f"val/{name}": value for name, value in record.scores.items()}
    scalars["time/epoch_seconds"] = record.seconds
    scalars["time/data_wait_seconds"] = record.seconds_waited
    if record.score is not None:
        scalars["time/validation_seconds"] = record.seconds_validating
    if record.batches:
        scalars["time/step_seconds"] = (record.seconds - record.seconds_waited) / record.batches
        scalars["time/step_data_wait_seconds"] = record.seconds_waited / record.batches
        scalars["time/step_validation_seconds"] = record.seconds_validating / record.batches
    return {tag: float(value) for tag, value in scalars.items()}  # custom metrics may return NumPy's numbers


RECENT = 5
"""Epochs whose mean duration gives the remaining time; for validations, which most epochs lack, the mean of all."""


def read_progress(training: Training) -> dict[str, Any]:
    """Return a training's progress by the fields of a `RunStatus`, without waiting for a device."""
    history = training.history
    times = [one.seconds for one in history[-RECENT:]], [one.seconds_validating for one in history]
    left = max(training.epochs - training.epoch - training.position / max(training.num_batches, 1), 0.0)
    return {
        "epoch": training.epoch,
        "epochs": training.epochs,
        "batch": training.position,
        "batches": training.num_batches,
        "loss": training.latest_losses.get("loss"),
        "score": next((one.score for one in reversed(history) if one.score is not None), None),
        "best": None if training.best is None else training.best.score,
        "seconds_left": left * sum(map(fmean, times)) if history else None,
        "voxels_per_second": history[-1].voxels_per_second if history else None,
        "memory_gib": max((device.reserved / GIB for device in GpuMeter().read()), default=None),
    }


def list_final(record: EpochRecord) -> dict[str, float]:
    """Return the final scores by tag of a training that ends with this epoch and is not validated again."""
    scores = {} if record.score is None else {"final/dice_mean": float(record.score)}
    return {"final/loss": record.losses["loss"], **scores}


def _list_memory(devices: Sequence[DeviceMemory]) -> dict[str, float]:
    """Return the peaks of every GPU, counted over all processes."""
    found: dict[str, Any] = {}
    for number, device in enumerate(devices):
        found[f"gpu/{number}/used_gib"] = device.used / GIB
        found[f"gpu/{number}/reserved_gib"] = device.reserved / GIB
    return found
