"""Resample a case to a spacing as MONAI does, a few planes at a time; on request, interpolate only within planes.

MONAI's ``Spacing`` computes the homogeneous float64 coordinates of all new voxels before it interpolates. A CT of 512 x
512 x 160 takes gigabytes of fresh memory, and page faults take most of the time. A slab of a few planes stays in the
cache; only the float64 copy of the source is whole, since positions for ``grid_sample`` are relative to the whole
volume. The grid and the arithmetic are MONAI's, in the same order, so that a voxel halfway between two others is
rounded to the same one. No trace for ``Invertd`` is stored: the way back to the file's grid needs only the affines (see
`grid`).

A volume on a GPU is interpolated there, also in float64. A GPU rounds a product and a sum together, so a voxel in
float32 may differ in its last bit. Nearest voxels are selected on the CPU, since a GPU could select others.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from monai.data import MetaTensor
from monai.data.utils import AFFINE_TOL, compute_shape_offset, zoom_affine
from monai.networks.utils import to_norm_affine
from monai.transforms import MapTransform
from torch import Tensor
from torch.nn.functional import grid_sample

from volseg.errors import GridError
from volseg.fields import LABEL_FIELDS, Case
from volseg.memory import available_bytes
from volseg.transforms.grid import ANISOTROPY, Grid, find_coarse_axis
from volseg.transforms.slabs import run_over_slabs

SLAB_VOXELS = 1 << 17
"""New voxels at a time; their coordinates take 7 MB."""

DEVICE_VOXELS = 1 << 23
"""New voxels at a time on a GPU; their coordinates temporarily take half a gigabyte."""

RESAMPLING_BYTES = 24
"""Bytes per new voxel that must be free: three coordinates in float64; each channel needs 8 more, and 8 per old voxel
for a copy in float64. Slabs need less."""

MOST_VOXELS = 2**31 - 1
"""Most voxels of a resampled volume, since torch's kernels count voxels in 32 bits."""

ALWAYS_FITS = 1 << 28
"""Bytes up to which the free memory is not checked."""

Sides = Sequence[float]


class Spacing(MapTransform):
    """Resample to ``spacing`` (mm along D, H, W): images trilinearly, label maps to the nearest voxel.

    An axis within 0.001 mm of its target is not resampled, so 1 mm data remain unchanged at a target of 1 mm. Voxels
    beyond a volume get the value at its border.

    ``thick_slices: nearest`` applies to a case with one axis more than three times coarser than the finest, before or
    after resampling. It is interpolated within its planes, with the nearest plane along that axis, since the mean of
    two thick slices shows an anatomy that neither has. This is nnU-Net's rule.
    """

    def __init__(
        self, fields: Sequence[str], *, spacing: Sides, thick_slices: Literal["linear", "nearest"] = "linear"
    ) -> None:
        if thick_slices not in ("linear", "nearest"):
            raise ValueError(f"thick_slices must be linear or nearest, got {thick_slices!r}")
        if len(spacing) != 3 or not all(0 < side < math.inf for side in spacing):
            raise ValueError(f"spacing must be three positive lengths in mm, got {list(spacing)}")
        super().__init__(fields, allow_missing_keys=True)
        self.target = [float(side) for side in spacing]
        self.thick_slices = thick_slices

    def __call__(self, data: Mapping[str, Any]) -> Case:
        """Return the case at the spacing.

        Raises
        ------
        GridError
            If a resampled volume would exceed `MOST_VOXELS` or the available memory.
        """
        case, target = dict(data), self.target
        thick = self._find_thick_axis(case)
        for field in self.key_iterator(case):
            mode = "nearest" if field in LABEL_FIELDS else "bilinear"
            if thick is not None:
                within = list(target)
                # Distance between planes, not along the axis: the axis of a tilted gantry is oblique, and would mix
                # planes.
                within[thick] = 1 / float(torch.linalg.inv(case[field].affine.double())[thick, :3].norm())
                case[field] = _resample(case[field], within, mode, field)
                mode = "nearest"
            case[field] = _resample(case[field], target, mode, field)
        return case

    def _find_thick_axis(self, case: Case) -> int | None:
        """Return the axis of thick slices of the image, or of the target; None without the rule for them."""
        if self.thick_slices == "linear":
            return None
        sides = Grid.of(case[self.first_key(case)]).affine[:3, :3].norm(dim=0).tolist()
        return find_coarse_axis(sides if max(sides) / min(sides) > ANISOTROPY else self.target)


def _resample(volume: MetaTensor, target: Sides, mode: str, field: str) -> MetaTensor:
    """Return ``volume`` ``(C, D, H, W)`` in float32 at the spacing, on the grid that MONAI's ``Spacing`` computes."""
    grid = Grid.of(volume)
    before = grid.affine.numpy()
    sides = np.linalg.norm(before[:3, :3], axis=0)
    kept = np.abs(sides - target) <= AFFINE_TOL
    after = zoom_affine(before, np.where(kept, sides, target), diagonal=False)
    sizes, after[:3, 3] = compute_shape_offset(grid.shape, before, after)
    shape, moved = sizes.tolist(), torch.from_numpy(np.linalg.solve(before, after))
    if shape == list(grid.shape) and (
        np.allclose(before, after, atol=AFFINE_TOL) or np.allclose(moved, np.eye(4), atol=AFFINE_TOL)
    ):
        return volume.float()
    _require_room(volume, grid, target, field)
    source = volume.as_tensor() if mode == "bilinear" else volume.as_tensor().cpu()
    resampled = torch.empty(len(source), *shape, device=source.device)
    fill = _make_fill(source.double(), resampled, moved, mode)
    if source.device.type == "cpu":
        run_over_slabs(fill, shape, max(1, SLAB_VOXELS // (shape[1] * shape[2])))
    else:
        planes = max(1, DEVICE_VOXELS // (shape[1] * shape[2]))
        for begin in range(0, shape[0], planes):
            fill(slice(begin, begin + planes))
    made = MetaTensor(resampled.to(volume.device)).copy_meta_from(volume)
    made.affine = grid.affine @ moved
    return made


def _require_room(volume: Tensor, grid: Grid, target: Sides, field: str) -> None:
    sides = grid.affine[:3, :3].norm(dim=0).tolist()
    shape = [math.ceil(n * side / to) for n, side, to in zip(grid.shape, sides, target, strict=True)]
    needed = math.prod(shape) * (RESAMPLING_BYTES + 8 * len(volume)) + 8 * volume.numel()
    if math.prod(shape) > MOST_VOXELS or (needed > ALWAYS_FITS and needed > available_bytes()):
        raise GridError(
            f"{field} has {grid.shape} voxels of {' x '.join(f'{side:.4g}' for side in sides)} mm; at the "
            f"spacing {list(target)} mm that is {tuple(shape)} voxels, {needed / 2**30:.1f} GiB to resample. Correct "
            "the spacing in the header if it is wrong, else choose a coarser spacing or leave the case out"
        )


def _make_fill(exact: Tensor, resampled: Tensor, moved: Tensor, mode: str) -> Callable[[slice], object]:
    """Return a function that writes planes of ``resampled`` ``(C, D, H, W)``, interpolated from ``exact``.

    ``moved`` maps the indices of new voxels to old indices.
    """
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
        slab = grid_sample(exact[None], grid, mode=mode, padding_mode="border", align_corners=False)
        resampled[:, planes_of] = slab[0]

    return fill


def _place_voxels(side: int) -> Tensor:
    """Return the centres of the voxels along an axis whose outer borders are at -1 and 1."""
    places = torch.linspace(-1, 1, side, dtype=torch.float64) if side > 1 else torch.zeros(1, dtype=torch.float64)
    return places * (side - 1) / side  # in this order, as affine_grid does
