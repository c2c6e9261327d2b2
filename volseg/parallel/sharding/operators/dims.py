"""Dims: moved, inserted, removed, broadcast and merged; each cut dim stays a dim of its own."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.sharding.operators.arguments import bound
from volseg.parallel.sharding.operators.pointwise import cut_like
from volseg.parallel.sharding.table import handles, unsupported
from volseg.parallel.sharding.volume import ShardedVolume, wrap

__all__ = ["expand", "insert_dim", "permute", "repeat", "reshape", "squeeze", "transposed", "unsqueeze"]


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
    return insert_dim(given["input"], given["dim"])


def insert_dim(volume: ShardedVolume, dim: int) -> ShardedVolume:
    """Return the volume with a dim of extent one; the cut dims behind it move up."""
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
