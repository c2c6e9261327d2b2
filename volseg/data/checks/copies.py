"""Images that are another case's but for a crop, a mirroring, or another scale of intensities.

Small copies of all images are compared with each other, in the eight mirrorings. The pairs that are most alike are read
again, and compared voxel by voxel where they overlap: two patients, or two scans of one, never agree to a thousandth.
"""

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from volseg.data.cases import Case
from volseg.data.checks.kinds import Finding
from volseg.data.readers import list_files

__all__ = ["find_copies"]

ALIKE = 0.85
"""Correlation of two small copies from which a pair is compared voxel by voxel. Of a crop by three voxels of 35 it is
0.9; of two hippocampi 0.8 at most."""

SAME = 0.999
"""Correlation of the voxels of a copy. Rounding to 8 bits leaves more than 0.9999."""

FEWEST_PAIRS, PAIRS_PER_CASE = 8, 0.125
"""How many pairs are read again at most: those that are most alike."""

OVERLAP = 0.5
"""Share of the smaller image that must lie in the larger one."""

BLOCK_SIDE = 96
"""Voxels along each axis of what is compared, around the middle."""

ROWS = 256
"""Small copies compared with all others at a time."""

MIRRORINGS = tuple(axes for count in range(4) for axes in combinations(range(3), count))


def find_copies(
    cases: Sequence[Case],
    thumbnails: np.ndarray,
    known: Callable[[int, int], bool],
    read: Callable[[Case], np.ndarray],
) -> list[Finding]:
    """Remark on each case of a pair of which one is a copy of the other.

    Parameters
    ----------
    cases : sequence of dict
        With paths.
    thumbnails : numpy array
        ``(N, S, S, S)``, of mean 0 and length 1.
    known : callable
        Whether two cases, by their places, are reported as doubles already.
    read : callable
        Returns the upright first channel of a case.
    """
    partners: dict[int, list[str]] = {}
    for one, other, mirrored in _list_alike(thumbnails, known):
        if _agree(read(cases[one]), np.flip(read(cases[other]), mirrored)):
            partners.setdefault(one, []).append(cases[other]["case"])
            partners.setdefault(other, []).append(cases[one]["case"])
    return [
        Finding(cases[place]["case"], list_files(cases[place]["image"])[0], f"of {', '.join(names)}", "image-copy")
        for place, names in sorted(partners.items())
    ]


def _list_alike(thumbnails: np.ndarray, known: Callable[[int, int], bool]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the pairs that are most alike, the best first, each with the axes along which one is mirrored."""
    found: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
    flat = thumbnails.reshape(len(thumbnails), -1)
    for axes in MIRRORINGS:
        mirrored = np.flip(thumbnails, [axis + 1 for axis in axes]).reshape(len(flat), -1)
        for start in range(0, len(flat), ROWS):
            likeness = flat[start : start + ROWS] @ mirrored.T
            for row, other in np.argwhere(likeness > ALIKE).tolist():
                one, value = start + row, float(likeness[row, other])
                if one < other and value > found.get((one, other), (0.0, ()))[0] and not known(one, other):
                    found[one, other] = value, axes
    best = sorted(found.items(), key=lambda item: -item[1][0])
    return [(*pair, axes) for pair, (_, axes) in best[: max(FEWEST_PAIRS, round(PAIRS_PER_CASE * len(flat)))]]


def _agree(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two images, shifted by whole voxels, are one up to the scale of their intensities."""
    blocks = [_take_middle(image) for image in (one, other)]
    room = [side + other_side for side, other_side in zip(blocks[0].shape, blocks[1].shape, strict=True)]
    spectra = [np.fft.rfftn(block - block.mean(), room) for block in blocks]
    match = np.fft.irfftn(spectra[0] * spectra[1].conj(), room)
    shift = [int(at) for at in np.unravel_index(int(match.argmax()), match.shape)]
    shift = [
        at - side if at >= blocks[0].shape[axis] else at
        for axis, (at, side) in enumerate(zip(shift, room, strict=True))
    ]
    parts = []
    for block, sign in ((blocks[0], 1), (blocks[1], -1)):
        starts = [max(0, sign * at) for at in shift]
        parts.append(block[tuple(slice(start, None) for start in starts)])
    sides = [min(side, other_side) for side, other_side in zip(parts[0].shape, parts[1].shape, strict=True)]
    if np.prod(sides) < OVERLAP * min(block.size for block in blocks):
        return False
    flat = [part[tuple(slice(side) for side in sides)].ravel() for part in parts]
    return min(part.std() for part in flat) > 0 and float(np.corrcoef(np.stack(flat))[0, 1]) > SAME


def _take_middle(image: np.ndarray) -> np.ndarray:
    starts = [max(0, (side - BLOCK_SIDE) // 2) for side in image.shape]
    return image[tuple(slice(start, start + BLOCK_SIDE) for start in starts)].astype(np.float64)
