"""Overlap of a batch's foreground with its label: the sums of a loss, for the soft Dice of the training.

A loss returns one number. While a caller gathers, Dice plus cross entropy also records its sums over the voxels of the
finest logits, one reduction per batch. Sums of batches, shards and replicas add up; their Dice values do not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor


class Gathered:
    """Sums that the losses of one batch record."""

    sums: Tensor | None = None
    """``(3, F)``: overlap, mass and truth of each foreground class, from the first loss and its finest logits."""


_GATHERED: ContextVar[Gathered | None] = ContextVar("gathered", default=None)


@contextmanager
def gathering_overlap() -> Iterator[Gathered]:
    """Gather the foreground's overlap from the losses that are computed in this block."""
    gathered = Gathered()
    token = _GATHERED.set(gathered)
    try:
        yield gathered
    finally:
        _GATHERED.reset(token)


def leave_overlap(sums: Tensor, dims: tuple[int, ...]) -> None:
    """Record the overlap, if a caller gathers and nothing is recorded yet.

    Parameters
    ----------
    sums
        Overlap, mass and truth along one dim, and the foreground's classes along the last dim.
    dims
        The other dims, to sum over: parts, samples.
    """
    gathered = _GATHERED.get()
    if gathered is not None and gathered.sums is None:
        gathered.sums = sums.detach().sum(dims)


def compute_soft_dice(sums: Tensor) -> float | None:
    """Return the mean soft Dice of the classes in the labels, or None if the labels have no foreground.

    Parameters
    ----------
    sums
        ``(3, F)``, as gathered and added up. The call waits for their device.

    Examples
    --------
    >>> import torch
    >>> compute_soft_dice(torch.tensor([[8.0, 0.0], [10.0, 3.0], [10.0, 0.0]]))
    0.8
    """
    overlap, mass, truth = sums.double().cpu()
    held = truth > 0
    return float((2 * overlap / (mass + truth))[held].mean()) if held.any() else None
