"""What becomes of recorded steps where patches grow."""

from typing import Protocol

from volseg.workflow.hooks import Hook
from volseg.workflow.training import Training

__all__ = ["ForgetOldSizes"]


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

    def on_epoch_begin(self, training: Training) -> None:
        """Free it where the size changes."""
        if self._batches.changes_at(training.epoch):
            training.step.release()
            self._batches.release_before(training.epoch)
