"""Channels that are repeated: what needs no gradient is written again by whoever reads it, and takes no memory.

V-Net adds its image to each of sixteen channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from volseg.device.layout import DIM, layout_of
from volseg.parallel.spatial.pending import Released, Waiting, Written
from volseg.parallel.spatial.recipe import Recipe, outline_slab
from volseg.parallel.spatial.versions import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["repeat_later"]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Writes the channels of a slab, so many times one behind the other."""

    count: int

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Copy them."""
        (slab,) = tensors
        planes = slab.narrow(DIM, start, out.shape[DIM])
        out.unflatten(1, (self.count, slab.shape[1])).copy_(planes.unsqueeze(1))


def repeat_later(volume: ShardedVolume, count: int) -> ShardedVolume | None:
    """Return a volume with its channels repeated, unwritten; None where it waits itself, or needs a gradient.

    Parameters
    ----------
    volume
        Of five dims, cut along D.
    count
        How many times.
    """
    if isinstance(volume.pending, Waiting) or any(slab.requires_grad for slab in volume._slabs):
        return None
    slabs = volume.slabs
    shape = [volume.shape[0], count * volume.shape[1], *volume.shape[2:]]
    outlines = [
        outline_slab([slab.shape[0], count * slab.shape[1], *slab.shape[2:]], slab.dtype, slab.device) for slab in slabs
    ]
    recipe = Recipe(tuple((slab,) for slab in slabs), Repeat(count))
    repeated = ShardedVolume(outlines, volume.dims, shape, volume.context)
    written = Written(recipe, Unchanged((*outlines, *slabs)))
    repeated.pending = Released(written, [0] * len(slabs), None, layout_of(slabs[0]))
    return repeated
