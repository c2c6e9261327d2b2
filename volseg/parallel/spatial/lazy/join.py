"""Channels of several volumes side by side, in a slab with room for its halo that need not be kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from volseg.device.dims import DIM
from volseg.device.first_order import first_order
from volseg.parallel.spatial.lazy.norm import Moment
from volseg.parallel.spatial.lazy.recipes import Recipe, joined, kept
from volseg.parallel.spatial.lazy.recomputed import Again
from volseg.parallel.spatial.transport.halo import Halo, Wait, roomy, write_outer_first
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["join_channels"]


def join_channels(parts: Sequence[ShardedVolume]) -> ShardedVolume:
    """Join volumes that are cut alike, this process holding one slab of each, along the channels.

    The copy is deferred like a norm (see ``deferred``). The result's recipe are the parts' recipes: a convolution
    behind an encoder's skip keeps neither the join nor the activated skip.
    """
    like = parts[0]
    recipes = [part.recipe_to_read() for part in parts]
    # Where there is a recipe, the slab stands for its history alone: it may have given its memory back.
    slabs = [part.slabs[0] if recipe is None else part._slabs[0] for part, recipe in zip(parts, recipes, strict=True)]
    shape = list(like.shape)
    shape[1] = sum(slab.shape[1] for slab in slabs)
    if len({slab.dtype for slab in slabs}) > 1:
        return ShardedVolume([torch.cat([part.slabs[0] for part in parts], 1)], like.dims, shape, like.context)
    recipe = joined(
        [recipe or kept(slab) for recipe, slab in zip(recipes, slabs, strict=True)], [slab.shape[1] for slab in slabs]
    )
    cut_along_depth = like.context.communicator.shards > 1 and like.dims == (DIM,)
    first = like.deferred.like if isinstance(like.deferred, Again) else slabs[0]
    deferred = DeferredJoin(slabs, recipe, first, like.context.room if cut_along_depth else 0)
    result = ShardedVolume(slabs[:1], like.dims, shape, like.context, deferred)
    like.context.defer(result)
    return result


@dataclass
class DeferredJoin:
    """A join that waits for the next operator, whose halo it can send early."""

    slabs: list[Tensor]
    recipe: Recipe
    like: Tensor
    room: int
    halo: Halo | None = None
    wait: Wait | None = None
    moment: Moment = field(default_factory=Moment)

    def __post_init__(self) -> None:
        self.moment.note(self._inputs)

    @property
    def _inputs(self) -> list[Tensor]:
        return [*self.slabs, *self.recipe.tensors]

    @property
    def parts(self) -> list[Tensor] | None:
        """The slabs, for an operator that hands each its own gradient; None where the join has no history."""
        return self.slabs if self.moment.grad_enabled else None

    def activated(self, activation: object) -> None:
        """Take no activation along."""
        del activation

    def run(self, halo: Halo | None) -> tuple[list[Tensor], Recipe | None, int, Wait | None]:
        """Join: see ``Deferred.run``."""
        self.moment.check(self._inputs)
        self.halo = halo if halo is not None and halo.width <= self.room else None
        with self.moment.restored():
            joined = _Join.apply(self, *self.slabs)
        return [joined], self.recipe, self.room, self.wait


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, join: DeferredJoin, *slabs: Tensor) -> Tensor:
        ctx.channels = [slab.shape[1] for slab in slabs]
        out = roomy(join.like, join.room, sum(ctx.channels), slabs[0].device)

        def planes(start: int, count: int) -> None:
            join.recipe.write(join.recipe.tensors, out.narrow(DIM, start, count), start)

        join.wait = write_outer_first(out, join.room, join.halo, planes)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradient.split(ctx.channels, 1)
