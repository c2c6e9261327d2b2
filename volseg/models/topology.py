"""Plan the strides and kernels of a U-Net or a V-Net from patch size and spacing."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from volseg.errors import ConfigError

Sides = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Topology:
    """Stages of a U-Net or a V-Net from the finest to the bottleneck."""

    strides: tuple[Sides, ...]
    """Stride of each stage's first convolution; the first stage's is 1."""
    kernels: tuple[Sides, ...]
    """Kernel of each stage's convolutions."""
    filters: tuple[int, ...]
    """Channels of each stage."""

    @property
    def divisors(self) -> Sides:
        """Divisors of a volume's sides: the product of the strides along each axis."""
        d, h, w = (math.prod(stride[axis] for stride in self.strides) for axis in range(3))
        return d, h, w


SMALLEST_SIDE = 4
"""Fewest voxels along a halved axis: nnU-Net's number for volumes."""

FIRST_FILTERS, MOST_FILTERS, MOST_FILTERS_2D = 32, 320, 512
"""Channels of the first stage, and most channels of a stage, for volumes and for single slices: nnU-Net's numbers."""


def plan_topology(patch_size: Sequence[float], spacing: Sequence[float] = (1.0, 1.0, 1.0)) -> Topology:
    """Halve the axes until the bottleneck would have fewer than `SMALLEST_SIDE` voxels along each.

    An axis is halved while it has twice that many voxels and its spacing is below twice the finest of the axes that can
    be halved. A kernel spans 3 voxels along an axis once its spacing is below twice the finest of all. An axis of one
    voxel has kernels and strides of 1, and its spacing is ignored: nnU-Net's 2D network.

    Parameters
    ----------
    patch_size : sequence of float
        D, H, W in voxels; a median of sizes may be fractional.
    spacing : sequence of float
        Voxel size in mm.

    Raises
    ------
    ConfigError
        If the patch is too small to halve twice.

    References
    ----------
    .. [1] F. Isensee et al., "nnU-Net", Nature Methods 18, 2021, supplement, doi:10.1038/s41592-020-01008-z.

    Examples
    --------
    >>> plan_topology((40, 56, 40)).strides
    ((1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 2))
    >>> plan_topology((40, 56, 40)).filters
    (32, 64, 128, 256)
    >>> plan_topology((64, 64, 1)).kernels[-1]
    (3, 3, 1)
    """
    sides, mm = list(patch_size), leave_out_slices(patch_size, spacing)
    widest = _each(3 if length < math.inf else 1 for length in mm)
    kernel = [1, 1, 1]
    strides: list[Sides] = [(1, 1, 1)]
    kernels: list[Sides] = []
    while True:
        large = [axis for axis in range(3) if sides[axis] >= 2 * SMALLEST_SIDE]
        finest = min((mm[axis] for axis in large), default=0.0)
        halved = [axis for axis in large if mm[axis] / finest < 2]
        # A single axis is halved only if it stays clearly longer than the smallest side.
        if not halved or (len(halved) == 1 and sides[halved[0]] < 3 * SMALLEST_SIDE):
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
            f"{SMALLEST_SIDE} voxels; choose a larger patch.size, or set strides and kernel_size"
        )
    most = MOST_FILTERS if min(widest) > 1 else MOST_FILTERS_2D
    filters = tuple(min(FIRST_FILTERS * 2**stage, most) for stage in range(len(strides)))
    return Topology(tuple(strides), (*kernels, widest), filters)


def leave_out_slices(patch_size: Sequence[float], spacing: Sequence[float]) -> list[float]:
    """Return the spacing with infinity along axes of one voxel, which no kernel spans and no comparison includes.

    >>> leave_out_slices((64, 64, 1), (1.0, 1.0, 0.5))
    [1.0, 1.0, inf]
    """
    return [mm if side > 1 or max(patch_size) <= 1 else math.inf for side, mm in zip(patch_size, spacing, strict=True)]


VNET_FILTERS = (16, 32, 64, 128, 256)
"""Channels of a V-Net's five levels."""

VNET_KERNEL = 5
"""Side of a V-Net's kernels."""

VNET_MONAI = Topology(((1, 1, 1), *[(2, 2, 2)] * 4), ((VNET_KERNEL,) * 3,) * 5, VNET_FILTERS)
"""The V-Net of MONAI and of its authors, which treats all axes equally."""

THIN_SIDE, THIN_SHARE = 24, 3
"""An axis is thin if it has fewer than ``THIN_SIDE`` voxels, and the longest axis is over ``THIN_SHARE`` times as
long."""


def plan_vnet_topology(
    patch_size: Sequence[float], spacing: Sequence[float] = (1.0, 1.0, 1.0), *, thin: Sequence[bool] | None = None
) -> Topology:
    """Halve the axes of a V-Net's patch four times; halve a coarse or thin axis later and less often.

    The result is `VNET_MONAI` unless an axis is coarse (its spacing is at least twice the finest) or thin. As in a
    U-Net (`plan_topology`), an axis is halved once its spacing is below twice the finest of the axes that can be
    halved, and kernels span more than one voxel along it once its spacing is below twice the finest of all. A coarse or
    thin axis is halved only while it has at least twice `SMALLEST_SIDE` voxels. An axis of one voxel is ignored, as in
    a U-Net.

    Parameters
    ----------
    patch_size : sequence of float
        D, H, W in voxels.
    spacing : sequence of float
        Voxel size in mm.
    thin : sequence of bool, optional
        Which axes are thin; by default those that `is_thin` finds in the patch.

    Examples
    --------
    >>> plan_vnet_topology((224, 256, 9), (1.5, 1.5, 10.0)).strides
    ((1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 1))
    >>> plan_vnet_topology((48, 64, 48)) == VNET_MONAI
    True
    """
    sides, mm = [math.ceil(side) for side in patch_size], leave_out_slices(patch_size, spacing)
    thin = is_thin(patch_size) if thin is None else thin
    limited = [thin[axis] or mm[axis] / min(mm) >= 2 for axis in range(3)]
    strides, kernels = [(1, 1, 1)], [(1, 1, 1)]
    for _ in VNET_FILTERS:
        mm = [length * step for length, step in zip(mm, strides[-1], strict=True)]
        sides = [math.ceil(side / step) for side, step in zip(sides, strides[-1], strict=True)]
        kernels.append(
            _each(VNET_KERNEL if kernels[-1][axis] > 1 or mm[axis] / min(mm) < 2 else 1 for axis in range(3))
        )
        large = [axis for axis in range(3) if not limited[axis] or sides[axis] >= 2 * SMALLEST_SIDE]
        finest = min((mm[axis] for axis in large), default=0.0)
        strides.append(_each(2 if axis in large and mm[axis] / finest < 2 else 1 for axis in range(3)))
    return Topology(tuple(strides[:-1]), tuple(kernels[1:]), VNET_FILTERS)


def is_thin(shape: Sequence[float]) -> tuple[bool, bool, bool]:
    """Return which axes are thin: few voxels, and fewer than a third of the longest axis, as in a stack of few slices.

    >>> is_thin((216, 256, 9)), is_thin((35, 50, 36)), is_thin((5, 5, 5))
    ((False, False, True), (False, False, False), (False, False, False))
    """
    d, h, w = (side < THIN_SIDE and THIN_SHARE * side < max(shape) for side in shape)
    return d, h, w


def _each(values: Iterable[int]) -> Sides:
    d, h, w = values
    return d, h, w
