"""Operators that move, insert, remove, broadcast, merge and split dims."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.spatial.convolution.plan import count_slab_tiles
from volseg.parallel.spatial.copied_view import Origin
from volseg.parallel.spatial.dispatch import in_planes
from volseg.parallel.spatial.gathered import gather, say_gathered
from volseg.parallel.spatial.lazy.attention import waits
from volseg.parallel.spatial.lazy.recipes import repeat_later
from volseg.parallel.spatial.lazy.scores import reshape_scores
from volseg.parallel.spatial.operators.operands import cut_like, wrap_reduced
from volseg.parallel.spatial.plan.shards import Fetch, Merged, can_split, spans
from volseg.parallel.spatial.signatures import bind
from volseg.parallel.spatial.table import handles, refuse, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume, wrap


@handles("Dims", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", rehearse=False, merged=True)
@handles("Dims", "unsqueeze", "t", "Tensor.T", "Tensor.mT", merged=True)
def permute(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Move dims, or insert one of extent one; the cut moves along."""
    volume, *rest = args if args else (next(v for v in kwargs.values() if isinstance(v, ShardedVolume)),)
    named = {key: value for key, value in kwargs.items() if value is not volume}
    # The sizes of this meta tensor number the dims: they show where each dim went.
    tracer = torch.empty([dim + 2 for dim in range(volume.ndim)], device="meta")
    order = [size - 2 for size in func(tracer, *rest, **named).shape]
    slabs = [func(slab, *rest, **named) for slab in volume.slabs]
    return wrap(volume, slabs, [order.index(dim) for dim in volume.dims])


@handles("Dims", "squeeze", merged=True)
def squeeze(func: Callable, input: Any, dim: int | Sequence[int] | None = None) -> Any:
    """Remove dims of extent one; a cut dim is longer, even if a slab has a single plane."""
    dims = range(input.ndim) if dim is None else ([dim] if isinstance(dim, int) else dim)
    gone = {d % input.ndim for d in dims if input.shape[d] == 1}
    refuse_if(gone & set(input.dims), "it would remove the cut dim")
    slabs = list(input.slabs)
    for d in sorted(gone, reverse=True):
        slabs = [slab.squeeze(d) for slab in slabs]
    return wrap_reduced(input, slabs, gone)


@handles("Dims", "Tensor.expand", "Tensor.expand_as", "broadcast_to", merged=True)
def expand(func: Callable, input: Any, size: Sequence[int] = (), other: Any = None, implicit: bool = False) -> Any:
    """Broadcast uncut dims."""
    shape = list(size if other is None else other.shape)
    if not isinstance(input, ShardedVolume):
        result = cut_like(input.expand(shape), other)
        result.origin = Origin([input], result.slabs, [])  # torch returns a view of an ordinary tensor
        return result
    shift = len(shape) - input.ndim
    dims = [dim + shift for dim in input.dims]
    if any(shape[dim] not in (-1, size) for dim, size in zip(dims, input.sizes, strict=True)):
        refuse("a cut dim cannot be expanded")
    for dim in dims:
        shape[dim] = -1
    return wrap(input, [slab.expand(shape) for slab in input.slabs], dims)


@handles("Dims", "Tensor.repeat", "tile", merged=True)
def repeat(func: Callable, input: Any, repeats: Sequence[int] = (), dims: Sequence[int] = ()) -> Any:
    """Repeat along uncut dims."""
    counts = [repeats] if isinstance(repeats, int) else list(repeats or dims)
    counts = [1] * (input.ndim - len(counts)) + counts
    cut = [dim + len(counts) - input.ndim for dim in input.dims]
    refuse_if(any(counts[dim] != 1 for dim in cut), "a cut dim cannot be repeated")
    if input.ndim == 5 and counts[1] > 1 and list(counts) == [1, counts[1], 1, 1, 1]:
        tiles = count_slab_tiles(input, counts[1] * input.shape[1], input.dtype.itemsize)
        later = repeat_later(input, counts[1], tiles)
        if later is not None:
            return later
    return wrap(input, [slab.repeat(counts) for slab in input.slabs], cut)


@handles("Dims", "repeat_interleave", rehearse=False, merged=True)  # counts in a tensor have no outline
def repeat_interleave(
    func: Callable, input: Any, repeats: Any, dim: int | None = None, output_size: int | None = None
) -> Any:
    """Repeat each entry along a dim; along the cut, in the gathered volume."""
    if isinstance(repeats, Tensor) or dim is None or dim % input.ndim in input.dims:
        return gather(func, (input, repeats, dim), {"output_size": output_size})
    return wrap(input, [func(slab, repeats, dim) for slab in input.slabs])


@handles(
    "Dims",
    "reshape",
    "Tensor.view",
    "flatten",
    "unflatten",
    "Tensor.reshape_as",
    "Tensor.view_as",
    "ravel",
    merged=True,
)
def reshape(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Reshape; the cut dim may be merged with its neighbours, and split again."""
    named = bind(func, args, kwargs)
    volume = named["input"]
    if not isinstance(volume, ShardedVolume):
        refuse("it gives an ordinary tensor the shape of a volume: pass volume.shape")
    refuse_if("dtype" in named, "reinterpreting voxels as another dtype is not supported")
    target = _target_shape(func, args, kwargs)
    turned = partial(_reshaped, target=target, moves=False)
    later = reshape_scores(volume, target, turned) if waits(volume) else None
    if later is not None:
        return later
    if list(target) == list(volume.shape):
        return wrap(volume, list(volume.slabs))
    return reshaped(volume, target)


def reshaped(volume: ShardedVolume, target: Sequence[int]) -> ShardedVolume | Tensor:
    """Return the reshaped volume; gather it if no dim of the new shape can hold the shards' planes."""
    result = _reshaped(volume, target, moves=True)
    assert result is not None
    return result


def _reshaped(volume: ShardedVolume, target: Sequence[int], *, moves: bool) -> ShardedVolume | Tensor | None:
    """Return the reshaped volume, or None if planes would change shards and ``moves`` is False."""
    context = volume.context
    if volume.merged is None:
        dims = [_kept_dim(volume.shape, target, dim) for dim in volume.dims]
        if None not in dims:
            return _with_slabs(volume, target, dims, volume.dims)  # type: ignore[arg-type]
    if len(volume.dims) == 1:
        plain = volume if volume.merged is None else volume.unmerged()
        place = _place(plain.shape, plain.dims[0], target)
        if place is None and moves and volume.merged is not None and volume.merged.outer == 1:
            plain = in_planes(volume)  # its groups of planes are not those of the new shape
            place = _place(plain.shape, plain.dims[0], target)
        if place is not None:
            return _merged_or_split(plain, target, *place, moves)
        if context.communicator.num_shards == 1 and target:
            return ShardedVolume([volume.slabs[0].reshape(target)], [len(target) - 1], target, context)
    if not moves:
        return None
    say_gathered(volume, f"gives the shape {tuple(target)} to")
    return volume.full_tensor().reshape(target)


def _with_slabs(
    volume: ShardedVolume, target: Sequence[int], dims: Sequence[int], old: Sequence[int], merged: Merged | None = None
) -> ShardedVolume:
    """Reshape the slabs: dims ``old`` of the volume become ``dims`` of the target, possibly merged with others."""
    slabs = []
    for slab in volume.slabs:
        shape = list(target)
        for own, new in zip(old, dims, strict=True):
            outer, unit = merged or (1, 1)
            shape[new] = outer * slab.shape[own] * unit
        slabs.append(slab.reshape(shape))
    return ShardedVolume(slabs, dims, target, volume.context, merged)


def _merged_or_split(
    volume: ShardedVolume, target: Sequence[int], dim: int, outer: int, extent: int, moves: bool
) -> ShardedVolume | Tensor | None:
    """Reshape to a target whose dim ``dim`` has ``outer`` entries of dims in front, times ``extent`` of the cut."""
    context, (cut,), (planes,) = volume.context, volume.dims, volume.sizes
    shards = context.communicator.num_shards
    if extent % planes == 0:
        layout = Merged(outer, extent // planes)
    else:
        # Each entry of the new dim holds several planes, which must be on one shard.
        group = planes // extent
        if not moves and spans(planes, shards, group) != spans(planes, shards):
            return None
        if not can_split(extent, shards):
            return volume.full_tensor().reshape(target)
        slabs = context.communicator.fetch(volume.slabs, Fetch(0, cut, planes, spans(planes, shards, group)))
        shape = (*volume.shape[:cut], extent, group, *volume.shape[cut + 1 :])
        slabs = [slab.unflatten(cut, (slab.shape[cut] // group, group)) for slab in slabs]
        volume, layout = ShardedVolume(slabs, (cut,), shape, context), Merged(outer, 1)
    if shards == 1:
        return ShardedVolume([volume.slabs[0].reshape(target)], [dim], target, context)
    result = _with_slabs(volume, target, [dim], [cut], layout)
    entries = target[dim] // outer
    if spans(entries, shards, layout.unit) == spans(entries, shards):  # layouts with equal spans get one representation
        result.merged = None if outer == 1 else Merged(outer, 1)
    return result


def _place(old: Sequence[int], cut: int, new: Sequence[int]) -> tuple[int, int, int] | None:
    """Return ``dim``, ``outer`` and ``extent`` of ``_merged_or_split``, for the dim of ``new`` that holds the cut one.

    None if no dim of ``new`` has whole entries of both.
    """
    before, planes, product = prod(old[:cut]), old[cut], 1
    for dim, size in enumerate(new):
        if product * size > before:
            outer, rest = divmod(before, product)
            if rest or size % outer:
                return None
            extent = size // outer
            return (dim, outer, extent) if extent % planes == 0 or planes % extent == 0 else None
        product *= size
    return None


def _target_shape(func: Callable, args: tuple, kwargs: dict[str, Any]) -> list[int]:
    """Return the shape of the result; sizes in a sequence may be tensors, and keep their values."""

    def outline(leaf: Any) -> Any:
        return torch.empty(leaf.shape, device="meta") if isinstance(leaf, Tensor) else leaf

    return list(func(*map(outline, args), **{name: outline(value) for name, value in kwargs.items()}).shape)


def _kept_dim(old: Sequence[int], new: Sequence[int], dim: int) -> int | None:
    """Return the dim of ``new`` that contains exactly dim ``dim`` of ``old``, or None; its size may be 0 or 1."""
    before = prod(old[:dim])
    for candidate, size in enumerate(new):
        if size == old[dim] and prod(new[:candidate]) == before:
            return candidate
    return None
