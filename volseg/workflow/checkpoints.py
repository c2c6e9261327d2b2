"""Checkpoints: written whole or not at all, read without running anybody's code.

A checkpoint is one ``torch.save`` file of tensors and plain values. It is written beside its name, flushed to the disk
and renamed over it, so a full disk or a lost machine leaves the last good one in place. `read_torch_file` reads it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from volseg.errors import CheckpointError, NonFiniteLossError
from volseg.exchange.torch_file import read_torch_file
from volseg.files import replacing, require_writable
from volseg.parallel.devices import is_main_process
from volseg.workflow.background import BackgroundWriter, HostCopies, Snapshot
from volseg.workflow.epoch_losses import NORM
from volseg.workflow.hooks import Hook
from volseg.workflow.records import EpochRecord
from volseg.workflow.state import FORMAT, TrainingState

if TYPE_CHECKING:
    from volseg.workflow.training import Training

__all__ = ["BEST", "LATEST", "PREVIOUS", "Checkpoints", "load_checkpoint", "parse_checkpoint", "save_checkpoint"]

LATEST = "latest.pt"
PREVIOUS = "previous.pt"
"""What was the latest one before."""
BEST = "best.pt"


def save_checkpoint(
    state: TrainingState | Mapping[str, Any],
    path: str | Path,
    *,
    previous: str | Path | None = None,
    make_folder: bool = True,
) -> Path:
    """Write a training's state to ``path`` atomically.

    Parameters
    ----------
    state : TrainingState or mapping
        What is written; as a mapping, what `Training.state_dict` returns.
    path : path
        Of the checkpoint.
    previous : path, optional
        In the same folder; takes the checkpoint that ``path`` was before.
    make_folder : bool
        Make the folder where it is not there.

    Raises
    ------
    CheckpointError
        If the disk is full or the folder cannot be written; what was at ``path`` before is still there.
    """
    path = Path(path)
    content = TrainingState.from_checkpoint(state, f"what is to be written to {path}").as_checkpoint()
    try:
        # Into an open file: given a path torch writes in C++ without a pause in which Python could train on.
        with (
            replacing(path, previous=previous, make_folder=make_folder) as partial,
            partial.open("wb") as file,
        ):
            torch.save({"format": FORMAT, **content}, file)
    except (OSError, RuntimeError) as fault:
        # On a full disk torch's writer raises another error over the system's, about the position in the file.
        reason = fault.__context__ if isinstance(fault.__context__, OSError) else fault
        kept = "the one written before is still there" if path.exists() else "no earlier one exists"
        raise CheckpointError(
            f"checkpoint {path} could not be written ({reason}); {kept}. Free space or choose another output folder, "
            "then go on with --resume"
        ) from fault
    return path


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> TrainingState:
    """Read a checkpoint that ``save_checkpoint`` wrote, of this format.

    Raises
    ------
    CheckpointError
        If the file is absent, damaged in any bit, of a newer format, lacks a part of the state, or holds anything but
        tensors and plain values.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}; train first, or name another run folder")
    if not path.is_file():
        raise CheckpointError(f"{path} is no file and hence no checkpoint; remove it, or name another run folder")
    state = parse_checkpoint(read_torch_file(path, device), path)
    if state is None:
        raise CheckpointError(f"{path} holds no volseg checkpoint; expected the keys that `volseg train` writes")
    return state


def parse_checkpoint(content: Any, path: Path) -> TrainingState | None:
    """Return the training's state in a file's content; None if it holds none.

    Raises
    ------
    CheckpointError
        If the state is of another format or not whole.
    """
    layout = content.get("format") if isinstance(content, Mapping) else None
    if isinstance(layout, int):
        if layout != FORMAT:
            raise CheckpointError(f"{path} has format {layout}, this volseg reads {FORMAT}: update volseg")
    elif not (isinstance(content, Mapping) and isinstance(content.get("model"), Mapping) and "average" in content):
        return None  # neither what `save_checkpoint` wrote nor what `Training.state_dict` returned
    return TrainingState.from_checkpoint(content, path)


class Checkpoints(Hook):
    """Write ``latest.pt`` and ``best.pt`` while training, which goes on meanwhile.

    The state is copied between two batches and written by a thread. A fault of the thread, such as a full disk, is
    raised after the next batch. The latest checkpoint before the last one is kept as ``previous.pt``.

    Parameters
    ----------
    folder : path
        Where the checkpoints lie; made when the first one is written.
    every_minutes : float
        ``latest.pt`` is written when this much time has passed since the last one, in the middle of an epoch too, and
        always after the last epoch, also where a hook ended the training, and at an interrupt. Time, not epochs: what
        a crash can cost is time. One is written after the other, however short the time.
    metadata : callable, optional
        Returns plain values to store beside the state (the config).
    require_folder : callable, optional
        Called before each writing, in its thread; raises if nothing may be written to the folder any more.

    Raises
    ------
    ConfigError
        If the folder cannot be written to: now, and not when there is a checkpoint to lose.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_minutes: float = 5.0,
        metadata: Callable[[], dict[str, Any]] | None = None,
        require_folder: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder = require_writable(folder) if is_main_process() else Path(folder)
        self.every_seconds = 60 * every_minutes
        self.metadata = metadata or dict
        self.require_folder = require_folder
        self._copies = HostCopies()
        self._writer = BackgroundWriter(self._save)
        self._on_the_way: dict[str, Snapshot] = {}  # from the device
        self._taken_at = time.monotonic()
        self._taken: tuple[int, int] | None = None  # the progress of the latest one

    def on_batch_end(self, training: "Training", fields: Mapping[str, Any]) -> None:
        """Keep the latest state once enough time has passed."""
        del fields
        self._writer.raise_fault()
        self._hand_over()
        if self._is_due and training.is_between_steps:
            self._take(training, LATEST)

    def on_best(self, training: "Training", record: EpochRecord) -> None:
        """Keep the weights of the best epoch."""
        del record
        self._take(training, BEST)

    def on_epoch_end(self, training: "Training", record: EpochRecord) -> None:
        """Keep the latest state after the last epoch, and once enough time has passed in a validation."""
        del record
        if self._is_due or training.finished:
            self._take(training, LATEST)

    def on_interrupt(self, training: "Training") -> None:
        """Keep the state between two batches, from which the training goes on as if nothing had happened."""
        self._take(training, LATEST)
        self._finish()

    def on_training_end(self, training: "Training") -> None:
        """Keep the last epoch where a hook that was called after this one stopped the training there."""
        try:
            if training.finished and training.position == 0 and self._taken != (training.epoch, 0):
                self._take(training, LATEST)
        finally:
            self._finish()
        self._copies = HostCopies()  # frees the memory of the old ones

    @property
    def _is_due(self) -> bool:
        is_idle = not self._on_the_way and not self._writer.is_busy
        return is_idle and time.monotonic() - self._taken_at >= self.every_seconds

    def _take(self, training: "Training", name: str) -> None:
        if not training.is_main_process:
            return
        if name in self._on_the_way:  # not dropped: the newer one may be one that is refused
            self._on_the_way[name].wait()
            self._hand_over()
        self._on_the_way[name] = self._copies.take(replace(training.state(), metadata=self.metadata()))
        self._hand_over()
        if name == LATEST:
            self._taken_at, self._taken = time.monotonic(), (training.epoch, training.position)

    def _hand_over(self) -> None:
        """Give to the writer what has arrived."""
        for name in [name for name, snapshot in self._on_the_way.items() if snapshot.is_whole]:
            self._writer.submit(name, self._on_the_way.pop(name))

    def _finish(self) -> None:
        """Wait until everything is on the disk."""
        try:
            for snapshot in self._on_the_way.values():
                snapshot.wait()
            self._hand_over()
        finally:  # a device that has failed: what came from it before is written to its end
            self._writer.join()

    def _save(self, name: str, state: TrainingState) -> None:
        """Write a state in the writer's thread, unless it is one of which nothing good can come."""
        losses = (loss for batch in state.losses for name, loss in batch.items() if name != NORM)
        if not all(loss.isfinite().all() for loss in losses):
            return  # the training raises that itself, with the cases, when it looks at its losses
        for part, tensors in state.model.items():
            if isinstance(tensors, Tensor) and tensors.is_floating_point() and tensors.isnan().any():
                raise NonFiniteLossError(
                    f"{part} is not a number after epoch {state.epoch}, batch {state.position}, though every loss so "
                    f"far was one; it is not written to {self.folder / name}. Lower the learning rate or set "
                    "training.clip, then go on from the checkpoint before by --resume"
                )
        is_there = self.folder.is_dir()  # asked first: one that is taken away from now on is not made again
        self.require_folder()
        try:
            save_checkpoint(
                state,
                self.folder / name,
                previous=self.folder / PREVIOUS if name == LATEST else None,
                make_folder=not is_there,
            )
        except CheckpointError:
            self.require_folder()  # says more, where the folder was taken away since it was asked
            raise
