"""MONAI's resampling to a spacing: bounded in memory, left out where it does nothing, and by planes where asked."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from monai.transforms import Spacingd

from volseg.errors import GridError
from volseg.fields import LABEL_FIELDS, Case
from volseg.memory import available_bytes
from volseg.transforms.grid import ANISOTROPY, Grid, find_coarse_axis
from volseg.transforms.kept_grid import keep_spaced
from volseg.transforms.resampling import SlabResample

__all__ = ["BoundedSpacing", "PlaneSpacing"]

RESAMPLING_BYTES = 24
"""Of each new voxel while MONAI resamples: its three coordinates in float64; each channel takes 8 more."""

MOST_VOXELS = 2**31 - 1
"""Of a resampled volume; torch's kernels count voxels in 32 bits."""

ALWAYS_FITS = 1 << 28
"""Bytes for which the system is not asked how many are free."""


class BoundedSpacing(Spacingd):
    """MONAI's, a slab at a time, which refuses before it resamples what no memory could hold.

    A case that has the spacing is returned at once, as MONAI leaves it.
    """

    def __init__(
        self,
        fields: Sequence[str],
        *,
        pixdim: Sequence[float],
        mode: Sequence[str] | str,
        padding_mode: str,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(
            fields, pixdim=pixdim, mode=mode, padding_mode=padding_mode, allow_missing_keys=allow_missing_keys
        )
        self.spacing_transform.sp_resample = SlabResample(
            mode="bilinear", padding_mode="border", align_corners=False, dtype=np.float64
        )

    def __call__(self, data: Mapping[str, Any], lazy: bool | None = None) -> Case:
        """Return the case at the spacing.

        Raises
        ------
        GridError
            If a volume would have more voxels, or take more memory, than there may be.
        """
        target = [float(side) for side in self.spacing_transform.pixdim]
        if not (self.lazy if lazy is None else lazy):
            modes = dict(self.key_iterator(data, self.mode))
            kept = keep_spaced(data, modes, target, self.padding_mode[0], self.spacing_transform.sp_resample)
            if kept is not None:
                return kept
        for field in self.key_iterator(data):
            grid = Grid.of(data[field])
            sides = grid.affine[:3, :3].norm(dim=0).tolist()
            shape = [math.ceil(n * side / to) for n, side, to in zip(grid.shape, sides, target, strict=True)]
            needed = math.prod(shape) * (RESAMPLING_BYTES + 8 * len(data[field]))
            if math.prod(shape) > MOST_VOXELS or (needed > ALWAYS_FITS and needed > available_bytes()):
                raise GridError(
                    f"{field} has {grid.shape} voxels of {' x '.join(f'{side:.4g}' for side in sides)} mm; at the "
                    f"spacing {target} mm that is {tuple(shape)} voxels, {needed / 2**30:.1f} GiB to resample. Mend "
                    "the spacing in the header if it is wrong, else choose a coarser spacing or leave the case out"
                )
        return super().__call__(data, lazy)


class PlaneSpacing(BoundedSpacing):
    """Resamples thick slices within their planes only, and takes the nearest of them."""

    def __call__(self, data: Mapping[str, Any], lazy: bool | None = None) -> Case:
        """Return the case at the spacing; one without thick slices as `BoundedSpacing` does."""
        target = [float(side) for side in self.spacing_transform.pixdim]
        fields = list(self.key_iterator(data))
        sides = Grid.of(data[fields[0]]).affine[:3, :3].norm(dim=0).tolist()
        axis = find_coarse_axis(sides if max(sides) / min(sides) > ANISOTROPY else target)
        if axis is None:
            return super().__call__(data, lazy)
        within = [sides[axis] if i == axis else side for i, side in enumerate(target)]
        modes = ["nearest" if field in LABEL_FIELDS else "bilinear" for field in fields]
        planes = BoundedSpacing(fields, pixdim=within, mode=modes, padding_mode="border")
        return BoundedSpacing(fields, pixdim=target, mode="nearest", padding_mode="border")(planes(data))
