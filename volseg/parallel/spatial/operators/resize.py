"""Pooling and interpolation.

Max and average pooling (overlapping, padded, ``ceil_mode``) and their adaptive forms; nearest, nearest-exact and the
linear family of interpolation, with either ``align_corners``.
"""

from collections.abc import Callable
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device import fusions, upsample2x
from volseg.device.first_order import LinearMap
from volseg.device.layout import DIM
from volseg.parallel.spatial.gathered import gather_for
from volseg.parallel.spatial.operators.operands import each_slab, per_dim, spatial_only
from volseg.parallel.spatial.operators.planes import (
    AxisPlan,
    LocalWindow,
    constant,
    convolution_plans,
    outside_cut,
    select_planes,
    sharded_windows,
)
from volseg.parallel.spatial.operators.reductions import over_dims
from volseg.parallel.spatial.pending import PLAIN
from volseg.parallel.spatial.plan.windows import ChosenPlanes, Resize, nearest_planes
from volseg.parallel.spatial.sources import Moment, Unchanged
from volseg.parallel.spatial.table import handles, refuse, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume, wrap


@handles("Pooling", "torch.max_pool1d", "torch.max_pool2d", "torch.max_pool3d", samples=each_slab)
@handles("Pooling", "F.max_pool1d", "F.max_pool2d", "F.max_pool3d", samples=each_slab)
def max_pool(
    func: Callable, input: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Any:
    """Pool each slab, extended by its halo; planes beyond the volume are minus infinity."""
    volume, count = input, _spatial(func)
    if not spatial_only(volume, count) or not volume.dtype.is_floating_point:
        refuse("the volume must have a floating point type and be cut along spatial dims")
    kernel, stride, padding = _read_windows(kernel_size, stride, padding, count)
    dilation = per_dim(dilation, count)
    plans = convolution_plans(volume, (kernel, stride, padding, dilation), ceil_mode=ceil_mode, fill=-inf)
    inside = outside_cut(volume, padding)

    def run(tensor: Tensor, padding: list[int]) -> Tensor:
        return func(tensor, kernel, stride, padding, dilation, ceil_mode)

    return sharded_windows(volume, plans, lambda slab, *_: run(slab, inside), lambda tensor: run(tensor, padding))


def _read_windows(kernel: Any, stride: Any, padding: Any, count: int) -> tuple[list[int], list[int], list[int]]:
    """Return kernel, stride and padding per spatial dim."""
    return per_dim(kernel, count), per_dim(stride or kernel, count), per_dim(padding, count)


@handles("Pooling", "torch.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d", samples=each_slab)
def average_pool(
    func: Callable, input: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool,
    divisor_override: int | None = None,
) -> Any:  # fmt: skip
    """Average each window on the extended slab; on the gathered volume if windows at the border have fewer planes."""
    volume, count = input, _spatial(func)
    refuse_if(not spatial_only(volume, count), "the volume must be cut along spatial dims")
    kernel, stride, padding = _read_windows(kernel_size, stride, padding, count)
    include, divisor = count_include_pad, divisor_override  # a divisor only with two or three dims
    plans = convolution_plans(volume, (kernel, stride, padding, [1] * count), ceil_mode=ceil_mode)
    inside = outside_cut(volume, padding)
    first = volume.ndim - count
    rest = (ceil_mode, include) if count == 1 else (ceil_mode, include, divisor)
    halves = kernel == stride == [2] * 3 and padding == [0] * 3 and not ceil_mode and divisor is None

    def local(slab: Tensor, *_: Any) -> Tensor:
        return _halve(slab) if halves and _fits_halves(slab) else func(slab, kernel, stride, inside, *rest)

    def whole(tensor: Tensor) -> Tensor:
        return _halve(tensor) if halves and _fits_halves(tensor) else func(tensor, kernel, stride, padding, *rest)

    # A window at the volume's border may have fewer planes to divide by than those inside; a slab does not know it.
    margins = [planes if include else 0 for planes in padding]
    full = all(
        margins[dim - first] == padding[dim - first]
        and plan.window.need(0, plan.outputs)[1] <= size + margins[dim - first]
        for dim, size, plan in zip(volume.dims, volume.sizes, plans, strict=True)
    )
    if full or divisor is not None or volume.context.communicator.num_shards == 1:
        return sharded_windows(volume, plans, local, whole)
    return gather_for(func, volume, whole)


def _fits_halves(slab: Tensor) -> bool:
    """Return whether our kernel can average 2 x 2 x 2 voxels of a slab: it needs even sizes and a GPU."""
    even = slab.ndim == 5 and all(size % 2 == 0 for size in slab.shape[2:])
    return even and slab.numel() > 0 and fusions.is_on("doubling") and upsample2x.takes(slab)


def _halve(slab: Tensor) -> Tensor:
    halved: Tensor = LinearMap.apply(upsample2x.halve, upsample2x.spread_gradient, slab)
    return halved


@handles("Pooling", "F.adaptive_avg_pool1d", "F.adaptive_avg_pool2d", "F.adaptive_avg_pool3d", samples=each_slab)
@handles("Pooling", "F.adaptive_max_pool1d", "F.adaptive_max_pool2d", "F.adaptive_max_pool3d", samples=each_slab)
def adaptive_pool(func: Callable, input: Any, output_size: Any) -> Any:
    """Pool to one voxel by slabs, and then over the shards; to several voxels in the gathered volume."""
    volume, count = input, _spatial(func)
    refuse_if(not spatial_only(volume, count), "the volume must be cut along spatial dims")
    first = volume.ndim - count
    outputs = [volume.shape[first + i] if n is None else n for i, n in enumerate(per_dim(output_size, count))]
    if "avg" in func.__name__ and set(outputs) == {1}:
        return over_dims("mean", volume, list(range(first, volume.ndim)), keepdim=True)
    if "max" in func.__name__ and outputs[0] == 1 and volume.dims == (first,):
        # Of equal voxels the first in memory, as in torch: it is on the first of their shards.
        return volume.context.communicator.collect([func(slab, outputs) for slab in volume.slabs]).max(0).values
    if volume.context.communicator.num_shards == 1:
        return each_slab(func, volume, outputs)
    return gather_for(func, volume, lambda tensor: func(tensor, outputs))


def _spatial(func: Callable) -> int:
    """Return the number of spatial dims in a pooling function's name."""
    digits = [letter for letter in func.__name__ if letter.isdigit()]
    return int(digits[0])


NEAREST = ("nearest", "nearest-exact")
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@handles("Interpolation", "F.interpolate", samples=each_slab)
@handles("Interpolation", "F.upsample")
def interpolate(
    func: Callable, input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Any:  # fmt: skip
    """Blend planes along the cut, then let torch interpolate within them: linear interpolation is separable."""
    volume, count = input, input.ndim - 2
    given: dict[str, Any] = {"size": size, "scale_factor": scale_factor, "mode": mode}  # F.upsample calls F.interpolate
    given |= {"align_corners": align_corners, "recompute_scale_factor": recompute_scale_factor}
    if mode == "area":
        sizes = _sizes(volume, given, count)
        pool = getattr(F, f"adaptive_avg_pool{count}d")
        return adaptive_pool(pool, volume, sizes)
    known = mode in NEAREST or mode == LINEAR.get(count)
    if not known or antialias or not spatial_only(volume, count):
        modes = ", ".join((*NEAREST, *filter(None, [LINEAR.get(count)]), "area"))
        refuse(f"it needs a volume cut along spatial dims, no antialias, and a mode of {modes}; got mode={mode!r}")
    sizes = _sizes(volume, given, count)
    scales = _given_scales(given, count)
    corners = bool(align_corners)
    if _is_doubled(volume, mode, sizes, scales, corners):
        return _double_in_own_type(volume, mode)
    same = [volume.shape[2 + i] == sizes[i] for i in range(count)]
    # torch may shift planes by a factor that keeps their number.
    moves = any(same[i] and scales[i] not in (None, 1.0) and not corners for i in range(count))
    plans = []
    for dim, size in zip(volume.dims, volume.sizes, strict=True):
        i = dim - 2
        window: Any = Resize(size, sizes[i], scales[i], corners)
        if mode in NEAREST:
            planes = nearest_planes(size, sizes[i], mode, scales[i])
            window = None if planes is None else ChosenPlanes(planes)
        plans.append(AxisPlan(window, sizes[i]))

    def whole(tensor: Tensor) -> Tensor:
        return F.interpolate(tensor, **given)

    if volume.context.communicator.num_shards > 1 and (moves or any(plan.window is None for plan in plans)):
        return gather_for(func, volume, whole)
    cut = {dim - 2 for dim in volume.dims}

    def local(slab: Tensor, windows: list[LocalWindow], _position: int) -> Tensor:
        for dim, plan, window in zip(volume.dims, plans, windows, strict=True):
            slab = _blend(slab, dim, plan.window, window)  # type: ignore[arg-type]
        return slab if all(i in cut or same[i] for i in range(count)) else _within(slab, sizes, scales, cut, given)

    return sharded_windows(volume, plans, local, whole)


def _is_doubled(volume: ShardedVolume, mode: str, sizes: list[int], scales: list[float | None], corners: bool) -> bool:
    """Return whether D, H and W are doubled in a mode that our kernels compute."""
    twice = sizes == [2 * size for size in volume.shape[2:]] and all(scale in (None, 2.0) for scale in scales)
    taken = volume.ndim == 5 and volume.dims == (DIM,) and volume.merged is None and mode in ("nearest", "trilinear")
    # Outside of the network only a loss reads the result, in torch's element type.
    own = volume.context.in_network or not _is_widened(volume)
    return taken and twice and not corners and own and volume.numel() > 0 and _takes(volume)


def _is_widened(volume: ShardedVolume) -> bool:
    """Return whether autocast would make torch's result float32."""
    return volume.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(volume.device.type)


def _takes(volume: ShardedVolume) -> bool:
    return fusions.is_on("doubling") and upsample2x.takes(volume)


def _double_in_own_type(volume: ShardedVolume, mode: str) -> Any:
    """Return the doubled volume; ``widen`` computes its float32 voxels, for example if the network returns it."""
    result = _double(volume, mode)
    if _is_widened(volume) and isinstance(result, ShardedVolume):
        moment, unchanged = Moment(), Unchanged(list(volume._slabs))

        def widen(result: ShardedVolume) -> ShardedVolume:
            with moment.restored(), torch.autocast(volume.device.type, enabled=False):
                if result.pending is not PLAIN or not unchanged.holds():  # read, hooked or changed: convert its slabs
                    return wrap(result, [slab.float() for slab in result.slabs])
                wide: ShardedVolume = _double(wrap(volume, [slab.float() for slab in volume.slabs]), mode)
                return wide

        result.widen = widen
    return result


def _double(volume: ShardedVolume, mode: str) -> Any:
    linear, planes = mode == "trilinear", volume.shape[DIM]
    along = Resize(planes, 2 * planes) if linear else ChosenPlanes(tuple(plane // 2 for plane in range(2 * planes)))

    def double(slab: Tensor, part: upsample2x.DoubledPart) -> Tensor:
        shape = slab.shape

        def gather(gradient: Tensor) -> Tensor:
            return upsample2x.gather_gradient(gradient, shape, part, linear)

        doubled: Tensor = LinearMap.apply(lambda own: upsample2x.double(own, part, linear), gather, slab)
        return doubled

    def local(slab: Tensor, windows: list[LocalWindow], _position: int) -> Tensor:
        (window,) = windows
        return double(slab, upsample2x.DoubledPart(planes, window.span[0], window.output))

    def whole(tensor: Tensor) -> Tensor:
        return double(tensor, upsample2x.DoubledPart(planes, 0, (0, 2 * planes)))

    return sharded_windows(volume, [AxisPlan(along, 2 * planes)], local, whole)


def _within(slab: Tensor, sizes: list[int], scales: list[float | None], cut: set[int], given: dict) -> Tensor:
    """Interpolate along the uncut dims; along the cut dims the slab already has the output planes."""
    count = slab.ndim - 2
    corners, mode = given["align_corners"], given["mode"]
    if given["scale_factor"] is not None and not given["recompute_scale_factor"]:
        factors = [1.0 if i in cut else scales[i] for i in range(count)]
        return F.interpolate(slab, scale_factor=factors, mode=mode, align_corners=corners)  # type: ignore[arg-type]
    size = [slab.shape[2 + i] if i in cut else sizes[i] for i in range(count)]
    return F.interpolate(slab, size=size, mode=mode, align_corners=corners)


def _blend(slab: Tensor, dim: int, resize: Resize | ChosenPlanes, window: LocalWindow) -> Tensor:
    """Return the output planes of a slab along one cut dim."""
    sources = [resize.source(plane) for plane in range(*window.output)]
    start = window.span[0]
    first = select_planes(slab, dim, [low - start for low, _, _ in sources])
    weights = tuple(weight for _, _, weight in sources)
    if not any(weights):
        return first
    second = select_planes(slab, dim, [high - start for _, high, _ in sources])
    weight = constant(weights, slab.dtype, slab.device)
    return torch.lerp(first, second, weight.reshape([-1] + [1] * (slab.ndim - dim - 1)))


def _sizes(volume: ShardedVolume, given: dict, count: int) -> list[int]:
    if given["size"] is not None:
        return [int(size) for size in per_dim(given["size"], count)]
    factors = per_dim(given["scale_factor"], count)
    return [int(size * factor) for size, factor in zip(volume.shape[2:], factors, strict=True)]


def _given_scales(given: dict, count: int) -> list[float | None]:
    """Return the factors that torch uses for coordinates; None if it uses the ratio of the sizes."""
    if given["scale_factor"] is None or given["recompute_scale_factor"]:
        return [None] * count
    return [float(factor) for factor in per_dim(given["scale_factor"], count)]
