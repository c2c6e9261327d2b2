"""Channels of several volumes side by side, in slabs with room for their halos that need not be kept."""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from volseg.device.first_order import first_order
from volseg.device.layout import DIM, layout_of
from volseg.parallel.spatial.lazy.recipes import Convert, WaitingRecipe, join_recipes, recipe_of_kept
from volseg.parallel.spatial.lazy.recomputed import RecomputedInput
from volseg.parallel.spatial.moment import Moment
from volseg.parallel.spatial.pending import find_likes
from volseg.parallel.spatial.recipe import Recipe
from volseg.parallel.spatial.versions import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume, defer

__all__ = ["join_channels"]


def join_channels(parts: Sequence[ShardedVolume], later: bool = False) -> ShardedVolume:
    """Join volumes that are cut alike along the channels.

    The copy waits for the next operator. The result's recipe are the parts' recipes: a convolution behind an encoder's
    skip keeps neither the join nor the activated skip.

    Parameters
    ----------
    parts
        The volumes.
    later
        Whether parts of several element types are joined when they are read, too.
    """
    like = parts[0]
    # Each has the state that the one before left: one volume may be several of the parts.
    recipes = [(part.pending.spare if part.context.tiled else part.pending.find_recipe)(part) for part in parts]
    # Where there is a recipe, the slabs stand for their history alone: they may have given their memory back.
    columns = [part.slabs if recipe is None else part._slabs for part, recipe in zip(parts, recipes, strict=True)]
    shape = list(like.shape)
    shape[1] = sum(column[0].shape[1] for column in columns)
    dtypes = [column[0].dtype for column in columns]
    dtype = reduce(torch.promote_types, dtypes)
    mixed = len(set(dtypes)) > 1
    if mixed and not later:
        slabs = [torch.cat(row, 1) for row in zip(*(part.slabs for part in parts), strict=True)]
        return ShardedVolume(slabs, like.dims, shape, like.context)
    found = [recipe or recipe_of_kept(column) for recipe, column in zip(recipes, columns, strict=True)]
    if mixed:
        found = [Recipe(own.rows, Convert(own.write, dtype)) for own, dtype in zip(found, dtypes, strict=True)]
    recipe = join_recipes(found, [column[0].shape[1] for column in columns])
    cut_along_depth = like.context.communicator.num_shards > 1 and like.dims == (DIM,)
    # A stand-in has the slab's shape, and not its layout.
    firsts = like.pending.likes if isinstance(like.pending, RecomputedInput) else find_likes(like)
    likes = [
        torch.empty([len(own), shape[1], *own.shape[2:]], dtype=dtype, device="meta", memory_format=layout_of(own))
        for own in firsts
    ]
    waiting = WaitingJoin(columns, recipe, likes, like.context.room if cut_along_depth else 0)
    joined = defer(waiting, like.dims, shape, like.context)
    if mixed:
        waiting.spare(joined)  # what stands for it has the type of one part
    return joined


class WaitingJoin(WaitingRecipe):
    """A join that waits for the next operator, whose halo it can send early.

    Parameters
    ----------
    columns
        The slabs of each volume that is joined, for their history: where there is a recipe they may hold nothing.
    recipe
        How to write the join.
    likes
        See ``WaitingRecipe``: the layout is that of the first volume.
    room
        Planes of room to leave around the join.
    """

    def __init__(self, columns: list[list[Tensor]], recipe: Recipe, likes: Sequence[Tensor], room: int) -> None:
        self.columns, self.recipe, self.likes, self.room = columns, recipe, likes, room
        self.stand_ins = list(columns[0])
        self.unchanged = Unchanged([*chain.from_iterable(columns), *recipe.tensors])
        self.moment = Moment()
        # For an operator that hands each its own gradient; a join without history passes none on.
        self.parts = columns if self.moment.grad_enabled else None

    def record(self, fill: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the slabs, whose gradient the joined ones get."""
        with self.moment.restored():
            channels = [column[0].shape[1] for column in self.columns]
            return list(_Join.apply(fill, channels, *chain.from_iterable(self.columns)))


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fill: Callable[[], list[Tensor]], channels: list[int], *slabs: Tensor) -> tuple[Tensor, ...]:
        del slabs
        ctx.channels = channels
        return tuple(fill())

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        split = [gradient.split(ctx.channels, 1) for gradient in gradients]
        return None, None, *chain.from_iterable(zip(*split, strict=True))
