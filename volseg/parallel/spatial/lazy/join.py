"""Channels of several volumes side by side, in a slab with room for its halo that need not be kept."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device.first_order import first_order
from volseg.device.layout import DIM
from volseg.parallel.spatial.lazy.recipes import join_recipes, recipe_of_kept
from volseg.parallel.spatial.lazy.recomputed import RecomputedInput
from volseg.parallel.spatial.pending import Moment, Recipe, Unchanged, Waiting
from volseg.parallel.spatial.transport.halo import Halo, Wait, write_outer_first
from volseg.parallel.spatial.transport.room import allocate_with_room
from volseg.parallel.spatial.volume import ShardedVolume, defer

__all__ = ["join_channels"]


def join_channels(parts: Sequence[ShardedVolume]) -> ShardedVolume:
    """Join volumes that are cut alike, this process holding one slab of each, along the channels.

    The copy waits for the next operator. The result's recipe are the parts' recipes: a convolution behind an encoder's
    skip keeps neither the join nor the activated skip.
    """
    like = parts[0]
    recipes = [part.pending.find_recipe(part) for part in parts]
    # Where there is a recipe, the slab stands for its history alone: it may have given its memory back.
    slabs = [part.slabs[0] if recipe is None else part._slabs[0] for part, recipe in zip(parts, recipes, strict=True)]
    shape = list(like.shape)
    shape[1] = sum(slab.shape[1] for slab in slabs)
    if len({slab.dtype for slab in slabs}) > 1:
        return ShardedVolume([torch.cat([part.slabs[0] for part in parts], 1)], like.dims, shape, like.context)
    recipe = join_recipes(
        [recipe or recipe_of_kept(slab) for recipe, slab in zip(recipes, slabs, strict=True)],
        [slab.shape[1] for slab in slabs],
    )
    cut_along_depth = like.context.communicator.num_shards > 1 and like.dims == (DIM,)
    # A stand-in has the slab's shape, and not its layout.
    first = like.pending.like if isinstance(like.pending, RecomputedInput) else slabs[0]
    waiting = WaitingJoin(slabs, recipe, first, like.context.room if cut_along_depth else 0)
    return defer(waiting, like.dims, shape, like.context)


class WaitingJoin(Waiting):
    """A join that waits for the next operator, whose halo it can send early.

    Parameters
    ----------
    slabs
        What is joined, for its history: where there is a recipe it may hold nothing.
    recipe
        How to write the join.
    like
        Shape, element type and layout of the first slab.
    room
        Planes of room to leave around the join.
    """

    def __init__(self, slabs: list[Tensor], recipe: Recipe, like: Tensor, room: int) -> None:
        self.slabs, self.recipe, self.like, self.room = slabs, recipe, like, room
        self.stand_ins = slabs[:1]
        self.unchanged = Unchanged([*slabs, *recipe.tensors])
        self.moment = Moment()
        # For an operator that hands each its own gradient; a join without history passes none on.
        self.parts = slabs if self.moment.grad_enabled else None

    def write(self, halo: Halo | None) -> tuple[list[Tensor], Recipe | None, Wait | None]:
        """Join the slabs."""
        wait: Wait | None = None
        channels = [slab.shape[1] for slab in self.slabs]

        def fill() -> Tensor:
            nonlocal wait
            out = allocate_with_room(self.like, self.room, sum(channels), self.slabs[0].device)

            def planes(start: int, count: int) -> None:
                self.recipe.write(self.recipe.tensors, out.narrow(DIM, start, count), start)

            wait = write_outer_first(out, self.room, halo, planes)
            return out

        with self.moment.restored():
            joined = _Join.apply(fill, channels, *self.slabs)
        return [joined], self.recipe, wait


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fill: Callable[[], Tensor], channels: list[int], *slabs: Tensor) -> Tensor:
        del slabs
        ctx.channels = channels
        return fill()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *gradient.split(ctx.channels, 1)
