"""Compare the cases of a data set: find unusual cases, labels that no case has, and copied images.

`volseg.data.checks.facts` compares statistics of single cases. If many cases differ, the data set is mixed; this is
reported once.

For copies, thumbnails of all images are compared with each other, in the eight mirrorings. The most similar pairs are
read again and compared voxel by voxel where they overlap: two patients, or two scans of one patient, differ by as much
as neighbouring voxels do, but a copy differs only by rounding.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from volseg.data.cases import Case, Task
from volseg.data.checks.facts import (
    AXES,
    FEWEST_CASES,
    RARE,
    ChannelFacts,
    ComparedCase,
    ImageFacts,
    StructureFacts,
    find_outliers,
    report_odd_images,
    report_odd_labels,
    turn_upright,
)
from volseg.data.checks.kinds import Finding
from volseg.data.readers import read_volume
from volseg.formatting import list_some

FEW_CASES = 5
"""Fewest cases for outliers of grids and intensities: factors this large are evident among a few cases."""

FAR_SIZE, FAR_SPACING, FAR_SCALE = 1.5, 3.0, 10.0
"""Factors from the median beyond which a size, a spacing, and a range of intensities can be outliers. With fewer than
`FEWEST_CASES` cases, a size needs the factor of a spacing."""

THICKNESS_SHOWS = {"noise", "slices-unlike", "wrapped", "label-ragged"}
"""Kinds of findings that an unusual slice thickness explains."""

ALWAYS, FEWEST_ALWAYS = 0.95, 20
"""Smallest share of the cases with a label, and fewest cases, for which it is expected in all."""

MIXED_SCALE = 100.0
"""Ratio of ranges of intensities above which a data set is mixed."""

COMMON = 0.8
"""Smallest share of the cases that makes their orientation the usual one."""

APART = 0.05
"""Largest share of the cases whose range of intensities can be far from all others."""

FOLDS = 5
"""Folds of nnU-Net's cross-validation, the default here too."""

LEAST_CONTRAST = 0.05
"""Smallest contrast whose sign counts, in ranges of intensities."""

LEAST_DOUBLED = 64
"""Fewest labelled voxels for which two equal label maps are not a coincidence."""

CLIPPED_ABOVE, CLIPPED_SHARE = -500.0, 0.01
"""A CT was clipped if its lowest value is above these Hounsfield units, and this share or more of its voxels has it."""

OFFSET_HIGH = 1000.0
"""A CT without negative values whose 99.5th percentile is above this stores soft tissue at about 1024."""

Images = Sequence[tuple[Case, ImageFacts]]
Channels = Sequence[tuple[Case, ChannelFacts]]


def compare_cases(facts: Sequence[ComparedCase], task: Task) -> list[Finding]:
    """Return the findings of a comparison of cases; all are remarks."""
    labelled = [fact for fact in facts if fact.label_counts]
    images = [(fact.case, fact.image) for fact in facts if fact.image is not None]
    unlike = _list_unlike_spacings(images)
    odd = (*report_odd_labels(facts), *report_odd_images(facts, task))
    found = [
        *_compare_label_counts(labelled, task),
        *_list_same_labels(labelled, task),
        *_compare_orientations(images),
        *_compare_grids(images),
        *_list_absent_labels(labelled, task),
        *(finding for finding in odd if finding.case not in unlike or finding.kind not in THICKNESS_SHOWS),
    ]
    for index, modality in enumerate(task.modalities):
        where = f"{modality}, " if task.num_channels > 1 else ""
        is_ct = modality.strip().lower() == "ct"
        channels = [(case, image.channels[index]) for case, image in images if len(image.channels) == task.num_channels]
        found += _check_ct(channels, where) if is_ct else _compare_scales(channels, where)
        found += _compare_structures(channels, where, is_ct=is_ct)
    return list({(one.case, one.kind): one for one in reversed(found)}.values())[::-1]


def _compare_label_counts(facts: Sequence[ComparedCase], task: Task) -> Iterator[Finding]:
    for value, name in task.foreground.items():
        looked = [fact for fact in facts if value in (fact.case.get("labelled") or (value,))]
        holding = sum(value in fact.label_counts for fact in looked)
        if facts and not holding:
            yield Finding("", None, f"{value} ({name})", "label-missing")
        elif holding < FOLDS and len(looked) >= 2 * FOLDS:
            yield Finding("", None, f"{value} ({name}) in {holding} of {len(looked)} cases", "label-rare")


def _list_absent_labels(facts: Sequence[ComparedCase], task: Task) -> Iterator[Finding]:
    """Remark on cases that lack a label which nearly all others have; an empty label is a separate finding."""
    labelled = [fact for fact in facts if fact.image is not None and _count_structures(fact, task)]
    for value, name in task.foreground.items():
        looked = [fact for fact in labelled if value in (fact.case.get("labelled") or (value,))]
        absent = [fact for fact in looked if value not in fact.label_counts]
        if len(looked) >= FEWEST_ALWAYS and len(absent) <= max(1, (1 - ALWAYS) * len(looked)):
            share = 1 - len(absent) / len(looked)
            for fact in absent:
                message = f"{value} ({name}), which {share:.0%} of the cases have"
                yield Finding.of(fact.case, "label-absent", message, "label")


def _count_structures(fact: ComparedCase, task: Task) -> int:
    return sum(count for value, count in fact.label_counts.items() if value not in (0, task.ignore))


def _list_same_labels(facts: Sequence[ComparedCase], task: Task) -> Iterator[Finding]:
    by_digest: dict[str, list[ComparedCase]] = defaultdict(list)
    for fact in facts:
        if fact.label_digest is not None and _count_structures(fact, task) >= LEAST_DOUBLED:
            by_digest[fact.label_digest].append(fact)
    for first, *rest in by_digest.values():
        # Equal images are a separate finding.
        others = [fact.case["case"] for fact in rest if fact.image != first.image]
        if others:
            yield Finding.of(first.case, "same-label", f"also {list_some(others)}", "label")


def _compare_orientations(images: Images) -> Iterator[Finding]:
    counts = Counter(image.orientation for _, image in images)
    if len(counts) < 2:
        return
    usual, count = counts.most_common(1)[0]
    if count < COMMON * len(images):
        found = ", ".join(f"{codes} {number}" for codes, number in counts.most_common(6))
        yield Finding("", None, f"{len(counts)} orientations: {found}{' ...' * (len(counts) > 6)}", "orientation")
        return
    for case, image in images:
        if image.orientation != usual:
            yield Finding.of(case, "orientation", f"{image.orientation}, usually {usual}")


def _compare_grids(images: Images) -> Iterator[Finding]:
    """Remark on unusual sizes, and on spacings that are extreme or make the size unusual too.

    Another protocol has thicker slices and fewer of them; a wrong spacing makes the patient larger.
    """
    least = FAR_SIZE if len(images) >= FEWEST_CASES else FAR_SPACING
    spacings: Sequence[Sequence[float]] = [image.spacing for _, image in images]
    extents: Sequence[Sequence[float]] = [image.extent for _, image in images]
    for index, axis in enumerate(AXES):
        steps, sizes = ([side[index] for side in sides] for sides in (spacings, extents))
        odd_sizes = _list_far(sizes, least)
        wrong = {*_list_far(steps, FAR_SPACING), *({*_list_far(steps, least)} & {*odd_sizes})}
        for kind, values, outliers in (("spacing", steps, sorted(wrong)), ("extent", sizes, odd_sizes)):
            for outlier in outliers:
                detail = f"{values[outlier]:.3g} mm {axis}, median {np.median(values):.3g}"
                yield Finding.of(images[outlier][0], kind, detail)


def _list_unlike_spacings(images: Images) -> set[str]:
    """Return the cases with a spacing far from the median, however many they are."""
    logs = np.log([image.spacing for _, image in images]).reshape(-1, 3)
    far = np.abs(logs - np.median(logs, axis=0)).max(1) > np.log(FAR_SPACING) if len(images) else []
    return {case["case"] for (case, _), is_far in zip(images, far, strict=True) if is_far}


def _list_far(values: Sequence[float], factor: float) -> list[int]:
    return find_outliers(values, factor, is_ratio=True, fewest=FEW_CASES)


def _list_apart(values: Sequence[float], factor: float) -> list[int]:
    """Return the indices of values that are a factor below or above all others, whatever the spread of the others."""
    order = np.argsort(values)
    logs = np.log(np.maximum(np.array(values)[order], np.finfo(np.float64).tiny))
    most = max(1, int(APART * len(values)))
    wide = (np.diff(logs) > np.log(factor)).nonzero()[0]
    low = max((at + 1 for at in wide if at < most), default=0)
    high = min((at + 1 for at in wide if at + 1 >= len(values) - most), default=len(values))
    return [*order[:low].tolist(), *order[high:].tolist()]


def _compare_scales(channels: Channels, where: str) -> Iterator[Finding]:
    ranges = [channel.high - channel.low for _, channel in channels]
    if len(ranges) < FEW_CASES:
        return
    low, high = np.percentile(ranges, [100 * RARE / 2, 100 - 100 * RARE / 2])
    if low > 0 and high / low > MIXED_SCALE:
        yield Finding("", None, f"{where}ranges of {min(ranges):.3g} to {max(ranges):.3g}", "intensity-mixed")
    for place in sorted({*_list_far(ranges, FAR_SCALE), *_list_apart(ranges, FAR_SCALE)}):
        detail = f"{where}a range of {ranges[place]:.3g}, median {np.median(ranges):.3g}"
        yield Finding.of(channels[place][0], "intensity-scale", detail)


def _check_ct(channels: Channels, where: str) -> Iterator[Finding]:
    for case, channel in channels:
        if channel.lowest >= 0 and channel.high > OFFSET_HIGH:
            yield Finding.of(case, "ct-offset", f"{where}{channel.lowest:g} to {channel.highest:g}")
        elif channel.lowest > CLIPPED_ABOVE and channel.share_lowest >= CLIPPED_SHARE:
            detail = f"{where}{100 * channel.share_lowest:.0f} % of the voxels at {channel.lowest:g}"
            yield Finding.of(case, "ct-clipped", detail)


def _compare_structures(channels: Channels, where: str, *, is_ct: bool) -> Iterator[Finding]:
    """Remark on cases whose largest structure is on air, or has a contrast opposite to that in other cases.

    Each structure is compared with the same structure: in a cropped CT, the lungs may be the only one.
    """
    by_label: dict[int, list[tuple[Case, StructureFacts, bool]]] = defaultdict(list)
    for case, channel in channels:
        for rank, (value, structure) in enumerate(channel.structures.items()):
            by_label[value].append((case, structure, rank == 0))
    for held in by_label.values():
        if len(held) < FEW_CASES:
            continue
        contrasts = np.array([structure.contrast for _, structure, _ in held])
        usual = np.nanmedian(contrasts) if np.isfinite(contrasts).any() else 0.0
        clear, reverse = (sign * np.sign(usual) * contrasts > LEAST_CONTRAST for sign in (1, -1))
        has_sign = np.isfinite(contrasts).sum() - clear.sum() <= max(1, RARE * len(held))
        on_air = [of.share_lowest > 0.5 or (is_ct and of.median < CLIPPED_ABOVE) for _, of, _ in held]
        is_tissue = sum(on_air) <= max(1, RARE * len(held))  # neither lungs nor the darkest structure
        for (case, structure, is_largest), is_reverse, is_on_air in zip(held, reverse, on_air, strict=True):
            if is_largest and has_sign and is_reverse:
                message = f"{where}{structure.contrast:+.2f} of the range, median {usual:+.2f}"
                yield Finding.of(case, "contrast", message)
            if is_largest and is_tissue and is_on_air:
                yield Finding.of(case, "label-on-air", f"{where}its median intensity is {structure.median:g}", "label")


def describe_data(facts: Sequence[ComparedCase], task: Task) -> dict[str, object]:
    """Return summary statistics of the cases, for the JSON of a check."""
    images = [fact.image for fact in facts if fact.image is not None]

    def middle(rows: Iterable[Sequence[float]]) -> list[float]:
        return [float(value) for value in np.median(list(rows), axis=0)] if images else []

    labelled = [fact for fact in facts if fact.label_counts]
    return {
        "orientations": dict(Counter(image.orientation for image in images).most_common()),
        "median_spacing_mm": middle(image.spacing for image in images),
        "median_shape_voxels": middle(image.shape for image in images),
        "labels": {
            str(value): {
                "name": name,
                "cases": sum(value in fact.label_counts for fact in labelled),
                "voxels": sum(fact.label_counts.get(value, 0) for fact in labelled),
            }
            for value, name in sorted(task.labels.items())
        },
    }


SMALLEST_CORRELATION = 0.6
"""Smallest correlation of two thumbnails, after subtracting the mean thumbnail, for which a pair may be read again."""

FEWEST_USUAL = 10
"""Fewest images for which the mean thumbnail is subtracted."""

SAME = 0.25
"""Largest difference of a copy from the scaled original, relative to the difference of neighbouring voxels (medians).
It is 0.1 for rounding to 8 bits, and 1 for two noisy images of one object."""

FEWEST_COMPARED = 1000
"""Fewest voxels that differ from their neighbour for a median of the differences."""

FEWEST_PAIRS, PAIRS_PER_CASE = 8, 0.125
"""Most pairs that are read again, in total and per case; the larger limit counts."""

OVERLAP = 0.5
"""Smallest share of the smaller image that must overlap the larger image."""

BLOCK_SIDE = 96
"""Side (voxels) of the central blocks that are compared."""

ROWS = 256
"""Thumbnails compared with all others at a time."""

MIRRORINGS = tuple(axes for count in range(4) for axes in combinations(range(3), count))


def report_copies(facts: Sequence[ComparedCase], digests: Mapping[str, str]) -> list[Finding]:
    """Remark on both cases of each pair of images that are copies, but not equal.

    Parameters
    ----------
    facts : sequence of ComparedCase
        All cases.
    digests : mapping
        Case id to the digest of the image; equal images are a separate finding.
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
    """Return the most similar pairs with different digests, each with the axes along which one image is mirrored."""
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
    """Return whether two images are equal after a shift by whole voxels and a linear change of intensities."""
    from scipy.signal import correlate  # the import takes a second, and few data sets need it

    blocks = [_take_middle(image) for image in (one, other)]
    match = correlate(*(block - block.mean() for block in blocks), method="fft")
    place = np.unravel_index(int(match.argmax()), match.shape)
    shift = [int(at) - side + 1 for at, side in zip(place, blocks[1].shape, strict=True)]
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
