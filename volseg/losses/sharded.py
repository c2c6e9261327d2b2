"""Compute Dice plus cross entropy of a sharded volume from the sums of all shards, added in the order of the grid."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.losses.dice_cross_entropy import check_shapes, compute_loss, dice_cross_entropy, read_at_grid, sum_classes
from volseg.losses.known_voxels import check_outputs, compute_known_loss, known_dice_cross_entropy, sum_known
from volseg.parallel.spatial.operators.operands import cut_like
from volseg.parallel.spatial.operators.resize import interpolate
from volseg.parallel.spatial.plan.shards import bounds
from volseg.parallel.spatial.table import sharded_form
from volseg.parallel.spatial.volume import ShardedVolume, wrap


@sharded_form(dice_cross_entropy)
def compute_of_slabs(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return the loss, unsharded; the shards exchange four numbers per sample and class."""
    del func, kwargs  # dice_cross_entropy passes its arguments by position
    logits, label, terms = args
    check_shapes(logits, label)
    if not isinstance(logits, ShardedVolume):
        return dice_cross_entropy(logits, _make_whole(label, logits), terms)
    communicator, labels = logits.context.communicator, _cut_alike(label, logits)
    if communicator.num_shards == 1:
        sums = sum_classes(logits.slabs[0], labels[0], terms)
    else:
        pairs = zip(logits.slabs, labels, strict=True)
        sums = communicator.collect([sum_classes(slab, own, terms).sum(0) for slab, own in pairs])
    return compute_loss(sums, labels, terms, logits.shape)


@sharded_form(known_dice_cross_entropy)
def compute_known_of_slabs(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return the loss of the known voxels, unsharded, from the sums of the shards."""
    del func, kwargs
    logits, label, targets, terms = args
    check_outputs(logits, label, targets)
    if not isinstance(logits, ShardedVolume):
        return known_dice_cross_entropy(logits, _make_whole(label, logits), targets, terms)
    pairs = zip(logits.slabs, _cut_alike(label, logits), strict=True)
    sums = logits.context.communicator.collect([sum_known(slab, own, targets, terms) for slab, own in pairs])
    return compute_known_loss(sums.sum(0), targets, terms)


def _make_whole(label: ShardedVolume, logits: Tensor) -> Tensor:
    """Return the whole label of a level that is too coarse for a cut, which every rank computes completely."""
    label = _coarsen(label, logits.shape[2:])
    return label.full_tensor() if isinstance(label, ShardedVolume) else label


def _cut_alike(label: Tensor, logits: ShardedVolume) -> Sequence[Tensor]:
    """Return the label's slabs on the grid of the logits."""
    if isinstance(label, ShardedVolume):
        return _coarsen(label, logits.shape[2:]).slabs
    label = read_at_grid(label, logits.shape[2:])
    return [label] if logits.context.communicator.num_shards == 1 else cut_like(label, logits).slabs


def _coarsen(label: ShardedVolume, size: Sequence[int]) -> Any:
    """Return the label on a head's grid; views of the slabs if no shard needs a plane of another shard."""
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
    if not label.dtype.is_floating_point and label.dtype != torch.uint8:  # torch cannot resize these
        label = wrap(label, [slab.float() for slab in label.slabs])
    return interpolate(F.interpolate, label, list(size), mode="nearest-exact")
