"""Resample onto another grid like MONAI, a few planes at a time.

MONAI computes the homogeneous float64 coordinates of all new voxels before it interpolates. A CT of 512 x 512 x 160
takes gigabytes of fresh memory, and page faults take most of the time. A slab of a few planes stays in the cache; only
the source's copy in float64 is whole, as ``grid_sample`` takes positions relative to the whole volume.
The arithmetic is MONAI's, in the same order, so that a voxel halfway between two others rounds to the same one.

A volume on a GPU is interpolated there, also in float64. A GPU rounds a product and a sum at once, so that a voxel in
float32 may differ in its last bit. Nearest voxels are selected on the CPU, since a GPU could select others.
"""

from collections.abc import Callable, Sequence
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

SLAB_VOXELS = 1 << 17
"""New voxels at a time; their coordinates take 7 MB."""

DEVICE_VOXELS = 1 << 23
"""New voxels at a time on a GPU; their coordinates temporarily take half a gigabyte."""


class SlabResample(SpatialResample):
    """`SpatialResample` with bounded memory for eager resampling in float64 by ``grid_sample``."""

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

        is_plain = isinstance(img, MetaTensor) and not lazy and not align_corners
        sizes = isinstance(spatial_size, Sequence) and len(spatial_size) == 3 and img.ndim == 4
        named = mode in ("bilinear", "nearest") and padding_mode in ("border", "zeros") and dtype == np.float64
        if not (is_plain and sizes and named) or dst_affine is None:
            return as_monai()
        assert isinstance(img, MetaTensor)
        assert isinstance(spatial_size, Sequence)
        shape = [int(side) for side in spatial_size]
        before, after = img.affine.to(torch.float64), dst_affine.to(torch.float64)
        moved = torch.from_numpy(np.linalg.solve(before.numpy(), after.numpy()))  # the same bits as MONAI
        if shape == list(img.shape[1:]) and (_is_close(before, after) or _is_close(moved, torch.eye(4))):
            return as_monai()  # MONAI returns the volume unchanged
        volume, how = img.as_tensor(), (moved, shape, str(mode), str(padding_mode))
        voxels = _resample(volume if mode == "bilinear" else volume.cpu(), *how).to(volume.device)
        tracked = self.track_transform_meta(  # updates the affine, and records the step for `Invertd`
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
    """Return the values of ``volume`` at the new voxels; ``moved`` maps their indices to old indices."""
    resampled = torch.empty(len(volume), *shape, device=volume.device)
    fill = _make_fill(volume.double(), resampled, moved, mode, padding_mode)
    if volume.device.type == "cpu":
        run_over_slabs(fill, shape, max(1, SLAB_VOXELS // (shape[1] * shape[2])))
        return resampled
    planes = max(1, DEVICE_VOXELS // (shape[1] * shape[2]))
    for begin in range(0, shape[0], planes):
        fill(slice(begin, min(begin + planes, shape[0])))
    return resampled


def _make_fill(
    exact: Tensor, resampled: Tensor, moved: Tensor, mode: str, padding_mode: str
) -> Callable[[slice], object]:
    """Return a function that writes planes of ``resampled`` ``(C, D, H, W)``, interpolated from ``exact``."""
    shape, device = resampled.shape[1:], exact.device
    _, height, width = shape
    theta = to_norm_affine(moved[None], exact.shape[1:], shape, align_corners=False)[0]
    theta = theta[[2, 1, 0]][:, [2, 1, 0, 3]].contiguous().to(device)  # from (d, h, w, 1) to grid_sample's (w, h, d)
    places = [_place_voxels(side).to(device) for side in shape]

    def fill(planes_of: slice) -> None:
        planes = places[0][planes_of]
        homogeneous = torch.ones(len(planes), height, width, 4, dtype=torch.float64, device=device)
        homogeneous[..., 0] = places[2]
        homogeneous[..., 1] = places[1][:, None]
        homogeneous[..., 2] = planes[:, None, None]
        grid = homogeneous.view(1, -1, 4).bmm(theta.T[None]).view(1, len(planes), height, width, 3)
        slab = grid_sample(exact[None], grid, mode=mode, padding_mode=padding_mode, align_corners=False)
        resampled[:, planes_of] = slab[0]

    return fill


def _place_voxels(side: int) -> Tensor:
    """Return the centres of the voxels along an axis whose outer borders are at -1 and 1."""
    places = torch.linspace(-1, 1, side, dtype=torch.float64) if side > 1 else torch.zeros(1, dtype=torch.float64)
    return places * (side - 1) / side  # in this order, as affine_grid does
