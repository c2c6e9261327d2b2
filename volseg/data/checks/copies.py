"""Images that are cropped, mirrored or rescaled copies of other cases' images.

Thumbnails of all images are compared with each other, in the eight mirrorings. The most similar pairs are read again
and compared voxel by voxel where they overlap: two patients, or two scans of one patient, differ by as much as
neighbouring voxels do, and a copy only by rounding.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from volseg.data.checks.facts import ComparedCase, turn_upright
from volseg.data.checks.kinds import Finding
from volseg.data.readers import read_volume

__all__ = ["report_copies"]

SMALLEST_CORRELATION = 0.6
"""Correlation of two thumbnails, after subtracting the mean thumbnail, from which a pair may be read again."""

FEWEST_USUAL = 10
"""Images from which on the mean thumbnail is subtracted."""

SAME = 0.25
"""Largest difference of a copy, up to a scale, in differences of neighbouring voxels (medians). Rounding to 8 bits
leaves 0.1; two noisy images of one object have 1."""

FEWEST_COMPARED = 1000
"""Voxels that must differ from their neighbour, for a median of the differences."""

FEWEST_PAIRS, PAIRS_PER_CASE = 8, 0.125
"""Most pairs that are read again, the larger of: a number, and a number per case."""

OVERLAP = 0.5
"""Least share of the smaller image that is in the larger image."""

BLOCK_SIDE = 96
"""Voxels along each axis of the blocks, around the middle, that are compared."""

ROWS = 256
"""Thumbnails compared with all others at a time."""

MIRRORINGS = tuple(axes for count in range(4) for axes in combinations(range(3), count))


def report_copies(facts: Sequence[ComparedCase], digests: Mapping[str, str]) -> list[Finding]:
    """Remark on both cases of each pair whose images are copies without being equal.

    Parameters
    ----------
    facts : sequence of ComparedCase
        All cases.
    digests : mapping
        Case id to the digest of the image; equal images are a finding of their own.
    """
    cases = [fact.case for fact in facts if fact.thumbnail is not None and fact.thumbnail.any()]
    thumbnails = np.array([fact.thumbnail for fact in facts if fact.thumbnail is not None and fact.thumbnail.any()])
    named = [digests.get(case["case"]) for case in cases]
    partners: dict[int, list[str]] = {}
    for one, other, mirrored in _list_alike(thumbnails, named):
        images = [turn_upright(read_volume(cases[index]["image"])) for index in (one, other)]
        if _agree(images[0], np.flip(images[1], mirrored)):
            partners.setdefault(one, []).append(cases[other]["case"])
            partners.setdefault(other, []).append(cases[one]["case"])
    return [
        Finding.of(cases[index], "image-copy", f"of {', '.join(names)}") for index, names in sorted(partners.items())
    ]


def _list_alike(thumbnails: np.ndarray, digests: Sequence[str | None]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the most similar pairs with other digests, each with the axes along which one image is mirrored."""
    if not len(thumbnails):
        return []
    found: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
    usual = thumbnails.mean(0) if len(thumbnails) >= FEWEST_USUAL else 0
    flat = _standardise(thumbnails - usual)
    for axes in MIRRORINGS:
        mirrored = _standardise(np.flip(thumbnails, tuple(axis + 1 for axis in axes)) - usual)
        for start in range(0, len(flat), ROWS):
            likeness = flat[start : start + ROWS] @ mirrored.T
            for row, other in np.argwhere(likeness > SMALLEST_CORRELATION).tolist():
                one, value = start + row, float(likeness[row, other])
                best = found.get((one, other), (0.0, ()))[0]
                if one < other and value > best and digests[one] != digests[other]:
                    found[one, other] = value, axes
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    return [(*pair, axes) for pair, (_, axes) in ordered[: max(FEWEST_PAIRS, round(PAIRS_PER_CASE * len(flat)))]]


def _standardise(thumbnails: np.ndarray) -> np.ndarray:
    flat = thumbnails.reshape(len(thumbnails), -1)
    standardised: np.ndarray = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-9)
    return standardised


def _agree(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two images are equal after a shift by whole voxels and a linear change of intensities."""
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
