"""Batches whose patches grow: the first epochs see smaller ones."""

from collections.abc import Callable, Iterator

from volseg.data.augmented import AugmentedBatches
from volseg.data.cases import Batch

__all__ = ["GrowingBatches"]


class GrowingBatches:
    """Batches of one size in some epochs, and of another in others; all are of the same length.

    Which size an epoch has follows from its number alone, as its batches do: a training that goes on in any of them
    sees what it would have seen.

    Parameters
    ----------
    choose : callable
        Returns the batches of an epoch, the same object for all epochs of one size.
    """

    def __init__(self, choose: Callable[[int], AugmentedBatches]) -> None:
        self.of_epoch = choose

    def __len__(self) -> int:
        return len(self.of_epoch(0))

    @property
    def batch_size(self) -> int:
        """Samples of a whole batch, of any size."""
        return self.of_epoch(0).batch_size

    def changes_at(self, epoch: int) -> bool:
        """Say whether the patches of an epoch have another size than those of the one before."""
        return epoch > 0 and self.of_epoch(epoch) is not self.of_epoch(epoch - 1)

    def release_before(self, epoch: int) -> None:
        """Free what the batches of the epoch before hold of a GPU besides the cases."""
        self.of_epoch(epoch - 1).release()

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch ``number`` from batch ``start`` on."""
        return self.of_epoch(number).epoch(number, start)
