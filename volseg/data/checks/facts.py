"""Facts of a case: a few numbers and no voxels, for the comparison of cases (`volseg.data.checks.comparing`)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd, nan
from typing import NamedTuple

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from scipy import ndimage
from torch import Tensor
from torch.nn.functional import max_pool3d

from volseg.data.cases import Case, Task
from volseg.data.checks.reading import CheckedCase

SAMPLES = 1 << 20
"""Voxels that percentiles are taken of."""

RANGE = (0.005, 0.995)
"""Percentiles that limit the range of intensities, which single hot voxels must not change."""

INCOMPARABLE = {"size", "not-finite", "constant", "image-is-label", "swapped"}
"""Kinds of problems whose consequences would make a case an outlier."""

UNLIKE_LABELS = {"label-reordered", "label-channels", "label-fractions", "label-undeclared"}
"""Kinds of problems after which the shape of a label is unknown."""


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
    high: float
    """The 99.5th percentile."""
    share_lowest: float
    """Share of the voxels that have the lowest value."""
    empty_slices: float
    """Share of the slices that hold a single value, along the axis with the most of them."""
    structures: Mapping[int, StructureFacts]
    """By label, the largest structure first."""


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
class LabelShape:
    """Statistics of all structures of a label map together."""

    volume: float
    """In mm3."""
    unlabelled: float
    """Share of the voxels."""
    stray: float
    """Distance of the farthest voxel from the largest connected part, in root mean square radii of the label."""
    on_faces: float
    """Number of labelled voxels on the faces of the volume, divided by the number of labelled voxels to the 2/3."""


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
    """None without structures on the image's grid, and with ignored voxels."""


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
    shape = None
    # With ignored voxels, the size of a label is unknown.
    values = checked.label_counts.keys()
    if is_comparable and label is not None and values - {0} and task.ignore not in values:
        # On the image's grid, even if the label's header differs: that is a separate finding.
        shape = measure_shape(label.as_tensor()[0].numpy(), image.affine[:3, :3].norm(dim=0).numpy())
    return replace(known, image=facts, label=shape)


COARSE_SIDE = 96
"""Most blocks along each axis in which the connected parts of a label are looked for."""


def measure_shape(label: np.ndarray, spacing: np.ndarray) -> LabelShape:
    """Return the statistics of a label ``(D, H, W)`` with structures."""
    labelled = label > 0
    size = int(labelled.sum())
    faces = [(place, axis) for axis in range(3) for place in {0, label.shape[axis] - 1}]
    return LabelShape(
        volume=size * float(np.prod(spacing)),
        unlabelled=1 - size / label.size,
        stray=_measure_stray(labelled, spacing),
        on_faces=sum(int(labelled.take(*face).sum()) for face in faces) / size ** (2 / 3),
    )


def _measure_stray(labelled: np.ndarray, spacing: np.ndarray) -> float:
    steps = [-(-side // COARSE_SIDE) for side in labelled.shape]
    volume = torch.from_numpy(np.ascontiguousarray(labelled, dtype=np.float32))
    coarse = max_pool3d(volume[None, None], steps, ceil_mode=True)[0, 0].numpy() > 0
    [box] = ndimage.find_objects(coarse.astype(np.uint8))
    coarse, sides = coarse[box], spacing * steps
    parts, count = ndimage.label(coarse, np.ones((3, 3, 3)))
    if count < 2:
        return 0.0
    main = parts == np.bincount(parts.flat)[1:].argmax() + 1
    places = np.argwhere(coarse) * sides
    radius = np.sqrt(((places - places.mean(0)) ** 2).sum(1).mean())
    return float(ndimage.distance_transform_edt(~main, sampling=sides)[coarse].max() / max(radius, sides.min()))


def _measure_image(image: MetaTensor, label: MetaTensor | None, task: Task) -> ImageFacts:
    codes = nibabel.orientations.io_orientation(image.affine.numpy())
    order = [int(axis) for axis in codes[:, 0].argsort()]
    steps = image.affine[:3, :3].norm(dim=0).tolist()
    shape, spacing = ([values[axis] for axis in order] for values in (image.shape[1:], steps))
    labels = None if label is None else label.as_tensor()[0]
    return ImageFacts(
        shape=(int(shape[0]), int(shape[1]), int(shape[2])),
        spacing=(spacing[0], spacing[1], spacing[2]),
        orientation="".join(nibabel.orientations.ornt2axcodes(codes)),
        channels=tuple(_measure_channel(channel, labels, task.foreground) for channel in image.as_tensor()),
    )


def _measure_channel(channel: Tensor, labels: Tensor | None, values: Iterable[int]) -> ChannelFacts:
    lowest, highest = channel.aminmax()
    taken = _choose_samples(channel.numel())
    samples = channel.flatten()[taken]
    low, high = (_percentile(samples, part) for part in RANGE)
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
        high=high,
        share_lowest=(samples == lowest).float().mean().item(),
        empty_slices=max(_share_empty(channel, dim) for dim in range(3)),
        structures=structures,
    )


def _share_empty(channel: Tensor, dim: int) -> float:
    """Return the share of the slices across a dim that hold a single value; 0 of a volume of one slice."""
    others = [other for other in range(3) if other != dim]
    is_empty = channel.amax(others) == channel.amin(others)
    return is_empty.double().mean().item() if min(channel.shape) > 1 else 0.0


def _sample_structures(channel: Tensor, labels: Tensor, values: Iterable[int]) -> list[tuple[int, Tensor]]:
    """Return voxels of each structure, the largest first."""
    # A sample of all voxels could miss small structures.
    is_labelled = labels > 0
    taken = _choose_samples(int(is_labelled.sum()))
    intensities, held = channel[is_labelled][taken], labels[is_labelled][taken]
    found = [(value, intensities[held == value]) for value in values]
    return sorted(((value, voxels) for value, voxels in found if voxels.numel()), key=lambda item: -item[1].numel())


def _choose_samples(count: int) -> slice:
    """Return the voxels of ``count`` to sample: evenly, by a step that meets every row and column."""
    step = max(1, count // SAMPLES)
    while gcd(step, count) > 1:
        step += 1
    return slice(None, None, step)


def _percentile(values: Tensor, part: float) -> float:
    place = round(part * (values.numel() - 1))
    return values.kthvalue(place + 1).values.item()
