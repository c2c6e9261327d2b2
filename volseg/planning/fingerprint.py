"""Read a data set once, to know what its networks have to cope with: sizes, spacings, intensities, structures.

It is nnU-Net's fingerprint, with the voxels of each label besides. Two things are done otherwise: axes are turned to
RAS first, so that a median along an axis is one of the same direction in the patient, whereas nnU-Net takes axes as
files store them; and voxels that nobody annotated count for no structure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from numpy.typing import NDArray
from torch import Tensor

from volseg.data.cases import Case, Task
from volseg.data.checks import Finding, read_case, require_sound
from volseg.data.threads import map_in_threads
from volseg.errors import DataError
from volseg.planning.facts import CaseSizes, Fingerprint, Intensities
from volseg.transforms.spacing import measure_sides

__all__ = ["Taken", "take_fingerprint"]

SAMPLES, SAMPLES_PER_CASE = 10_000_000, 200_000
"""Foreground voxels that are drawn, in all cases together and of each at most; nnU-Net draws ten times as many, which
the percentiles do not notice."""

SEED = 1234

Voxels = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A fingerprint, and what was found on the way."""

    fingerprint: Fingerprint
    left_out: Sequence[str] = ()
    """What is wrong with cases that it does not speak of, one sentence each."""


def take_fingerprint(
    task: Task,
    *,
    skip_bad: bool = False,
    workers: int | None = None,
    progress: Callable[[], object] | None = None,
) -> Taken:
    """Read and check every case with a label, and describe them.

    The same files give the same fingerprint, by however many threads.

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
        If a case is bad and ``skip_bad`` is off, all of them at once as `volseg data check` tells them; or if none is
        left.
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
        require_sound(problems, "mend them, or leave them out of the plan and the training by --skip-bad")
    if not facts:
        raise DataError(f"no case of {task.name} with a label can be used; volseg data check says what is wrong")
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
    box = _find_box((channels != 0).any(0))
    axes, spacing = _find_axes(image)
    sides = [stop - start for start, stop in box]
    d, h, w = (sides[axis] for axis in axes)
    facts = CaseSizes(
        case=str(case["case"]),
        shape=(d, h, w),
        spacing=spacing,
        kept=float(np.prod(sides, dtype=np.float64) / channels[0].numel()),
        voxels=dict(sorted(counts.items())),
    )
    return facts, _draw_foreground(channels, label.as_subclass(Tensor)[0], task, number, place)


def _find_box(inside: Tensor) -> list[tuple[int, int]]:
    """Return where what is inside begins and ends along each axis; all of it where there is nothing."""
    box = []
    for axis in range(3):
        others = tuple(other for other in range(3) if other != axis)
        found = inside.any(others[1]).any(others[0]).nonzero()
        box.append((int(found[0]), int(found[-1]) + 1) if len(found) else (0, inside.shape[axis]))
    return box


def _find_axes(image: MetaTensor) -> tuple[list[int], tuple[float, float, float]]:
    """Return which axis of the file D, H and W are after turning to RAS, and their spacing (mm)."""
    affine = image.affine.numpy().astype(np.float64)
    goals = nibabel.io_orientation(affine)[:, 0].astype(int).tolist()
    axes = [goals.index(axis) for axis in range(3)]
    lengths = measure_sides(affine)
    d, h, w = (lengths[axis] for axis in axes)
    return axes, (d, h, w)


def _draw_foreground(channels: Tensor, label: Tensor, task: Task, number: int, place: int) -> Voxels:
    """Return voxels of the foreground, drawn with replacement as in nnU-Net, so that each case counts alike."""
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
        low, median, high = np.percentile(channel, (0.5, 50.0, 99.5))
        described.append(
            Intensities(
                mean=float(channel.mean(dtype=np.float64)),
                std=float(channel.std(dtype=np.float64)),
                median=float(median),
                min=float(channel.min()),
                max=float(channel.max()),
                percentile_00_5=float(low),
                percentile_99_5=float(high),
            )
        )
    return tuple(described)
