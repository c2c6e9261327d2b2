"""A recomputed block's input that is written only when an operator reads it, and never where a join reads it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from volseg.parallel.spatial.lazy.recipes import WaitingRecipe
from volseg.parallel.spatial.recipe import Recipe
from volseg.parallel.spatial.versions import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["RecomputedInput"]


class RecomputedInput(WaitingRecipe):
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

    def record(self, fill: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the slabs without history, as the block's input was."""
        with torch.no_grad():
            slabs = fill()
        return [slab.requires_grad_(self.requires_grad) for slab in slabs]
