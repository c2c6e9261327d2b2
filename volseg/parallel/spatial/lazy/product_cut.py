"""How a product of two volumes is cut, where each shard computes its own part of attention."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.spatial.plan.shards import Merged
from volseg.parallel.spatial.volume import ShardedVolume, give_whole

__all__ = ["Cut", "find_cut", "give_both_whole", "is_cut_once", "list_shapes", "transpose_last"]


def is_cut_once(volume: Any) -> bool:
    """Say whether a value is a volume that is cut along one dim, if at all."""
    if not isinstance(volume, ShardedVolume) or len(volume.dims) != 1:
        return False
    return volume.context.communicator.num_shards > 1 or volume.merged is None


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut, and whether its second factor is gathered for it."""

    dim: int
    merged: Merged | None
    gathers: bool = False


def find_cut(first: ShardedVolume, second: ShardedVolume, along: int, summed: int) -> Cut | None:
    """Return how a product of two volumes is cut, by slabs of the first one; None where it is not.

    Parameters
    ----------
    first
        Of ``(..., N, K)``.
    second
        Of the same dims in front of the last two.
    along, summed
        Which dim of it a row of the first one meets all of, and which it is summed over.
    """
    (dim,), rows = first.dims, first.ndim - 2
    if first.context.communicator.num_shards == 1:  # the dim tells nothing but where a cut would be
        if dim != first.ndim - 1:
            return Cut(dim, None)
        if second.dims[0] == summed:
            return None
        return Cut(second.dims[0] if second.dims[0] < rows else first.ndim - 1, None)
    if dim < rows:
        return Cut(dim, first.merged) if (second.dims, second.merged) == (first.dims, first.merged) else None
    if dim > rows or second.dims != (along,) or (second.merged is not None and second.merged.outer > 1):
        return None
    return Cut(dim, first.merged, gathers=True)


def list_shapes(volume: ShardedVolume, *, gathered: bool = False) -> list[tuple[int, ...]]:
    """Return the shape of every shard's slab, so that all processes decide alike; with ``gathered`` of the whole."""
    (dim,), (extents,) = volume.dims, volume.extents()
    if gathered or len(extents) == 1:
        return [tuple(volume.shape)] * len(extents)
    return [(*volume.shape[:dim], extent, *volume.shape[dim + 1 :]) for extent in extents]


def transpose_last(volume: ShardedVolume) -> ShardedVolume:
    """Return a volume that is written with its last two dims swapped."""
    order = [*range(volume.ndim - 2), volume.ndim - 1, volume.ndim - 2]
    slabs = [slab.transpose(-2, -1) for slab in volume.slabs]
    dims, shape = [order[dim] for dim in volume.dims], [volume.shape[dim] for dim in order]
    return ShardedVolume(slabs, dims, shape, volume.context, volume.merged)


def give_both_whole(first: ShardedVolume, second: ShardedVolume) -> tuple[list[Tensor], list[Tensor]]:
    """Give each shard two whole volumes, in one message where they are alike."""
    alike = (first.dims, first.merged, first.shape) == (second.dims, second.merged, second.shape)
    if not alike or first.dtype != second.dtype:
        return give_whole(first), give_whole(second)
    slabs = [torch.stack(pair) for pair in zip(first.slabs, second.slabs, strict=True)]
    dims = [dim + 1 for dim in first.dims]
    both = ShardedVolume(slabs, dims, (2, *first.shape), first.context, first.merged)
    pairs = [slab.unbind(0) for slab in give_whole(both)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
