"""The image along a label's border, and statistics of the label's shape, as few numbers of each case.

Voxels near the border are sorted into cells: by how far inside or outside they lie (eight shells, one finest voxel
each) and by the octant around the label's centre. The mean intensities of all cells are the profile of the border. It
is alike in cases of one anatomy. A profile is taken for the label as it lies, and for the label after each of several
shifts and mirrorings: if one of these resembles the other cases much more, the label is misplaced
(`volseg.data.checks.placing`).

References
----------
.. [1] Cootes et al., Active shape models (1995), doi:10.1006/cviu.1995.1004: profiles across a contour, compared with
       those of other cases by their covariance.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from scipy import ndimage

from volseg.data.checks.texture import COARSE_SIDE, coarsen

__all__ = [
    "CELLS",
    "MOVES",
    "Border",
    "LabelShape",
    "Move",
    "describe_border",
    "find_structures",
    "measure_shape",
    "pool",
    "take_profile",
]

SHELLS = np.arange(-2.5, 4.0)
"""Distances from the border, in finest voxels and negative inside, at which one shell ends and the next begins."""

NEAR, FAR = -3.5, 4.0
"""Where the first shell begins and the last one ends."""

CELLS = 8 * (len(SHELLS) + 1)
"""Shells times octants."""

OCTANT_BITS = np.array([8, 16, 32])
"""Of a cell's number, beside the shell: whether it lies to the right, in front, and above of the centre."""

MOST_BORDER = 8192
"""Voxels of a border at most; of a longer one every so many are taken."""

FEWEST_VOXELS = 3
"""Of a cell that has a mean."""

FEWEST_PAIRS = 200
"""Neighbours that are compared at least: two lesions of one voxel each are no noise."""

COUNTED_VOXELS = 1 << 22
"""About how many voxels are compared with their neighbours."""


class Move(NamedTuple):
    """A way in which a label may be misplaced, which is undone by the same."""

    kind: Literal["none", "shift", "mirror"]
    axis: int = 0
    """Of right-left, front-back and head-feet."""
    step: int = 0
    """Voxels."""


STEPS = (-12, -8, -4, -2, 2, 4, 8, 12)
MOVES = (
    Move("none"),
    *(Move("shift", axis, step) for axis in range(3) for step in STEPS),
    *(Move("mirror", axis) for axis in range(3)),
)
"""What is tried, the label as it lies first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelShape:
    """Statistics of the structures of a label map, all together."""

    agreement: float
    """Share of neighbours, of which one at least is labelled, that have one value: low for a ragged label."""
    stray: float
    """Distance of the farthest voxel from the largest connected part, per root mean square radius of all."""
    on_faces: float
    """Labelled voxels on the faces of the volume, per two thirds power of their number."""
    offset: tuple[float, ...] = ()
    """From the middle of the volume to that of the label's box (coarse voxels)."""
    skew: tuple[float, ...] = ()
    """From the middle of the label's box to its centre, per side of the box."""
    steps: tuple[int, ...] = (1, 1, 1)
    """Voxels of the file for one coarse voxel."""
    profiles: np.ndarray = field(compare=False, repr=False)
    """``(moves, cells)``, float32; NaN where a cell has too few voxels. No rows for a label without a border."""


class Border(NamedTuple):
    """Voxels near the border of a label."""

    positions: np.ndarray
    """``(N, 3)``."""
    cells: np.ndarray
    """``(N,)``: the shell, and in `OCTANT_BITS` whether the voxel lies beyond the centre along each axis."""


def measure_shape(
    image: np.ndarray, label: np.ndarray, ignore: int | None, spacing: tuple[float, ...], limits: tuple[float, float]
) -> LabelShape:
    """Return the statistics of a label ``(D, H, W)`` with structures.

    The image is on the label's grid, both are upright, and most of its values are between the ``limits``.
    """
    labelled = find_structures(label, ignore)
    coarse, steps = pool(labelled)
    sides = np.array(spacing) * steps
    places = np.argwhere(coarse)
    first, last = places.min(0), places.max(0)
    border = describe_border(coarse, sides)
    flat = coarsen(image).clip(*limits)
    rows = [] if border is None else [take_profile(flat, border, move) for move in MOVES]
    return LabelShape(
        agreement=_measure_agreement(label),
        stray=_measure_stray(coarse[tuple(map(slice, first, last + 1))], sides),
        on_faces=_count_on_faces(labelled) / max(1, int(labelled.sum())) ** (2 / 3),
        offset=tuple(((first + last + 1 - coarse.shape) / 2).tolist()),
        skew=tuple(((places.mean(0) - (first + last) / 2) / (last - first + 1)).tolist()),
        steps=steps,
        profiles=np.array(rows, dtype=np.float32).reshape(-1, CELLS),
    )


def find_structures(label: np.ndarray, ignore: int | None) -> np.ndarray:
    """Return which voxels of a label map are labelled."""
    return label > 0 if ignore is None else (label > 0) & (label != ignore)


def pool(labelled: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return for each block of voxels whether one of them is labelled, and the sides of the blocks (voxels)."""
    steps = tuple(-(-side // COARSE_SIDE) for side in labelled.shape)
    for axis, step in enumerate(steps):
        if step > 1:
            # `coarsen` takes the middle of each block; the voxels that fill no block belong to the last one.
            starts = np.arange(0, labelled.shape[axis], step)[: -(-(labelled.shape[axis] - step // 2) // step)]
            labelled = np.logical_or.reduceat(labelled, starts, axis=axis)
    return labelled, steps


def _measure_agreement(label: np.ndarray) -> float:
    """Compare neighbours in planes, of a large label in some of them; a label of a few voxels has no surface."""
    planes = label[:: -(-label.size // COUNTED_VOXELS)]
    pairs = same = 0
    for one, other in ((planes[:, 1:], planes[:, :-1]), (planes[:, :, 1:], planes[:, :, :-1])):
        counts = (one > 0) | (other > 0)
        pairs += int(counts.sum())
        same += int((counts & (one == other)).sum())
    return same / pairs if pairs >= FEWEST_PAIRS else 1.0


def _measure_stray(box: np.ndarray, sides: np.ndarray) -> float:
    parts, count = ndimage.label(box, np.ones((3, 3, 3)))
    if count < 2:
        return 0.0
    main = parts == np.bincount(parts.flat)[1:].argmax() + 1
    places = np.argwhere(box) * sides
    radius = np.sqrt(((places - places.mean(0)) ** 2).sum(1).mean())
    return float(ndimage.distance_transform_edt(~main, sampling=sides)[box].max() / max(radius, sides.min()))


def _count_on_faces(labelled: np.ndarray) -> int:
    return sum(int(labelled.take(place, axis).sum()) for axis in range(3) for place in {0, labelled.shape[axis] - 1})


def describe_border(labelled: np.ndarray, sides: np.ndarray) -> Border | None:
    """Return the voxels near the border of a coarse label; None where all or nothing is labelled."""
    places = np.argwhere(labelled)
    if not len(places):
        return None
    margin = int(FAR)
    first = np.maximum(places.min(0) - margin, 0)
    box = labelled[tuple(map(slice, first, places.max(0) + 1 + margin))]
    if box.all():
        return None
    sampling = sides / sides.min()
    inside = ndimage.distance_transform_edt(box, sampling=sampling)
    outside = ndimage.distance_transform_edt(~box, sampling=sampling)
    distance = np.where(box, 0.5 - inside, outside - 0.5)
    near = ((distance > NEAR) & (distance < FAR)).ravel().nonzero()[0]
    near = near[:: -(-len(near) // MOST_BORDER)]
    positions = np.stack(np.unravel_index(near, box.shape), 1)
    octants = (positions > places.mean(0) - first) @ OCTANT_BITS
    return Border(positions + first, octants + np.digitize(distance.ravel()[near], SHELLS))


def take_profile(image: np.ndarray, border: Border, move: Move = MOVES[0]) -> np.ndarray:
    """Return the mean intensity of each cell of a border that was moved, NaN where there are too few voxels."""
    shape = image.shape
    places, cells = list(border.positions.T), border.cells
    if move.kind == "shift":
        places[move.axis] = places[move.axis] + move.step
    elif move.kind == "mirror":
        places[move.axis] = shape[move.axis] - 1 - places[move.axis]
        cells = cells ^ OCTANT_BITS[move.axis]
    is_there = np.ones(len(cells), dtype=bool)
    for place, side in zip(places, shape, strict=True):
        if place.min() < 0 or place.max() >= side:
            is_there &= (place >= 0) & (place < side)
    if not is_there.all():
        places, cells = [place[is_there] for place in places], cells[is_there]
    values = image[tuple(places)]
    counts = np.bincount(cells, minlength=CELLS)
    sums = np.bincount(cells, values, minlength=CELLS)
    return np.where(counts >= FEWEST_VOXELS, sums / np.maximum(counts, 1), np.nan)
