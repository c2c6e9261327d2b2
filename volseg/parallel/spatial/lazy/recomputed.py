"""A recomputed block's input that is written only when an operator reads it, and never where a join reads it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from volseg.device.dims import DIM
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.lazy.recipes import Recipe
from volseg.parallel.spatial.transport.halo import Halo, Wait, roomy, write_outer_first

__all__ = ["Again"]


@dataclass
class Again:
    """A slab to be computed from its recipe, without history.

    Attributes
    ----------
    like
        Shape, element type and layout of the slab; on the meta device.
    room
        Planes of room to leave around it.
    versions
        How often the recipe's tensors had been changed in place when the block ran.
    """

    recipe: Recipe
    like: Tensor
    room: int
    versions: Sequence[int]
    requires_grad: bool
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.recipe.tensors[0].device
        self.check()

    def placeholder(self) -> Tensor:
        """Return a tensor of the slab's shape in the memory of one element."""
        one = torch.empty((), dtype=self.like.dtype, device=self.device)
        return one.expand(self.like.shape).requires_grad_(self.requires_grad)

    def check(self) -> None:
        """Refuse tensors that were changed in place since."""
        if [tensor._version for tensor in self.recipe.tensors] != list(self.versions):
            raise UnsupportedOperatorError(
                "the input of a recomputed block was changed in place after the block ran; do that out of place, or "
                "leave out checkpoint="
            )

    @property
    def recipe_alone(self) -> Recipe:
        """The recipe, for whoever writes the slab elsewhere."""
        self.check()
        return self.recipe

    def activated(self, activation: object) -> None:
        """Take no activation along."""
        del activation

    def run(self, halo: Halo | None) -> tuple[list[Tensor], Recipe | None, int, Wait | None]:
        """Compute the slab: see ``Deferred.run``."""
        self.check()
        halo = halo if halo is not None and halo.width <= self.room else None
        with torch.no_grad():
            if self.room:
                slab = roomy(self.like, self.room, device=self.device)
            else:
                slab = torch.empty_like(self.like, device=self.device)

            def planes(start: int, count: int) -> None:
                self.recipe.write(self.recipe.tensors, slab.narrow(DIM, start, count), start)

            wait = write_outer_first(slab, self.room, halo, planes)
        return [slab.requires_grad_(self.requires_grad)], self.recipe, self.room, wait
