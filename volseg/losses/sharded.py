"""Dice plus cross entropy of a sharded volume: each shard's sums, added in the order of the grid."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.losses.dice_cross_entropy import check_shapes, compute_loss, dice_cross_entropy, read_at_grid, sum_classes
from volseg.parallel.spatial.operators.pointwise import cut_like
from volseg.parallel.spatial.operators.resize import interpolate
from volseg.parallel.spatial.plan.shards import bounds
from volseg.parallel.spatial.table import sharded_form
from volseg.parallel.spatial.volume import ShardedVolume, wrap

__all__ = ["compute_of_slabs"]


@sharded_form(dice_cross_entropy)
def compute_of_slabs(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return the loss, a whole value; what the shards exchange is four numbers per sample and class."""
    del func, kwargs  # dice_cross_entropy hands its arguments over by position
    logits, label, terms = args
    check_shapes(logits, label)
    if not isinstance(logits, ShardedVolume):  # a level too coarse to be cut, which everybody computes whole
        label = _coarsen(label, logits.shape[2:])
        return dice_cross_entropy(logits, label.full_tensor() if isinstance(label, ShardedVolume) else label, terms)
    communicator = logits.context.communicator
    if isinstance(label, ShardedVolume):
        labels = _coarsen(label, logits.shape[2:]).slabs
    else:
        label = read_at_grid(label, logits.shape[2:])
        labels = [label] if communicator.num_shards == 1 else cut_like(label, logits).slabs
    if communicator.num_shards == 1:
        sums = sum_classes(logits.slabs[0], labels[0], terms)
    else:
        pairs = zip(logits.slabs, labels, strict=True)
        sums = communicator.collect([sum_classes(slab, own, terms).sum(0) for slab, own in pairs])
    return compute_loss(sums, labels, terms, logits.shape)


def _coarsen(label: ShardedVolume, size: Sequence[int]) -> Any:
    """Return the label on a head's grid; views of the slabs, where no shard needs a plane of another's."""
    factors = [fine // coarse for fine, coarse in zip(label.shape[2:], size, strict=True)]
    shards = dict(zip(label.dims, label.context.communicator.grid, strict=True))
    if all(
        fine == coarse * factor
        and bounds(fine, shards.get(dim, 1)) == tuple(factor * border for border in bounds(coarse, shards.get(dim, 1)))
        and coarse >= shards.get(dim, 1)
        for dim, fine, coarse, factor in zip(range(2, 5), label.shape[2:], size, factors, strict=True)
    ):
        own = [[side // factor for side, factor in zip(slab.shape[2:], factors, strict=True)] for slab in label.slabs]
        slabs = [read_at_grid(slab, sides) for slab, sides in zip(label.slabs, own, strict=True)]
        return ShardedVolume(slabs, label.dims, [*label.shape[:2], *size], label.context)
    if not label.dtype.is_floating_point and label.dtype != torch.uint8:  # which torch cannot resize
        label = wrap(label, [slab.float() for slab in label.slabs])
    return interpolate(F.interpolate, label, size=list(size), mode="nearest-exact")
