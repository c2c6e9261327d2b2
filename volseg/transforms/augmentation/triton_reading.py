# ruff: noqa: N803  (upper case: constants for which Triton compiles, and extents of the formula)
# mypy: disable-error-code="no-untyped-def"
"""Cut, move and interpolate the patches of a batch in one Triton kernel, directly from their volumes on the device.

The plain way cuts each patch with its margin, turns its label into a channel per class and interpolates both: it moves
a hundred times the bytes of the resulting patches. Here each voxel of a patch reads its eight neighbours from the
volume itself, so a margin costs nothing. A neighbour without weight is not read, so a patch that is only mirrored is a
copy. The plain way (`PatchSources.cut`, then ``spatial``) defines the result, including the zeros outside the margin.
Positions are computed in voxels instead of ``grid_sample``'s units: in float32 they differ by some 1e-5 voxels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import available

__all__ = ["PatchSources", "available", "read_patches"]


@dataclass(frozen=True, slots=True)
class PatchSources:
    """Voxels on a device, and the positions of a batch's patches in them; B patches of C channels."""

    stored: tuple[Tensor, Tensor]
    """Flat images and labels (uint8): concatenated volumes, each (C, D, H, W) and (1, D, H, W)."""
    boxes: tuple[Tensor, Tensor]
    """Images (S, C, *source) of the same type and labels (S, 1, *source), fetched from elsewhere."""
    begins: Tensor
    """Offset in voxels of the volume of each patch, (B,); -1 - s if the volume is box s."""
    shapes: Tensor
    """D, H, W of the volume or box of each patch, (B, 3)."""
    corners: Tensor
    """First voxel of each patch in its volume, (B, 3), possibly outside the volume."""

    @property
    def num_channels(self) -> int:
        """Channels of the images."""
        return self.boxes[0].shape[1]

    def __len__(self) -> int:
        return len(self.begins)

    def select(self, rows: slice) -> Self:
        """Return the sources of some patches, without a wait for the device."""
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


BLOCK = 128
"""Voxels per program, one per thread: two per thread use 153 registers instead of 64 (three classes, sm_90)."""


@triton.jit
def _compute_offset(index, shift, v, inside, SIDE, SHIFTED: tl.constexpr):
    offset = index.to(tl.float32) - (SIDE - 1) * 0.5
    if SHIFTED:
        offset += tl.load(shift + v, mask=inside, other=0.0)
    return offset


@triton.jit
def _compute_position(offset_d, offset_h, offset_w, columns, SIDE):
    position = offset_d * tl.load(columns) + (SIDE - 1) * 0.5
    position += offset_h * tl.load(columns + 3)
    return position + offset_w * tl.load(columns + 6)


@triton.jit
def _is_within(index, corner, SOURCE, side):
    """Return whether a voxel is inside the source patch and inside its volume."""
    place = corner + index
    return (index >= 0) & (index < SOURCE) & (place >= 0) & (place < side)


@kernel()
def _read_kernel(
    images, labels, box_images, box_labels, begins, shapes, corners, columns, shift, out_images, out_labels,
    C, K, RD, RH, RW, D, H, W,
    NEAREST: tl.constexpr, SHIFTED: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    # R: a patch with its margin. Along each axis: offset from the patch's centre, position in R.
    b = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    volume, inside = D * H * W, v < D * H * W
    d, h, w = v // (H * W), v // W % H, v % W
    offset_d = _compute_offset(d, shift + (b * 3 + 0) * volume, v, inside, D, SHIFTED)
    offset_h = _compute_offset(h, shift + (b * 3 + 1) * volume, v, inside, H, SHIFTED)
    offset_w = _compute_offset(w, shift + (b * 3 + 2) * volume, v, inside, W, SHIFTED)
    position_d = _compute_position(offset_d, offset_h, offset_w, columns + b * 9 + 0, RD)
    position_h = _compute_position(offset_d, offset_h, offset_w, columns + b * 9 + 1, RH)
    position_w = _compute_position(offset_d, offset_h, offset_w, columns + b * 9 + 2, RW)
    below_d, below_h, below_w = tl.floor(position_d), tl.floor(position_h), tl.floor(position_w)
    corner_d = tl.load(corners + b * 3 + 0).to(tl.int32)
    corner_h = tl.load(corners + b * 3 + 1).to(tl.int32)
    corner_w = tl.load(corners + b * 3 + 2).to(tl.int32)

    # The volume: a stored one, or a box.
    side_d = tl.load(shapes + b * 3 + 0).to(tl.int32)
    side_h = tl.load(shapes + b * 3 + 1).to(tl.int32)
    side_w = tl.load(shapes + b * 3 + 2).to(tl.int32)
    in_volume = side_d.to(tl.int64) * side_h * side_w
    begin = tl.load(begins + b).to(tl.int64)
    first = tl.where(begin < 0, (-1 - begin) * in_volume, begin)
    channels, classes = tl.arange(0, BC), tl.arange(0, BK)
    image_of = tl.where(begin < 0, box_images, images) + first * C + channels[None, :] * in_volume
    label_of = tl.where(begin < 0, box_labels, labels) + first
    values = tl.zeros((BV, BC), tl.float32)
    shares = tl.zeros((BV, BK), tl.float32)
    copied = tl.full((BV,), -1, tl.int32)
    for corner in tl.static_range(8):
        up_d, up_h, up_w = corner // 4, corner // 2 % 2, corner % 2
        weight = 1 - tl.abs(position_d - (below_d + up_d))
        weight *= 1 - tl.abs(position_h - (below_h + up_h))
        weight *= 1 - tl.abs(position_w - (below_w + up_w))
        index_d, index_h, index_w = (
            below_d.to(tl.int32) + up_d, below_h.to(tl.int32) + up_h, below_w.to(tl.int32) + up_w,
        )  # fmt: skip
        exists = inside & (weight > 0) & _is_within(index_d, corner_d, RD, side_d)
        exists = exists & _is_within(index_h, corner_h, RH, side_h) & _is_within(index_w, corner_w, RW, side_w)
        place = ((corner_d + index_d).to(tl.int64) * side_h + corner_h + index_h) * side_w + corner_w + index_w
        mask = exists[:, None] & (channels[None, :] < C)
        value = tl.load(image_of + place[:, None], mask=mask, other=0.0).to(tl.float32)
        values += weight[:, None] * value
        if not NEAREST:
            label = tl.load(label_of + place, mask=exists, other=0).to(tl.int32)
            shares += tl.where(label[:, None] == classes[None, :], weight[:, None], 0.0)
            copied = tl.where(weight == 1, label, copied)
    to = out_images + (b * C + channels[None, :]) * volume + v[:, None]
    tl.store(to, values, mask=inside[:, None] & (channels[None, :] < C))

    if NEAREST:
        index_d = tl.floor(position_d + 0.5).to(tl.int32)
        index_h = tl.floor(position_h + 0.5).to(tl.int32)
        index_w = tl.floor(position_w + 0.5).to(tl.int32)
        exists = inside & _is_within(index_d, corner_d, RD, side_d) & _is_within(index_h, corner_h, RH, side_h)
        exists = exists & _is_within(index_w, corner_w, RW, side_w)
        place = ((corner_d + index_d).to(tl.int64) * side_h + corner_h + index_h) * side_w + corner_w + index_w
        chosen = tl.load(label_of + place, mask=exists, other=0).to(tl.int32)
    else:
        # Background is 1 minus the foreground: beyond the border, all is background.
        foreground = (classes[None, :] > 0) & (classes[None, :] < K)
        most = tl.max(tl.where(foreground, shares, -1.0), 1)
        background = 1 - tl.sum(tl.where(foreground, shares, 0.0), 1)
        first = tl.min(tl.where(shares == most[:, None], classes[None, :], BK), 1)
        chosen = tl.where(most > background, first, 0)
        # A label that is not a class must reach the loss, which refuses it.
        chosen = tl.where(copied >= 0, copied, chosen)
    tl.store(out_labels + b * volume + v, chosen.to(out_labels.dtype.element_ty), mask=inside)


def read_patches(
    sources: PatchSources,
    steps: tuple[Tensor, Tensor | None],
    patch_size: Sequence[int],
    source_size: Sequence[int],
    num_classes: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the patches of a batch, moved and interpolated.

    Parameters
    ----------
    sources : PatchSources
        Sources of the patches of the batch.
    steps : (Tensor, Tensor or None)
        From ``spatial.voxel_steps``: the step in the source per voxel along each axis of the patch, (B, 3, 3), and the
        shift of each voxel's offset from the patch's centre, (B, 3, *patch_size).
    patch_size, source_size : sequence of int
        D, H, W of the patches, without and with the margin; voxels beyond the margin are 0.
    num_classes : int, optional
        Number of classes, to choose the class with the largest interpolated share; None: the label of the nearest
        voxel.
    """
    batch, channels = len(sources), sources.num_channels
    (images, labels), (box_images, box_labels) = sources.stored, sources.boxes
    voxels = patch_size[0] * patch_size[1] * patch_size[2]
    out_images = torch.empty(batch, channels, *patch_size, device=images.device)
    out_labels = torch.empty(batch, 1, *patch_size, dtype=labels.dtype, device=images.device)
    columns, shift = steps[0].contiguous(), steps[1]
    _read_kernel[triton.cdiv(voxels, BLOCK), batch](
        images, labels, box_images.contiguous(), box_labels.contiguous(),
        *(where.contiguous() for where in (sources.begins, sources.shapes, sources.corners)),
        columns, columns if shift is None else shift.contiguous(), out_images, out_labels,
        channels, num_classes or 0, *source_size, *patch_size,
        NEAREST=num_classes is None, SHIFTED=shift is not None,
        BC=triton.next_power_of_2(channels), BK=triton.next_power_of_2(num_classes or 1), BV=BLOCK, num_warps=4,
    )  # fmt: skip
    return out_images, out_labels
