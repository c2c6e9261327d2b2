"""Max and average pooling (overlapping, padded, ``ceil_mode``) and their adaptive forms."""

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.sharding.layout import can_split
from volseg.parallel.sharding.operators.arguments import bound, per_dim, spatial_only
from volseg.parallel.sharding.operators.planes import (
    AxisPlan,
    LocalWindow,
    convolution_plans,
    outside_cut,
    sharded_windows,
)
from volseg.parallel.sharding.operators.reductions import over_dims
from volseg.parallel.sharding.table import handles, unsupported
from volseg.parallel.sharding.volume import ShardedVolume
from volseg.parallel.sharding.windows import AdaptivePool

__all__ = ["adaptive_pool", "average_pool", "max_pool"]


@handles("Pooling", "torch.max_pool1d", "torch.max_pool2d", "torch.max_pool3d")
@handles("Pooling", "F.max_pool1d", "F.max_pool2d", "F.max_pool3d")
def max_pool(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pool each slab, extended by its halo; planes beyond the volume hold minus infinity."""
    given = bound(
        "input kernel_size stride padding dilation ceil_mode",
        args,
        kwargs,
        stride=None,
        padding=0,
        dilation=1,
        ceil_mode=False,
    )
    volume, count = given["input"], _spatial(func)
    if given.get("return_indices") or not spatial_only(volume, count) or not volume.dtype.is_floating_point:
        return unsupported(
            func, args, kwargs, "it pools floating point volumes cut along spatial dims, without indices"
        )
    kernel = per_dim(given["kernel_size"], count)
    stride = per_dim(given["stride"] or kernel, count)
    padding, dilation = per_dim(given["padding"], count), per_dim(given["dilation"], count)
    plans = convolution_plans(volume, kernel, stride, padding, dilation, ceil_mode=given["ceil_mode"], fill=-inf)
    inside = outside_cut(volume, padding)

    def local(slab: Tensor, _windows: list[LocalWindow], _position: int) -> Tensor:
        return func(slab, kernel, stride, inside, dilation, given["ceil_mode"])

    def whole(tensor: Tensor) -> Tensor:
        return func(tensor, kernel, stride, padding, dilation, given["ceil_mode"])

    return sharded_windows(volume, plans, local, whole)


@handles("Pooling", "torch.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d")
def average_pool(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Sum each window on the extended slab, then divide by the number of planes that torch counts."""
    given = bound(
        "input kernel_size stride padding ceil_mode count_include_pad divisor_override",
        args,
        kwargs,
        stride=None,
        padding=0,
        ceil_mode=False,
        count_include_pad=True,
        divisor_override=None,
    )
    volume, count = given["input"], _spatial(func)
    if not spatial_only(volume, count):
        return unsupported(func, args, kwargs, "the volume must be cut along spatial dims")
    kernel = per_dim(given["kernel_size"], count)
    stride = per_dim(given["stride"] or kernel, count)
    padding = per_dim(given["padding"], count)
    ceil_mode, include, divisor = given["ceil_mode"], given["count_include_pad"], given["divisor_override"]
    plans = convolution_plans(volume, kernel, stride, padding, [1] * count, ceil_mode=ceil_mode)
    inside = outside_cut(volume, padding)
    first = volume.ndim - count
    # Windows that lie inside the volume everywhere along the cut are counted alike by the plain operator.
    regular = all(
        padding[dim - first] == 0 and plan.window.need(0, plan.outputs)[1] <= size
        for dim, size, plan in zip(volume.dims, volume.sizes, plans, strict=True)
    )
    rest = (ceil_mode, include) if count == 1 else (ceil_mode, include, divisor)

    def local(slab: Tensor, windows: list[LocalWindow], _position: int) -> Tensor:
        pooled = func(slab, kernel, stride, inside, *rest)
        if regular or divisor is not None:
            return pooled
        for dim, size, window in zip(volume.dims, volume.sizes, windows, strict=True):
            i = dim - first
            planes = _counted(kernel[i], stride[i], padding[i], size, window, include)
            # The plain operator divided by the kernel; the volume's border counts fewer planes.
            factor = torch.tensor([kernel[i] / n for n in planes], dtype=pooled.dtype, device=pooled.device)
            pooled = pooled.narrow(dim, window.skip, len(planes)) * factor.reshape([-1] + [1] * (pooled.ndim - dim - 1))
        return pooled

    def whole(tensor: Tensor) -> Tensor:
        return func(tensor, kernel, stride, padding, *rest)

    return sharded_windows(volume, plans, local, whole)


def _counted(kernel: int, stride: int, padding: int, size: int, window: LocalWindow, include: bool) -> list[int]:
    """Return, for each output plane, how many planes torch divides by."""
    counts = []
    for plane in range(*window.output):
        start = plane * stride - padding
        low, high = (
            (start, min(start + kernel, size + padding)) if include else (max(start, 0), min(start + kernel, size))
        )
        counts.append(high - low)
    return counts


@handles(
    "Pooling",
    *(f"{space}.adaptive_{kind}_pool{n}d" for space in ("torch", "F") for kind in ("avg", "max") for n in (1, 2, 3)),
)
def adaptive_pool(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pool to a given number of planes; to one plane it is a reduction over the volume."""
    given = bound("input output_size return_indices", args, kwargs, return_indices=False)
    volume, count = given["input"], _spatial(func)
    if given["return_indices"] or not spatial_only(volume, count):
        return unsupported(
            func, args, kwargs, "the volume must be cut along spatial dims, and indices are not returned"
        )
    first = volume.ndim - count
    outputs = per_dim(given["output_size"], count)
    outputs = [volume.shape[first + i] if n is None else n for i, n in enumerate(outputs)]
    cut = [dim - first for dim in volume.dims]
    kind = "mean" if "avg" in func.__name__ else "amax"
    if all(outputs[i] == 1 for i in cut):
        # Pooling along the cut and pooling within the slabs commute.
        within = [volume.shape[dim] for dim in range(first, volume.ndim)]
        if any(outputs[i] != within[i] for i in range(count) if i not in cut):
            partial = [outputs[i] if i not in cut else None for i in range(count)]
            slabs = [func(slab, partial) for slab in volume.slabs]
            shape = [*volume.shape[:first], *(within[i] if i in cut else outputs[i] for i in range(count))]
            volume = ShardedVolume(slabs, volume.dims, shape, volume.context)
        return over_dims(kind, volume, list(volume.dims), keepdim=True)
    plans = [AxisPlan(AdaptivePool(n, outputs[i]), outputs[i]) for i, n in zip(cut, volume.sizes, strict=True)]
    grid = volume.context.communicator.grid
    if not all(can_split(plan.outputs, shards) for plan, shards in zip(plans, grid, strict=True)):
        return func(volume.full_tensor(), outputs)

    def local(slab: Tensor, windows: list[LocalWindow], _position: int) -> Tensor:
        # Along the cut the intervals do not start where the slab does: pool them one by one there.
        for dim, plan, window in zip(volume.dims, plans, windows, strict=True):
            slab = _pool_intervals(kind, slab, dim, plan.window, window)  # type: ignore[arg-type]
        within = [slab.shape[first + i] if i in cut else outputs[i] for i in range(count)]
        return func(slab, within)

    return sharded_windows(volume, plans, local, lambda tensor: func(tensor, outputs))


def _pool_intervals(kind: str, slab: Tensor, dim: int, pool: AdaptivePool, window: LocalWindow) -> Tensor:
    planes = []
    for plane in range(*window.output):
        start, stop = pool.need(plane, plane + 1)
        interval = slab.narrow(dim, start - window.span[0], stop - start)
        planes.append(getattr(interval, kind)(dim, keepdim=True))
    return torch.cat(planes, dim)


def _spatial(func: Callable) -> int:
    """Return the number of spatial dims that a pooling function's name tells."""
    digits = [letter for letter in func.__name__ if letter.isdigit()]
    return int(digits[0])
