"""Slices and joins: read planes of a volume by index or range; concatenate and stack volumes.

Along the cut the slabs are rebalanced. Parts that are whole, or have another cut, are first cut like the first volume.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.spatial.convolution.plan import count_slab_tiles
from volseg.parallel.spatial.gathered import say_gathered, volumes, whole_of
from volseg.parallel.spatial.lazy.recipes import join_channels
from volseg.parallel.spatial.operators.dims import permute
from volseg.parallel.spatial.operators.operands import cut_like, wrap_reduced
from volseg.parallel.spatial.operators.planes import AxisPlan, sharded_windows
from volseg.parallel.spatial.plan.windows import Strided
from volseg.parallel.spatial.signatures import bind
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume, from_whole, wrap


def take_planes(volume: ShardedVolume, dim: int, start: int, count: int, step: int = 1) -> ShardedVolume | Tensor:
    """Return ``count`` planes from ``start`` on, every ``step``-th; along the cut the slabs are rebalanced."""
    dim %= volume.ndim
    if dim not in volume.dims:
        stop = start + (count - 1) * step + 1 if count else start
        index = (slice(None),) * dim + (slice(start, stop, step),)
        return wrap(volume, [slab[index] for slab in volume.slabs])
    if (start, count, step) == (0, volume.shape[dim], 1):
        return volume
    plans = [
        AxisPlan(Strided(start, step), count) if cut == dim else AxisPlan(Strided(), size)
        for cut, size in zip(volume.dims, volume.sizes, strict=True)
    ]

    def every(tensor: Tensor) -> Tensor:
        index = (slice(None),) * dim + (slice(None, None, step),)
        return tensor[index]

    def whole(tensor: Tensor) -> Tensor:
        return every(tensor.narrow(dim, start, (count - 1) * step + 1 if count else 0))

    return sharded_windows(volume, plans, lambda slab, *_: every(slab), whole)


def sliced(volume: ShardedVolume, entries: Sequence[Any]) -> ShardedVolume | Tensor:
    """Index with integers, slices and None, along cut dims too."""
    # Slice all uncut dims first, in one step: planes that change shards are then smaller.
    given = [place for place, entry in enumerate(entries) if entry is not None]
    ranges = {place for dim, place in enumerate(given) if isinstance(entries[place], slice) and dim not in volume.dims}
    index = tuple(entries[place] if place in ranges else slice(None) for place in given)
    dim = 0
    result: ShardedVolume | Tensor = volume
    if any(part != slice(None) for part in index):
        result = wrap(volume, [slab[index] for slab in volume.slabs])
        entries = [slice(None) if place in ranges else entry for place, entry in enumerate(entries)]
    for entry in entries:
        if not isinstance(result, ShardedVolume):  # now too thin to be cut
            result = result[(slice(None),) * dim + (entry,)]
            dim += not isinstance(entry, int)
            continue
        if isinstance(entry, slice):
            result = _take_range(result, dim, entry)
        elif entry is None:
            result = permute(torch.unsqueeze, (result, dim), {})
        else:
            result = _select(result, dim, entry)
            continue
        dim += 1
    return result


def _take_range(volume: ShardedVolume, dim: int, entry: slice) -> ShardedVolume | Tensor:
    start, stop, step = entry.indices(volume.shape[dim])
    if step < 1:
        raise ValueError("step must be greater than zero")
    count = max(0, -(-(stop - start) // step))
    return volume if entry == slice(None) else take_planes(volume, dim, start, count, step)


def is_basic(entry: Any) -> bool:
    """Return whether an index is an integer, a slice, None or an ellipsis."""
    return entry is None or entry is ... or (isinstance(entry, int | slice) and not isinstance(entry, bool))


def expanded(index: tuple, ndim: int) -> list[Any]:
    """Replace the ellipsis by full slices."""
    used = sum(entry is not None and entry is not ... for entry in index)
    rest = [slice(None)] * (ndim - used)
    if ... in index:
        where = index.index(...)
        return [*index[:where], *rest, *index[where + 1 :]]
    return [*index, *rest]


def _select(volume: ShardedVolume, dim: int, index: int) -> ShardedVolume | Tensor:
    size = volume.shape[dim]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {size}")
    if dim in volume.dims:  # one plane is whole: every shard holds it
        one = take_planes(volume, dim, index % size, 1)
        one = one.full_tensor() if isinstance(one, ShardedVolume) else one
        return one.squeeze(dim)
    return wrap_reduced(volume, [slab.select(dim, index) for slab in volume.slabs], [dim])


@handles("Slices and joins", "narrow", merged=True)
def narrow(func: Callable, input: Any, dim: int, start: Any, length: int) -> Any:
    """Take a range of planes."""
    dim %= input.ndim
    first = int(start)
    return take_planes(input, dim, first + input.shape[dim] if first < 0 else first, length)


@handles("Slices and joins", "select", merged=True)
def select(func: Callable, input: Any, dim: int, index: int) -> Any:
    """Take one plane."""
    return _select(input, dim % input.ndim, index)


@handles("Slices and joins", "unbind", "Tensor.__iter__", merged=True)
def unbind(func: Callable, input: Any, dim: int = 0) -> Any:
    """Take the planes one by one."""
    return tuple(_select(input, dim % input.ndim, index) for index in range(input.shape[dim]))


SPLITS = {"vsplit": 0, "hsplit": 1, "dsplit": 2}


@handles("Slices and joins", "split", "chunk", "tensor_split", "split_with_sizes", *SPLITS, rehearse=False, merged=True)
def split(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Split along an uncut dim, or along the cut into balanced volumes."""
    named = bind(func, args, kwargs)
    volume = named.pop("input")
    dim = SPLITS.get(func.__name__, named.pop("dim", 0)) % volume.ndim
    if any(isinstance(value, Tensor) for value in named.values()):
        refuse("it needs numbers where to split, not a tensor")
    # A meta tensor gives the sizes of the parts by torch's own rules.
    outline = torch.empty(volume.shape, device="meta")
    (how,) = named.values()
    parts = func(outline, how) if func.__name__ in SPLITS else func(outline, how, dim=dim)
    result, start = [], 0
    for part in parts:
        result.append(take_planes(volume, dim, start, part.shape[dim]))
        start += part.shape[dim]
    return tuple(result)


@handles("Slices and joins", "cat", "concat", "concatenate", merged=True, rounded=True)
def cat(func: Callable, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Join along uncut dims slab by slab; along the cut, join the gathered volumes."""
    # torch ignores an empty tensor of one dim, whatever dims the others have.
    parts = [part for part in tensors if part.shape != (0,)]
    like = volumes(parts)[0]
    dim %= like.ndim
    if dim in like.dims:
        say_gathered(like, "joins planes to")
        return from_whole(torch.cat(list(map(whole_of, parts)), dim), like.dims, like.context)
    joined = [cut_like(part, like) for part in parts]
    if dim == 1 and like.ndim == 5 and like.merged is None and like.context.communicator.is_direct:
        itemsize = max(part.dtype.itemsize for part in joined)
        tiles = count_slab_tiles(like, sum(part.shape[1] for part in joined), itemsize)
        return join_channels(joined, later=tiles > 1)
    slabs = [torch.cat(column, dim) for column in zip(*(part.slabs for part in joined), strict=True)]
    return wrap(like, slabs)


@handles("Slices and joins", "stack", merged=True)
def stack(func: Callable, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Stack volumes along a new dim."""
    like = volumes(tensors)[0]
    dim %= like.ndim + 1
    parts = [cut_like(part, like) for part in tensors]
    slabs = [torch.stack(column, dim) for column in zip(*(part.slabs for part in parts), strict=True)]
    return wrap(like, slabs, [cut + (dim <= cut) for cut in like.dims])
