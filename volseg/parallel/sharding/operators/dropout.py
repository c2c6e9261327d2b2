"""Dropout: independent voxels on every shard, whole channels alike on all of them.

Masks are drawn from seeds: see ``random``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.sharding.operators.arguments import bound
from volseg.parallel.sharding.operators.random import common_generator, generators
from volseg.parallel.sharding.table import handles, unsupported
from volseg.parallel.sharding.volume import ShardedVolume, wrap

__all__ = ["channel_dropout", "dropout"]


@handles("Dropout", "F.dropout", "torch.dropout", "F.alpha_dropout", "torch.alpha_dropout")
def dropout(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Drop voxels independently."""
    given = bound("input p training inplace", args, kwargs, p=0.5, training=True, inplace=False)
    volume, p = given["input"], given["p"]
    if not isinstance(volume, ShardedVolume) or (not given["training"] or p == 0):
        return volume
    if "alpha" in func.__name__:
        return unsupported(func, args, kwargs, "alpha dropout has no sharded form")
    masks = voxel_masks(volume, 1 - p)
    factor = 1 / (1 - p) if p < 1 else 0.0
    return _apply(volume, masks, factor, given["inplace"])


@handles("Dropout", "F.dropout1d", "F.dropout2d", "F.dropout3d", "torch.feature_dropout")
def channel_dropout(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Drop whole channels, the same on all shards."""
    given = bound("input p training inplace", args, kwargs, p=0.5, training=True, inplace=False)
    volume, p = given["input"], given["p"]
    if not isinstance(volume, ShardedVolume) or not given["training"] or p == 0:
        return volume
    # Unbatched input (C, D, H, W): the channels come first.
    digits = [int(letter) for letter in func.__name__ if letter.isdigit()]
    leading = 1 if digits and volume.ndim == digits[0] + 1 else 2
    if any(dim < leading for dim in volume.dims):
        return unsupported(func, args, kwargs, "batch and channels must not be cut")
    shape = [*volume.shape[:leading], *([1] * (volume.ndim - leading))]
    mask = channel_mask(volume, shape, 1 - p)
    factor = 1 / (1 - p) if p < 1 else 0.0
    return _apply(volume, volume.context.spread(mask), factor, given["inplace"])


def voxel_masks(volume: ShardedVolume, keep: float) -> list[Tensor]:
    """Draw one mask per slab."""
    return [
        torch.empty_like(slab, requires_grad=False).bernoulli_(keep, generator=generator)
        for slab, generator in zip(volume.slabs, generators(volume), strict=True)
    ]


def channel_mask(volume: ShardedVolume, shape: list[int], keep: float) -> Tensor:
    """Draw one mask for all slabs."""
    empty = torch.empty(shape, dtype=volume.dtype, device=volume.context.communicator.home)
    return empty.bernoulli_(keep, generator=common_generator(volume))


def _apply(volume: ShardedVolume, masks: list[Tensor], factor: float, in_place: bool) -> ShardedVolume:
    pairs = zip(volume.slabs, masks, strict=True)
    if in_place:
        for slab, mask in pairs:
            slab.mul_(mask * factor)
        return volume
    return wrap(volume, [slab * (mask * factor) for slab, mask in pairs])
