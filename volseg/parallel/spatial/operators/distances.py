"""Distances and similarities of vectors, one per voxel or over the cut, and the losses made of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.spatial.operators.losses import legacy_reduction, reduced
from volseg.parallel.spatial.operators.operands import elementwise
from volseg.parallel.spatial.operators.reductions import norm, over_dims
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["cosine_similarity", "distance", "pairwise_distance", "triplet_margin_loss"]


@handles("Losses", "F.cosine_similarity", merged=True)
def cosine_similarity(func: Callable, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Sum the products of two normalised volumes along a dim; in the order of torch's own steps."""
    if x1.ndim != x2.ndim or x1.shape[dim] != x2.shape[dim]:
        refuse("both must have the same extent along dim: torch broadcasts them before it takes their lengths")
    products = elementwise(torch.mul, _normalised(x1, dim, eps), _normalised(x2, dim, eps))
    return over_dims("sum", products, [dim % products.ndim])


def _normalised(operand: Any, dim: int, eps: float) -> Any:
    length = _length(operand, 2.0, dim, keepdim=True)
    with torch.no_grad():  # as torch does: the gradient is that of the length, clamped or not
        below = elementwise(torch.sub, elementwise(torch.clamp_min, length, eps), length)
    return elementwise(torch.div, operand, elementwise(torch.add, length, below))


@handles("Losses", "F.pairwise_distance", merged=True)
def pairwise_distance(
    func: Callable, x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    """Return the length of the difference along the last dim."""
    difference = elementwise(torch.add, elementwise(torch.sub, x1, x2), eps)
    return _length(difference, p, -1, keepdim)


@handles("Reductions", "dist", merged=True)
def distance(func: Callable, input: Any, other: Any, p: float = 2.0) -> Any:
    """Return the length of the difference."""
    difference = elementwise(torch.sub, input, other)
    return _length(difference, p, list(range(difference.ndim)), keepdim=False)


@handles("Losses", "F.triplet_margin_loss", merged=True)
def triplet_margin_loss(
    func: Callable,
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
    size_average: bool | None = None,
    reduce: bool | None = None,
) -> Any:
    """Compare the distances of vectors in the last dim."""
    near = pairwise_distance(func, anchor, positive, p, eps)
    far = pairwise_distance(func, anchor, negative, p, eps)
    if swap:
        far = elementwise(torch.minimum, far, pairwise_distance(func, positive, negative, p, eps))
    losses = elementwise(torch.clamp_min, elementwise(torch.sub, elementwise(torch.add, near, margin), far), 0)
    return reduced(losses, legacy_reduction(size_average, reduce, reduction))


def _length(operand: Any, p: float, dim: Any, keepdim: bool) -> Any:
    if isinstance(operand, ShardedVolume):
        return norm(torch.linalg.vector_norm, operand, p, dim, keepdim)
    length: Tensor = torch.linalg.vector_norm(operand, p, dim, keepdim)
    return length
