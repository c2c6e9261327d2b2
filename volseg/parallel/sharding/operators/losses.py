"""Losses of torch on sharded volumes: voxels on each shard, the mean over all of them."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from volseg.parallel.sharding.operators.arguments import bound
from volseg.parallel.sharding.operators.pointwise import cut_like, pointwise
from volseg.parallel.sharding.operators.reductions import over_dims
from volseg.parallel.sharding.table import handles, unsupported, volumes
from volseg.parallel.sharding.volume import ShardedVolume, wrap

__all__ = ["class_loss", "voxel_loss"]

VOXELWISE = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "poisson_nll_loss",
    "soft_margin_loss",
]


def reduced(volume: ShardedVolume, reduction: str) -> Any:
    """Reduce a volume of losses as torch's ``reduction`` says."""
    everything = list(range(volume.ndim))
    if reduction == "none":
        return volume
    return over_dims("mean" if reduction == "mean" else "sum", volume, everything)


@handles("Losses", *(f"F.{name}" for name in VOXELWISE))
def voxel_loss(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute the loss of each voxel, then reduce."""
    given = dict(kwargs)
    reduction = given.pop("reduction", "mean")
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None or len(args) > 3:
        return unsupported(
            func, args, kwargs, "the deprecated size_average and reduce are not supported; use reduction="
        )
    losses = pointwise(func, args, {**given, "reduction": "none"})
    if reduction == "batchmean":
        return over_dims("sum", losses, list(range(losses.ndim))) / losses.shape[0]
    return reduced(losses, reduction)


@handles("Losses", "F.cross_entropy", "F.nll_loss", "nn.cross_entropy_loss")
def class_loss(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute the loss of each voxel; with class weights the mean is weighted, as torch does."""
    order = "input target weight size_average ignore_index reduce reduction label_smoothing"
    given = bound(order, args, kwargs, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0)
    logits, target, weight = given["input"], given["target"], given["weight"]
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return unsupported(
            func, args, kwargs, "the deprecated size_average and reduce are not supported; use reduction="
        )
    if not isinstance(logits, ShardedVolume):
        logits = cut_like(logits, volumes((args, kwargs))[0])
    if 1 in logits.dims or 0 in logits.dims:
        return unsupported(func, args, kwargs, "batch and classes must not be cut")
    probabilities = target.ndim == logits.ndim
    if not isinstance(target, ShardedVolume):
        target = cut_like(target, logits)
    smoothing = {} if func is F.nll_loss else {"label_smoothing": given["label_smoothing"]}
    weights = [None] * len(logits.slabs) if weight is None else logits.context.spread(weight)
    slabs = [
        func(x, t, w, ignore_index=given["ignore_index"], reduction="none", **smoothing)
        for x, t, w in zip(logits.slabs, target.slabs, weights, strict=True)
    ]
    losses = wrap(logits, slabs, [dim - 1 for dim in logits.dims])
    if given["reduction"] != "mean" or (probabilities and weight is None and given["ignore_index"] < 0):
        return reduced(losses, given["reduction"])
    if probabilities:  # torch divides by the number of voxels, whatever the weights
        return reduced(losses, "mean")
    counted = [
        _counted(t, w, given["ignore_index"], loss) for t, w, loss in zip(target.slabs, weights, slabs, strict=True)
    ]
    return reduced(losses, "sum") / reduced(wrap(losses, counted, losses.dims), "sum")


def _counted(target: Tensor, weight: Tensor | None, ignore: int, loss: Tensor) -> Tensor:
    kept = target != ignore
    if weight is None:
        return kept.to(loss.dtype)
    return weight[target.where(kept, 0)].to(loss.dtype) * kept
