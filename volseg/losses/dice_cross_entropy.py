"""Soft Dice plus cross entropy of logits and a label map, without a volume of probabilities or of one-hot labels.

Each voxel is read once forward and once backward, and nothing is kept for the backward pass but the logits, in their
own dtype, and the label map::

    logits, label --> sums of p, [y = c] p, [y = c], -[y = c] log p per sample and class --> loss
                                                                                       <-- slope of each sum
    gradient of the logits <-- softmax again, from the logits

Between the two arrows shards add their sums (see ``sharded``). A deep supervision head's label is
the full one, read at a stride. The formula is that of MONAI's ``DiceCELoss(softmax=True, to_onehot_y=True)``.

A label that is no class makes the loss NaN, and an error where the host may look at it without waiting (the CPU).
"""

from collections.abc import Sequence
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
from volseg.losses.overlap import leave_overlap

__all__ = ["Terms", "choose_backend", "compute_loss", "dice_cross_entropy", "read_at_grid", "sum_classes"]


def dice_cross_entropy(logits: Tensor, label: Tensor, terms: Terms) -> Tensor:
    """Return the scalar loss, in float32, or in float64 for logits of float64.

    Parameters
    ----------
    logits
        ``(B, K, D, H, W)``, two classes at least; or a sharded volume.
    label
        ``(B, 1, D, H, W)``, any real dtype; on a finer grid the voxels are taken that ``nearest-exact`` takes.
    terms
        Weights and variants of the two losses.

    Raises
    ------
    DataError
        On the CPU, if the label holds a value that is no class. On a GPU the loss is NaN then.
    """
    if has_torch_function((logits, label)):
        result: Tensor = handle_torch_function(dice_cross_entropy, (logits, label), logits, label, terms)
        return result
    check_shapes(logits, label)
    label = read_at_grid(label, logits.shape[2:])
    return compute_loss(sum_classes(logits, label, terms), [label], terms, logits.shape)


def check_shapes(logits: Tensor, label: Tensor) -> None:
    """Raise unless the two are of one batch, and there are classes to tell apart."""
    expected = (logits.shape[0], 1)
    if logits.ndim != 5 or label.ndim != 5 or logits.shape[1] < 2 or tuple(label.shape[:2]) != expected:
        raise DataError(
            f"need logits (B, K, D, H, W) of two classes at least and a label map (B, 1, D, H, W), got "
            f"{tuple(logits.shape)} and {tuple(label.shape)}"
        )


def read_at_grid(label: Tensor, size: Sequence[int]) -> Tensor:
    """Return the label map on a grid of ``size``, nearest-exact: a view where the grid is a whole number coarser."""
    factors = [fine // coarse for fine, coarse in zip(label.shape[2:], size, strict=True)]
    if all(fine == coarse * f for fine, coarse, f in zip(label.shape[2:], size, factors, strict=True)):
        # floor((i + 1/2) * f) = i * f + floor(f / 2)
        return label[(slice(None), slice(None), *(slice(f // 2, None, f) for f in factors))]
    if not label.is_floating_point() and label.dtype != torch.uint8:  # which torch cannot resize
        label = label.float()
    return F.interpolate(label, size=list(size), mode="nearest-exact")


def sum_classes(logits: Tensor, label: Tensor, terms: Terms) -> Tensor:
    """Return the sums ``(parts, 4, B, K)`` of one slab, in any number of parts that are still to be added.

    The rows are those of ``dice.terms``: overlap, mass, truth, surprise.
    """
    return _ClassSums.apply(logits, label, terms.squared)


def compute_loss(sums: Tensor, labels: Sequence[Tensor], terms: Terms, shape: Sequence[int]) -> Tensor:
    """Return the loss of logits ``shape`` from the sums of all parts; ``labels`` are named if one is no class."""
    if not on_gpu(sums) and bool(sums[:, TRUTH].isnan().any()):
        strangers = [value for label in labels for value in label.unique().tolist() if value not in range(shape[1])]
        raise DataError(
            f"a label map may hold the {shape[1]} classes 0 to {shape[1] - 1} of the logits, got also "
            f"{strangers[:10] or 'others, on another process'}; map the labels, or give the network more classes"
        )
    leave_foreground(sums)
    return _Loss.apply(sums, terms, tuple(shape))


def leave_foreground(sums: Tensor) -> None:
    """Leave the overlap of the classes but the background, where it is gathered."""
    leave_overlap(sums[:, :SURPRISE, :, 1:], (0, 2))


def choose_backend(tensor: Tensor) -> ModuleType:
    """Return what computes on a tensor: Triton's kernels where they take it, else plain torch."""
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
        # The loss depends on the sum of the parts alone: every part has the same slopes.
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
