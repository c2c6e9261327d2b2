"""Batch, instance, group and layer norm with the statistics of the whole volume.

Instance, batch and group norm share one form: statistics of (sample, channel) pairs, averaged over groups of pairs, then one scale and
one shift per pair. One autograd function does all three, with two small collectives (statistics forward, two sums backward).
It keeps the input and nothing else of its size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from volseg.parallel.sharding import kernels
from volseg.parallel.sharding.context import Context
from volseg.parallel.sharding.layout import spans
from volseg.parallel.sharding.operators.arguments import bound, spatial_only
from volseg.parallel.sharding.operators.pointwise import elementwise
from volseg.parallel.sharding.operators.reductions import moments
from volseg.parallel.sharding.table import handles, unsupported
from volseg.parallel.sharding.volume import ShardedVolume, wrap

__all__ = ["Pooled", "batch_norm", "group_norm", "instance_norm", "layer_norm", "normalize"]


@dataclass(frozen=True, slots=True)
class Pooled:
    """Which (sample, channel) pairs share statistics: all samples (batch norm), or each of ``groups`` of channels."""

    over_batch: bool
    groups: int | None = None

    def average(self, pairs: Tensor) -> Tensor:
        """Replace each entry of ``(B, C)`` by the mean of its group."""
        if self.over_batch:
            return pairs.mean(0, keepdim=True).expand_as(pairs)
        if self.groups is None:
            return pairs
        split = pairs.unflatten(1, (self.groups, -1))
        return split.mean(-1, keepdim=True).expand_as(split).flatten(1)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Mean, biased variance and their voxel counts, ``(B, C)``, on the home device."""

    mean: Tensor
    variance: Tensor
    voxels: int


def slab_voxels(context: Context, dims: tuple[int, ...], shape: torch.Size) -> list[int]:
    """Return the number of voxels of every shard's slab, in the order of the grid."""
    counts = [prod(size for dim, size in enumerate(shape) if dim >= 2 and dim not in dims)]
    for dim, shards in zip(dims, context.communicator.grid, strict=True):
        counts = [count * (stop - start) for count in counts for start, stop in spans(shape[dim], shards)]
    return counts


def statistics(volume: ShardedVolume, slabs: list[Tensor], pooled: Pooled) -> Statistics:
    """Combine the slabs' means and variances by Chan's formula (see ``reductions.moments``)."""
    context = volume.context
    counts = slab_voxels(context, volume.dims, volume.shape)
    voxels = sum(counts)
    partials = [kernels.moments(slab) for slab in slabs]
    stacked = context.communicator.collect(partials)  # (shards, 2, B, C)
    means, variances = stacked.unbind(1)
    weights = kernels.weights(tuple(counts), stacked.dtype, stacked.device)
    mean = (means * weights).sum(0)
    variance = ((variances + (means - mean).square()) * weights).sum(0)
    center = pooled.average(mean)
    return Statistics(center, pooled.average(variance + (mean - center).square()), voxels)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        volume: ShardedVolume,
        pooled: Pooled,
        eps: float,
        weight: Tensor | None,
        bias: Tensor | None,
        *slabs: Tensor,
    ) -> tuple[Tensor, ...]:
        context = volume.context
        found = statistics(volume, list(slabs), pooled)
        rstd = (found.variance + eps).rsqrt()
        scale = rstd if weight is None else rstd * weight.to(rstd)
        shift = -found.mean * scale if bias is None else torch.addcmul(bias.to(rstd), found.mean, scale, value=-1)
        scales, shifts = context.spread(scale), context.spread(shift)
        results = tuple(kernels.affine(slab, a, b) for slab, a, b in zip(slabs, scales, shifts, strict=True))
        ctx.plan = context, pooled, found.voxels, bias is not None
        ctx.save_for_backward(found.mean, rstd, weight, *slabs)
        volume.statistics = found  # type: ignore[attr-defined]
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        context, pooled, voxels, has_bias = ctx.plan
        mean, rstd, weight, *slabs = ctx.saved_tensors
        means = context.spread(mean)
        partials = [kernels.gradient_sums(g, x, m) for g, x, m in zip(gradients, slabs, means, strict=True)]
        total, moment = context.communicator.collect(partials).sum(0)  # sums of g and of g * (x - mean)
        moment = moment * rstd
        gain = rstd if weight is None else rstd * weight.to(rstd)
        scaled = weight.to(rstd) if weight is not None else torch.ones_like(rstd)
        first = pooled.average(total * scaled) / voxels
        second = pooled.average(moment * scaled) / voxels
        slope = -rstd * rstd * second
        offset = -rstd * first - slope * mean
        triples = [context.spread(t) for t in (gain, slope, offset)]
        inputs = [
            kernels.gradient_input(g, x, a, b, c) for g, x, a, b, c in zip(gradients, slabs, *triples, strict=True)
        ]
        weight_gradient = moment.sum(0).to(weight) if weight is not None else None
        bias_gradient = total.sum(0).to(weight) if has_bias else None
        return None, None, None, weight_gradient, bias_gradient, *inputs


def normalize(
    volume: ShardedVolume, pooled: Pooled, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[ShardedVolume, Statistics]:
    """Return the normalised volume and the statistics that it was normalised with."""
    holder = ShardedVolume(volume.slabs, volume.dims, volume.shape, volume.context)
    results = _Normalize.apply(holder, pooled, eps, weight, bias, *volume.slabs)
    found: Statistics = holder.statistics  # type: ignore[attr-defined]
    return wrap(volume, results), found


@handles("Normalisation", "F.batch_norm", "torch.batch_norm")
def batch_norm(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Normalise each channel over batch and volume."""
    given = bound(
        "input running_mean running_var weight bias training momentum eps",
        args,
        kwargs,
        weight=None,
        bias=None,
        training=False,
        momentum=0.1,
        eps=1e-5,
    )
    return _with_running(func, args, kwargs, given, given["training"], Pooled(over_batch=True))


@handles("Normalisation", "F.instance_norm")
def instance_norm(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Normalise each sample and channel over the volume."""
    given = bound(
        "input running_mean running_var weight bias use_input_stats momentum eps",
        args,
        kwargs,
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        use_input_stats=True,
        momentum=0.1,
        eps=1e-5,
    )
    return _with_running(func, args, kwargs, given, given["use_input_stats"], Pooled(over_batch=False))


def _with_running(
    func: Callable, args: tuple, kwargs: dict[str, Any], given: dict, from_input: bool, pooled: Pooled
) -> Any:
    volume = given["input"]
    if not isinstance(volume, ShardedVolume) or not spatial_only(volume, volume.ndim - 2):
        return unsupported(func, args, kwargs, "the volume must be cut along spatial dims")
    weight, bias, mean, var = given["weight"], given["bias"], given["running_mean"], given["running_var"]
    if not from_input:
        columns = [
            [None] * len(volume.slabs) if t is None else volume.context.spread(t) for t in (mean, var, weight, bias)
        ]
        rows = zip(volume.slabs, *columns, strict=True)
        return wrap(volume, [F.batch_norm(x, m, v, w, b, False, 0.0, given["eps"]) for x, m, v, w, b in rows])
    result, found = normalize(volume, pooled, weight, bias, given["eps"])
    if mean is not None:
        count = found.voxels * (volume.shape[0] if pooled.over_batch else 1)
        with torch.no_grad():
            unbiased = found.variance.mean(0) * (count / (count - 1))
            mean.lerp_(found.mean.mean(0).to(mean), given["momentum"])
            var.lerp_(unbiased.to(var), given["momentum"])
    return result


@handles("Normalisation", "F.group_norm", "torch.group_norm")
def group_norm(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Normalise groups of channels of each sample over the volume."""
    given = bound("input num_groups weight bias eps", args, kwargs, weight=None, bias=None, eps=1e-5)
    volume, groups = given["input"], given["num_groups"]
    if not isinstance(volume, ShardedVolume) or not spatial_only(volume, volume.ndim - 2):
        return unsupported(func, args, kwargs, "the volume must be cut along spatial dims")
    if volume.shape[1] % groups:
        raise RuntimeError(f"number of channels ({volume.shape[1]}) must be divisible by num_groups ({groups})")
    return normalize(volume, Pooled(False, groups), given["weight"], given["bias"], given["eps"])[0]


@handles("Normalisation", "F.layer_norm", "torch.layer_norm", "F.rms_norm")
def layer_norm(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Normalise over the last dims: within each slab, or over the cut where it is one of them."""
    rms = func.__name__ == "rms_norm"
    names = "input normalized_shape weight eps" if rms else "input normalized_shape weight bias eps"
    given = bound(names, args, kwargs, weight=None, bias=None, eps=None if rms else 1e-5)
    volume, shape = given["input"], given["normalized_shape"]
    if not isinstance(volume, ShardedVolume):
        return unsupported(func, args, kwargs, "weight and bias must be ordinary tensors")
    dims = list(range(volume.ndim - len(shape), volume.ndim))
    weight, bias = given["weight"], given["bias"]
    if not set(dims) & set(volume.dims):
        spread = volume.context.spread
        columns = [
            [None] * len(volume.slabs) if t is None else spread(t) for t in ((weight,) if rms else (weight, bias))
        ]
        rows = zip(volume.slabs, *columns, strict=True)
        return wrap(volume, [func(slab, shape, *own, given["eps"]) for slab, *own in rows])
    if rms:
        return unsupported(func, args, kwargs, "the cut dim is normalised over")
    mean, squares, count = moments(volume, dims)
    centered = elementwise(torch.sub, volume, mean.to(volume.dtype))
    result = elementwise(torch.mul, centered, (squares / count + given["eps"]).rsqrt().to(volume.dtype))
    result = result if weight is None else elementwise(torch.mul, result, weight)
    return result if bias is None else elementwise(torch.add, result, bias)


@handles("Normalisation", "F.local_response_norm")
def local_response_norm(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Normalise across neighbouring channels of each voxel."""
    volume = args[0]
    if not isinstance(volume, ShardedVolume) or 1 in volume.dims:
        return unsupported(func, args, kwargs, "the channels must not be cut")
    return wrap(volume, [func(slab, *args[1:], **kwargs) for slab in volume.slabs])
