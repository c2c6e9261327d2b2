"""MONAI's resampling onto another grid, a few planes at a time.

MONAI writes down the three coordinates of every new voxel in float64, by way of a fourth number, before it looks at the
first: a CT of 512 x 512 x 160 takes gigabytes of fresh memory, and most of the time goes into its pages. A slab of some
planes stays in the cache. The arithmetic is MONAI's, number by number and in its order, so that a voxel halfway between
two others goes to the same one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.data.utils import AFFINE_TOL
from monai.networks.utils import to_norm_affine
from monai.transforms import SpatialResample
from torch import Tensor
from torch.nn.functional import grid_sample

from volseg.transforms.slabs import run_over_slabs

__all__ = ["SlabResample"]

SLAB_VOXELS = 1 << 17
"""New voxels at a time; their coordinates take 7 MB."""

CONVERTED_PLANES = 16
"""Planes that a thread makes float64 at a time."""


class SlabResample(SpatialResample):
    """`SpatialResample` for volumes on the CPU that are resampled at once, in float64, by ``grid_sample``'s rule."""

    def __call__(
        self,
        img: Tensor,
        dst_affine: Tensor | None = None,
        spatial_size: Sequence[int] | Tensor | int | None = None,
        mode: str | int | None = None,
        padding_mode: str | None = None,
        align_corners: bool | None = None,
        dtype: Any = None,
        lazy: bool | None = None,
    ) -> Tensor:
        """Return ``img`` (C, D, H, W) in float32 on the grid of ``dst_affine`` and ``spatial_size``."""

        def as_monai() -> Tensor:
            parent = super(SlabResample, self).__call__
            return parent(img, dst_affine, spatial_size, mode, padding_mode, align_corners, dtype, lazy)

        is_plain = isinstance(img, MetaTensor) and img.device.type == "cpu" and not lazy and not align_corners
        sizes = isinstance(spatial_size, Sequence) and len(spatial_size) == 3 and img.ndim == 4
        named = mode in ("bilinear", "nearest") and isinstance(padding_mode, str) and np.dtype(dtype) == np.float64
        if not (is_plain and sizes and named) or dst_affine is None:
            return as_monai()
        assert isinstance(img, MetaTensor)
        assert isinstance(spatial_size, Sequence)
        shape = [int(side) for side in spatial_size]
        before, after = img.affine.to(torch.float64), dst_affine.to(torch.float64)
        moved = torch.from_numpy(np.linalg.solve(before.numpy(), after.numpy()))  # to MONAI's last bit
        if shape == list(img.shape[1:]) and (_is_close(before, after) or _is_close(moved, torch.eye(4))):
            return as_monai()  # which leaves it as it is
        voxels = _resample(img.as_tensor(), moved, shape, str(mode), str(padding_mode))
        tracked = self.track_transform_meta(  # moves the affine, and notes what `Invertd` takes back
            img,
            sp_size=torch.tensor(shape),
            affine=moved,
            extra_info={
                "dtype": "float64",
                "mode": mode,
                "padding_mode": padding_mode,
                "align_corners": align_corners,
                "src_affine": before,
            },
            orig_size=img.peek_pending_shape(),
            transform_info=self.get_transform_info(),
        )
        return MetaTensor(voxels).copy_meta_from(tracked)


def _is_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other.to(one), atol=AFFINE_TOL)


def _resample(volume: Tensor, moved: Tensor, shape: Sequence[int], mode: str, padding_mode: str) -> Tensor:
    """Return the values of ``volume`` at the new voxels, whose indices ``moved`` maps to old ones."""
    _, height, width = shape
    theta = to_norm_affine(moved[None], volume.shape[1:], shape, align_corners=False)[0]
    theta = theta[[2, 1, 0]][:, [2, 1, 0, 3]].contiguous()  # from (d, h, w, 1) to grid_sample's (w, h, d)
    places = [_place_voxels(side) for side in shape]
    resampled = torch.empty(len(volume), *shape)
    exact = torch.empty(volume.shape, dtype=torch.float64)
    run_over_slabs(lambda slab: exact[:, slab].copy_(volume[:, slab]), volume.shape[1:], CONVERTED_PLANES)

    def fill(planes_of: slice) -> None:
        planes = places[0][planes_of]
        homogeneous = torch.ones(len(planes), height, width, 4, dtype=torch.float64)
        homogeneous[..., 0] = places[2]
        homogeneous[..., 1] = places[1][:, None]
        homogeneous[..., 2] = planes[:, None, None]
        grid = homogeneous.view(1, -1, 4).bmm(theta.T[None]).view(1, len(planes), height, width, 3)
        slab = grid_sample(exact[None], grid, mode=mode, padding_mode=padding_mode, align_corners=False)
        resampled[:, planes_of] = slab[0]

    run_over_slabs(fill, shape, max(1, SLAB_VOXELS // (height * width)))
    return resampled


def _place_voxels(side: int) -> Tensor:
    """Return the centres of the voxels along an axis whose outer borders lie at -1 and 1."""
    places = torch.linspace(-1, 1, side, dtype=torch.float64) if side > 1 else torch.zeros(1, dtype=torch.float64)
    return places * (side - 1) / side  # in this order, as affine_grid does
