"""Measure facts of a case, a few numbers and no voxels, and find cases whose facts are outliers.

One table of rules says which facts are compared. A value is an outlier if it is beyond Tukey's outer fences [1]_, three
quartile ranges from the quartiles, and differs from the median by an amount that matters for its statistic. If more
than a tenth of the cases are outliers, the data set is mixed, and none is reported.

References
----------
.. [1] Tukey, Exploratory Data Analysis (1977), chapter 2: outer fences.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd, nan
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import nibabel
import numpy as np
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Case, Task
from volseg.data.checks.borders import LabelShape, Texture, compute_thumbnail, measure_shape, measure_texture
from volseg.data.checks.kinds import Finding
from volseg.data.checks.reading import CheckedCase

AXES = ("left-right", "front-back", "head-feet")
"""Names of the axes of an upright volume."""

SAMPLES = 1 << 20
"""Number of voxels from which percentiles are computed."""

RANGE = (0.005, 0.5, 0.995)
"""Percentiles for the range of intensities and its middle, which single hot voxels must not change."""

INCOMPARABLE = {"size", "not-finite", "constant", "image-is-label", "swapped"}
"""Kinds of problems that would make a case an outlier."""

UNLIKE_LABELS = {"label-reordered", "label-channels", "label-fractions", "label-undeclared"}
"""Kinds of problems that leave the shape of a label unknown."""


class StructureFacts(NamedTuple):
    """Intensities of the voxels with one label."""

    median: float
    contrast: float
    """Difference of the median from that of unlabelled voxels, in ranges of intensities; NaN if either is unknown."""
    share_lowest: float
    """Share of the voxels that have the channel's lowest value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelFacts:
    """Intensities of a channel."""

    lowest: float
    highest: float
    low: float
    """The 0.5th percentile."""
    median: float
    high: float
    """The 99.5th percentile."""
    share_lowest: float
    """Share of the voxels that have the lowest value."""
    texture: Texture
    structures: Mapping[int, StructureFacts]
    """Facts of each structure by its label, the largest structure first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFacts:
    """Facts of an image."""

    shape: tuple[int, int, int]
    """Voxels along right-left, front-back and head-feet."""
    spacing: tuple[float, float, float]
    """mm along the same axes."""
    orientation: str
    """Directions of the voxel axes of the file, such as ``RAS``."""
    channels: tuple[ChannelFacts, ...]

    @property
    def extent(self) -> tuple[float, ...]:
        """Sides of the volume (mm)."""
        return tuple(side * step for side, step in zip(self.shape, self.spacing, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedCase:
    """Facts of a case."""

    case: Case
    """The case with paths."""
    image: ImageFacts | None
    """None if the image cannot be read or is `INCOMPARABLE`."""
    label_counts: Mapping[int, int]
    """Voxels of each value; empty without a readable label."""
    label_digest: str | None = None
    label: LabelShape | None = None
    """None if no structure is on the image's grid, or if the label has ignored voxels."""
    thumbnail: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Thumbnail of the image's upright first channel, from `compute_thumbnail`; None if ``image`` is None."""


def measure(checked: CheckedCase, case: Case, task: Task) -> ComparedCase:
    """Return the facts of a case.

    Parameters
    ----------
    checked
        The case with volumes.
    case
        The same case with paths.
    """
    image, label = checked.case.get("image"), checked.case.get("label")
    known = ComparedCase(case=case, image=None, label_counts=checked.label_counts, label_digest=checked.label_digest)
    if not isinstance(image, MetaTensor) or any(problem.kind in INCOMPARABLE for problem in checked.problems):
        return known
    is_labelled = isinstance(label, MetaTensor) and bool(checked.label_counts) and label.shape[1:] == image.shape[1:]
    is_comparable = is_labelled and not any(problem.kind in UNLIKE_LABELS for problem in checked.problems)
    facts = _measure_image(image, label if is_labelled else None, task)
    first, limits = turn_upright(image), (facts.channels[0].low, facts.channels[0].high)
    shape = None
    # With ignored voxels, the size and the border of a label are unknown.
    if is_comparable and task.ignore not in checked.label_counts and checked.label_counts.keys() - {0}:
        # On the image's grid, even if the label's header differs: that is a separate finding.
        shape = measure_shape(first, turn_upright(label, image), facts.spacing, limits)
    return replace(known, image=facts, label=shape, thumbnail=compute_thumbnail(first, *limits))


def anatomical_axes(volume: MetaTensor) -> tuple[list[int], list[bool]]:
    """Return the file's axes along right-left, front-back and head-feet, and whether each points left, back or down."""
    codes = nibabel.orientations.io_orientation(volume.affine.numpy())
    order = [int(axis) for axis in codes[:, 0].argsort()]
    return order, [bool(codes[axis, 1] < 0) for axis in order]


def turn_upright(volume: MetaTensor, place: MetaTensor | None = None) -> np.ndarray:
    """Return the first channel with axes to the right, front and head, by the affine of ``place``; a view."""
    order, turned = anatomical_axes(volume if place is None else place)
    channel: np.ndarray = volume.as_tensor()[0].permute(order).numpy()
    return channel[tuple(slice(None, None, -1 if is_turned else 1) for is_turned in turned)]


def _measure_image(image: MetaTensor, label: MetaTensor | None, task: Task) -> ImageFacts:
    order, _ = anatomical_axes(image)
    steps = image.affine[:3, :3].norm(dim=0).tolist()
    shape, spacing = ([values[axis] for axis in order] for values in (image.shape[1:], steps))
    codes = nibabel.orientations.io_orientation(image.affine.numpy())
    labels = None if label is None else label.as_tensor()[0]
    return ImageFacts(
        shape=(int(shape[0]), int(shape[1]), int(shape[2])),
        spacing=(spacing[0], spacing[1], spacing[2]),
        orientation="".join(nibabel.orientations.ornt2axcodes(codes)),
        channels=tuple(_measure_channel(channel, labels, order, task.foreground) for channel in image.as_tensor()),
    )


def _measure_channel(channel: Tensor, labels: Tensor | None, order: list[int], values: Iterable[int]) -> ChannelFacts:
    lowest, highest = channel.aminmax()
    taken = _choose_samples(channel.numel())
    samples = channel.flatten()[taken]
    low, median, high = (_percentile(samples, part) for part in RANGE)
    structures: dict[int, StructureFacts] = {}
    if labels is not None:
        others = samples[labels.flatten()[taken] == 0]
        background = _percentile(others, 0.5) if others.numel() else nan
        for value, voxels in _sample_structures(channel, labels, values):
            middle = _percentile(voxels, 0.5)
            structures[value] = StructureFacts(
                median=middle,
                contrast=(middle - background) / ((high - low) or nan),
                share_lowest=(voxels == lowest).float().mean().item(),
            )
    return ChannelFacts(
        lowest=lowest.item(),
        highest=highest.item(),
        low=low,
        median=median,
        high=high,
        share_lowest=(samples == lowest).float().mean().item(),
        texture=measure_texture(channel.permute(order), low, high),
        structures=structures,
    )


def _sample_structures(channel: Tensor, labels: Tensor, values: Iterable[int]) -> list[tuple[int, Tensor]]:
    """Return voxels of each structure, the largest first."""
    # A sample of all voxels could miss small structures.
    is_labelled = labels > 0
    taken = _choose_samples(int(is_labelled.sum()))
    intensities, held = channel[is_labelled][taken], labels[is_labelled][taken]
    found = [(value, intensities[held == value]) for value in values]
    return sorted(((value, voxels) for value, voxels in found if voxels.numel()), key=lambda item: -item[1].numel())


def _choose_samples(count: int) -> slice:
    """Return the slice that samples ``count`` voxels: evenly, with a step that reaches every row and column."""
    step = max(1, count // SAMPLES)
    while gcd(step, count) > 1:
        step += 1
    return slice(None, None, step)


def _percentile(values: Tensor, part: float) -> float:
    place = round(part * (values.numel() - 1))
    return values.kthvalue(place + 1).values.item()


FEWEST_CASES = 10
"""Fewest cases for outliers of a statistic."""

FENCE = 3.0
"""Distance of the fences from the quartiles, in quartile ranges."""

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
    """Function of a `LabelShape` or a `Texture`."""
    message: str
    """Template with ``{value}`` and ``{median}``."""
    is_ratio: bool = False


def _take_smoothness(axis: int) -> Callable[[Texture], float]:
    return lambda texture: texture.smoothness[axis]


VOLUME = "{value:.3g} mm3, median {median:.3g}"
FULL = "{value:.0%} of the voxels are background, median {median:.0%}"
RAGGED = "{value:.0%} of neighbours agree, median {median:.0%}"
STRAY = "a voxel is {value:.2g} radii from the largest part, median {median:.2g}"
CUT = "{value:.0%} of its surface, median {median:.0%}"
LABEL_RULES = (
    OutlierRule("label-volume", "low", 4, attrgetter("volume"), VOLUME, is_ratio=True),
    OutlierRule("label-volume", "high", 6, attrgetter("volume"), VOLUME, is_ratio=True),
    OutlierRule("label-full", "low", 10, attrgetter("unlabelled"), FULL, is_ratio=True),
    OutlierRule("label-ragged", "low", 0.12, attrgetter("agreement"), RAGGED),
    OutlierRule("label-scattered", "high", 0.3, attrgetter("stray"), STRAY),
    OutlierRule("label-cut", "high", 0.03, attrgetter("on_faces"), CUT),
)

NOISE = "correlation of {axis} neighbours {{value:.2f}}, median {{median:.2f}}"
ROUGH = "{{value:.2f}} times as rough {axis} as along the other axes, median {{median:.2f}}"
JUMPS = "{value:.2%} of neighbours differ by more than 90 % of the range, median {median:.2%}"
SATURATED = "{value:.1%} of the voxels have the highest value, median {median:.1%}"
EMPTY = "{value:.0%} of the slices, median {median:.0%}"
TEXTURE_RULES = (
    *(
        OutlierRule("noise", "low", 0.15, _take_smoothness(axis), NOISE.format(axis=name))
        for axis, name in enumerate(AXES)
    ),
    *(
        OutlierRule(
            "slices-unlike",
            "high",
            1.5,
            partial(Texture.compare_axis, axis=axis),
            ROUGH.format(axis=name),
            is_ratio=True,
        )
        for axis, name in enumerate(AXES)
    ),
    OutlierRule("wrapped", "high", 0.005, attrgetter("jumps"), JUMPS),
    OutlierRule("saturated", "high", 0.01, attrgetter("share_highest"), SATURATED),
    OutlierRule("empty-slices", "high", 0.1, attrgetter("empty_slices"), EMPTY),
)


def report_odd_labels(facts: Sequence[ComparedCase]) -> Iterator[Finding]:
    """Remark on labels whose size, shape or place in the volume is unlike that of the other cases."""
    labels = [(fact.case, fact.label) for fact in facts if fact.label is not None]
    for rule in LABEL_RULES:
        yield from _apply(rule, labels, "label")


def report_odd_images(facts: Sequence[ComparedCase], task: Task) -> Iterator[Finding]:
    """Remark on images whose voxels are unlike those of the other cases."""
    for index, modality in enumerate(task.modalities):
        where = f"{modality}, " if task.num_channels > 1 else ""
        textures = [
            (fact.case, fact.image.channels[index].texture)
            for fact in facts
            if fact.image is not None and len(fact.image.channels) == task.num_channels
        ]
        for rule in TEXTURE_RULES:
            yield from _apply(rule, textures, "image", where)


def _apply(rule: OutlierRule, measured: Sequence[tuple[Case, Any]], field: str, where: str = "") -> Iterator[Finding]:
    values = [rule.statistic(of) for _, of in measured]
    for index in find_outliers(values, rule.margin, rule.tail, is_ratio=rule.is_ratio):
        message = where + rule.message.format(value=values[index], median=float(np.median(values)))
        yield Finding.of(measured[index][0], rule.kind, message, field)
