"""Read a batch's patches on a device, from concatenated volumes of any sizes or from fetched boxes.

A patch has the same voxels from a stored volume and from a fetched box: beyond its volume there is 0. So a batch does
not depend on where its cases are stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PatchSources:
    """Voxels on a device, and the positions of a batch's patches in them; B patches of C channels."""

    stored: tuple[Tensor, Tensor]
    """Flat images and labels (uint8): concatenated volumes, each (C, D, H, W) and (1, D, H, W)."""
    boxes: tuple[Tensor, Tensor]
    """Images (S, C, *source) of the same type and labels (S, 1, *source), fetched from elsewhere."""
    begins: Tensor
    """Offset of each patch's volume in voxels, (B,); -1 - s if the volume is box s."""
    shapes: Tensor
    """D, H, W of each patch's volume, (B, 3); of a box, its own."""
    corners: Tensor
    """First voxel of each patch in its volume, (B, 3), possibly outside of it."""

    @property
    def num_channels(self) -> int:
        """Channels of the images."""
        return self.boxes[0].shape[1]

    def __len__(self) -> int:
        return len(self.begins)

    def select(self, rows: slice) -> Self:
        """Return the sources of some patches, which waits for no device."""
        return replace(self, begins=self.begins[rows], shapes=self.shapes[rows], corners=self.corners[rows])

    def cut(self, size: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return boxes of ``size`` at the corners: images (B, C, *size) in float32, labels (B, 1, *size) in uint8."""
        place = torch.zeros((), dtype=torch.int64, device=self.begins.device)
        exists = torch.ones((), dtype=torch.bool, device=self.begins.device)
        for axis, side in enumerate(size):
            along = (-1, *(side if axis == other else 1 for other in range(3)))
            position = (self.corners[:, axis, None] + torch.arange(side, device=place.device)).view(along)
            length = self.shapes[:, axis].view(-1, 1, 1, 1)
            exists = exists & (position >= 0) & (position < length)
            place = place * length + position
        image, label = (
            self._take(stored, boxes, place[:, None], exists[:, None])
            for stored, boxes in zip(self.stored, self.boxes, strict=True)
        )
        return image.float(), label

    def _take(self, stored: Tensor, boxes: Tensor, place: Tensor, exists: Tensor) -> Tensor:
        """Return the values at ``place`` (B, 1, *size) of each patch's volume, 0 where nothing ``exists``."""
        in_volume, begins = self.shapes.prod(1), self.begins
        num_channels = boxes.shape[1]
        channel = torch.arange(num_channels, device=place.device).view(-1, 1, 1, 1)
        first = torch.where(begins < 0, (-1 - begins) * in_volume, begins) * num_channels
        index = first.view(-1, 1, 1, 1, 1) + channel * in_volume.view(-1, 1, 1, 1, 1) + place
        is_box = (begins < 0).view(-1, 1, 1, 1, 1)
        values = boxes.new_zeros(index.shape)
        for source, there in ((stored, exists & ~is_box), (boxes.flatten(), exists & is_box)):
            if len(source):
                values = torch.where(there, source[torch.where(there, index, 0)], values)
        return values
