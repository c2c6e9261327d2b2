"""Observe a training with hooks, whose methods are its events.

A training calls its hooks in their order and passes itself. There is no event bus and no registration by name: the list
of hooks shows everything that happens at an event.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from volseg.checkpointing.file import BEST, CHECKPOINTS, LATEST, PREVIOUS, BackgroundWriter, save_checkpoint
from volseg.checkpointing.state import EpochRecord, TrainingState
from volseg.config.registry import Registry
from volseg.data.augmented import GrowingBatches
from volseg.errors import CheckpointError, ConfigError, NonFiniteLossError
from volseg.files import require_writable
from volseg.parallel.devices import is_main_process
from volseg.workflow.checks import NORM

if TYPE_CHECKING:
    from volseg.workflow.training import Training


class Hook:
    """Watch a training; override the events of interest.

    Every event gets the ``Training`` itself: its model, optimizer, ``epoch``, ``position``, ``best`` and ``stop()``.
    Fields passed to ``on_batch_end`` are on the training device; reading a value there waits for the device.
    """

    def on_training_begin(self, training: "Training") -> None:
        """Before the first epoch, also after resuming."""

    def on_epoch_begin(self, training: "Training") -> None:
        """Before the first batch of an epoch."""

    def on_batch_begin(self, training: "Training", batch: Mapping[str, Any]) -> None:
        """Before the forward pass of a batch."""

    def on_batch_end(self, training: "Training", fields: Mapping[str, Any]) -> None:
        """After the step on a batch; ``fields`` has the batch and the losses, on the device."""

    def on_validation_begin(self, training: "Training") -> None:
        """Before the validation of an epoch that is validated."""

    def on_epoch_end(self, training: "Training", record: EpochRecord) -> None:
        """After an epoch and its validation."""

    def on_best(self, training: "Training", record: EpochRecord) -> None:
        """When an epoch's score is the best so far; called before ``on_epoch_end``."""

    def on_interrupt(self, training: "Training") -> None:
        """When a signal stops the training between two batches; save everything that must not be lost."""

    def on_training_end(self, training: "Training") -> None:
        """After the last epoch, or when the training was stopped, interrupted or failed."""


class Patience(Hook):
    """Stop when the score has not improved for a number of validations.

    Parameters
    ----------
    validations : int
        Consecutive validations that may pass without a new best score.
    """

    def __init__(self, validations: int) -> None:
        if validations < 1:
            raise ValueError(f"patience must be at least one validation, got {validations}")
        self.validations = validations

    def has_run_out(self, history: Sequence[EpochRecord]) -> bool:
        """Return whether a training with this history must stop."""
        return _validations_since_best(history) >= self.validations

    def on_training_begin(self, training: "Training") -> None:
        """Stop a resumed training that had already run out of patience."""
        self._judge(training)

    def on_epoch_end(self, training: "Training", record: EpochRecord) -> None:
        """Count the validations since the best one."""
        if record.score is not None:
            self._judge(training)

    def _judge(self, training: "Training") -> None:
        if self.has_run_out(training.history):
            training.stop(f"no better score in {_validations_since_best(training.history)} validations")


HOOKS = Registry("hook")
"""Hooks that a config may name: only the user's, as other settings create the framework's own hooks."""


def build_hook(spec: Mapping[str, Any]) -> Hook:
    """Return the hook that a config names.

    Raises
    ------
    ConfigError
        For an unknown name or parameter, or a component that makes no `Hook`.
    """
    hook = HOOKS.build(spec)
    if not isinstance(hook, Hook):
        raise ConfigError(f"hook {spec['name']} must be a volseg.Hook, got a {type(hook).__name__}; subclass Hook")
    return hook


def _validations_since_best(history: Sequence[EpochRecord]) -> int:
    scores = [record.score for record in history if record.score is not None]
    known = [-math.inf if math.isnan(score) else score for score in scores]  # a score of NaN is never the best
    return len(known) - 1 - known.index(max(known)) if known else 0


class ForgetOldSizes(Hook):
    """Free the recordings of a step and its batches when the patch size changes for good.

    Parameters
    ----------
    batches : GrowingBatches
        Batches of the training.
    """

    def __init__(self, batches: GrowingBatches) -> None:
        self._batches = batches

    def on_epoch_begin(self, training: "Training") -> None:
        """Free the recordings if the patch size changes at this epoch."""
        if self._batches.changes_at(training.epoch):
            training.step.release()
            self._batches.release_before(training.epoch)


# Saving a training: a hook copies its state between two batches, while the training continues.
#
# `volseg.checkpointing` defines the content of a checkpoint and writes it.


class Checkpoints(Hook):
    """Write ``latest.pt`` and ``best.pt`` while the training continues.

    The state is copied between two batches and written by a thread. A fault of the thread, such as a full disk, is
    raised after the next batch. The previous ``latest.pt`` is kept as ``previous.pt``. A new training in a folder with
    checkpoints of an earlier one is refused.

    Parameters
    ----------
    folder : path
        Folder of the checkpoints; created when the first checkpoint is written.
    every_minutes : float
        Minimum time between two writes of ``latest.pt``, also within an epoch. It is always written after the last
        epoch, when a hook ends the training, and on an interrupt. Time, not epochs, as a crash costs time. Only one
        checkpoint is written at a time.
    metadata : callable, optional
        Returns plain values to store with the state (the config).
    require_folder : callable, optional
        Called in the writer's thread before each checkpoint; raises if the folder must no longer be written to.

    Raises
    ------
    ConfigError
        If the folder cannot be written to; checked at once, before there is a checkpoint to lose.

    Examples
    --------
    A script that resumes after it was stopped:

    >>> from tempfile import mkdtemp
    >>> import torch
    >>> from volseg import Training
    >>> from volseg.workflow import load_checkpoint
    >>> latest = Path(mkdtemp()) / "latest.pt"
    >>> def make(epochs):
    ...     net = torch.nn.Conv3d(1, 2, 1)
    ...     batches = [{"image": torch.randn(1, 1, 8, 8, 8), "label": torch.zeros(1, 8, 8, 8).long()}]
    ...     training = Training(net, torch.nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.1),
    ...         batches, epochs=epochs, hooks=[Checkpoints(latest.parent)])
    ...     if latest.exists():
    ...         training.load_state_dict(load_checkpoint(latest))
    ...     return training
    >>> len(make(2).run()), make(3).epoch
    (2, 2)
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
        self._writer = BackgroundWriter(self._save)
        self._taken_at = time.monotonic()
        self._taken: tuple[int, int] | None = None  # progress at the last checkpoint

    def on_training_begin(self, training: "Training") -> None:
        """Refuse to overwrite the checkpoints of an earlier training."""
        held = [name for name in CHECKPOINTS.values() if (self.folder / name).exists()]
        if held and training.is_main_process and (training.epoch, training.position) == (0, 0):
            raise CheckpointError(
                f"{self.folder} contains {', '.join(held)} of an earlier training, which a new one would overwrite; "
                "continue it with training.load_state_dict(volseg.workflow.load_checkpoint("
                f"{str(self.folder / held[0])!r})), or choose another folder"
            )

    def on_batch_end(self, training: "Training", fields: Mapping[str, Any]) -> None:
        """Save the latest state once enough time has passed."""
        del fields
        self._writer.poll()
        if self._is_due and training.is_between_steps:
            self._take(training, LATEST)

    def on_best(self, training: "Training", record: EpochRecord) -> None:
        """Save the state of the best epoch."""
        del record
        self._take(training, BEST)

    def on_epoch_end(self, training: "Training", record: EpochRecord) -> None:
        """Save the latest state after the last epoch, or if enough time has passed during a validation."""
        del record
        if self._is_due or training.finished:
            self._take(training, LATEST)

    def on_interrupt(self, training: "Training") -> None:
        """Save the state between two batches, so that the training resumes exactly."""
        self._take(training, LATEST)
        self.finish()

    def on_training_end(self, training: "Training") -> None:
        """Save the last epoch if a later hook in the list stopped the training."""
        try:
            if training.finished and training.position == 0 and self._taken != (training.epoch, 0):
                self._take(training, LATEST)
        finally:
            self.finish()
        self._writer = BackgroundWriter(self._save)  # frees the host memory of the old one

    def finish(self) -> None:
        """Wait until every saved state is on disk."""
        self._writer.finish()

    @property
    def _is_due(self) -> bool:
        return self._writer.is_idle and time.monotonic() - self._taken_at >= self.every_seconds

    def _take(self, training: "Training", name: str) -> None:
        if not training.is_main_process:
            return
        self._writer.take(name, replace(training.state(), metadata=self.metadata()))
        if name == LATEST:
            self._taken_at, self._taken = time.monotonic(), (training.epoch, training.position)

    def _save(self, name: str, state: TrainingState) -> None:
        """Write a state, in the writer's thread. Skip it if losses are not finite; raise if weights are NaN."""
        losses = (loss for batch in state.losses for name, loss in batch.items() if name != NORM)
        if not all(loss.isfinite().all() for loss in losses):
            return  # the training itself raises, with the cases, when it checks its losses
        for part, tensors in state.model.items():
            if isinstance(tensors, Tensor) and tensors.is_floating_point() and tensors.isnan().any():
                raise NonFiniteLossError(
                    f"{part} contains NaN after epoch {state.epoch}, batch {state.position}, although the losses "
                    f"so far are finite; {self.folder / name} was not written. Lower the learning rate or set "
                    "training.clip, then continue from the previous checkpoint with --resume"
                )
        is_there = self.folder.is_dir()  # checked first: a folder removed from now on is not created again
        self.require_folder()
        try:
            save_checkpoint(
                state,
                self.folder / name,
                previous=self.folder / PREVIOUS if name == LATEST else None,
                make_folder=not is_there,
            )
        except CheckpointError:
            self.require_folder()  # explains more if the folder was removed since the last check
            raise
