"""A recomputed block's input that is written only when an operator reads it, and never where a join reads it."""

import torch
from torch import Tensor

from volseg.device.layout import DIM
from volseg.parallel.spatial.pending import Recipe, Unchanged, Waiting
from volseg.parallel.spatial.transport.halo import Halo, Wait, write_outer_first
from volseg.parallel.spatial.transport.room import allocate_with_room
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["RecomputedInput"]


class RecomputedInput(Waiting):
    """A slab to be written from its recipe, without history.

    Parameters
    ----------
    recipe
        How to write it.
    like
        Shape, element type and layout of the slab; on the meta device.
    room
        Planes of room to leave around it.
    unchanged
        The recipe's tensors as they were when the block ran.
    requires_grad
        Whether the block's input needed a gradient.
    """

    refusal = (
        "the input of a recomputed block was changed in place after the block ran; do that out of place, or leave out "
        "checkpoint="
    )

    def __init__(self, recipe: Recipe, like: Tensor, room: int, unchanged: Unchanged, requires_grad: bool) -> None:
        self.recipe, self.like, self.room, self.unchanged = recipe, like, room, unchanged
        self.requires_grad = requires_grad
        self.check()
        # The slab's shape in the memory of one element.
        one = torch.empty((), dtype=like.dtype, device=recipe.tensors[0].device)
        self.stand_ins = [one.expand(like.shape).requires_grad_(requires_grad)]

    def find_recipe(self, volume: ShardedVolume) -> Recipe:
        """Return the recipe for whoever writes the slab elsewhere; leave it unwritten here."""
        del volume
        self.check()
        return self.recipe

    def write(self, halo: Halo | None) -> tuple[list[Tensor], Recipe | None, Wait | None]:
        """Write the slab."""
        device = self.recipe.tensors[0].device
        with torch.no_grad():
            if self.room:
                slab = allocate_with_room(self.like, self.room, device=device)
            else:
                slab = torch.empty_like(self.like, device=device)

            def planes(start: int, count: int) -> None:
                self.recipe.write(self.recipe.tensors, slab.narrow(DIM, start, count), start)

            wait = write_outer_first(slab, self.room, halo, planes)
        return [slab.requires_grad_(self.requires_grad)], self.recipe, wait
