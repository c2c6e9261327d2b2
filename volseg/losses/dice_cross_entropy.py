"""Compute soft Dice plus cross entropy of logits and a label map, without volumes of probabilities or one-hot labels.

Each voxel is read once forward and once backward. Only the logits, in their own dtype, and the label map are kept for
the backward pass::

    logits, label --> sums of p, [y = c] p, [y = c], -[y = c] log p per sample and class --> loss
                                                                                       <-- slope of each sum
    gradient of the logits <-- softmax again, from the logits

Between the two arrows shards add their sums (see ``sharded``). A deep supervision head reads the full label at a
stride. The formula is that of MONAI's ``DiceCELoss(softmax=True, to_onehot_y=True)``.

A label that is not a class makes the loss NaN. On the CPU, where reading the sums needs no wait, it raises an error.

While a caller gathers overlaps, a loss also records its sums over the voxels of the finest logits, for the soft Dice of
the training: one reduction per batch. Sums of batches, shards and replicas add up; their Dice values do not.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from volseg.device.first_order import first_order
from volseg.device.gpus import on_gpu
from volseg.device.triton_tiles import takes
from volseg.errors import DataError
from volseg.losses.dice import passes, reference
from volseg.losses.dice.reference import SURPRISE, TRUTH, Terms


def dice_cross_entropy(logits: Tensor, label: Tensor, terms: Terms) -> Tensor:
    """Return the scalar loss, in float32, or in float64 for logits of float64.

    Parameters
    ----------
    logits
        ``(B, K, D, H, W)``, at least two classes; or a sharded volume.
    label
        ``(B, 1, D, H, W)``, any real dtype; a finer grid is read at the voxels of ``nearest-exact``.
    terms
        Weights and variants of the two losses.

    Raises
    ------
    DataError
        On the CPU, if the label has a value that is not a class. On a GPU the loss becomes NaN instead.
    """
    if has_torch_function((logits, label)):
        result: Tensor = handle_torch_function(dice_cross_entropy, (logits, label), logits, label, terms)
        return result
    check_shapes(logits, label)
    label = read_at_grid(label, logits.shape[2:])
    return compute_loss(sum_classes(logits, label, terms), [label], terms, logits.shape)


def check_shapes(logits: Tensor, label: Tensor, outputs: int | None = None, unit: str = "class") -> None:
    """Raise unless logits and label have one batch size, and the logits a channel per output, at least two classes."""
    fits = logits.ndim == label.ndim == 5 and tuple(label.shape[:2]) == (logits.shape[0], 1)
    if not fits or (logits.shape[1] < 2 if outputs is None else logits.shape[1] != outputs):
        rule = "with at least two classes" if outputs is None else f"with one channel per {unit}"
        raise DataError(
            f"needed: logits (B, {outputs or 'K'}, D, H, W) {rule} and a label map (B, 1, D, H, W), got "
            f"{tuple(logits.shape)} and {tuple(label.shape)}"
        )


def read_at_grid(label: Tensor, size: Sequence[int]) -> Tensor:
    """Return the label map on a grid of ``size``, nearest-exact; a view if the grid is coarser by a whole number."""
    factors = [fine // coarse for fine, coarse in zip(label.shape[2:], size, strict=True)]
    if all(fine == coarse * f for fine, coarse, f in zip(label.shape[2:], size, factors, strict=True)):
        # floor((i + 1/2) * f) = i * f + floor(f / 2)
        return label[(slice(None), slice(None), *(slice(f // 2, None, f) for f in factors))]
    if not label.is_floating_point() and label.dtype != torch.uint8:  # torch cannot resize these
        label = label.float()
    return F.interpolate(label, size=list(size), mode="nearest-exact")


def sum_classes(logits: Tensor, label: Tensor, terms: Terms) -> Tensor:
    """Return the sums ``(parts, 4, B, K)`` of one slab; the caller adds the parts.

    The rows are those of ``dice.reference``: overlap, mass, truth, surprise.
    """
    return _ClassSums.apply(logits, label, terms.squared)


def compute_loss(sums: Tensor, labels: Sequence[Tensor], terms: Terms, shape: Sequence[int]) -> Tensor:
    """Return the loss of logits of ``shape`` from the sums of all parts; ``labels`` are for the error message."""
    if not on_gpu(sums) and bool(sums[:, TRUTH].isnan().any()):
        strangers = [value for label in labels for value in label.unique().tolist() if value not in range(shape[1])]
        raise DataError(
            f"a label map may contain the {shape[1]} classes 0 to {shape[1] - 1} of the logits, but also has "
            f"{strangers[:10] or 'others, on another process'}; map the labels, or build the network with more classes"
        )
    leave_foreground(sums)
    return _Loss.apply(sums, terms, tuple(shape))


def leave_foreground(sums: Tensor) -> None:
    """Record the overlap of the foreground classes, if a caller gathers it."""
    leave_overlap(sums[:, :SURPRISE, :, 1:], (0, 2))


def choose_backend(tensor: Tensor) -> ModuleType:
    """Return the module that computes on a tensor: Triton's kernels if they support it, else plain torch."""
    return passes if takes(tensor) else reference


class _ClassSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, squared: bool) -> Tensor:
        ctx.save_for_backward(logits, label)
        ctx.squared = squared
        return choose_backend(logits).sums(logits, label, squared)

    @staticmethod
    @first_order
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        logits, label = ctx.saved_tensors
        # The loss depends only on the sum of the parts: every part has the same slopes.
        return choose_backend(logits).gradient(logits, label, slopes[0], ctx.squared), None, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, terms: Terms, shape: tuple[int, ...]) -> Tensor:
        loss, slopes = choose_backend(sums).combine(sums, terms, shape)
        ctx.save_for_backward(slopes)
        ctx.shape = sums.shape
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (slopes * gradient).expand(ctx.shape), None, None


class Gathered:
    """Sums that the losses of one batch record."""

    sums: Tensor | None = None
    """``(3, F)``: overlap, mass and truth of each foreground class, from the first loss and its finest logits."""


_GATHERED: ContextVar[Gathered | None] = ContextVar("gathered", default=None)


@contextmanager
def gathering_overlap() -> Iterator[Gathered]:
    """Gather the foreground's overlap from the losses computed in this block."""
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
        Overlap, mass and truth along one dim, and the foreground classes along the last dim.
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
