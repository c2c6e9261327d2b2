"""Dropout: independent voxels on every shard, whole channels alike on all of them.

Masks are drawn from a seed that the CPU's default generator gives, which all processes of a group hold in the same
state during a forward pass (see ``strategy``). One seed therefore repeats a run, and activation checkpointing, which
restores that generator, repeats a mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.sharding.signatures import bind
from volseg.parallel.sharding.table import handles, refuse
from volseg.parallel.sharding.volume import ShardedVolume, wrap

__all__ = ["channel_dropout", "dropout"]


def draw_seed() -> int:
    """Draw a seed that every shard agrees on."""
    return int(torch.randint(2**62, ()).item())


def _capturing(volume: ShardedVolume) -> bool:
    return volume.is_cuda and torch.cuda.is_current_stream_capturing()


@handles("Dropout", "F.alpha_dropout", "torch.alpha_dropout", "F.feature_alpha_dropout", rehearse=False)
def alpha_dropout(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the volume in eval mode."""
    named = bind(func, args, kwargs)
    if named.get("training", named.get("train", False)) and named.get("p", 0.5) != 0:
        refuse("alpha dropout has no sharded form")
    return named["input"]


@handles("Dropout", "F.dropout")
def dropout(func: Callable, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Drop voxels independently."""
    if not isinstance(input, ShardedVolume) or not training or p == 0:
        return input
    masks = voxel_masks(input, 1 - p)
    factor = 1 / (1 - p) if p < 1 else 0.0
    return _apply(input, masks, factor, inplace)


@handles("Dropout", "torch.dropout", "torch.dropout_", rehearse=False)
def plain_dropout(func: Callable, input: Any, p: float, train: bool) -> Any:
    """Drop voxels independently."""
    return dropout(func, input, p, train, func.__name__.endswith("_"))


@handles("Dropout", "F.dropout1d", "F.dropout2d", "F.dropout3d")
def channel_dropout(func: Callable, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Drop whole channels, the same on all shards."""
    # Unbatched input (C, D, H, W): the channels come first.
    (digit,) = (int(letter) for letter in func.__name__ if letter.isdigit())
    return _drop_channels(input, p, training, inplace, 1 if input.ndim == digit + 1 else 2)


@handles("Dropout", "torch.feature_dropout", rehearse=False)
def feature_dropout(func: Callable, input: Any, p: float, train: bool) -> Any:
    """Drop whole channels, the same on all shards."""
    return _drop_channels(input, p, train, False, 2)


def _drop_channels(volume: Any, p: float, training: bool, inplace: bool, leading: int) -> Any:
    if not isinstance(volume, ShardedVolume) or not training or p == 0:
        return volume
    if any(dim < leading for dim in volume.dims):
        refuse("batch and channels must not be cut")
    shape = [*volume.shape[:leading], *([1] * (volume.ndim - leading))]
    mask = channel_mask(volume, shape, 1 - p)
    factor = 1 / (1 - p) if p < 1 else 0.0
    return _apply(volume, volume.context.spread(mask), factor, inplace)


def voxel_masks(volume: ShardedVolume, keep: float) -> list[Tensor]:
    """Draw one mask per slab."""
    if _capturing(volume):
        return [
            torch.empty_like(slab).bernoulli_(keep, generator=volume.context.graph_generator) for slab in volume.slabs
        ]
    seed = draw_seed()
    masks = []
    for slab, index in zip(volume.slabs, volume.context.communicator.indices, strict=True):
        # Seeds one apart would give the CPU's Mersenne twister related streams; a large odd step does not.
        own = (seed + index * 0x9E3779B97F4A7C15) % 2**63
        generator = torch.Generator(slab.device).manual_seed(own)
        masks.append(torch.empty_like(slab, requires_grad=False).bernoulli_(keep, generator=generator))
    return masks


def channel_mask(volume: ShardedVolume, shape: list[int], keep: float) -> Tensor:
    """Draw one mask for all slabs."""
    empty = torch.empty(shape, dtype=volume.dtype, device=volume.context.communicator.home)
    if _capturing(volume):  # every process's default generator has the same state: see ``graphs``
        return empty.bernoulli_(keep)
    return empty.bernoulli_(keep, generator=torch.Generator(empty.device).manual_seed(draw_seed()))


def _apply(volume: ShardedVolume, masks: list[Tensor], factor: float, in_place: bool) -> ShardedVolume:
    pairs = zip(volume.slabs, masks, strict=True)
    if in_place:
        volume.context.settle()
        for slab, mask in pairs:
            slab.mul_(mask * factor)
        return volume
    return wrap(volume, [slab * (mask * factor) for slab, mask in pairs])
