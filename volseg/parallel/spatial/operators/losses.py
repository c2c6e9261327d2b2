"""Losses of torch on sharded volumes: voxels on each shard, the mean over all of them.

Distances and similarities of vectors, one per voxel or over the cut, and the losses made of them, are here too.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device.torch_internals import with_overrides
from volseg.parallel.spatial.gathered import volumes
from volseg.parallel.spatial.operators.operands import cut_like, elementwise
from volseg.parallel.spatial.operators.reductions import over_dims
from volseg.parallel.spatial.signatures import bind
from volseg.parallel.spatial.table import handles, refuse, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume, wrap

__all__ = ["cosine_similarity", "distance", "one_hot", "pairwise_distance", "triplet_margin_loss"]

VOXELWISE = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "hinge_embedding_loss",
    "kl_div",
    "margin_ranking_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
]

WEIGHTED = ["mse_loss", "l1_loss", "huber_loss"]
"""Their ``weight`` is one per voxel."""


def reduced(volume: ShardedVolume | Tensor, reduction: str) -> Any:
    """Reduce losses as torch's ``reduction`` says; where the cut was summed over, they are no volume any more."""
    if reduction == "none":
        return volume
    if not isinstance(volume, ShardedVolume):
        return volume.mean() if reduction == "mean" else volume.sum()
    if reduction == "batchmean":
        return over_dims("sum", volume, list(range(volume.ndim))) / volume.shape[0]
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction!r} is not a valid value for reduction")
    return over_dims(reduction, volume, list(range(volume.ndim)))


def legacy_reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """Return the reduction that torch's two arguments of old ask for, where one of them is given."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _settings(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the arguments by name, and the reduction."""
    named = bind(func, args, kwargs)
    old = named.pop("size_average", None), named.pop("reduce", None)
    return named, legacy_reduction(*old, named.pop("reduction", "mean"))


@handles("Losses", *(f"F.{name}" for name in (*VOXELWISE, *WEIGHTED)), merged=True)
def voxel_loss(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute the loss of each voxel, then reduce; a weighted mean is one over the weights, except for Huber's."""
    named, reduction = _settings(func, args, kwargs)
    weight = named.pop("weight", None) if func.__name__ in WEIGHTED else None
    if func is F.l1_loss and weight is None:
        weight = _weight_that_torch_drops()
    if weight is None:
        return reduced(elementwise(func, **named, reduction="none"), reduction)
    if weight.shape != named["input"].shape:
        raise ValueError("Weights and input must have the same size.")
    losses = elementwise(torch.mul, elementwise(func, **named, reduction="none"), weight)
    if reduction != "mean" or func is F.huber_loss:
        return reduced(losses, reduction)
    everything = list(range(weight.ndim))
    total = over_dims("sum", weight, everything) if isinstance(weight, ShardedVolume) else weight.sum()
    return reduced(losses, "sum") / total


def _weight_that_torch_drops() -> Tensor | None:
    """Return the ``weight`` of the call of ``F.l1_loss`` that led here, which hands over all arguments but this one.

    So it is in torch 2.8 to 2.13 at least: there is nowhere else to read it than that call's frame.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is F.l1_loss.__code__:
            return frame.f_locals.get("weight")
        frame = frame.f_back
    return None


@handles("Losses", "F.cross_entropy", "F.nll_loss", merged=True)
def class_loss(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute the loss of each voxel; with class weights the mean is weighted, as torch does."""
    named, reduction = _settings(func, args, kwargs)
    logits, target, weight = named["input"], named["target"], named.get("weight")
    ignore = named.get("ignore_index", -100)
    if not isinstance(logits, ShardedVolume):
        logits = cut_like(logits, volumes((args, kwargs))[0])
    refuse_if(1 in logits.dims or 0 in logits.dims, "batch and classes must not be cut")
    probabilities = target.ndim == logits.ndim
    target = cut_like(target, logits)
    smoothing = {} if func is F.nll_loss else {"label_smoothing": named.get("label_smoothing", 0.0)}
    weights = [None] * len(logits.slabs) if weight is None else logits.context.spread(weight)
    slabs = [
        func(x, t, w, ignore_index=ignore, reduction="none", **smoothing)
        for x, t, w in zip(logits.slabs, target.slabs, weights, strict=True)
    ]
    losses = wrap(logits, slabs, [dim - 1 for dim in logits.dims])
    # With probabilities torch divides by the number of voxels, whatever the weights.
    if reduction != "mean" or probabilities:
        return reduced(losses, reduction)
    counted = [_counted(t, w, ignore, loss) for t, w, loss in zip(target.slabs, weights, slabs, strict=True)]
    return reduced(losses, "sum") / reduced(wrap(losses, counted, losses.dims), "sum")


@handles("Losses", "F.one_hot", rehearse=False, merged=True)
def one_hot(func: Callable, input: Any, num_classes: int = -1) -> Any:
    """Encode classes in a new last dim; where their number is not given, it is that of the whole volume."""
    # A slab alone may lack the highest class, or the wrong one. On a GPU torch does not look, and does not wait.
    if input.dtype == torch.int64 and (num_classes == -1 or input.device.type == "cpu"):
        everything = list(range(input.ndim))
        lowest, highest = (int(over_dims(kind, input, everything)) for kind in ("amin", "amax"))
        if lowest < 0:
            raise RuntimeError("Class values must be non-negative.")
        if num_classes == -1:
            num_classes = highest + 1
        elif highest >= num_classes:
            raise RuntimeError("Class values must be smaller than num_classes.")
    return wrap(input, [func(slab, num_classes) for slab in input.slabs])


def _counted(target: Tensor, weight: Tensor | None, ignore: int, loss: Tensor) -> Tensor:
    kept = target != ignore
    if weight is None:
        return kept.to(loss.dtype)
    return weight[target.where(kept, 0)].to(loss.dtype) * kept


@handles("Losses", "F.cosine_similarity", merged=True)
def cosine_similarity(func: Callable, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Sum the products of two normalised volumes along a dim; in the order of torch's own steps."""
    if x1.ndim != x2.ndim or x1.shape[dim] != x2.shape[dim]:
        refuse("both must have the same extent along dim: torch broadcasts them before it takes their lengths")
    with with_overrides():
        return (_normalised(x1, dim, eps) * _normalised(x2, dim, eps)).sum(dim)


def _normalised(operand: Tensor, dim: int, eps: float) -> Tensor:
    length = torch.linalg.vector_norm(operand, dim=dim, keepdim=True)
    with torch.no_grad():  # as torch does: the gradient is that of the length, clamped or not
        below = length.clamp_min(eps) - length
    return operand / (length + below)


@handles("Losses", "F.pairwise_distance", merged=True)
def pairwise_distance(
    func: Callable, x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    """Return the length of the difference along the last dim."""
    with with_overrides():
        return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@handles("Reductions", "dist", merged=True)
def distance(func: Callable, input: Any, other: Any, p: float = 2.0) -> Any:
    """Return the length of the difference."""
    with with_overrides():
        return torch.linalg.vector_norm(input - other, p)


TRIPLET = "anchor positive negative margin p eps swap reduction size_average reduce"


@handles("Losses", "F.triplet_margin_loss", merged=True, treats=TRIPLET)
def triplet_margin_loss(func: Callable, given: Any) -> Any:
    """Compare the distances of vectors in the last dim."""
    order = given.p, given.eps
    near = pairwise_distance(func, given.anchor, given.positive, *order)
    far = pairwise_distance(func, given.anchor, given.negative, *order)
    if given.swap:
        far = elementwise(torch.minimum, far, pairwise_distance(func, given.positive, given.negative, *order))
    losses = elementwise(torch.clamp_min, elementwise(torch.sub, elementwise(torch.add, near, given.margin), far), 0)
    return reduced(losses, legacy_reduction(given.size_average, given.reduce, given.reduction))
