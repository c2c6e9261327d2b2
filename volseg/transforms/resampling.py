"""Resample onto another grid like MONAI, a few planes at a time.

MONAI computes the homogeneous float64 coordinates of all new voxels before it interpolates. A CT of 512 x 512 x 160
takes gigabytes of fresh memory, and page faults take most of the time. A slab of a few planes stays in the cache.
The arithmetic is MONAI's, in the same order, so that a voxel halfway between two others rounds to the same one.

A volume on a GPU is interpolated there, also in float64. A GPU rounds a product and a sum at once, so that a voxel in
float32 may differ in its last bit. Nearest voxels are selected on the CPU, since a GPU could select others.
"""

import math
import mmap
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

CONVERTED_PLANES = 16
"""Planes that a thread converts to float64 at a time."""

DEVICE_VOXELS = 1 << 23
"""New voxels at a time on a GPU; their coordinates temporarily take half a gigabyte."""

TOGETHER_VOXELS = 1 << 24
"""New voxels per update of the source's float64 planes: convert the needed planes, release the others."""


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
        if img.device.type == "cpu":
            voxels = _resample(volume, *how)
        elif mode == "bilinear":
            voxels = resample_on_device(volume, *how)
        else:
            voxels = _resample(volume.cpu(), *how).to(volume.device)
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
    _, height, width = shape
    resampled = torch.empty(len(volume), *shape)
    source = _ExactPlanes(volume)
    fill = _make_fill(source.exact, resampled, moved, mode, padding_mode)
    planes = max(1, SLAB_VOXELS // (height * width))
    together = planes * max(1, TOGETHER_VOXELS // (planes * height * width))
    for begin in range(0, shape[0], together):
        end = min(begin + together, shape[0])
        source.hold(*_reach(moved, [(begin, end - 1), (0, height - 1), (0, width - 1)]))
        run_over_slabs(fill, (end - begin, height, width), planes, begin)
    return resampled


def resample_on_device(volume: Tensor, moved: Tensor, shape: Sequence[int], mode: str, padding_mode: str) -> Tensor:
    """Return the values at the new voxels, computed on the volume's device from a complete float64 copy."""
    resampled = torch.empty(len(volume), *shape, device=volume.device)
    fill = _make_fill(volume.double(), resampled, moved, mode, padding_mode)
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


def _reach(moved: Tensor, box: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the range of source planes, end excluded, that the new voxels of a box need."""
    ends = [sorted(float(moved[0, axis]) * end for end in ends) for axis, ends in enumerate(box)]
    low, high = (float(moved[0, 3]) + sum(end[side] for end in ends) for side in (0, 1))
    return math.floor(low) - 2, math.ceil(high) + 3  # 2 more: for rounding, and the neighbour


class _ExactPlanes:
    """A float64 copy of a volume (C, D, H, W) that holds only the planes in use.

    ``grid_sample`` takes positions relative to the whole volume; relative to a part they would round differently. So it
    gets the whole volume, but only pages of planes that were written and not yet released take memory.
    """

    def __init__(self, volume: Tensor) -> None:
        self.volume = volume
        # Private pages, since shared pages are not released. Windows has no such flags.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MADV_DONTNEED") else {}
        self.memory = mmap.mmap(-1, 8 * volume.numel(), **flags)
        self.exact = torch.frombuffer(self.memory, dtype=torch.float64).view(volume.shape)
        self.held = range(0)

    def hold(self, start: int, stop: int) -> None:
        """Convert the planes in ``[start, stop)``, clipped to the volume, to float64, and release the others."""
        channels, depth, height, width = self.volume.shape
        start, stop = min(max(start, 0), depth - 1), max(min(stop, depth), 1)
        old = self.held
        for forgotten in filter(None, (range(old.start, min(old.stop, start)), range(max(old.start, stop), old.stop))):
            for first in range(0, channels * depth, depth):
                ends = (8 * (first + plane) * height * width for plane in (forgotten.start, forgotten.stop))
                self._release(*ends)
        kept = range(max(start, old.start), min(stop, old.stop)) or range(start, start)
        for fresh in filter(None, (range(start, kept.start), range(kept.stop, stop))):
            run_over_slabs(self._convert, (len(fresh), height, width), CONVERTED_PLANES, fresh.start)
        self.held = range(start, stop)

    def _convert(self, planes: slice) -> None:
        self.exact[:, planes] = self.volume[:, planes]

    def _release(self, begin: int, end: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):  # elsewhere the planes stay in memory
            begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                self.memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _place_voxels(side: int) -> Tensor:
    """Return the centres of the voxels along an axis whose outer borders are at -1 and 1."""
    places = torch.linspace(-1, 1, side, dtype=torch.float64) if side > 1 else torch.zeros(1, dtype=torch.float64)
    return places * (side - 1) / side  # in this order, as affine_grid does
