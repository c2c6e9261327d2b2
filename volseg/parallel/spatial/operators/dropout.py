"""Dropout: independent voxels on every shard, whole channels alike on all of them.

Masks are drawn from seeds: see ``random``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.spatial.operators.random import common_generator, generators
from volseg.parallel.spatial.signatures import bind
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume, wrap

__all__ = ["channel_dropout", "dropout"]


@handles("Dropout", "F.alpha_dropout", "torch.alpha_dropout", "F.feature_alpha_dropout", rehearse=False, merged=True)
def alpha_dropout(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the volume in eval mode."""
    named = bind(func, args, kwargs)
    if named.get("training", False) and named.get("p", 0.5) != 0:
        refuse("alpha dropout has no sharded form")
    return named["input"]


@handles("Dropout", "F.dropout", "torch.dropout", "torch.dropout_", rehearse=False, merged=True)
def dropout(func: Callable, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Drop voxels independently."""
    _check_probability(p)
    if not isinstance(input, ShardedVolume) or not training or p == 0:
        return input
    masks = voxel_masks(input, 1 - p)
    factor = 1 / (1 - p) if p < 1 else 0.0
    return _apply(input, masks, factor, inplace or func.__name__.endswith("_"))


@handles("Dropout", "F.dropout1d", "F.dropout2d", "F.dropout3d", "torch.feature_dropout", rehearse=False, merged=True)
def channel_dropout(func: Callable, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Drop whole channels, the same on all shards."""
    _check_probability(p)
    if not isinstance(input, ShardedVolume) or not training or p == 0:
        return input
    # Unbatched input (C, D, H, W): the channels come first.
    spatial = [int(letter) for letter in func.__name__ if letter.isdigit()]
    leading = 1 if spatial == [input.ndim - 1] else 2
    if any(dim < leading for dim in input.dims):
        refuse("batch and channels must not be cut")
    shape = [*input.shape[:leading], *([1] * (input.ndim - leading))]
    mask = channel_mask(input, shape, 1 - p)
    factor = 1 / (1 - p) if p < 1 else 0.0
    return _apply(input, input.context.spread(mask), factor, inplace)


def _check_probability(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


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
        volume.context.change(volume)
        for slab, mask in pairs:
            slab.mul_(mask * factor)
        return volume
    return wrap(volume, [slab * (mask * factor) for slab, mask in pairs])
