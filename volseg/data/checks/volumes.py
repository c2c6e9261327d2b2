"""Find faults in the grid and the values of one image or label map."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Case, Task
from volseg.transforms.grid import MISPLACED_VOXELS, Grid

FINEST_SPACING, COARSEST_SPACING = 0.01, 50.0
"""Bounds of voxel sides (mm) in a patient's volume: larger or smaller sides are in other units."""

LARGEST_EXTENT = 5000.0
"""Largest extent along an axis (mm)."""

LARGEST_VALUE = 1e18
"""Largest value of an image; the square of larger values is infinite in float32."""

PIECE_VOXELS = 1 << 22
"""Voxels counted at a time: sorting takes several times their memory."""

MOST_COUNTED = 1 << 15
"""Values of a label map up to this are counted in a table; larger values are sorted."""

MOST_FRACTIONS = 5
"""Most values that a message lists."""

ROUNDED_VALUE = 1e-3
"""Largest distance of a label's values from integers that counts as rounding."""

MOST_LABELS, LEAST_AGREEMENT = 256, 0.6
"""Most values of a label map, and its smallest agreement. The agreement is a tenth in 8-bit images, a half in noise of
two values, and three quarters in labels of the hippocampus."""

FEWEST_PAIRS = 200
"""Fewest pairs of neighbours for an agreement: two lesions of one voxel each are not noise."""

COMPARED_VOXELS = 1 << 22
"""Approximate number of voxels that are compared with their neighbours."""

SAME_SPACING = 0.01
"""Largest relative difference of two spacings that counts as rounding."""


class Fault(NamedTuple):
    """A kind of finding, and its text; for a bad kind, a sentence whose subject is the file."""

    kind: str
    text: str
    channel: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelValues:
    """Values of a label map."""

    counts: dict[int, int]
    """Number of voxels of each rounded value."""
    fractions: tuple[float, ...] = ()
    """The lowest values that are not integers."""
    num_fractions: int = 0
    """Number of such values."""
    farthest: float = 0.0
    """Largest distance from an integer."""


def check_grid(volume: MetaTensor) -> Iterator[Fault]:
    """Yield faults of a volume's grid."""
    shape, sform = tuple(volume.shape[1:]), volume.affine.numpy()
    spacing = np.linalg.norm(sform[:3, :3], axis=0)
    extent = spacing * shape
    if not (spacing.min() >= FINEST_SPACING and spacing.max() <= COARSEST_SPACING and extent.max() < LARGEST_EXTENT):
        yield Fault(
            "size",
            f"has voxels of {_list_lengths(spacing)} mm and an extent of {_list_lengths(extent)} mm; needed: sides of "
            f"{FINEST_SPACING:g} to {COARSEST_SPACING:g} mm, and less than {LARGEST_EXTENT:g} mm along each axis; "
            "correct the spacing in the header, or its unit",
        )
    if 1 in shape:
        yield Fault("single-slice", f"{shape} voxels")
    if not volume.meta.get("sform_code", 1) and not volume.meta.get("qform_code", 1):
        yield Fault("unplaced", "")
    yield from _compare_forms(sform, np.asarray(volume.meta.get("qform_affine", sform)), shape)


def _compare_forms(sform: np.ndarray, qform: np.ndarray, shape: Sequence[int]) -> Iterator[Fault]:
    if not np.isfinite(qform).all():  # damaged; the readers do not use it
        return
    corners = np.array([(*corner, 1) for corner in product(*((0, side - 1) for side in shape))]).T
    distance = np.linalg.norm(((sform - qform) @ corners)[:3], axis=0).max()
    apart = distance / np.linalg.norm(sform[:3, :3], axis=0).min()
    if apart > MISPLACED_VOXELS:
        mirrors = np.linalg.det(sform[:3, :3]) * np.linalg.det(qform[:3, :3]) < 0
        yield Fault("mirrored" if mirrors else "forms-disagree", f"up to {apart:.3g} voxels apart")


def _list_lengths(lengths: Iterable[float]) -> str:
    return " x ".join(f"{length:.4g}" for length in lengths)


def check_image_voxels(image: MetaTensor, task: Task) -> Iterator[Fault]:
    """Yield faults of an image's voxels."""
    channels = image.as_tensor()
    if len(channels) != task.num_channels:
        series = " (a time series?)" if task.num_channels == 1 else ""
        yield Fault(
            "channels",
            f"has {len(channels)} channel(s){series}, but the task declares {task.num_channels} "
            f"({', '.join(task.modalities)}); correct the file, or the channels of the task",
        )
    if fault := _check_finite(channels):
        yield fault
        return
    if (largest := float(channels.abs().max())) > LARGEST_VALUE:
        yield Fault("huge-values", f"up to {largest:.2g}")
    constant = set()
    for index, channel in enumerate(channels):
        lowest, highest = channel.aminmax()
        if lowest == highest:
            constant.add(index)
            where = f" in channel {index}" if len(channels) > 1 else ""
            text = f"is constant{where}: every voxel is {lowest.item():g}; export the image again"
            yield Fault("constant", text, index)
    for one, other in combinations(range(len(channels)), 2):
        if not {one, other} & constant and channels[one].equal(channels[other]):
            yield Fault("same-channels", f"channels {one} and {other}", other)


def check_label_voxels(label: MetaTensor, values: LabelValues | None, task: Task, case: Case) -> Iterator[Fault]:
    """Yield faults of a label map's voxels; ``values`` is the result of `count_values`."""
    voxels = label.as_tensor()
    if len(voxels) != 1:
        text = f"has {len(voxels)} channels; a label map needs one channel, with one integer per structure"
        yield Fault("label-channels", text)
    if values is None:
        fault = _check_finite(voxels)
        assert fault is not None
        yield fault
        return
    if values.fractions:
        yield Fault("label-fractions", _describe_fractions(voxels, values))
        return
    declared = {*task.file_values}
    if unknown := sorted(value for value in values.counts if value not in declared):
        count = sum(values.counts[value] for value in unknown)
        yield Fault(
            "label-undeclared",
            f"contains {_list_values(unknown[:MOST_FRACTIONS], len(unknown))} in {count} voxel(s), but the task "
            f"declares {sorted(declared)}; correct the label map or declare the value",
        )
    structures = values.counts.keys() - {0, task.ignore}
    if not structures:
        yield Fault("label-empty", "all other voxels are ignored" if task.ignore in values.counts else "")
    labelled = task.labelled(case)
    if labelled is not None and (extra := sorted((structures & declared) - {*labelled})):
        yield Fault("label-not-looked-for", _list_values(extra, len(extra)))


def _describe_fractions(voxels: Tensor, values: LabelValues) -> str:
    found = _list_values(values.fractions, values.num_fractions)
    if values.farthest <= ROUNDED_VALUE:
        return (
            f"contains values that differ from integers ({found}) by {values.farthest:.1g} at most, probably due to "
            "a scale factor; round them, for example with `volseg data check DATA_SET --fix DIR`"
        )
    probabilities = ", as in a probability map" if voxels.min() >= 0 and voxels.max() <= 1 else ""
    return (
        f"contains values that are not integers ({found}){probabilities}; it was probably resampled linearly; export "
        "it again with nearest-neighbour interpolation"
    )


def count_values(voxels: Tensor) -> LabelValues | None:
    """Count the values of a label map, a piece at a time; return None if a value is not finite."""
    if not voxels.isfinite().all():
        return None
    counts: Counter[int] = Counter()
    fractions: set[float] = set()
    shown: list[float] = []
    farthest = 0.0
    for piece in voxels.flatten().split(PIECE_VOXELS):
        rounded = piece.round()
        off = (piece - rounded).abs()
        if (highest := off.max().item()) > 0:
            farthest = max(farthest, highest)
            if len(fractions) < MOST_COUNTED:  # in a probability map all values may differ
                fractions.update(piece[off > 0].unique()[:MOST_COUNTED].tolist())
        lowest, highest = (bound.item() for bound in rounded.aminmax())
        if lowest >= 0 and highest < MOST_COUNTED:
            table = torch.bincount(rounded.to(torch.int32))
            found, numbers = table.nonzero()[:, 0], table[table > 0]
        else:
            found, numbers = rounded.unique(return_counts=True)
        counts.update(dict(zip(map(int, found.tolist()), numbers.tolist(), strict=True)))
    shown = sorted(fractions)[:MOST_FRACTIONS]
    return LabelValues(counts=dict(counts), fractions=tuple(shown), num_fractions=len(fractions), farthest=farthest)


def holds_labels_only(image: Tensor, task: Task) -> bool:
    """Return whether every voxel has a declared value, and more than one value occurs, as in a label map."""
    declared = torch.tensor(task.file_values, dtype=image.dtype)
    for piece in image.flatten().split(PIECE_VOXELS):
        # The first voxels already rule out nearly every image.
        if not torch.isin(piece[:1000], declared).all() or not torch.isin(piece, declared).all():
            return False
    lowest, highest = image.aminmax()
    return bool(lowest != highest)


def resembles_labels(image: Tensor) -> bool:
    """Return whether a volume contains few different integers, mostly next to equal ones, like a label map."""
    channel = image[0]
    middle = channel[channel.shape[0] // 2]
    lowest, highest = (float(bound) for bound in channel.aminmax())
    if not (lowest >= 0 and 0 < highest < MOST_COUNTED) or not middle.equal(middle.round()):
        return False
    values = count_values(channel)
    if values is None or values.fractions or len(values.counts) > MOST_LABELS:
        return False
    return measure_agreement(channel.numpy()) > LEAST_AGREEMENT


def measure_agreement(labels: np.ndarray) -> float:
    """Return the share of neighbours with equal values, among pairs with at least one labelled voxel.

    Neighbours share a plane along the first axis; in a large volume only some planes are compared. NaN if there are
    fewer than `FEWEST_PAIRS`.
    """
    planes = labels[:: -(-labels.size // COMPARED_VOXELS)]
    pairs = same = 0
    for one, other in ((planes[:, 1:], planes[:, :-1]), (planes[:, :, 1:], planes[:, :, :-1])):
        counts = (one > 0) | (other > 0)
        pairs += int(counts.sum())
        same += int((counts & (one == other)).sum())
    return same / pairs if pairs >= FEWEST_PAIRS else math.nan


def check_label_place(image: MetaTensor, label: MetaTensor) -> Fault | None:
    """Return the fault of a label whose grid differs from its image's, or None."""
    grid, other = Grid.of(image), Grid.of(label)
    misplaced = grid.fault_of(other, "image")
    if misplaced is None:
        return None
    if grid.find_axis_order(other) is not None:
        return Fault("label-reordered", misplaced)
    if grid.shape == other.shape:
        return Fault("affine", misplaced)
    return Fault("label-coarser" if _is_resampled(grid, other) else "shape", misplaced)


def _is_resampled(grid: Grid, other: Grid) -> bool:
    """Return whether two grids cover the same place with different voxel sizes, up to a voxel of the coarser grid."""
    steps = [each.affine[:3, :3].norm(dim=0) for each in (grid, other)]
    if (steps[0] / steps[1] - 1).abs().max() < SAME_SPACING:
        return False
    faces = [
        torch.tensor([(*corner, 1.0) for corner in product(*((-0.5, side - 0.5) for side in each.shape))]).double()
        for each in (grid, other)
    ]
    apart = (grid.affine @ faces[0].T - other.affine @ faces[1].T)[:3].norm(dim=0).max()
    return bool(apart <= torch.stack(steps).max())


def _check_finite(voxels: Tensor) -> Fault | None:
    # On a large image `aminmax` takes a tenth of the time of `isfinite`; it returns any NaN or infinity.
    if all(math.isfinite(end) for end in map(float, voxels.aminmax())):
        return None
    bad = ~voxels.isfinite()
    first = tuple(int(index) for index in np.unravel_index(int(bad.flatten().byte().argmax()), bad.shape))
    return Fault(
        "not-finite",
        f"contains {int(bad.sum())} NaN or infinite voxel(s), the first at (c, i, j, k) = {first}; "
        "replace them, for instance with the value of air",
        first[0],
    )


def _list_values(values: Sequence[float], count: int) -> str:
    # With all digits of float32, if `:g` would round: 1.0000001 is not an integer.
    shown = ", ".join(
        f"{value:g}" if float(f"{value:g}") == value else str(np.float32(value)) for value in values[:MOST_FRACTIONS]
    )
    rest = count - min(count, MOST_FRACTIONS)
    return shown + (f" and {rest} more" if rest else "")
