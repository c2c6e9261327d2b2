"""Read a data set once and measure its sizes, spacings, intensities and structures, to plan a training.

The fingerprint is nnU-Net's, plus the voxels of each label. Two things differ. Axes are turned to RAS first, so that a
median along an axis refers to one direction in the patient; nnU-Net uses the axes of the files. Voxels without
annotation do not belong to any structure.

Axes are those of a case turned to RAS: D to the right, H to the front, W to the head.

The fingerprint is stored as JSON in the user's cache folder. It is computed again after a change of a file's size, its
modification time, or the inode's change time (``ctime``), which nothing can reset.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from numpy.typing import NDArray
from pydantic import TypeAdapter
from scipy import ndimage
from torch import Tensor

from volseg.config.catalogue import get_public_task
from volseg.data.case_store.cache_folder import list_image_files
from volseg.data.cases import Case, Task
from volseg.data.checks.kinds import Finding
from volseg.data.checks.reading import read_case, require_sound
from volseg.data.json_files import read_json
from volseg.data.readers import list_files
from volseg.data.threads import map_in_threads
from volseg.errors import DataError, ReaderError
from volseg.files import choose_cache_folder, replacing
from volseg.transforms.grid import measure_sides

Lengths = tuple[float, float, float]
Sides = tuple[int, int, int]

SHARE_OF_FINE = 0.25
"""Share of the cases of a task with thick slices that are as thin as its target spacing. It is more than a tenth, which
the rule for the target spacing uses, and less than half, which the median uses."""

MOSTLY_ZERO, HARDLY_ZERO = 0.74, 1.0
"""Assumed share of the voxels in the box of nonzero voxels, if the size of the files is unknown. nnU-Net's plans show
only whether it is below 0.75."""

SAMPLES, SAMPLES_PER_CASE = 10_000_000, 200_000
"""Foreground voxels to draw: in all cases together, and at most in each case. nnU-Net draws ten times as many, which
does not change the percentiles."""

SEED = 1234

QUANTILES = (0.5, 50.0, 99.5)

Voxels = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseSizes:
    """Sizes of one case."""

    case: str
    shape: Sides
    """D, H, W after cropping to the box of the voxels that are not 0 in any channel."""
    spacing: Lengths
    """Along D, H, W (mm)."""
    kept: float = 1.0
    """Share of the voxels that remain after cropping."""
    voxels: Mapping[int, int] = field(default_factory=dict)
    """Number of voxels of each value of the label map, before cropping."""
    largest: Mapping[str, float] = field(default_factory=dict)
    """Share of each structure's voxels that are in its largest component (26 neighbours)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Intensities:
    """One channel's intensities in the foreground of all cases; each case has the same weight."""

    mean: float
    std: float
    median: float
    min: float
    max: float
    percentile_00_5: float
    percentile_99_5: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Facts of a data set, from which a training is planned.

    `volseg.planning.take_fingerprint` computes it; published numbers can also be entered by hand.
    """

    task: str
    channels: tuple[str, ...]
    labels: Mapping[int, str]
    """Name of each value, including the background's."""
    cases: tuple[CaseSizes, ...]
    """All cases with usable labels."""
    intensities: tuple[Intensities, ...] = ()
    """Intensities of each channel; empty if no voxel was read."""
    regions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ignore: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the whole fingerprint as values of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the fingerprint from the output of `to_json`.

        Raises
        ------
        ValueError
            If the content is not a fingerprint.
        """
        return TypeAdapter(cls).validate_python(content)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A fingerprint, and the problems of the cases that it leaves out."""

    fingerprint: Fingerprint
    left_out: Sequence[str] = ()
    """Problems of the cases that are left out, one sentence each."""


def take_fingerprint(
    task: Task, *, skip_bad: bool = False, workers: int | None = None, progress: Callable[[], object] | None = None
) -> Taken:
    """Read and check every case with a label, and return the fingerprint of all.

    The same files give the same fingerprint for any number of threads.

    Parameters
    ----------
    task : Task
        See `volseg.data.load_task`.
    skip_bad : bool
        Leave bad cases out instead of raising.
    workers : int, optional
        Threads; see `map_in_threads`.
    progress : callable, optional
        Called after each case.

    Raises
    ------
    DataError
        If a case is bad and ``skip_bad`` is off (all bad cases at once, as `volseg data check` reports them), or if no
        case remains.
    """
    number = max(1, min(SAMPLES_PER_CASE, SAMPLES // max(1, len(task.training))))
    problems: list[Finding] = []
    facts: list[CaseSizes] = []
    samples: list[Voxels] = []

    def look(item: tuple[int, Case]) -> tuple[Sequence[Finding], CaseSizes | None, Voxels | None]:
        place, case = item
        checked = read_case(case, task)
        if checked.problems:
            return checked.problems, None, None
        return (), *_describe_case(checked.case, checked.label_counts, task, number, place)

    for found, case, sample in map_in_threads(look, list(enumerate(task.training)), workers):
        problems.extend(found)
        if case is not None and sample is not None:
            facts.append(case)
            samples.append(sample)
        if progress is not None:
            progress()
    if not skip_bad:
        require_sound(problems, "fix them, or leave them out of the plan and the training with --skip-bad")
    if not facts:
        raise DataError(f"no labelled case of {task.name} can be used; `volseg data check` reports the faults")
    fingerprint = Fingerprint(
        task=task.name,
        channels=task.modalities,
        labels=task.labels,
        cases=tuple(facts),
        intensities=_describe_intensities(np.concatenate(samples, axis=1)),
        regions=task.regions,
        ignore=task.ignore,
    )
    return Taken(fingerprint=fingerprint, left_out=[str(problem) for problem in problems])


def _describe_case(
    case: Case, counts: Mapping[int, int], task: Task, number: int, place: int
) -> tuple[CaseSizes, Voxels]:
    image, label = case["image"], case["label"]
    channels = image.as_subclass(Tensor)
    inside = (channels != 0).any(0).numpy().astype(np.uint8)
    found = ndimage.find_objects(inside)
    sides = [part.stop - part.start for part in found[0]] if found else list(inside.shape)
    axes, spacing = _read_axes(image)
    d, h, w = (sides[axis] for axis in axes)
    facts = CaseSizes(
        case=str(case["case"]),
        shape=(d, h, w),
        spacing=spacing,
        kept=float(np.prod(sides, dtype=np.float64) / channels[0].numel()),
        voxels=dict(sorted(counts.items())),
        largest=_measure_largest(label.as_subclass(Tensor)[0].numpy(), task),
    )
    return facts, _draw_foreground(channels, label.as_subclass(Tensor)[0], task, number, place)


def _measure_largest(label: NDArray[Any], task: Task) -> dict[str, float]:
    """Return the share of the voxels of each structure in its largest component."""
    shares = {}
    for values, name in task.structures.items():
        mask = np.isin(label, values)
        if mask.any():
            (box,) = ndimage.find_objects(mask.astype(np.uint8))
            components, _ = ndimage.label(mask[box], np.ones((3, 3, 3)))
            sizes = np.bincount(components[mask[box]])
            shares[name] = float(sizes.max() / sizes.sum())
    return shares


def _read_axes(image: MetaTensor) -> tuple[list[int], tuple[float, float, float]]:
    """Return the file's axes that become D, H and W after turning to RAS, and their spacing (mm)."""
    affine = image.affine.numpy().astype(np.float64)
    goals = nibabel.io_orientation(affine)[:, 0].astype(int).tolist()
    axes = [goals.index(axis) for axis in range(3)]
    lengths = measure_sides(affine)
    d, h, w = (lengths[axis] for axis in axes)
    return axes, (d, h, w)


def _draw_foreground(channels: Tensor, label: Tensor, task: Task, number: int, place: int) -> Voxels:
    """Return foreground voxels, drawn with replacement as in nnU-Net, the same number from each case."""
    foreground = label > 0
    if task.ignore is not None:
        foreground &= label != task.ignore
    where = foreground.flatten().nonzero().squeeze(1)
    if not len(where):
        return np.zeros((len(channels), 0), dtype=np.float32)
    drawn = np.random.default_rng((SEED, place)).integers(len(where), size=number)
    return channels.flatten(1)[:, where[torch.from_numpy(drawn)]].numpy().astype(np.float32)


def _describe_intensities(samples: Voxels) -> tuple[Intensities, ...]:
    if not samples.shape[1]:  # every label is empty
        return ()
    described = []
    for channel in samples:
        moments = (channel.mean(dtype=np.float64), channel.std(dtype=np.float64), *np.percentile(channel, QUANTILES))
        mean, std, low, median, high, least, most = map(float, (*moments, channel.min(), channel.max()))
        described.append(
            Intensities(
                mean=mean, std=std, median=median, min=least, max=most, percentile_00_5=low, percentile_99_5=high
            )
        )
    return tuple(described)


logger = logging.getLogger(__name__)

VERSION = 2
"""Version of the stored content; grows with any change to the content of a fingerprint."""


def load_fingerprint(task: Task, *, skip_bad: bool = False) -> Taken | None:
    """Return the stored fingerprint of a data set, or None if there is none or a file has changed.

    Parameters
    ----------
    task, skip_bad
        As for `take_fingerprint`.
    """
    place = fingerprint_path(task)
    if place is None or not place.is_file():
        return None
    try:
        content = read_json(place)
        if content["key"] == describe_files(task, skip_bad=skip_bad):
            return Taken(fingerprint=Fingerprint.from_json(content["fingerprint"]), left_out=content["left_out"])
    except (DataError, KeyError, TypeError, AttributeError, ValueError) as fault:
        logger.warning("%s is not a fingerprint (%s); the data set is read again", place, fault)
    return None


def keep_fingerprint(taken: Taken, task: Task, *, skip_bad: bool = False) -> Path | None:
    """Store a fingerprint for `load_fingerprint`; return its path, or None if no cache folder can be written."""
    place = fingerprint_path(task)
    if place is None:
        return None
    content = {
        "version": VERSION,
        "key": describe_files(task, skip_bad=skip_bad),
        "left_out": list(taken.left_out),
        "fingerprint": taken.fingerprint.to_json(),
    }
    try:
        with replacing(place) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return place
    except OSError as fault:
        logger.warning("the fingerprint of %s cannot be stored (%s); the next plan reads all cases", task.name, fault)
    return None


def fingerprint_path(task: Task) -> Path | None:
    """Return the path of a data set's fingerprint; None without a cache folder."""
    folder, root = choose_cache_folder("auto"), os.path.abspath(task.root)
    return folder and folder / "fingerprints" / f"{sha256(os.fsencode(root)).hexdigest()[:16]}.json"


def describe_files(task: Task, *, skip_bad: bool) -> str:
    """Return a digest that changes with any input of a fingerprint; no image is decompressed."""
    described = {
        "version": VERSION,
        "skip_bad": skip_bad,
        "task": [task.name, task.modalities, sorted(task.labels.items()), list(task.regions.items()), task.ignore],
        "cases": [
            [case["case"], case.get("labelled"), list(_describe_case_files(case, task))] for case in task.training
        ],
    }
    return sha256(json.dumps(described).encode()).hexdigest()


def _describe_case_files(case: Case, task: Task) -> Iterator[list[Any]]:
    for path in (*list_files(case["image"]), *list_files(case["label"])):
        try:
            for file in list_image_files(path):
                told = file.stat()
                yield [os.path.relpath(file, task.root), told.st_size, told.st_mtime_ns, told.st_ctime_ns]
        except (OSError, ReaderError) as fault:  # absent or damaged: a bad case, which its reader reports
            yield [os.path.relpath(path, task.root), type(fault).__name__]


def published_fingerprint(name: str) -> Fingerprint:
    """Return a fingerprint that agrees with nnU-Net's published numbers of a task, as far as its rules need them.

    The published numbers are the median size, the median spacing and the target spacing. So every case has the median
    size at the target spacing. Most cases have the median spacing and a quarter has the target spacing, which differs
    only for thick slices. A fingerprint of the data themselves may give another plan.

    Parameters
    ----------
    name : str
        Such as ``Task09_Spleen``, or ``9``.

    Raises
    ------
    DataError
        If there is no such task.
    """
    manifest = get_public_task(name).manifest
    known = manifest["nnunet"]
    found, target = known["fingerprint"], [float(mm) for mm in known["spacing"]]
    resampled = found["median_shape_resampled"]
    num_cases = manifest["num_training"]
    kept = MOSTLY_ZERO if found["mostly_zero"] else HARDLY_ZERO
    if found["mostly_zero"] and "stored" in manifest:
        kept = math.prod(found["median_shape"]) / math.prod(manifest["stored"]["shape"][1])
    cases = []
    for number in range(num_cases):
        mm = target if number < math.ceil(SHARE_OF_FINE * num_cases) else found["median_spacing"]
        d, h, w = (round(side * to / own) for side, to, own in zip(resampled, target, mm, strict=True))
        x, y, z = (float(side) for side in mm)
        cases.append(CaseSizes(case=f"case_{number:03d}", shape=(d, h, w), spacing=(x, y, z), kept=kept))
    return Fingerprint(
        task=manifest["name"],
        channels=tuple(manifest["modalities"]),
        labels=dict(manifest["labels"]),
        cases=tuple(cases),
        intensities=tuple(Intensities(**{of: float(x) for of, x in each.items()}) for each in found["intensities"]),
    )
