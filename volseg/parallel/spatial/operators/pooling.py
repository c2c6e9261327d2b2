"""Max and average pooling (overlapping, padded, ``ceil_mode``) and their adaptive forms."""

from collections.abc import Callable
from math import inf
from typing import Any

from torch import Tensor

from volseg.device import fusions, upsample2x
from volseg.device.first_order import LinearMap
from volseg.parallel.spatial.gathered import cut_if_thick, say_gathered
from volseg.parallel.spatial.operators.operands import each_sample, each_slab, per_dim, spatial_only
from volseg.parallel.spatial.operators.planes import convolution_plans, outside_cut, sharded_windows
from volseg.parallel.spatial.operators.reductions import over_dims
from volseg.parallel.spatial.table import handles, refuse, refuse_if

TREATED = "input kernel_size stride padding ceil_mode"

LARGEST = f"{TREATED} dilation"


@handles("Pooling", "torch.max_pool1d", "torch.max_pool2d", "torch.max_pool3d", treats=LARGEST, samples=each_sample)
@handles("Pooling", "F.max_pool1d", "F.max_pool2d", "F.max_pool3d", treats=LARGEST, samples=each_sample)
def max_pool(func: Callable, given: Any) -> Any:
    """Pool each slab, extended by its halo; planes beyond the volume hold minus infinity."""
    volume, ceil_mode = given.input, given.ceil_mode
    count = _spatial(func)
    if not spatial_only(volume, count) or not volume.dtype.is_floating_point:
        refuse("it pools floating point volumes cut along spatial dims")
    kernel, stride, padding = _read_windows(given, count)
    dilation = per_dim(given.dilation, count)
    plans = convolution_plans(volume, (kernel, stride, padding, dilation), ceil_mode=ceil_mode, fill=-inf)
    inside = outside_cut(volume, padding)

    def run(tensor: Tensor, padding: list[int]) -> Tensor:
        return func(tensor, kernel, stride, padding, dilation, ceil_mode)

    return sharded_windows(volume, plans, lambda slab, *_: run(slab, inside), lambda tensor: run(tensor, padding))


def _read_windows(given: Any, count: int) -> tuple[list[int], list[int], list[int]]:
    """Return kernel, stride and padding per spatial dim."""
    kernel = per_dim(given.kernel_size, count)
    return kernel, per_dim(given.stride or kernel, count), per_dim(given.padding, count)


AVERAGED = f"{TREATED} count_include_pad divisor_override"


@handles("Pooling", "torch.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d", treats=AVERAGED, samples=each_sample)
def average_pool(func: Callable, given: Any) -> Any:
    """Average each window on the extended slab; on the gathered volume if windows at the border have fewer planes."""
    volume, ceil_mode = given.input, given.ceil_mode
    count = _spatial(func)
    refuse_if(not spatial_only(volume, count), "the volume must be cut along spatial dims")
    kernel, stride, padding = _read_windows(given, count)
    include = given.count_include_pad
    divisor = getattr(given, "divisor_override", None)  # only of two or three dims
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
    say_gathered(volume, f"calls {func.__name__} with")
    return cut_if_thick(whole(volume.full_tensor()), volume)


def _fits_halves(slab: Tensor) -> bool:
    """Return whether our kernel can average 2 x 2 x 2 voxels of a slab: it needs even sizes and a GPU."""
    even = slab.ndim == 5 and all(size % 2 == 0 for size in slab.shape[2:])
    return even and slab.numel() > 0 and fusions.is_on("doubling") and upsample2x.takes(slab)


def _halve(slab: Tensor) -> Tensor:
    halved: Tensor = LinearMap.apply(upsample2x.halve, upsample2x.spread_gradient, slab)
    return halved


@handles("Pooling", "F.adaptive_avg_pool1d", "F.adaptive_avg_pool2d", "F.adaptive_avg_pool3d", samples=each_sample)
@handles("Pooling", "F.adaptive_max_pool1d", "F.adaptive_max_pool2d", "F.adaptive_max_pool3d", samples=each_sample)
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
    say_gathered(volume, f"calls {func.__name__} with")
    return cut_if_thick(func(volume.full_tensor(), outputs), volume)


def _spatial(func: Callable) -> int:
    """Return the number of spatial dims in a pooling function's name."""
    digits = [letter for letter in func.__name__ if letter.isdigit()]
    return int(digits[0])
