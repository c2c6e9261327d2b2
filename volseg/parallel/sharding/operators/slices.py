"""Slices: planes of a volume by number or range, read and assigned; along the cut the slabs are balanced anew."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.sharding.operators.arguments import bound
from volseg.parallel.sharding.operators.dims import insert_dim
from volseg.parallel.sharding.operators.planes import AxisPlan, LocalWindow, sharded_windows
from volseg.parallel.sharding.operators.pointwise import aligned
from volseg.parallel.sharding.table import handles, unsupported
from volseg.parallel.sharding.volume import ShardedVolume, wrap
from volseg.parallel.sharding.windows import Strided

__all__ = ["getitem", "narrow", "setitem", "split", "take_planes"]


def take_planes(volume: ShardedVolume, dim: int, start: int, count: int, step: int = 1) -> ShardedVolume | Tensor:
    """Return ``count`` planes from ``start`` on, every ``step``-th; along the cut the slabs are balanced anew."""
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

    def local(slab: Tensor, _windows: list[LocalWindow], _position: int) -> Tensor:
        return every(slab)

    def whole(tensor: Tensor) -> Tensor:
        return every(tensor.narrow(dim, start, (count - 1) * step + 1 if count else 0))

    return sharded_windows(volume, plans, local, whole)


@handles("Slices and joins", "Tensor.__getitem__")
def getitem(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Index with integers, slices, None and an ellipsis; a cut dim too."""
    volume, index = args
    if not isinstance(volume, ShardedVolume):
        return unsupported(func, args, kwargs, "an ordinary tensor cannot be indexed by a sharded one")
    index = index if isinstance(index, tuple) else (index,)
    if not all(entry is None or entry is ... or isinstance(entry, int | slice) for entry in index):
        return unsupported(func, args, kwargs, "only integers, slices, None and ... are supported as indices")
    entries = _expanded(index, volume.ndim)
    dim = 0
    result: ShardedVolume | Tensor = volume
    for entry in entries:
        if not isinstance(result, ShardedVolume):  # too thin to be cut by now
            result = result[(slice(None),) * dim + (entry,)]
            dim += not isinstance(entry, int)
            continue
        if isinstance(entry, slice):
            start, stop, step = entry.indices(result.shape[dim])
            if step < 1:
                raise ValueError("step must be greater than zero")
            result = take_planes(result, dim, start, max(0, -(-(stop - start) // step)), step)
        elif entry is None:
            result = insert_dim(result, dim)
        else:
            result = _select(result, dim, entry)
            continue
        dim += 1
    return result


def _expanded(index: tuple, ndim: int) -> list[Any]:
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
    cut = [d - (dim < d) for d in volume.dims]
    return wrap(volume, [slab.select(dim, index) for slab in volume.slabs], cut)


@handles("Slices and joins", "narrow", "select")
def narrow(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Take a range of planes, or one plane."""
    if func.__name__ == "select":
        given = bound("input dim index", args, kwargs)
        return _select(given["input"], given["dim"] % given["input"].ndim, given["index"])
    given = bound("input dim start length", args, kwargs)
    dim = given["dim"] % given["input"].ndim
    return take_planes(given["input"], dim, int(given["start"]) % max(1, given["input"].shape[dim]), given["length"])


@handles("Slices and joins", "split", "chunk", "tensor_split", "unbind", "split_with_sizes", "Tensor.__iter__")
def split(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Split along a dim that is not cut, or along the cut into balanced volumes."""
    volume, *rest = args
    default = 0
    dim = kwargs.get("dim", rest[1] if len(rest) > 1 else default)
    if func.__name__ in ("unbind", "__iter__"):
        dim = kwargs.get("dim", rest[0] if rest else 0) % volume.ndim
        return tuple(_select(volume, dim, index) for index in range(volume.shape[dim]))
    dim %= volume.ndim
    # A meta tensor tells the sizes of the parts, by torch's own rules.
    line = torch.empty(volume.shape[dim], device="meta")
    named = {key: value for key, value in kwargs.items() if key not in ("dim", "input", "self")}
    parts = func(line, *rest[:1], **named, dim=0)
    result, start = [], 0
    for part in parts:
        result.append(take_planes(volume, dim, start, part.shape[0]))
        start += part.shape[0]
    return tuple(result)


@handles("Slices and joins", "Tensor.__setitem__")
def setitem(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Assign to a slice that keeps the cut dims whole."""
    volume, index, value = args
    if not isinstance(volume, ShardedVolume):
        unsupported(func, args, kwargs, "an ordinary tensor cannot take in slabs")
    index = index if isinstance(index, tuple) else (index,)
    simple = all(entry is ... or isinstance(entry, int | slice) for entry in index)
    entries = _expanded(index, volume.ndim) if simple else []
    if not simple or any(entries[dim] != slice(None) for dim in volume.dims):
        raise UnsupportedOperatorError(
            f"assignment in {volume.context.module_path()} to {index} of a sharded volume cut along dim {volume.dims}: "
            f"only integers and slices that keep the cut dims whole are supported; build the result with torch.cat"
        )
    kept = [d - sum(isinstance(e, int) for e in entries[:d]) for d in volume.dims]
    ndim = sum(not isinstance(e, int) for e in entries)
    if isinstance(value, Tensor):
        like = ShardedVolume(volume.slabs, kept, [0] * ndim, volume.context)
        like._shape = torch.Size(_sizes_at(kept, volume.sizes, ndim))
        values = aligned(value, like)
    else:
        values = [value] * len(volume.slabs)
    volume.context.settle()
    for slab, own in zip(volume.slabs, values, strict=True):
        slab[tuple(entries)] = own


def _sizes_at(dims: Sequence[int], sizes: Sequence[int], ndim: int) -> list[int]:
    shape = [1] * ndim
    for dim, size in zip(dims, sizes, strict=True):
        shape[dim] = size
    return shape
