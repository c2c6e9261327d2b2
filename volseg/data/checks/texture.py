"""Statistics of an image's voxels by which noise, an overflow, saturation and lost slices show.

Of a large image a block around the middle is looked at, and every so many voxels of a slice.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

__all__ = ["COARSE_SIDE", "THUMBNAIL_SIDE", "Texture", "coarsen", "draw_thumbnail", "measure_texture"]

BLOCK_SIDE = 128
"""Voxels along each axis of the block in which neighbours are compared."""

COARSE_SIDE = 96
"""Voxels along each axis to which a volume is thinned out at most."""

WIDE_JUMP = 0.9
"""Part of the range. Up to four fifths lie between a brain and the background that was cut away around it; nearly all
of it lies between the ends of an integer type."""

THUMBNAIL_SIDE = 16
"""Voxels along each axis of the small copy by which images are compared with each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Texture:
    """Statistics of one channel."""

    smoothness: tuple[float, float, float]
    """Correlation of neighbours along each axis, between the 0.5th and the 99.5th percentile: 0 for noise."""
    jumps: float
    """Share of the neighbours that differ by more than `WIDE_JUMP` of the range of values, as after an overflow."""
    share_highest: float
    """Share of the voxels at the highest value."""
    empty_slices: float
    """Share of the slices that hold a single value, along the axis that has most of them."""

    def compare_axis(self, axis: int) -> float:
        """Return how much rougher the image is along an axis than along the others, as a logarithm."""
        rough = [math.log(max(1 - smooth, 1e-6)) for smooth in self.smoothness]
        return rough[axis] - (sum(rough) - rough[axis]) / 2


def measure_texture(channel: Tensor, low: float, high: float) -> Texture:
    """Return the statistics of a channel ``(D, H, W)`` whose values lie mostly between ``low`` and ``high``."""
    lowest, highest = (float(bound) for bound in channel.aminmax())
    middle = [max(0, (side - BLOCK_SIDE) // 2) for side in channel.shape]
    block = channel[tuple(slice(start, start + BLOCK_SIDE) for start in middle)].to(torch.float64)
    clipped = block.clamp(low, high)
    variance = max(float(clipped.var(correction=0)), np.finfo(np.float64).tiny)
    apart = [clipped.diff(dim=dim).square().mean() for dim in range(3)]
    smooth = [1.0 if steps.isnan() else 1 - float(steps) / (2 * variance) for steps in apart]
    wide = [block.diff(dim=dim).abs() > (highest - lowest) * WIDE_JUMP for dim in range(3)]
    return Texture(
        smoothness=(smooth[0], smooth[1], smooth[2]),
        jumps=sum(int(jump.sum()) for jump in wide) / max(1, sum(jump.numel() for jump in wide)),
        share_highest=float((block == highest).double().mean()),
        empty_slices=max(_count_empty(channel, dim) for dim in range(3)),
    )


def _count_empty(channel: Tensor, dim: int) -> float:
    steps = [1 if axis == dim else -(-side // COARSE_SIDE) for axis, side in enumerate(channel.shape)]
    thinned = channel[tuple(slice(None, None, step) for step in steps)]
    others = [axis for axis in range(3) if axis != dim]
    is_empty = thinned.amax(others) == thinned.amin(others)
    return float(is_empty.double().mean()) if min(channel.shape) > 1 else 0.0


def coarsen(channel: np.ndarray) -> np.ndarray:
    """Return every so many voxels of a channel, so that `COARSE_SIDE` are left along an axis at most."""
    steps = [-(-side // COARSE_SIDE) for side in channel.shape]
    return channel[tuple(slice(step // 2, None, step) for step in steps)]


def draw_thumbnail(channel: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return a small copy of a channel, of mean 0 and length 1, as float32."""
    coarse = torch.from_numpy(coarsen(channel).clip(low, high).astype(np.float32))[None, None]
    small = interpolate(coarse, size=(THUMBNAIL_SIDE,) * 3, mode="trilinear")[0, 0].double()
    small -= small.mean()
    drawn: np.ndarray = (small / small.norm().clamp(min=np.finfo(np.float64).tiny)).float().numpy()
    return drawn
