"""How deep a U-Net goes for a patch: nnU-Net's rule, a pure function of patch size and spacing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from volseg.errors import ConfigError

__all__ = ["Topology", "plan_topology"]

Sides = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Topology:
    """Stages of a U-Net from the finest to the bottleneck."""

    strides: tuple[Sides, ...]
    """Stride with which each stage begins; the first is 1."""
    kernels: tuple[Sides, ...]
    """Kernel of each stage's convolutions."""
    filters: tuple[int, ...]
    """Channels of each stage."""

    @property
    def divisors(self) -> Sides:
        """What each side of a volume must be a multiple of: the product of the strides along it."""
        d, h, w = (math.prod(stride[axis] for stride in self.strides) for axis in range(3))
        return d, h, w


def plan_topology(
    patch_size: Sequence[float],
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
    *,
    smallest_side: int = 4,
    first_filters: int = 32,
    most_filters: int = 320,
) -> Topology:
    """Halve the axes until the bottleneck would have fewer than ``smallest_side`` voxels along each.

    An axis is halved while it has twice that many voxels and its spacing is below twice the finest of the axes that
    can be halved; a kernel spans 3 voxels along an axis once its spacing is below twice the finest of all.

    Parameters
    ----------
    patch_size : sequence of float
        D, H, W in voxels; a median of sizes may be no whole number.
    spacing : sequence of float
        Voxel size in mm.
    smallest_side, first_filters, most_filters : int
        nnU-Net's numbers for volumes.

    Raises
    ------
    ConfigError
        For a patch too small to halve twice, which leaves no U.

    References
    ----------
    .. [1] F. Isensee et al., "nnU-Net", Nature Methods 18, 2021, supplement, doi:10.1038/s41592-020-01008-z.

    Examples
    --------
    >>> plan_topology((40, 56, 40)).strides
    ((1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 2))
    >>> plan_topology((40, 56, 40)).filters
    (32, 64, 128, 256)
    """
    sides, mm = list(patch_size), list(spacing)
    kernel = [1, 1, 1]
    strides: list[Sides] = [(1, 1, 1)]
    kernels: list[Sides] = []
    while True:
        large = [axis for axis in range(3) if sides[axis] >= 2 * smallest_side]
        finest = min((mm[axis] for axis in large), default=0.0)
        halved = [axis for axis in large if mm[axis] / finest < 2]
        # One axis alone is halved only where that leaves it clearly longer than the smallest side.
        if not halved or (len(halved) == 1 and sides[halved[0]] < 3 * smallest_side):
            break
        kernel = [3 if k == 3 or mm[axis] / min(mm) < 2 else 1 for axis, k in enumerate(kernel)]
        kernels.append((kernel[0], kernel[1], kernel[2]))
        for axis in halved:
            mm[axis] *= 2
            sides[axis] = math.ceil(sides[axis] / 2)
        d, h, w = (2 if axis in halved else 1 for axis in range(3))
        strides.append((d, h, w))
    if len(strides) < 3:
        raise ConfigError(
            f"patch size {tuple(patch_size)} is too small to plan a U-Net: it must be halved at least twice down to "
            f"{smallest_side} voxels; choose a larger patch.size, or give strides and kernel_size"
        )
    filters = tuple(min(first_filters * 2**stage, most_filters) for stage in range(len(strides)))
    return Topology(tuple(strides), (*kernels, (3, 3, 3)), filters)
