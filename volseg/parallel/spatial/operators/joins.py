"""Joins: concatenation and stacking; parts that are whole or cut otherwise are first cut alike."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.spatial.convolution.plan import count_slab_tiles
from volseg.parallel.spatial.dispatch import in_planes
from volseg.parallel.spatial.gathered import volumes
from volseg.parallel.spatial.lazy.recipes import join_channels
from volseg.parallel.spatial.operators.operands import cut_like
from volseg.parallel.spatial.operators.planes import clip
from volseg.parallel.spatial.plan.shards import Fetch, spans
from volseg.parallel.spatial.table import handles
from volseg.parallel.spatial.volume import ShardedVolume, relaid, wrap

__all__ = ["cat", "stack"]


@handles("Slices and joins", "cat", "concat", "concatenate", merged=True, rounded=True)
def cat(func: Callable, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Join along channels slab by slab, or along the cut with the slabs balanced anew."""
    # torch lets an empty tensor of one dim pass, whatever the others' are.
    parts = [part for part in tensors if part.shape != (0,)]
    like = volumes(parts)[0]
    dim %= like.ndim
    if dim in like.dims:
        parts = [in_planes(part) if isinstance(part, ShardedVolume) else part for part in parts]
        return _cat_along_cut(parts, volumes(parts)[0], dim)
    alike = [_cut_alike(part, like) for part in parts]
    if dim == 1 and like.ndim == 5 and like.merged is None and like.context.communicator.is_direct:
        itemsize = max(part.dtype.itemsize for part in alike)
        tiles = count_slab_tiles(like, sum(part.shape[1] for part in alike), itemsize)
        return join_channels(alike, later=tiles > 1)
    slabs = [torch.cat(column, dim) for column in zip(*(part.slabs for part in alike), strict=True)]
    return wrap(like, slabs)


def _cut_alike(part: Tensor, like: ShardedVolume) -> ShardedVolume:
    if isinstance(part, ShardedVolume) and part.dims == like.dims and part.sizes == like.sizes:
        return relaid(part, like.merged)
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
            columns.append(communicator.fetch(part.slabs, Fetch(axis, dim, size, wanted)))
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


@handles("Slices and joins", "stack", merged=True)
def stack(func: Callable, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Stack volumes along a new dim."""
    like = volumes(tensors)[0]
    dim %= like.ndim + 1
    parts = [_cut_alike(part, like) for part in tensors]
    slabs = [torch.stack(column, dim) for column in zip(*(part.slabs for part in parts), strict=True)]
    return wrap(like, slabs, [cut + (dim <= cut) for cut in like.dims])
