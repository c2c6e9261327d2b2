"""Compute the voxel sides of a volume before and after preprocessing, from the volume's affine only."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform
from numpy.typing import ArrayLike

__all__ = ["Sides", "depends_on_case", "measure_sides", "spacing_after"]

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
