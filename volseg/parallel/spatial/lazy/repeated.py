"""Channels that are repeated wait for whoever reads them, where they need no gradient.

V-Net adds its image to each of sixteen channels. What waits has a copy of such an image, which nobody changes, and a
sum reads that without writing the channels (see ``addition``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from volseg.device.layout import DIM, layout_of
from volseg.parallel.spatial.lazy.recipes import WaitingRecipe
from volseg.parallel.spatial.moment import Moment
from volseg.parallel.spatial.pending import Waiting
from volseg.parallel.spatial.recipe import Recipe, outline_slab
from volseg.parallel.spatial.versions import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume, defer

__all__ = ["WaitingRepeat", "repeat_later"]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Writes the channels of a slab, so many times one behind the other."""

    count: int

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Copy them."""
        (slab,) = tensors
        planes = slab.narrow(DIM, start, out.shape[DIM])
        out.unflatten(1, (self.count, slab.shape[1])).copy_(planes.unsqueeze(1))


class WaitingRepeat(WaitingRecipe):
    """Slabs whose channels are to be repeated.

    Parameters
    ----------
    slabs
        ``(B, C, D, H, W)``, without history.
    count
        How many times.
    """

    def __init__(self, slabs: Sequence[Tensor], count: int) -> None:
        self.repeated, self.count, self.unchanged, self.moment = list(slabs), count, Unchanged(slabs), Moment()
        shapes = [(slab.shape[0], count * slab.shape[1], *slab.shape[2:]) for slab in slabs]
        pairs = list(zip(shapes, slabs, strict=True))
        self.likes = [
            torch.empty(shape, dtype=slab.dtype, device="meta", memory_format=layout_of(slab)) for shape, slab in pairs
        ]
        self.stand_ins = [outline_slab(shape, slab.dtype, slab.device) for shape, slab in pairs]
        self.recipe = Recipe(tuple((slab,) for slab in slabs), Repeat(count))

    def expand(self) -> list[Tensor] | None:
        """Return views of the slabs that repeat them without memory; None where they have more than one channel."""
        if any(slab.shape[1] != 1 for slab in self.repeated):
            return None
        self.check()
        return [slab.expand(-1, self.count, -1, -1, -1) for slab in self.repeated]

    def record(self, fill: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the slabs; there is no history."""
        with self.moment.restored():
            return fill()

    def hold(self, volume: ShardedVolume) -> Recipe | None:
        """Leave it unwritten: it is larger than what it is written from."""
        return self.spare(volume)


def repeat_later(volume: ShardedVolume, count: int, tiles: int) -> ShardedVolume | None:
    """Return a volume with its channels repeated, unwritten; None where that saves nothing, or a gradient is needed.

    Parameters
    ----------
    volume
        Of five dims.
    count
        How many times.
    tiles
        In how many pieces the result would be written.
    """
    if isinstance(volume.pending, Waiting) or any(slab.requires_grad for slab in volume._slabs):
        return None
    if volume.shape[1] == 1:
        slabs = [slab.detach().clone(memory_format=torch.contiguous_format) for slab in volume.slabs]
    elif tiles > 1:
        slabs = [slab.detach() for slab in volume.slabs]  # who needs a gradient later needs none of what was repeated
    else:
        return None
    shape = [volume.shape[0], count * volume.shape[1], *volume.shape[2:]]
    return defer(WaitingRepeat(slabs, count), volume.dims, shape, volume.context, volume.merged)
