"""Measure distances between two surfaces in mm: Hausdorff, average distance, and surface Dice within a tolerance.

A structure's surface consists of surface elements, one for each neighbourhood of 2 x 2 x 2 voxels with voxels inside
and outside the structure. An element is in the middle of its neighbourhood and has the area of marching cubes. This is
the definition of DeepMind's ``surface-distance``, which scored the Medical Segmentation Decathlon, and of MONAI's
``use_subvoxels=True``. Counting border voxels instead would depend on the orientation of the surface in the grid and on
the spacing, and the centre of a border voxel is half a voxel inside the surface.

Distances are computed with a k-d tree of the elements: its cost grows with the surface, that of a distance transform
with the box around it, which is several times as much for an organ. For the scattered voxels of an untrained network,
which are all surface and far from the other surface, the transform is faster. Both give the same bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from monai.metrics.utils import create_table_neighbour_code_to_surface_area
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt
from scipy.spatial import KDTree

from volseg.errors import DataError

DISTANCES = ("HD95", "HD", "ASSD")
"""Metrics in mm; lower is better."""

ALL_INSIDE = 255
"""Code of a neighbourhood with all eight voxels inside."""

VOXELS_PER_ELEMENT = 16
"""With fewer, the transform is used: it needs 0.3 us for a voxel, the tree 1 to 10 us for an element."""

ROUNDING = 1e-5
"""Share of a tolerance by which a distance may exceed it: voxel sides are known to six digits."""

SUMMATION = 1e-9
"""Error of a share of an area, since it is a sum of up to some million elements."""

Mask = NDArray[np.bool_]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SurfaceDistances:
    """The elements of two surfaces: the distance of each from the other surface (mm), and its area (mm^2)."""

    of_prediction: Numbers
    of_reference: Numbers
    areas_of_prediction: Numbers
    areas_of_reference: Numbers

    def hausdorff(self, percent: float = 100.0) -> float:
        """Return the larger of the two directed distances at the percentile ``percent`` of a surface's area."""
        directed = (
            _find_percentile(self.of_prediction, self.areas_of_prediction, percent),
            _find_percentile(self.of_reference, self.areas_of_reference, percent),
        )
        return max(directed)

    def average(self) -> float:
        """Return the mean distance over the area of both surfaces: ASSD."""
        total = self.areas_of_prediction.sum() + self.areas_of_reference.sum()
        moment = self.of_prediction @ self.areas_of_prediction + self.of_reference @ self.areas_of_reference
        return float(moment / total)

    def surface_dice(self, tolerance: float) -> float:
        """Return the share of both surfaces' area within ``tolerance`` mm of the other surface: NSD."""
        # A tolerance is often a distance in the grid: between slices, or along a voxel's diagonal.
        most = tolerance * (1 + ROUNDING)
        close = self.areas_of_prediction[self.of_prediction <= most].sum()
        close += self.areas_of_reference[self.of_reference <= most].sum()
        return float(close / (self.areas_of_prediction.sum() + self.areas_of_reference.sum()))

    def metrics(self, tolerance: float | None) -> dict[str, float]:
        """Return HD95, HD and ASSD in mm, and NSD if there is a tolerance."""
        distances = {"HD95": self.hausdorff(95), "HD": self.hausdorff(), "ASSD": self.average()}
        return distances if tolerance is None else {**distances, "NSD": self.surface_dice(tolerance)}


def measure_surfaces(
    prediction: Mask, reference: Mask, spacing: Sequence[float], *, ignored: Mask | None = None
) -> SurfaceDistances | None:
    """Measure the distances between the surfaces of two structures.

    Parameters
    ----------
    prediction, reference : array of bool
        ``(D, H, W)``, such as a box around both structures; outside is background, so that a structure ends at the
        border.
    spacing : sequence of float
        Sides of a voxel in mm.
    ignored : array of bool, optional
        Voxels that are not annotated. A neighbourhood with such a voxel has no element, since its surface is unknown.

    Returns
    -------
    SurfaceDistances or None
        None if one of the two has no surface.

    Raises
    ------
    DataError
        For shapes or a spacing that do not fit together.

    References
    ----------
    .. [1] Nikolov et al., Clinically applicable segmentation of head and neck anatomy for radiotherapy, J. Med.
       Internet Res. 23 (2021), e26151, doi:10.2196/26151; https://github.com/google-deepmind/surface-distance.

    Examples
    --------
    >>> cube = np.zeros((6, 6, 6), dtype=bool)
    >>> cube[1:4, 1:4, 1:4] = True
    >>> measured = measure_surfaces(np.roll(cube, 1, axis=0), cube, (2.0, 1.0, 1.0))
    >>> measured.hausdorff(), round(measured.surface_dice(1.0), 3)
    (2.0, 0.8)
    """
    shapes = {mask.shape for mask in (prediction, reference, *(() if ignored is None else (ignored,)))}
    if len(shapes) > 1 or prediction.ndim != 3 or len(spacing) != 3 or not all(0 < side < math.inf for side in spacing):
        raise DataError(
            f"surfaces need masks (D, H, W) of one shape and three sides in mm, got {sorted(shapes)} and {spacing}"
        )
    unknown = None if ignored is None else _encode_neighbourhoods(ignored) != 0
    areas = create_table_neighbour_code_to_surface_area([float(side) for side in spacing])[0].double().numpy()
    (points, own), (others, theirs) = (_find_elements(mask, unknown, areas) for mask in (prediction, reference))
    if not len(points) or not len(others):
        return None
    size = tuple(side + 1 for side in prediction.shape)
    return SurfaceDistances(
        of_prediction=_measure_distances(points, others, size, spacing),
        of_reference=_measure_distances(others, points, size, spacing),
        areas_of_prediction=own,
        areas_of_reference=theirs,
    )


def _encode_neighbourhoods(mask: Mask) -> NDArray[np.uint8]:
    """Return a bit per voxel inside for each 2 x 2 x 2 voxels, starting one voxel before the first."""
    code = np.pad(mask, 1).view(np.uint8)
    code = code[:, :, 1:] | code[:, :, :-1] << np.uint8(1)
    code = code[:, 1:] | code[:, :-1] << np.uint8(2)
    return code[1:] | code[:-1] << np.uint8(4)


def _find_elements(mask: Mask, unknown: Mask | None, areas: Numbers) -> tuple[NDArray[np.intp], Numbers]:
    """Return index ``(N, 3)`` and area of each surface element."""
    codes = _encode_neighbourhoods(mask)
    is_element = (codes != 0) & (codes != ALL_INSIDE)
    if unknown is not None:
        is_element &= ~unknown
    return np.argwhere(is_element), areas[codes[is_element]]


def _measure_distances(
    points: NDArray[np.intp], others: NDArray[np.intp], size: tuple[int, ...], spacing: Sequence[float]
) -> Numbers:
    """Return the distance (mm) of each of ``points`` from the nearest of ``others``; all indices are below ``size``."""
    sides = np.asarray(spacing, dtype=np.float64)
    if len(points) * VOXELS_PER_ELEMENT > math.prod(size):
        is_away = np.ones(size, dtype=bool)
        is_away[tuple(others.T)] = False
        distances: Numbers = distance_transform_edt(is_away, sampling=sides)[tuple(points.T)]
        return distances
    # Neither balanced nor compact: the tree is queried once, and building it would take longer than the query.
    tree = KDTree(others * sides, balanced_tree=False, compact_nodes=False)
    nearest = tree.query(points * sides)[1]
    # From differences of indices, as in a distance transform: differences of rounded products would depend on the
    # position, and so would the comparison with a tolerance that is a multiple of a voxel's side.
    return np.sqrt((((points - others[nearest]) * sides) ** 2).sum(1))


def _find_percentile(distances: Numbers, areas: Numbers, percent: float) -> float:
    order = np.argsort(distances)
    share = np.cumsum(areas[order]) / areas.sum()
    return float(distances[order][min(int(np.searchsorted(share, percent / 100 - SUMMATION)), len(order) - 1)])
