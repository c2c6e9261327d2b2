"""Channels that are repeated wait for whoever reads them, where they need no gradient.

V-Net adds its image to each of sixteen channels. What waits has a copy of such an image, which nobody changes, and a
sum reads that without writing the channels (see ``addition``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from volseg.device.layout import DIM, layout_of
from volseg.parallel.spatial.moment import Moment
from volseg.parallel.spatial.pending import Waiting
from volseg.parallel.spatial.recipe import Outline, Recipe, outline_slab
from volseg.parallel.spatial.transport.halo import Halo, Wait
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


class WaitingRepeat(Waiting):
    """Slabs whose channels are to be repeated.

    Parameters
    ----------
    slabs
        ``(B, C, D, H, W)``, without history.
    count
        How many times.
    """

    room = 0

    def __init__(self, slabs: Sequence[Tensor], count: int) -> None:
        self.repeated, self.count, self.unchanged, self.moment = list(slabs), count, Unchanged(slabs), Moment()
        self.stand_ins = self._outline_slabs()

    def _outline_slabs(self) -> list[Tensor]:
        shapes = [(slab.shape[0], self.count * slab.shape[1], *slab.shape[2:]) for slab in self.repeated]
        return [outline_slab(shape, slab.dtype, slab.device) for shape, slab in zip(shapes, self.repeated, strict=True)]

    def _make_recipe(self) -> Recipe:
        return Recipe(tuple((slab,) for slab in self.repeated), Repeat(self.count))

    def expand(self) -> list[Tensor] | None:
        """Return views of the slabs that repeat them without memory; None where they have more than one channel."""
        if any(slab.shape[1] != 1 for slab in self.repeated):
            return None
        self.check()
        return [slab.expand(-1, self.count, -1, -1, -1) for slab in self.repeated]

    def write(self, halos: Sequence[Halo]) -> tuple[list[Tensor], Recipe | None, Wait | None]:
        """Copy the channels."""
        del halos  # there is no room for them
        with self.moment.restored():
            slabs = [slab.repeat(1, self.count, 1, 1, 1) for slab in self.repeated]
        return slabs, self._make_recipe(), None

    def outline(self) -> Outline | None:
        """Note it for whoever reads it a few planes at a time."""
        return Outline(self._outline_slabs(), self._make_recipe(), layout_of(self.repeated[0]))

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
