"""Images that are another case's but for a crop, a mirroring, or another scale of intensities.

Small copies of all images are compared with each other, in the eight mirrorings. The pairs that are most alike are read
again, and compared voxel by voxel where they overlap: two patients, or two scans of one, differ by as much as
neighbours do, and a copy by its rounding only.
"""

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from volseg.data.cases import Case
from volseg.data.checks.kinds import Finding
from volseg.data.readers import list_files

__all__ = ["find_copies"]

ALIKE = 0.6
"""Correlation of two small copies, without what all images have in common, from which a pair may be compared."""

FEWEST_USUAL = 10
"""Images of which a mean is what they have in common."""

SAME = 0.25
"""Median difference of two images, up to a scale, per median difference of neighbours. Rounding to 8 bits leaves 0.1;
two noisy images of one object have 1."""

FEWEST_COMPARED = 1000
"""Voxels that differ from their neighbour, of which a median is taken."""

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
    usual = thumbnails.mean(0) if len(thumbnails) >= FEWEST_USUAL else 0
    flat = _standardise(thumbnails - usual)
    for axes in MIRRORINGS:
        mirrored = _standardise(np.flip(thumbnails, tuple(axis + 1 for axis in axes)) - usual)
        for start in range(0, len(flat), ROWS):
            likeness = flat[start : start + ROWS] @ mirrored.T
            for row, other in np.argwhere(likeness > ALIKE).tolist():
                one, value = start + row, float(likeness[row, other])
                if one < other and value > found.get((one, other), (0.0, ()))[0] and not known(one, other):
                    found[one, other] = value, axes
    best = sorted(found.items(), key=lambda item: -item[1][0])
    return [(*pair, axes) for pair, (_, axes) in best[: max(FEWEST_PAIRS, round(PAIRS_PER_CASE * len(flat)))]]


def _standardise(thumbnails: np.ndarray) -> np.ndarray:
    flat = thumbnails.reshape(len(thumbnails), -1)
    standardised: np.ndarray = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-9)
    return standardised


def _agree(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two images, shifted by whole voxels, are one up to the scale of their intensities."""
    blocks = [_take_middle(image) for image in (one, other)]
    room = [side + other_side for side, other_side in zip(blocks[0].shape, blocks[1].shape, strict=True)]
    spectra = [np.fft.rfftn(block - block.mean(), room, axes=(0, 1, 2)) for block in blocks]
    match = np.fft.irfftn(spectra[0] * spectra[1].conj(), room, axes=(0, 1, 2))
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
    given, copied = (part[tuple(slice(side) for side in sides)] for part in parts)
    variance = given.var()
    if variance == 0:
        return False
    scale = ((given - given.mean()) * (copied - copied.mean())).mean() / variance
    apart = np.abs(copied - copied.mean() - scale * (given - given.mean()))[1:]
    steps = np.abs(np.diff(copied, axis=0))
    varies = steps > 0
    return int(varies.sum()) >= FEWEST_COMPARED and float(np.median(apart[varies])) < SAME * np.median(steps[varies])


def _take_middle(image: np.ndarray) -> np.ndarray:
    starts = [max(0, (side - BLOCK_SIDE) // 2) for side in image.shape]
    return image[tuple(slice(start, start + BLOCK_SIDE) for start in starts)].astype(np.float64)
