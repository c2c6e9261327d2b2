"""Statistics of an image that show noise, integer overflow, saturation and lost slices.

In a large image they are computed from a block around the middle, and slices are subsampled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

__all__ = ["Texture", "choose_steps", "coarsen", "compute_thumbnail", "measure_texture"]

BLOCK_SIDE = 128
"""Voxels along each axis of the block in which neighbours are compared."""

COARSE_SIDE = 96
"""Most voxels along each axis of a subsampled volume."""

WIDE_JUMP = 0.9
"""Share of the range of values. A brain differs from its masked background by up to 0.8, an overflow by nearly 1."""

THUMBNAIL_SIDE = 16
"""Voxels along each axis of a thumbnail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Texture:
    """Statistics of one channel."""

    smoothness: tuple[float, float, float]
    """Correlation of neighbours along each axis, of values clipped to the 0.5th and 99.5th percentile: 0 for noise."""
    jumps: float
    """Share of neighbours that differ by more than `WIDE_JUMP` of the range of values."""
    share_highest: float
    """Share of the voxels at the highest value."""
    empty_slices: float
    """Share of the slices that hold a single value, along the axis with the most of them."""

    def compare_axis(self, axis: int) -> float:
        """Return the roughness along an axis, relative to the geometric mean of the other axes'."""
        rough = [max(1 - smooth, 1e-6) for smooth in self.smoothness]
        others = rough[:axis] + rough[axis + 1 :]
        return rough[axis] / math.sqrt(math.prod(others))


def measure_texture(channel: Tensor, low: float, high: float) -> Texture:
    """Return the statistics of a channel ``(D, H, W)`` with the 0.5th percentile ``low`` and the 99.5th ``high``."""
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
    if min(channel.shape) == 1:
        return 0.0
    steps = [1 if axis == dim else step for axis, step in enumerate(choose_steps(channel.shape))]
    sampled = channel[tuple(slice(None, None, step) for step in steps)]
    others = [axis for axis in range(3) if axis != dim]
    return float((sampled.amax(others) == sampled.amin(others)).double().mean())


def choose_steps(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the subsampling along each axis that leaves at most `COARSE_SIDE` voxels."""
    return tuple(-(-side // COARSE_SIDE) for side in shape)


def coarsen(channel: np.ndarray) -> np.ndarray:
    """Subsample a channel to at most `COARSE_SIDE` voxels along each axis; a view."""
    return channel[tuple(slice(step // 2, None, step) for step in choose_steps(channel.shape))]


def compute_thumbnail(channel: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return a channel resized to `THUMBNAIL_SIDE` voxels along each axis, of mean 0 and norm 1, as float32."""
    coarse = torch.from_numpy(coarsen(channel).clip(low, high).astype(np.float32))[None, None]
    small = interpolate(coarse, size=(THUMBNAIL_SIDE,) * 3, mode="trilinear")[0, 0].double()
    small -= small.mean()
    thumbnail: np.ndarray = (small / small.norm().clamp(min=np.finfo(np.float64).tiny)).float().numpy()
    return thumbnail
