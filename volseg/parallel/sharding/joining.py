"""Channels of several volumes side by side, in a slab with room for its halo that need not be kept."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from volseg.parallel.sharding.halo import DIM, roomy
from volseg.parallel.sharding.recipes import Joined, Kept
from volseg.parallel.sharding.volume import ShardedVolume, wrap

__all__ = ["join_channels"]


def join_channels(parts: Sequence[ShardedVolume]) -> ShardedVolume:
    """Join volumes that are cut alike, this process holding one slab of each, along the channels.

    The result's recipe are the parts' recipes: a convolution behind an encoder's skip keeps neither the join nor the activated skip.
    """
    like = parts[0]
    context = like.context
    slabs = [part.slabs[0] for part in parts]
    alike = len({slab.dtype for slab in slabs}) == 1
    room = context.room if context.communicator.shards > 1 and like.dims == (DIM,) and alike else 0
    joined = _Join.apply(room, *slabs) if alike else torch.cat(slabs, 1)
    result = wrap(like, [joined])
    recipes = [part.current_recipe() or Kept((slab,)) for part, slab in zip(parts, slabs, strict=True)]
    recipe = Joined(tuple(recipes), tuple(slab.shape[1] for slab in slabs)) if alike else None
    return result.with_recipe(recipe, room)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, room: int, *slabs: Tensor) -> Tensor:
        ctx.channels = [slab.shape[1] for slab in slabs]
        if not room:
            return torch.cat(slabs, 1)
        out = roomy(slabs[0], room, sum(ctx.channels))
        first = 0
        for slab, count in zip(slabs, ctx.channels, strict=True):
            out.narrow(1, first, count).copy_(slab)
            first += count
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradient.split(ctx.channels, 1)
