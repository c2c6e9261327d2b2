"""Resample to a spacing like MONAI, with bounded memory, and within planes on request."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.data.utils import AFFINE_TOL
from monai.transforms import Spacingd

from volseg.errors import GridError
from volseg.fields import LABEL_FIELDS, Case
from volseg.memory import available_bytes
from volseg.transforms.grid import ANISOTROPY, Grid, find_coarse_axis
from volseg.transforms.resampling import SlabResample

RESAMPLING_BYTES = 24
"""Bytes per new voxel while MONAI resamples: three coordinates in float64; each channel takes 8 more, and 8 per old
voxel for a copy in float64."""

MOST_VOXELS = 2**31 - 1
"""Most voxels of a resampled volume, since torch's kernels count voxels in 32 bits."""

ALWAYS_FITS = 1 << 28
"""Bytes up to which the free memory is not checked."""


class BoundedSpacing(Spacingd):
    """MONAI's ``Spacingd``, computed slab by slab; a volume that would not fit the memory is refused first.

    Beyond a volume its border continues.
    """

    def __init__(
        self,
        fields: Sequence[str],
        *,
        pixdim: Sequence[float],
        mode: Sequence[str] | str,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(fields, pixdim, mode=mode, padding_mode="border", allow_missing_keys=allow_missing_keys)
        self.spacing_transform.sp_resample = SlabResample(
            mode="bilinear", padding_mode="border", align_corners=False, dtype=np.float64
        )

    def __call__(self, data: Mapping[str, Any], lazy: bool | None = None) -> Case:
        """Return the case at the spacing.

        Raises
        ------
        GridError
            If a resampled volume would exceed `MOST_VOXELS` or the available memory.
        """
        target = [float(side) for side in self.spacing_transform.pixdim]
        for field in self.key_iterator(data):
            grid = Grid.of(data[field])
            axes = grid.affine[:3, :3]
            if torch.allclose(axes.T @ axes, torch.tensor(target, dtype=axes.dtype).square().diag(), atol=AFFINE_TOL):
                continue  # nothing is resampled
            sides = axes.norm(dim=0).tolist()
            shape = [math.ceil(n * side / to) for n, side, to in zip(grid.shape, sides, target, strict=True)]
            needed = math.prod(shape) * (RESAMPLING_BYTES + 8 * len(data[field])) + 8 * data[field].numel()
            if math.prod(shape) > MOST_VOXELS or (needed > ALWAYS_FITS and needed > available_bytes()):
                raise GridError(
                    f"{field} has {grid.shape} voxels of {' x '.join(f'{side:.4g}' for side in sides)} mm; at the "
                    f"spacing {target} mm that is {tuple(shape)} voxels, {needed / 2**30:.1f} GiB to resample. Correct "
                    "the spacing in the header if it is wrong, else choose a coarser spacing or leave the case out"
                )
        return super().__call__(data, lazy)


class PlaneSpacing(BoundedSpacing):
    """Resample thick slices only within their planes, and take the nearest plane along the coarse axis."""

    def __call__(self, data: Mapping[str, Any], lazy: bool | None = None) -> Case:
        """Return the case at the spacing; without thick slices as `BoundedSpacing` does."""
        target = [float(side) for side in self.spacing_transform.pixdim]
        fields = list(self.key_iterator(data))
        sides = Grid.of(data[fields[0]]).affine[:3, :3].norm(dim=0).tolist()
        axis = find_coarse_axis(sides if max(sides) / min(sides) > ANISOTROPY else target)
        if axis is None:
            return super().__call__(data, lazy)
        within = [sides[axis] if i == axis else side for i, side in enumerate(target)]
        modes = ["nearest" if field in LABEL_FIELDS else "bilinear" for field in fields]
        planes = BoundedSpacing(fields, pixdim=within, mode=modes)
        return BoundedSpacing(fields, pixdim=target, mode="nearest")(planes(data))
