"""The overlap of a batch's foreground with its label: sums that a loss has anyway, for the soft Dice of the training.

A loss gives one number. While somebody gathers, Dice plus cross entropy leaves its sums over the voxels of the finest
logits as well, one reduction per batch. Sums of batches, shards and replicas add up, which their Dice does not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

__all__ = ["Gathered", "compute_soft_dice", "gathering_overlap", "leave_overlap"]


class Gathered:
    """What one batch's losses left."""

    sums: Tensor | None = None
    """``(3, F)``: overlap, mass and truth of each class of the foreground; of the first loss, and its finest logits."""


_GATHERED: ContextVar[Gathered | None] = ContextVar("gathered", default=None)


@contextmanager
def gathering_overlap() -> Iterator[Gathered]:
    """Let losses that are computed in this block leave the overlap of the foreground."""
    gathered = Gathered()
    token = _GATHERED.set(gathered)
    try:
        yield gathered
    finally:
        _GATHERED.reset(token)


def leave_overlap(sums: Tensor, dims: tuple[int, ...]) -> None:
    """Leave the overlap, if it is gathered and nothing else has been left.

    Parameters
    ----------
    sums
        Overlap, mass and truth along one dim and the foreground's classes along the last one.
    dims
        The other dims, over which it is still to be summed: parts, samples.
    """
    gathered = _GATHERED.get()
    if gathered is not None and gathered.sums is None:
        gathered.sums = sums.detach().sum(dims)


def compute_soft_dice(sums: Tensor) -> float | None:
    """Return the mean soft Dice of the classes that the labels hold; None where they hold none.

    Parameters
    ----------
    sums
        ``(3, F)``, as gathered and added up. Waits for their device.

    Examples
    --------
    >>> import torch
    >>> compute_soft_dice(torch.tensor([[8.0, 0.0], [10.0, 3.0], [10.0, 0.0]]))
    0.8
    """
    overlap, mass, truth = sums.double().cpu()
    held = truth > 0
    return float((2 * overlap / (mass + truth))[held].mean()) if held.any() else None
