"""Events of a workflow, as methods to override.

A workflow calls each of its hooks in the order they were given, passing itself: there is no event bus and no
registration by name, so what happens at an event is what the list of hooks says.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from volseg.checkpointing.state import EpochRecord
from volseg.config.registry import Registry
from volseg.errors import ConfigError

if TYPE_CHECKING:
    from volseg.workflow.training import Training

__all__ = ["HOOKS", "ForgetOldSizes", "Hook", "Patience", "build_hook"]


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
        """When a signal stops the training between two batches; save what must not be lost."""

    def on_training_end(self, training: "Training") -> None:
        """After the last epoch, or when the training was stopped, interrupted or failed."""


class Patience(Hook):
    """Stop when the score has not improved for a number of validations.

    Parameters
    ----------
    validations : int
        How many validations in a row may pass without a new best score.
    """

    def __init__(self, validations: int) -> None:
        if validations < 1:
            raise ValueError(f"patience must be at least one validation, got {validations}")
        self.validations = validations

    def has_run_out(self, history: Sequence[EpochRecord]) -> bool:
        """Tell whether so many validations have passed that a training with this history is at its end."""
        return _validations_since_best(history) >= self.validations

    def on_training_begin(self, training: "Training") -> None:
        """Stop a resumed training where it had been stopped before."""
        self._judge(training)

    def on_epoch_end(self, training: "Training", record: EpochRecord) -> None:
        """Count the validations since the best one."""
        if record.score is not None:
            self._judge(training)

    def _judge(self, training: "Training") -> None:
        if self.has_run_out(training.history):
            training.stop(f"no better score in {_validations_since_best(training.history)} validations")


HOOKS = Registry("hook", group="volseg.hooks")
"""What ``hooks`` in a config may name: only what users add, as the framework's own hooks follow from other settings."""


def build_hook(spec: Mapping[str, Any]) -> Hook:
    """Return the hook that a config names.

    Raises
    ------
    ConfigError
        For an unknown name or parameter, or a component that makes no `Hook`.
    """
    hook = HOOKS.build(spec)
    if not isinstance(hook, Hook):
        raise ConfigError(f"hook {spec['name']} must be a volseg.Hook, got a {type(hook).__name__}; derive its class")
    return hook


def _validations_since_best(history: Sequence[EpochRecord]) -> int:
    scores = [record.score for record in history if record.score is not None]
    known = [-math.inf if math.isnan(score) else score for score in scores]  # a score of NaN is never the best
    return len(known) - 1 - known.index(max(known)) if known else 0


class Growing(Protocol):
    """Batches that have another size from some epoch on."""

    def changes_at(self, epoch: int) -> bool:
        """Say whether the patches of an epoch have another size than those of the one before."""

    def release_before(self, epoch: int) -> None:
        """Free what the batches of the epoch before hold of a GPU besides the cases."""


class ForgetOldSizes(Hook):
    """Free the recordings of a step on patches of a size that will not come again, and of their batches.

    Parameters
    ----------
    batches : Growing
        Of the training.
    """

    def __init__(self, batches: Growing) -> None:
        self._batches = batches

    def on_epoch_begin(self, training: "Training") -> None:
        """Free it where the size changes."""
        if self._batches.changes_at(training.epoch):
            training.step.release()
            self._batches.release_before(training.epoch)
