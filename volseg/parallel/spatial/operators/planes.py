"""Fetch the planes that windows need and run the operator: the skeleton of operators with windows along the cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device.first_order import LinearMap
from volseg.device.gpus import keeping
from volseg.parallel.spatial.dispatch import SEVERAL_RANGES
from volseg.parallel.spatial.plan.shards import Fetch, Span, can_split, spans
from volseg.parallel.spatial.plan.windows import Convolution, Window
from volseg.parallel.spatial.table import refuse
from volseg.parallel.spatial.transport.pieces import start_total
from volseg.parallel.spatial.volume import ShardedVolume, wrap


@dataclass(frozen=True, slots=True)
class AxisPlan:
    """An operator along one cut dim: its window, its number of output planes and its padding value."""

    window: Window
    outputs: int
    fill: float = 0.0


@dataclass(frozen=True, slots=True)
class LocalWindow:
    """What one shard computes along one cut dim.

    ``span`` is the (unclipped) range of input planes in its extended slab, ``output`` the range of output planes to
    return, and ``skip`` the number of planes of the local result in front of them.
    """

    span: Span
    output: Span
    skip: int


Windows = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""Kernel, stride, padding in front and dilation per spatial dim."""


def convolution_plans(
    volume: ShardedVolume, sides: Windows, after: Sequence[int] = (), ceil_mode: bool = False, fill: float = 0.0
) -> list[AxisPlan]:
    """Return the plan of a convolution or pooling along each cut dim, from its values per spatial dim."""
    kernel, _, before, _ = sides
    plans = []
    for dim, size in zip(volume.dims, volume.sizes, strict=True):
        i = dim - (volume.ndim - len(kernel))
        window = Convolution(*(values[i] for values in sides))
        plans.append(AxisPlan(window, window.outputs(size, (after or before)[i], ceil_mode), fill))
    return plans


def outside_cut(volume: ShardedVolume, padding: Sequence[int]) -> list[int]:
    """Return the padding per spatial dim added by the operator itself: none along the cut, where planes are fetched."""
    first = volume.ndim - len(padding)
    return [0 if first + i in volume.dims else planes for i, planes in enumerate(padding)]


def _fetch_windows(
    volume: ShardedVolume, plans: Sequence[AxisPlan], reads_only: bool = False
) -> tuple[list[Tensor], list[list[LocalWindow]]]:
    """Give each slab the planes its outputs need, padding included.

    Returns the extended slabs and, for each of them, one ``LocalWindow`` per cut dim. With ``reads_only`` the
    caller neither changes them in place nor returns them.
    """
    communicator = volume.context.communicator
    slabs, unit = volume.slabs, get_plane_unit(volume)
    windows: list[list[LocalWindow]] = [[] for _ in slabs]
    for axis, (dim, size, plan) in enumerate(zip(volume.dims, volume.sizes, plans, strict=True)):
        outputs = spans(plan.outputs, communicator.grid[axis])
        needs = [plan.window.need(*output) for output in outputs]
        wanted = [clip(need, size) for need in needs]
        widths = []
        for coordinates, local in zip(communicator.coordinates, windows, strict=True):
            here = coordinates[axis]
            local.append(LocalWindow(needs[here], outputs[here], outputs[here][0] - plan.window.first(*outputs[here])))
            # A shard may need nothing but padding.
            start, stop = needs[here]
            before = min(max(-start, 0), stop - start)
            after = min(max(stop - size, 0), stop - start)
            widths.append([*[0, 0] * (volume.ndim - 1 - dim), before, after])
        fetch = Fetch(axis, dim, size, wanted, unit)
        fetched = communicator.take_own(slabs, fetch, take) if reads_only and fetch.stays else None
        rows = zip(communicator.fetch(slabs, fetch) if fetched is None else fetched, widths, strict=True)
        slabs = [F.pad(slab, own, value=plan.fill) if any(own) else slab for slab, own in rows]
    return slabs, windows


def get_plane_unit(volume: ShardedVolume) -> int:
    """Return how many planes of a volume stay together; refuse one whose cut dim holds several ranges of planes."""
    if volume.merged is None:
        return 1
    if volume.merged.outer > 1:
        refuse(SEVERAL_RANGES)
    return volume.merged.unit


def clip(span: Span, size: int) -> Span:
    """Return the part of a span that lies inside the volume."""
    start = min(max(span[0], 0), size)
    return start, max(start, min(span[1], size))


def take(slab: Tensor, dim: int, start: int, count: int, *, apart: bool = False) -> Tensor:
    """Return planes of a slab; their gradient is padded by zeros in its own layout (torch would make it contiguous).

    With ``apart``, autograd does not treat the planes as a view: the slab has no other use, and they may be changed in
    place.
    """
    size = slab.shape[dim]

    def narrow(own: Tensor) -> Tensor:
        part = own.narrow(dim, start, count)
        if not apart:
            return part
        alone = torch.empty(0, dtype=own.dtype, device=own.device)
        return alone.set_(own.untyped_storage(), part.storage_offset(), part.shape, part.stride())

    taken: Tensor = LinearMap.apply(narrow, lambda own: start_total(own, dim, size, start, own), slab)
    return taken


Local = Callable[[Tensor, list[LocalWindow], int], Tensor]
"""Computes a slab's outputs from the extended slab, its windows and its position among this process's slabs."""

Whole = Callable[[Tensor], Any]


def sharded_windows(
    volume: ShardedVolume, plans: Sequence[AxisPlan], local: Local, whole: Whole, reads_only: bool = False
) -> Any:
    """Run an operator that looks along the cut dims.

    Parameters
    ----------
    local
        Computes a slab's outputs from the extended slab, its windows and its position among this process's slabs;
        planes beyond those owed are dropped here.
    whole
        The plain operator. If the result has fewer planes than shards, it runs on the gathered volume on every shard:
        coarse levels are small. It also runs on the slab of a single shard: an operator that pads by itself needs no
        copy with planes of zeros, and returns no surplus planes.
    reads_only
        Whether ``local`` only reads its slab, and returns new memory that no backward pass reads.
    """
    context = volume.context
    if context.communicator.num_shards == 1:
        return wrap(volume, [whole(slab) for slab in volume.slabs])
    if not all(can_split(plan.outputs, count) for plan, count in zip(plans, context.communicator.grid, strict=True)):
        return whole(volume.full_tensor())
    # Without autograd the result is not a view either: torch would refuse to change a view in place later.
    apart = reads_only and not torch.is_grad_enabled()
    # Outside of the network second derivatives may be requested.
    reads_only = reads_only and context.communicator.is_direct and context.in_network
    slabs, windows = _fetch_windows(volume, plans, reads_only)
    results = []
    for position, (slab, own) in enumerate(zip(slabs, windows, strict=True)):
        result = local(slab, own, position)
        for dim, window in zip(volume.dims, own, strict=True):
            owed = window.output[1] - window.output[0]
            if window.skip or result.shape[dim] != owed:
                part = dim, window.skip, owed
                result = take(result, *part, apart=True) if reads_only or apart else result.narrow(*part)
        results.append(result)
    shape = list(results[0].shape)
    for dim, plan in zip(volume.dims, plans, strict=True):
        shape[dim] = plan.outputs
    return ShardedVolume(results, volume.dims, shape, context)


def select_planes(slab: Tensor, dim: int, indices: Sequence[int]) -> Tensor:
    """Return planes by index, for general cases that no slice expresses."""
    return slab.index_select(dim, constant(tuple(indices), torch.int64, slab.device))


@keeping()  # without a limit: recorded steps read these tensors at fixed addresses
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a plan's numbers on a device; cached, so that no step waits for the copy, and steps can be captured."""
    with torch.inference_mode(False):  # a later step may save it for its backward pass
        return torch.tensor(values, dtype=dtype).to(device)
