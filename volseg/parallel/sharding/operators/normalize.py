"""Batch, instance, group and layer norm with the statistics of the whole volume.

Statistics are computed at once; scale and shift are deferred until the next operator is known (see ``deferred``).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.parallel.sharding.deferred import Deferred, Pooled, Statistics, statistics
from volseg.parallel.sharding.operators.arguments import bound, spatial_only
from volseg.parallel.sharding.operators.pointwise import elementwise
from volseg.parallel.sharding.operators.reductions import moments
from volseg.parallel.sharding.table import handles, unsupported
from volseg.parallel.sharding.volume import ShardedVolume, wrap

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "normalize"]


def normalize(
    volume: ShardedVolume, pooled: Pooled, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[ShardedVolume, Statistics]:
    """Return the normalised volume, still to be computed, and the statistics it is normalised with."""
    found = statistics(volume, pooled, weight, bias, eps)
    deferred = Deferred(volume.context, volume.dims, list(volume.slabs), pooled, found, weight, bias)
    result = ShardedVolume(volume.slabs, volume.dims, volume.shape, volume.context, deferred)
    volume.context.defer(result)
    return result, found


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
    count = volume.shape[2:].numel() * (volume.shape[0] if pooled.over_batch else 1)
    if count == 1:  # torch's rule
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {volume.shape}")
    result, found = normalize(volume, pooled, weight, bias, given["eps"])
    if mean is not None:
        with torch.no_grad():
            # Samples that share their statistics have the same ones: no average of them is needed.
            alike = pooled.over_batch or volume.shape[0] == 1
            center, variance = (
                (found.mean[0], found.variance[0]) if alike else (found.mean.mean(0), found.variance.mean(0))
            )
            momentum, variance = given["momentum"], variance.to(var)
            mean.lerp_(center.to(mean), momentum)
            # Towards the unbiased variance, count / (count - 1) times the biased one.
            var.lerp_(variance, momentum).add_(variance, alpha=momentum / (count - 1))
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
