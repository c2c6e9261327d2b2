"""Functions that move voxels without computing: slices, joins, padding, mirroring, reshapes."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.sharding.joining import join_channels
from volseg.parallel.sharding.layout import spans
from volseg.parallel.sharding.operators.arguments import bound
from volseg.parallel.sharding.operators.planes import (
    AxisPlan,
    LocalWindow,
    clip,
    select_planes,
    sharded_windows,
)
from volseg.parallel.sharding.operators.pointwise import cut_like
from volseg.parallel.sharding.table import handles, unsupported, volumes
from volseg.parallel.sharding.volume import ShardedVolume, wrap
from volseg.parallel.sharding.windows import Strided, Window

__all__ = ["cat", "flip", "getitem", "pad", "permute", "reshape", "take_planes"]


# --- Slices ---


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
            result = _unsqueeze(result, dim)
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
        from volseg.parallel.sharding.operators.pointwise import aligned

        values = aligned(value, like, ndim)
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


# --- Joins ---


@handles("Slices and joins", "cat", "concat", "concatenate")
def cat(_func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Join along channels slab by slab, or along the cut with the slabs balanced anew."""
    given = bound("tensors dim", args, kwargs, dim=0)
    parts = list(given["tensors"])
    like = volumes(parts)[0]
    dim = given["dim"] % like.ndim
    if dim in like.dims:
        return _cat_along_cut(parts, like, dim)
    parts = [_cut_alike(part, like) for part in parts]
    if dim == 1 and like.ndim == 5 and len(like.context.communicator.devices) == 1:
        return join_channels(parts)
    slabs = [torch.cat(column, dim) for column in zip(*(part.slabs for part in parts), strict=True)]
    return wrap(like, slabs)


def _cut_alike(part: Tensor, like: ShardedVolume) -> ShardedVolume:
    if isinstance(part, ShardedVolume) and part.dims == like.dims and part.sizes == like.sizes:
        return part
    return cut_like(part.full_tensor() if isinstance(part, ShardedVolume) else part, like)


def _cat_along_cut(parts: Sequence[Tensor], like: ShardedVolume, dim: int) -> ShardedVolume:
    """Fetch, for each shard of the result, the planes of each part that fall into it."""
    communicator = like.context.communicator
    axis = like.dims.index(dim)
    total = sum(part.shape[dim] for part in parts)
    outputs = spans(total, communicator.grid[axis])
    columns, offset = [], 0
    for part in parts:
        size = part.shape[dim]
        wanted = [clip((start - offset, stop - offset), size) for start, stop in outputs]
        if isinstance(part, ShardedVolume) and part.dims != like.dims:
            part = part.full_tensor()
        if isinstance(part, ShardedVolume):
            columns.append(communicator.fetch(part.slabs, axis, dim, size, wanted))
        else:
            columns.append(_spans_of_whole(part, like, axis, dim, wanted))
        offset += size
    slabs = [torch.cat(pieces, dim) for pieces in zip(*columns, strict=True)]
    shape = list(like.shape)
    shape[dim] = total
    return ShardedVolume(slabs, like.dims, shape, like.context)


def _spans_of_whole(
    part: Tensor, like: ShardedVolume, axis: int, dim: int, wanted: Sequence[tuple[int, int]]
) -> list[Tensor]:
    """Take planes of an ordinary tensor that is too thin to be cut."""
    communicator = like.context.communicator
    slabs = []
    for index, (coordinates, copy) in enumerate(zip(communicator.coordinates, communicator.spread(part), strict=True)):
        start, stop = wanted[coordinates[axis]]
        piece = copy.narrow(dim, start if stop > start else 0, stop - start)
        for other, cut in enumerate(like.dims):
            if other != axis:
                own = communicator.owned(like.sizes)[index][other]
                piece = piece.narrow(cut, own[0], own[1] - own[0])
        slabs.append(piece)
    return slabs


@handles("Slices and joins", "stack")
def stack(_func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Stack volumes along a new dim."""
    given = bound("tensors dim", args, kwargs, dim=0)
    like = volumes(given["tensors"])[0]
    dim = given["dim"] % (like.ndim + 1)
    parts = [_cut_alike(part, like) for part in given["tensors"]]
    slabs = [torch.stack(column, dim) for column in zip(*(part.slabs for part in parts), strict=True)]
    return wrap(like, slabs, [cut + (dim <= cut) for cut in like.dims])


# --- Padding and mirroring ---


class _Gathered(Window):
    """Planes by number, for padding that repeats planes of the volume."""

    __slots__ = ("planes",)

    def __init__(self, planes: Sequence[int]) -> None:
        object.__setattr__(self, "planes", tuple(planes))

    planes: tuple[int, ...]

    def need(self, start: int, stop: int) -> tuple[int, int]:
        chosen = self.planes[start:stop]
        return min(chosen), max(chosen) + 1


@handles("Padding and mirroring", "F.pad", "nn.pad")
def pad(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pad within the slabs, and along the cut by planes that are constant or repeat the volume's own."""
    given = bound("input pad mode value", args, kwargs, mode="constant", value=None)
    volume, widths, mode = given["input"], list(given["pad"]), given["mode"]
    pairs = [(0, 0)] * (volume.ndim - len(widths) // 2) + list(zip(widths[::2], widths[1::2], strict=True))[::-1]
    inside = [0] * len(widths)
    for place, pair in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        if volume.ndim - 1 - place not in volume.dims:
            inside[2 * place : 2 * place + 2] = pair
    if any(inside):
        rest = {"mode": mode, "value": given["value"]}
        volume = _pad_inside(volume, inside, rest)
    for dim in volume.dims:
        if pairs[dim] != (0, 0):
            volume = _pad_cut(volume, dim, pairs[dim], mode, given["value"] or 0.0)
            if not isinstance(volume, ShardedVolume):
                return unsupported(func, args, kwargs, "the padded volume is thinner than the number of shards")
    return volume


def _pad_inside(volume: ShardedVolume, widths: list[int], rest: dict[str, Any]) -> ShardedVolume:
    # Modes other than constant pad the last dims only, all of them: name those that are not cut with zeros.
    slabs = [F.pad(slab, widths, **rest) for slab in volume.slabs]
    return wrap(volume, slabs)


def _pad_cut(volume: ShardedVolume, dim: int, pair: tuple[int, int], mode: str, value: float) -> ShardedVolume | Tensor:
    before, after = pair
    size = volume.shape[dim]
    outputs = size + before + after
    if mode == "constant":
        window: Window = Strided(-before)
    else:
        numbers = torch.arange(size, dtype=torch.float64).reshape(1, 1, size)
        window = _Gathered([int(n) for n in F.pad(numbers, (before, after), mode=mode).flatten().tolist()])
    plans = [
        AxisPlan(window, outputs, value) if cut == dim else AxisPlan(Strided(), planes)
        for cut, planes in zip(volume.dims, volume.sizes, strict=True)
    ]
    axis = volume.dims.index(dim)

    def local(slab: Tensor, windows: list[LocalWindow], _position: int) -> Tensor:
        if not isinstance(window, _Gathered):
            return slab
        own = windows[axis]
        return select_planes(slab, dim, [plane - own.span[0] for plane in window.planes[slice(*own.output)]])

    def whole(tensor: Tensor) -> Tensor:
        widths = [0] * (2 * (tensor.ndim - dim))
        widths[-2:] = [before, after]
        return F.pad(tensor, widths, mode=mode, value=value) if mode == "constant" else F.pad(tensor, widths, mode=mode)

    return sharded_windows(volume, plans, local, whole)


@handles("Padding and mirroring", "flip", "fliplr", "flipud")
def flip(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Mirror; along the cut the planes change shards."""
    if func.__name__ in ("fliplr", "flipud"):
        return flip(torch.flip, (args[0], [1 if func.__name__ == "fliplr" else 0]), {})
    given = bound("input dims", args[:2], kwargs)
    volume = given["input"]
    dims = args[1:] if len(args) > 2 else given["dims"]
    dims = [dim % volume.ndim for dim in ([dims] if isinstance(dims, int) else dims)]
    plans = [
        AxisPlan(Strided(size - 1, -1) if cut in dims else Strided(), size)
        for cut, size in zip(volume.dims, volume.sizes, strict=True)
    ]
    return sharded_windows(volume, plans, lambda slab, *_: slab.flip(dims), lambda tensor: tensor.flip(dims))


@handles("Padding and mirroring", "roll")
def roll(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Roll along named dims; along the cut two slices change places."""
    given = bound("input shifts dims", args, kwargs, dims=None)
    volume, shifts, dims = given["input"], given["shifts"], given["dims"]
    if dims is None or dims == ():
        return unsupported(func, args, kwargs, "rolling the flattened volume is not supported: name dims")
    shifts, dims = ([value] if isinstance(value, int) else list(value) for value in (shifts, dims))
    for shift, dim in zip(shifts, dims, strict=True):
        dim %= volume.ndim
        size = volume.shape[dim]
        if dim not in volume.dims:
            volume = wrap(volume, [slab.roll(shift, dim) for slab in volume.slabs])
        elif shift % size:
            behind = take_planes(volume, dim, size - shift % size, shift % size)
            front = take_planes(volume, dim, 0, size - shift % size)
            whole = [p for p in (behind, front) if isinstance(p, ShardedVolume)]
            if whole:
                volume = cat(torch.cat, ([behind, front], dim), {})
            else:
                volume = cut_like(torch.cat([behind, front], dim), volume)
    return volume


# --- Dims ---


@handles("Dims", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis")
def permute(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Move dims; the cut moves along."""
    volume, *rest = args if args else (kwargs["input"],)
    named = {key: value for key, value in kwargs.items() if key not in ("input", "self")}
    # A tiny tensor whose sizes are the dims' numbers tells where each dim went.
    tracer = torch.empty([dim + 2 for dim in range(volume.ndim)], device="meta")
    order = [size - 2 for size in func(tracer, *rest, **named).shape]
    slabs = [func(slab, *rest, **named) for slab in volume.slabs]
    return wrap(volume, slabs, [order.index(dim) for dim in volume.dims])


@handles("Dims", "unsqueeze")
def unsqueeze(_func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Insert a dim of extent one."""
    given = bound("input dim", args, kwargs)
    return _unsqueeze(given["input"], given["dim"])


def _unsqueeze(volume: ShardedVolume, dim: int) -> ShardedVolume:
    dim %= volume.ndim + 1
    slabs = [slab.unsqueeze(dim) for slab in volume.slabs]
    return wrap(volume, slabs, [cut + (dim <= cut) for cut in volume.dims])


@handles("Dims", "squeeze")
def squeeze(_func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Remove dims of extent one; a cut dim never is one, though a slab may be one plane thick."""
    given = bound("input dim", args, kwargs, dim=None)
    volume, dim = given["input"], given["dim"]
    dims = range(volume.ndim) if dim is None else ([dim] if isinstance(dim, int) else dim)
    gone = [d % volume.ndim for d in dims if volume.shape[d] == 1 and d % volume.ndim not in volume.dims]
    slabs = list(volume.slabs)
    for d in sorted(gone, reverse=True):
        slabs = [slab.squeeze(d) for slab in slabs]
    return wrap(volume, slabs, [cut - sum(d < cut for d in gone) for cut in volume.dims])


@handles("Dims", "Tensor.expand", "Tensor.expand_as", "broadcast_to")
def expand(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Broadcast dims that are not cut."""
    volume, *sizes = args
    if sizes and isinstance(sizes[0], Tensor):
        shape = list(sizes[0].shape)
    else:
        shape = list(sizes[0]) if sizes and not isinstance(sizes[0], int) else list(sizes or kwargs["size"])
    if not isinstance(volume, ShardedVolume):
        like = next(size for size in sizes if isinstance(size, ShardedVolume))
        return cut_like(volume.expand(shape), like)
    shift = len(shape) - volume.ndim
    dims = [dim + shift for dim in volume.dims]
    if any(shape[dim] not in (-1, size) for dim, size in zip(dims, volume.sizes, strict=True)):
        return unsupported(func, args, kwargs, "a cut dim cannot be expanded")
    for dim in dims:
        shape[dim] = -1
    return wrap(volume, [slab.expand(shape) for slab in volume.slabs], dims)


@handles("Dims", "Tensor.repeat", "tile", "repeat_interleave")
def repeat(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Repeat along dims that are not cut."""
    volume, *rest = args
    if func.__name__ == "repeat_interleave":
        dim = kwargs.get("dim", rest[1] if len(rest) > 1 else None)
        if dim is None or dim % volume.ndim in volume.dims or isinstance(rest[0] if rest else None, Tensor):
            return unsupported(func, args, kwargs, "it needs a count and a dim that is not cut")
        return wrap(volume, [func(slab, *rest, **kwargs) for slab in volume.slabs])
    counts = list(rest[0]) if rest and not isinstance(rest[0], int) else list(rest or kwargs.get("dims", ()))
    counts = [1] * (volume.ndim - len(counts)) + counts
    shift = len(counts) - volume.ndim
    dims = [dim + shift for dim in volume.dims]
    if any(counts[dim] != 1 for dim in dims):
        return unsupported(func, args, kwargs, "a cut dim cannot be repeated")
    return wrap(volume, [slab.repeat(counts) for slab in volume.slabs], dims)


@handles("Dims", "reshape", "Tensor.view", "flatten", "unflatten", "Tensor.reshape_as", "Tensor.view_as", "ravel")
def reshape(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Reshape where each cut dim stays a dim of its own."""
    volume, *rest = args
    if not isinstance(volume, ShardedVolume):
        return unsupported(func, args, kwargs, "an ordinary tensor takes the shape of a sharded one: pass its shape")
    if rest and isinstance(rest[0], torch.dtype):
        return unsupported(func, args, kwargs, "reinterpreting voxels as another dtype is not supported")
    target = _target_shape(func, volume, rest, kwargs)
    if list(target) == list(volume.shape):
        return wrap(volume, list(volume.slabs))
    dims = [_kept_dim(volume.shape, target, dim) for dim in volume.dims]
    if any(dim is None for dim in dims):
        reason = f"the shape {tuple(target)} does not keep the cut dim {volume.dims} as it is"
        return unsupported(func, args, kwargs, reason)
    slabs = []
    for slab in volume.slabs:
        shape = list(target)
        for old, new in zip(volume.dims, dims, strict=True):
            shape[new] = slab.shape[old]  # type: ignore[index]
        slabs.append(slab.reshape(shape))
    return wrap(volume, slabs, dims)  # type: ignore[arg-type]


def _target_shape(func: Callable, volume: ShardedVolume, rest: list, kwargs: dict[str, Any]) -> list[int]:
    if rest and isinstance(rest[0], Tensor):
        return list(rest[0].shape)
    named = {key: value for key, value in kwargs.items() if key not in ("input", "self")}
    return list(func(torch.empty(volume.shape, device="meta"), *rest, **named).shape)


def _kept_dim(old: Sequence[int], new: Sequence[int], dim: int) -> int | None:
    """Return the dim of ``new`` that holds exactly dim ``dim`` of ``old``, if there is one."""
    before = prod(old[:dim])
    for candidate, size in enumerate(new):
        if size == old[dim] and prod(new[:candidate]) == before:
            return candidate
    return None


@handles("Dims", "Tensor.T", "Tensor.mT")
def transposed(_func: Callable, args: tuple, _kwargs: dict[str, Any]) -> Any:
    """Transpose the last two dims."""
    return permute(torch.transpose, (args[0], -2, -1), {})
