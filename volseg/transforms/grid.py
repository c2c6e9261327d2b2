"""Define a grid of voxels with its place in the patient, and compute its voxel sides after preprocessing.

The way back to the image's original grid needs only the affines of the two grids. MONAI's ``Invertd`` would invert its
trace instead. It compares ``id(self)``, so the prediction depends on the same transform objects that preprocessed the
case. Hence it fails for cases from a cache or another process. It also interpolates once per transform.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform
from numpy.typing import ArrayLike
from torch import Tensor

from volseg.errors import GridError

ANISOTROPY = 3.0
"""Ratio to the finest spacing above which an axis has thick slices; nnU-Net's number."""

TIE = 1e-4
"""Difference in voxels up to which two planes are equally near. The later plane is used, however float32 rounds."""

MISPLACED_VOXELS = 0.1
"""Largest distance between corner voxels of two grids that count as equal, in voxels (shortest side).

Affines rounded by file formats differ by 0.01 voxel over a long axis; the usual mistake is a shift by 0.5 voxel.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Positions of the voxels of a volume.

    Parameters
    ----------
    shape : tuple of int
        Voxels along D, H, W.
    affine : Tensor
        ``(4, 4)`` float64, voxel index (i, j, k) to RAS+ position (mm).
    """

    shape: tuple[int, int, int]
    affine: Tensor

    @classmethod
    def of(cls, volume: MetaTensor) -> "Grid":
        """Return the current grid of ``volume`` ``(C, D, H, W)``."""
        return cls._from(volume.shape[-3:], volume.affine)

    @classmethod
    def original(cls, volume: MetaTensor) -> "Grid":
        """Return the grid that ``volume`` had in its file, before preprocessing.

        MONAI's readers also store it in ``meta["spatial_shape"]`` and ``meta["original_affine"]``; a volume without
        these has not been preprocessed.
        """
        shape = volume.meta.get("spatial_shape", volume.shape[-3:])
        return cls._from(shape, volume.meta.get("original_affine", volume.affine))

    @classmethod
    def _from(cls, shape: Sequence[int], affine: object) -> "Grid":
        depth, height, width = (int(size) for size in shape)
        matrix = torch.as_tensor(np.asarray(affine), dtype=torch.float64)
        if matrix.shape != (4, 4) or not matrix.isfinite().all() or matrix[:3, :3].det() == 0:
            raise GridError(
                f"a volume needs a finite, invertible 4 x 4 affine (voxel to mm), got {matrix.tolist()}; correct the "
                "header of the file"
            )
        return cls((depth, height, width), matrix)

    def index_map(self, other: "Grid") -> Tensor:
        """Return the ``(4, 4)`` matrix from voxel indices of this grid to voxel indices of ``other``."""
        return torch.linalg.solve(other.affine, self.affine)

    def crop(self, start: Sequence[int], shape: Sequence[int]) -> "Grid":
        """Return the grid of ``shape`` voxels that begins at voxel ``start``; no voxel moves in the patient."""
        shift = torch.eye(4, dtype=torch.float64)
        shift[:3, 3] = torch.tensor(start)
        return self._from(shape, self.affine @ shift)

    def distance(self, other: "Grid") -> float:
        """Return the largest distance (mm) between corresponding corner voxels; inf if the shapes differ."""
        if self.shape != other.shape:
            return float("inf")
        corners = self.corners()
        apart = (self.affine - other.affine) @ corners
        return float(apart[:3].norm(dim=0).max())

    def require_same(self, other: "Grid", name: str, other_name: str) -> None:
        """Raise `GridError` if the grids differ by more than `MISPLACED_VOXELS`."""
        if fault := self.fault_of(other, name):
            raise GridError(f"{other_name} {fault}")

    def fault_of(self, other: "Grid", name: str) -> str | None:
        """Return the difference of ``other`` from this grid as a predicate, or None within `MISPLACED_VOXELS`.

        ``name`` is the volume on this grid, such as ``image``; the caller adds the volume on ``other`` as subject.
        """
        if self.find_axis_order(other) is not None:
            return (
                f"is in the same place as its {name}, but stores its voxels in another axis order ({other.axes}, the "
                f"{name} {self.axes}); reorder its voxels, for example with `volseg data check --fix`, but do not copy "
                "the affine"
            )
        if self.shape != other.shape:
            return f"has the shape {other.shape}, but its {name} has {self.shape}; resample it onto the {name}'s grid"
        allowed = MISPLACED_VOXELS * float(self.affine[:3, :3].norm(dim=0).min())
        if (apart := self.distance(other)) <= allowed:
            return None
        return (
            f"is up to {apart:.3g} mm away from its {name} (allowed: {allowed:.3g} mm, {MISPLACED_VOXELS:g} voxel); "
            f"copy the {name}'s affine if the voxels correspond, else resample it"
        )

    @property
    def axes(self) -> str:
        """Directions of the voxel axes, such as ``RAS``."""
        return "".join(nibabel.orientations.aff2axcodes(self.affine.numpy()))

    def find_axis_order(self, other: "Grid") -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the reordering that turns ``other`` into this grid, if both have the same voxels in another order.

        Returns
        -------
        tuple, optional
            The dims of ``other`` in this grid's order, and the dims to flip after that. None if the order is the same,
            or the positions differ by more than `MISPLACED_VOXELS`.
        """
        turn = self.index_map(other)[:3, :3].round()
        if not torch.equal(turn.abs().sum(0), torch.ones(3)) or not torch.equal(turn.abs().sum(1), torch.ones(3)):
            return None
        dims = tuple(int(dim) for dim in turn.abs().argmax(0))
        flipped = tuple(axis for axis, dim in enumerate(dims) if turn[dim, axis] < 0)
        reordered = other.reorder(dims, flipped)
        allowed = MISPLACED_VOXELS * float(self.affine[:3, :3].norm(dim=0).min())
        is_same = (dims, flipped) == ((0, 1, 2), ())
        return None if is_same or self.distance(reordered) > allowed else (dims, flipped)

    def reorder(self, dims: Sequence[int], flipped: Sequence[int]) -> "Grid":
        """Return the grid of the same voxels with permuted dims; ``flipped`` dims are flipped after that."""
        shape = [self.shape[dim] for dim in dims]
        turn = torch.zeros(4, 4, dtype=torch.float64)
        turn[3, 3] = 1
        for axis, dim in enumerate(dims):
            turn[dim, axis] = -1 if axis in flipped else 1
            turn[dim, 3] = shape[axis] - 1 if axis in flipped else 0
        return self._from(shape, self.affine @ turn)

    def corners(self) -> Tensor:
        """Return the indices of the eight corner voxels as homogeneous columns ``(4, 8)``."""
        ends = [torch.tensor([0.0, size - 1.0], dtype=torch.float64) for size in self.shape]
        indices = torch.cartesian_prod(*ends).T
        return torch.cat([indices, torch.ones_like(indices[:1])])


def find_coarse_axis(spacing: Sequence[float]) -> int | None:
    """Return the axis of thick slices, with more than three times the finest spacing, or None.

    Two equally coarse axes give None, as in nnU-Net, since the volume is then fine along only one axis.

    Examples
    --------
    >>> find_coarse_axis((0.625, 0.625, 3.6)), find_coarse_axis((1.25, 1.25, 0.24)), find_coarse_axis((1, 1, 3))
    (2, None, None)
    """
    mm = [float(side) for side in spacing]
    coarse = [axis for axis, side in enumerate(mm) if side == max(mm)]
    return coarse[0] if max(mm) / min(mm) > ANISOTROPY and len(coarse) == 1 else None


Sides = tuple[float, float, float]

DIGITS = 6
"""Significant digits of a side. NIfTI stores affines as float32, DICOM and MetaImage as decimals, so that a rotated
axis of 2 mm has a side of 1.9999998 or 2.0000001 mm."""


def measure_sides(affine: ArrayLike) -> Sides:
    """Return the voxel sides along D, H, W in mm, rounded to the precision of a stored affine.

    All comparisons of sides or distances use this function, so that they do not depend on the volume's orientation.

    Parameters
    ----------
    affine : array_like
        3 x 3 or 4 x 4, voxel index to position in mm.

    Examples
    --------
    >>> measure_sides(np.diag([0.7, 0.7, 1.9999998]).astype(np.float32))
    (0.7, 0.7, 2.0)
    """
    axes = np.asarray(affine, dtype=np.float64)[:3, :3]
    d, h, w = (float(f"{side:.{DIGITS}g}") for side in np.linalg.norm(axes, axis=0))
    return d, h, w


def spacing_after(components: Sequence[Mapping[str, Any]], affine: np.ndarray) -> Sides:
    """Return the voxel sides along D, H, W in mm after the preprocessing that ``components`` list.

    ``Orientation`` permutes axes and ``Spacing`` sets their sides; no other built-in component changes them. A custom
    component that changes them must be followed by ``Spacing``.

    Parameters
    ----------
    components : sequence of mapping
        Components for `build_preprocessing`.
    affine : ndarray
        4 x 4, voxel index to RAS+ position in mm, of the case as read from its file.

    Examples
    --------
    >>> sagittal = np.diag([4.0, 1.0, 1.0, 1.0])[[1, 0, 2, 3]]  # the first voxel axis points to the front
    >>> spacing_after([], sagittal), spacing_after([{"name": "Orientation"}], sagittal)
    ((4.0, 1.0, 1.0), (1.0, 4.0, 1.0))
    """
    axes = np.array(affine, dtype=np.float64)[:3, :3]
    for component in components:
        if component["name"] == "Spacing":
            axes = axes / np.linalg.norm(axes, axis=0) * np.asarray(component["spacing"], dtype=np.float64)
        elif component["name"] == "Orientation":
            placed = np.eye(4)
            placed[:3, :3] = axes
            turn = ornt_transform(io_orientation(placed), axcodes2ornt(component.get("axcodes", "RAS")))
            axes = axes[:, np.argsort(turn[:, 0])]
    return measure_sides(axes)


def depends_on_case(components: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether cases may get different voxel sides: without ``Spacing``, or with ``Orientation`` after it.

    >>> depends_on_case([{"name": "Orientation"}, {"name": "Spacing", "spacing": [1, 1, 3]}])
    False
    """
    geometric = [component["name"] for component in components if component["name"] in ("Orientation", "Spacing")]
    return "Spacing" not in geometric or geometric[-1] == "Orientation"
