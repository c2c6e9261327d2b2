"""Describe the shape of a label, and the image along its border, by a few numbers per case.

Voxels near the border are sorted into cells: by their distance from the border (eight shells, one finest voxel each)
and by the octant around the label's centre. The mean intensities of the cells are the profile of the border, which is
similar in cases of one anatomy. Profiles are also taken after shifting and mirroring the label: a label is misplaced if
such a profile resembles the other cases much more (`volseg.data.checks.placing`).

References
----------
.. [1] Cootes et al., Active shape models (1995), doi:10.1006/cviu.1995.1004: profiles across a contour, compared with
       those of other cases by their covariance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor
from torch.nn.functional import interpolate

from volseg.data.checks.volumes import measure_agreement

SHELLS = np.arange(-2.5, 4.0)
"""Limits between the shells: distances from the border in finest voxels, negative inside."""

NEAR, FAR = -3.5, 4.0
"""Start of the first shell and end of the last one."""

CELLS = 8 * (len(SHELLS) + 1)
"""Number of shells times octants."""

OCTANT_BITS = np.array([8, 16, 32])
"""Bits of a cell's number above its shell: set for voxels right, in front and above of its centre."""

MOST_BORDER = 8192
"""Most voxels of a border; longer borders are subsampled."""

FEWEST_VOXELS = 3
"""Fewest voxels of a cell for a mean."""


class Move(NamedTuple):
    """A shift or mirroring of a label that may undo its misplacement."""

    kind: Literal["none", "shift", "mirror"]
    axis: int = 0
    """Right-left, front-back or head-feet."""
    step: int = 0
    """Coarse voxels."""


STEPS = (-12, -8, -4, -2, 2, 4, 8, 12)
MOVES = (
    Move("none"),
    *(Move("shift", axis, step) for axis in range(3) for step in STEPS),
    *(Move("mirror", axis) for axis in range(3)),
)
"""Moves that are tried; the first leaves the label in place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelShape:
    """Statistics of all structures of a label map together."""

    volume: float
    """Labelled volume (mm3)."""
    unlabelled: float
    """Share of the voxels that are not labelled."""
    agreement: float
    """Result of `measure_agreement`, low for a ragged label; 1 for a label with few neighbours."""
    stray: float
    """Distance of the farthest voxel from the largest connected part, in root mean square radii of the label."""
    on_faces: float
    """Number of labelled voxels on the faces of the volume, divided by the number of labelled voxels to the 2/3."""
    offset: tuple[float, ...]
    """From the middle of the volume to the middle of the label's bounding box (coarse voxels)."""
    skew: tuple[float, ...]
    """From the middle of the bounding box to the label's centre, in sides of the box."""
    steps: tuple[int, ...]
    """Voxels of the file per coarse voxel."""
    profiles: np.ndarray = field(compare=False, repr=False)
    """``(moves, cells)``, float32; NaN where a cell has too few voxels. No rows for a label without a border."""


class Border(NamedTuple):
    """Voxels near the border of a label."""

    positions: np.ndarray
    """``(N, 3)``."""
    cells: np.ndarray
    """``(N,)``: number of the shell, with the `OCTANT_BITS` of the octant."""


def measure_shape(
    image: np.ndarray, label: np.ndarray, spacing: tuple[float, ...], limits: tuple[float, float]
) -> LabelShape:
    """Return the statistics of a label ``(D, H, W)`` with structures.

    Image and label share a grid and are upright. Intensities are clipped to the ``limits``.
    """
    labelled = label > 0
    size = int(labelled.sum())
    coarse, steps = pool(labelled)
    sides = np.array(spacing) * steps
    places = np.argwhere(coarse)
    first, last = places.min(0), places.max(0)
    border = describe_border(coarse, sides)
    flat = coarsen(image).clip(*limits)
    rows = [] if border is None else [take_profile(flat, border, move) for move in MOVES]
    faces = [(place, axis) for axis in range(3) for place in {0, label.shape[axis] - 1}]
    on_faces = sum(int(labelled.take(*face).sum()) for face in faces)
    return LabelShape(
        volume=size * float(np.prod(spacing)),
        unlabelled=1 - size / label.size,
        agreement=1.0 if np.isnan(agreement := measure_agreement(label)) else agreement,
        stray=_measure_stray(coarse[tuple(map(slice, first, last + 1))], sides),
        on_faces=on_faces / size ** (2 / 3),
        offset=tuple(((first + last + 1 - coarse.shape) / 2).tolist()),
        skew=tuple(((places.mean(0) - (first + last) / 2) / (last - first + 1)).tolist()),
        steps=steps,
        profiles=np.array(rows, dtype=np.float32).reshape(-1, CELLS),
    )


def pool(labelled: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return a mask of the blocks with a labelled voxel, and the sides of the blocks (voxels)."""
    steps = choose_steps(labelled.shape)
    for axis, step in enumerate(steps):
        if step > 1:
            # `coarsen` takes the middle of each block; a remainder without a middle belongs to the last block.
            starts = np.arange(0, labelled.shape[axis], step)[: -(-(labelled.shape[axis] - step // 2) // step)]
            labelled = np.logical_or.reduceat(labelled, starts, axis=axis)
    return labelled, steps


def _measure_stray(box: np.ndarray, sides: np.ndarray) -> float:
    parts, count = ndimage.label(box, np.ones((3, 3, 3)))
    if count < 2:
        return 0.0
    main = parts == np.bincount(parts.flat)[1:].argmax() + 1
    places = np.argwhere(box) * sides
    radius = np.sqrt(((places - places.mean(0)) ** 2).sum(1).mean())
    return float(ndimage.distance_transform_edt(~main, sampling=sides)[box].max() / max(radius, sides.min()))


def describe_border(labelled: np.ndarray, sides: np.ndarray) -> Border | None:
    """Return the voxels near the border of a coarse label; None if all or no voxels are labelled."""
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
    """Return the mean intensity of each cell after a move of the border, NaN where a cell has too few voxels."""
    shape = image.shape
    places, cells = list(border.positions.T), border.cells
    if move.kind == "shift":
        places[move.axis] = places[move.axis] + move.step
    elif move.kind == "mirror":
        places[move.axis] = shape[move.axis] - 1 - places[move.axis]
        cells = cells ^ OCTANT_BITS[move.axis]
    is_inside = np.ones(len(cells), dtype=bool)
    for place, side in zip(places, shape, strict=True):
        is_inside &= (place >= 0) & (place < side)
    places, cells = [place[is_inside] for place in places], cells[is_inside]
    values = image[tuple(places)]
    counts = np.bincount(cells, minlength=CELLS)
    sums = np.bincount(cells, values, minlength=CELLS)
    return np.where(counts >= FEWEST_VOXELS, sums / np.maximum(counts, 1), np.nan)


BLOCK_SIDE = 128
"""Voxels along each axis of the block in which neighbours are compared."""

COARSE_SIDE = 96
"""Most voxels along each axis of a subsampled volume."""

WIDE_JUMP = 0.9
"""Least wide jump, in ranges of values. Brain and masked background differ by up to 0.8, an overflow by nearly 1."""

THUMBNAIL_SIDE = 16
"""Voxels along each axis of a thumbnail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Texture:
    """Statistics of one channel."""

    smoothness: tuple[float, float, float]
    """Correlation of neighbours along each axis, of values clipped to the 0.5th and 99.5th percentile: 0 for noise."""
    jumps: float
    """Share of neighbours that differ by more than `WIDE_JUMP` of the range of values."""
    share_highest: float
    """Share of the voxels at the highest value."""
    empty_slices: float
    """Share of constant slices, along the axis with the largest share."""

    def compare_axis(self, axis: int) -> float:
        """Return the roughness along an axis, relative to the geometric mean of the other axes'."""
        rough = [max(1 - smooth, 1e-6) for smooth in self.smoothness]
        others = rough[:axis] + rough[axis + 1 :]
        return rough[axis] / math.sqrt(math.prod(others))


def measure_texture(channel: Tensor, low: float, high: float) -> Texture:
    """Return the statistics of a channel ``(D, H, W)`` with the 0.5th percentile ``low`` and the 99.5th ``high``."""
    lowest, highest = (float(bound) for bound in channel.aminmax())
    middle = [max(0, (side - BLOCK_SIDE) // 2) for side in channel.shape]
    block = channel[tuple(slice(start, start + BLOCK_SIDE) for start in middle)].to(torch.float64)
    clipped = block.clamp(low, high)
    variance = max(float(clipped.var(correction=0)), np.finfo(np.float64).tiny)
    apart = [clipped.diff(dim=dim).square().mean() for dim in range(3)]
    smooth = [1.0 if steps.isnan() else 1 - float(steps) / (2 * variance) for steps in apart]
    wide = [block.diff(dim=dim).abs() > (highest - lowest) * WIDE_JUMP for dim in range(3)]
    return Texture(
        smoothness=(smooth[0], smooth[1], smooth[2]),
        jumps=sum(int(jump.sum()) for jump in wide) / max(1, sum(jump.numel() for jump in wide)),
        share_highest=float((block == highest).double().mean()),
        empty_slices=max(_count_empty(channel, dim) for dim in range(3)),
    )


def _count_empty(channel: Tensor, dim: int) -> float:
    if min(channel.shape) == 1:
        return 0.0
    steps = [1 if axis == dim else step for axis, step in enumerate(choose_steps(channel.shape))]
    sampled = channel[tuple(slice(None, None, step) for step in steps)]
    others = [axis for axis in range(3) if axis != dim]
    return float((sampled.amax(others) == sampled.amin(others)).double().mean())


def choose_steps(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the subsampling along each axis that leaves at most `COARSE_SIDE` voxels."""
    return tuple(-(-side // COARSE_SIDE) for side in shape)


def coarsen(channel: np.ndarray) -> np.ndarray:
    """Subsample a channel to at most `COARSE_SIDE` voxels along each axis; a view."""
    return channel[tuple(slice(step // 2, None, step) for step in choose_steps(channel.shape))]


def compute_thumbnail(channel: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return a channel resized to `THUMBNAIL_SIDE` voxels along each axis, of mean 0 and norm 1, as float32."""
    coarse = torch.from_numpy(coarsen(channel).clip(low, high).astype(np.float32))[None, None]
    small = interpolate(coarse, size=(THUMBNAIL_SIDE,) * 3, mode="trilinear")[0, 0].double()
    small -= small.mean()
    thumbnail: np.ndarray = (small / small.norm().clamp(min=np.finfo(np.float64).tiny)).float().numpy()
    return thumbnail
