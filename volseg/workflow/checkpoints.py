"""Checkpoints: written whole or not at all, read without running anybody's code.

A checkpoint is one ``torch.save`` file of tensors and plain values. It is written beside its name, flushed to the disk
and renamed over it, so a full disk or a lost machine leaves the last good one in place. It is read with
``weights_only=True`` only.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from volseg.errors import CheckpointError
from volseg.files import replacing
from volseg.workflow.hooks import Hook
from volseg.workflow.records import EpochRecord
from volseg.workflow.state import FORMAT, TrainingState

if TYPE_CHECKING:
    from volseg.workflow.training import Training

__all__ = ["BEST", "LATEST", "Checkpoints", "load_checkpoint", "save_checkpoint"]

LATEST = "latest.pt"
BEST = "best.pt"


def save_checkpoint(state: TrainingState | Mapping[str, Any], path: Path) -> Path:
    """Write a training's state to ``path`` atomically.

    Raises
    ------
    CheckpointError
        If the disk is full or the folder cannot be written; what was at ``path`` before is still there.
    """
    content = TrainingState.from_checkpoint(state, f"what is to be written to {path}").as_checkpoint()
    try:
        with replacing(path) as partial:
            torch.save({"format": FORMAT, **content}, partial)
    except (OSError, RuntimeError) as fault:  # torch's writer raises RuntimeError when the disk is full
        kept = "the one written before is still there" if path.exists() else "no earlier one exists"
        raise CheckpointError(
            f"checkpoint {path} could not be written ({fault}); {kept}. Free space or choose another output folder, "
            "then go on with --resume"
        ) from fault
    return path


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> TrainingState:
    """Read a checkpoint that ``save_checkpoint`` wrote, of this format or an older one.

    Raises
    ------
    CheckpointError
        If the file is absent, damaged, of a newer format, lacks a part of the state, or holds anything but tensors and
        plain values.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; train first, or name another run folder")
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as fault:  # torch's unpickler runs into damaged bytes as IndexError, KeyError, struct.error ...
        reason = str(fault).partition("\n")[0] or type(fault).__name__
        raise CheckpointError(f"checkpoint {path} is damaged or not a volseg checkpoint ({reason})") from fault
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise CheckpointError(f"{path} holds no volseg checkpoint; expected the keys that `volseg train` writes")
    if content["format"] > FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}, this volseg reads up to {FORMAT}: update volseg")
    return TrainingState.from_checkpoint(content, path)


class Checkpoints(Hook):
    """Write ``latest.pt`` and ``best.pt`` while training.

    Parameters
    ----------
    folder : Path
        Where the checkpoints lie; made when the first one is written.
    every_minutes : float
        ``latest.pt`` is written at the end of an epoch when this much time has passed since the last one, and always
        after the last epoch, also where a hook ended the training, and at an interrupt. Time, not epochs: what a crash
        can cost is time.
    metadata : callable, optional
        Returns plain values to store beside the state (the config).
    """

    def __init__(
        self, folder: Path, *, every_minutes: float = 5.0, metadata: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        self.folder = folder
        self.every_seconds = 60 * every_minutes
        self.metadata = metadata or dict
        self._written_at = time.monotonic()
        self._written_epoch: int | None = None

    def on_best(self, training: "Training", record: EpochRecord) -> None:
        """Keep the weights of the best epoch."""
        del record
        self._write(training, BEST)

    def on_epoch_end(self, training: "Training", record: EpochRecord) -> None:
        """Keep the latest state once enough time has passed."""
        del record
        due = time.monotonic() - self._written_at >= self.every_seconds
        if due or training.finished:
            self._write(training, LATEST)
            self._written_at = time.monotonic()
            self._written_epoch = training.epoch

    def on_interrupt(self, training: "Training") -> None:
        """Keep the state between two batches, from which the training goes on as if nothing had happened."""
        self._write(training, LATEST)

    def on_training_end(self, training: "Training") -> None:
        """Keep the last epoch where a hook that was called after this one stopped the training there."""
        if training.finished and training.position == 0 and self._written_epoch != training.epoch:
            self._write(training, LATEST)

    def _write(self, training: "Training", name: str) -> None:
        state = training.state()  # on every process: a placed model may gather
        if training.is_main_process:
            save_checkpoint(replace(state, metadata=self.metadata()), self.folder / name)
