"""A recomputed block's input that is written only when an operator reads it, and never where a join reads it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from volseg.device.layout import DIM
from volseg.parallel.spatial.pending import Waiting
from volseg.parallel.spatial.recipe import Recipe
from volseg.parallel.spatial.transport.halo import Halo, Wait, find_needed_room, write_outer_first
from volseg.parallel.spatial.transport.room import allocate_with_room
from volseg.parallel.spatial.versions import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["RecomputedInput"]


class RecomputedInput(Waiting):
    """Slabs to be written from their recipe, without history.

    Parameters
    ----------
    recipe
        How to write them.
    likes
        Shape, element type and layout of each slab; on the meta device.
    room
        Planes of room to leave around each.
    unchanged
        The recipe's tensors as they were when the block ran.
    requires_grad
        Whether the block's input needed a gradient.
    """

    refusal = (
        "the input of a recomputed block was changed in place after the block ran; do that out of place, or leave out "
        "checkpoint="
    )

    def __init__(
        self, recipe: Recipe, likes: Sequence[Tensor], room: int, unchanged: Unchanged, requires_grad: bool
    ) -> None:
        self.recipe, self.likes, self.room, self.unchanged = recipe, likes, room, unchanged
        self.requires_grad = requires_grad
        self.check()
        # The slabs' shapes in the memory of one element each.
        self.stand_ins = [
            torch.empty((), dtype=like.dtype, device=row[0].device).expand(like.shape).requires_grad_(requires_grad)
            for like, row in zip(likes, recipe.rows, strict=True)
        ]

    def find_recipe(self, volume: ShardedVolume) -> Recipe:
        """Return the recipe for whoever writes the slabs elsewhere; leave them unwritten here."""
        del volume
        self.check()
        return self.recipe

    spare = find_recipe

    def write(self, halos: Sequence[Halo]) -> tuple[list[Tensor], Recipe | None, Wait | None]:
        """Write the slabs."""
        rows, room = self.recipe.rows, find_needed_room(self.room, halos)
        with torch.no_grad():
            slabs = [
                allocate_with_room(like, room, device=row[0].device)
                if room
                else torch.empty_like(like, device=row[0].device)
                for like, row in zip(self.likes, rows, strict=True)
            ]

            def planes(number: int, start: int, count: int) -> None:
                self.recipe.write(rows[number], slabs[number].narrow(DIM, start, count), start)

            wait = write_outer_first(slabs, room, halos, planes)
        return [slab.requires_grad_(self.requires_grad) for slab in slabs], self.recipe, wait
