"""Compare the cases of a data set: cases that are unlike the others, and labels that few cases or no case have.

A value is an outlier if it is beyond Tukey's outer fences [1]_, three quartile ranges from the quartiles, and differs
from the median by an amount that matters for its statistic. If more than a tenth of the cases are outliers, the data
set is mixed, which is reported once.

References
----------
.. [1] Tukey, Exploratory Data Analysis (1977), chapter 2: outer fences.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from volseg.data.cases import Case, Task
from volseg.data.checks.facts import ChannelFacts, ComparedCase, ImageFacts, StructureFacts
from volseg.data.checks.kinds import Finding
from volseg.formatting import list_some

FEWEST_CASES = 10
"""Cases that a statistic needs before one of them can be an outlier."""

FENCE = 3.0
"""Quartile ranges from the quartiles."""

RARE = 0.1
"""Largest share of the cases that can be outliers."""

Tail = Literal["low", "high", "both"]


def find_outliers(
    values: Sequence[float], margin: float, tail: Tail = "both", *, is_ratio: bool = False, fewest: int = FEWEST_CASES
) -> list[int]:
    """Return the indices of the outliers.

    Parameters
    ----------
    margin : float
        Smallest distance of an outlier from the median; a factor if ``is_ratio``.
    tail : {"low", "high", "both"}
        Side of the outliers.
    is_ratio : bool
        Compare the logarithms of positive values.
    fewest : int
        Number of values below which none is an outlier.
    """
    if len(values) < fewest:
        return []
    compared = np.asarray(values, dtype=np.float64)
    if is_ratio:
        compared, margin = np.log(np.maximum(compared, np.finfo(np.float64).tiny)), np.log(margin)
    lower, median, upper = np.percentile(compared, [25, 50, 75])
    reach = FENCE * (upper - lower)
    is_low = (compared < lower - reach) & (compared < median - margin)
    is_high = (compared > upper + reach) & (compared > median + margin)
    outliers: list[int] = {"low": is_low, "high": is_high, "both": is_low | is_high}[tail].nonzero()[0].tolist()
    return outliers if len(outliers) <= max(1, RARE * len(values)) else []


@dataclass(frozen=True, slots=True)
class OutlierRule:
    """A statistic of a label or a channel, and the rule for its outliers; see `find_outliers`."""

    kind: str
    tail: Tail
    margin: float
    statistic: Callable[[Any], float]
    """Function of a `LabelShape` or of `ChannelFacts`."""
    message: str
    """Template with ``{value}`` and ``{median}``."""
    is_ratio: bool = False


AXES = ("left-right", "front-back", "head-feet")
"""Names of the axes of an upright volume."""

VOLUME = "{value:.3g} mm3, elsewhere about {median:.3g}"
FULL = "{value:.0%} of the voxels are background, elsewhere about {median:.0%}"
STRAY = "a voxel {value:.2g} radii from the largest part, elsewhere {median:.2g}"
CUT = "{value:.0%} of its surface, elsewhere {median:.0%}"
EMPTY = "{value:.0%} of the slices, elsewhere {median:.0%}"
LABEL_RULES = (
    OutlierRule("label-volume", "both", 5, attrgetter("volume"), VOLUME, is_ratio=True),
    OutlierRule("label-full", "low", 10, attrgetter("unlabelled"), FULL, is_ratio=True),
    OutlierRule("label-scattered", "high", 0.3, attrgetter("stray"), STRAY),
    OutlierRule("label-cut", "high", 0.03, attrgetter("on_faces"), CUT),
)
EMPTY_SLICES = OutlierRule("empty-slices", "high", 0.1, attrgetter("empty_slices"), EMPTY)


def _apply(rule: OutlierRule, measured: Sequence[tuple[Case, Any]], field: str, where: str = "") -> Iterator[Finding]:
    values = [rule.statistic(of) for _, of in measured]
    for index in find_outliers(values, rule.margin, rule.tail, is_ratio=rule.is_ratio):
        message = where + rule.message.format(value=values[index], median=float(np.median(values)))
        yield Finding.of(measured[index][0], rule.kind, message, field)


FEW_CASES = 5
"""Cases that grids and intensities need before one of them can be an outlier: factors this large show among few."""

FAR_SIZE, FAR_SPACING, FAR_SCALE = 1.5, 3.0, 10.0
"""Factors from the median beyond which a size, a spacing, and a range of intensities can be outliers. Among fewer than
`FEWEST_CASES` a size needs the factor of a spacing."""

ALWAYS, FEWEST_ALWAYS = 0.95, 20
"""A label is expected in each case if this share of the cases has it, among at least this many."""

MIXED_SCALE = 100.0
"""Factor between ranges of intensities from which on a data set is mixed."""

COMMON = 0.8
"""Share of the cases that makes a rule."""

FOLDS = 5
"""Folds of nnU-Net's cross-validation, the default here too."""

LEAST_CONTRAST = 0.05
"""Least contrast with a sign, in ranges of intensities."""

LEAST_DOUBLED = 64
"""Labelled voxels from which on two equal label maps are no coincidence."""

CLIPPED_ABOVE, CLIPPED_SHARE = -500.0, 0.01
"""Hounsfield units, and share of voxels: a CT with a higher lowest value, and this share there, was clipped."""

OFFSET_HIGH = 1000.0
"""A CT whose lowest value is 0 and whose 99.5th percentile is above this holds soft tissue at about 1024."""

Images = Sequence[tuple[Case, ImageFacts]]
Channels = Sequence[tuple[Case, ChannelFacts]]


def compare_cases(facts: Sequence[ComparedCase], task: Task) -> list[Finding]:
    """Return the findings of a comparison of cases; all are remarks."""
    labelled = [fact for fact in facts if fact.label_counts]
    images = [(fact.case, fact.image) for fact in facts if fact.image is not None]
    labels = [(fact.case, fact.label) for fact in facts if fact.label is not None]
    found = [
        *_compare_label_counts(labelled, task),
        *_list_same_labels(labelled, task),
        *_compare_orientations(images),
        *_compare_grids(images),
        *_list_absent_labels(labelled, task),
        *(finding for rule in LABEL_RULES for finding in _apply(rule, labels, "label")),
    ]
    for index, modality in enumerate(task.modalities):
        where = f"{modality}, " if task.num_channels > 1 else ""
        is_ct = modality.strip().lower() == "ct"
        channels = [(case, image.channels[index]) for case, image in images if len(image.channels) == task.num_channels]
        found += _check_ct(channels, where) if is_ct else _compare_scales(channels, where)
        found += [*_compare_structures(channels, where, is_ct=is_ct), *_apply(EMPTY_SLICES, channels, "image", where)]
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
            yield Finding.of(case, "orientation", f"{image.orientation}, elsewhere {usual}")


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
                detail = f"{values[outlier]:.3g} mm {axis}, elsewhere about {np.median(values):.3g}"
                yield Finding.of(images[outlier][0], kind, detail)


def _list_far(values: Sequence[float], factor: float) -> list[int]:
    return find_outliers(values, factor, is_ratio=True, fewest=FEW_CASES)


def _compare_scales(channels: Channels, where: str) -> Iterator[Finding]:
    ranges = [channel.high - channel.low for _, channel in channels]
    if len(ranges) < FEW_CASES:
        return
    low, high = np.percentile(ranges, [100 * RARE / 2, 100 - 100 * RARE / 2])
    if low > 0 and high / low > MIXED_SCALE:
        yield Finding("", None, f"{where}ranges of {min(ranges):.3g} to {max(ranges):.3g}", "intensity-mixed")
    for place in _list_far(ranges, FAR_SCALE):
        detail = f"{where}a range of {ranges[place]:.3g}, elsewhere about {np.median(ranges):.3g}"
        yield Finding.of(channels[place][0], "intensity-scale", detail)


def _check_ct(channels: Channels, where: str) -> Iterator[Finding]:
    for case, channel in channels:
        if channel.lowest >= 0 and channel.high > OFFSET_HIGH:
            yield Finding.of(case, "ct-offset", f"{where}{channel.lowest:g} to {channel.highest:g}")
        elif channel.lowest > CLIPPED_ABOVE and channel.share_lowest >= CLIPPED_SHARE:
            detail = f"{where}{100 * channel.share_lowest:.0f} % of the voxels at {channel.lowest:g}"
            yield Finding.of(case, "ct-clipped", detail)


def _compare_structures(channels: Channels, where: str, *, is_ct: bool) -> Iterator[Finding]:
    """Remark on cases whose largest structure is on air, or is dark where it is bright in the other cases.

    Each structure is compared with the same one: in a cropped CT, lungs may be the only one.
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
                message = f"{where}{structure.contrast:+.2f} of the range, elsewhere about {usual:+.2f}"
                yield Finding.of(case, "contrast", message)
            if is_largest and is_tissue and is_on_air:
                yield Finding.of(case, "label-on-air", f"{where}its median voxel is {structure.median:g}", "label")


def describe_data(facts: Sequence[ComparedCase], task: Task) -> dict[str, object]:
    """Return common properties of the cases, for the JSON of a check."""
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
