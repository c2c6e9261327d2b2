"""Describe a data set in a few lines for the terminal."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from volseg.config.catalogue import format_numbered
from volseg.data.cases import Task
from volseg.data.groups import propose_groups
from volseg.data.readers import list_files, read_volume
from volseg.data.threads import map_in_threads
from volseg.formatting import align_columns
from volseg.transforms.spacing import measure_sides

__all__ = ["describe_task"]


def describe_task(task: Task, *, progress: Callable[[], object] | None = None) -> str:
    """Return a description of a data set; every image is read for it.

    Parameters
    ----------
    task : Task
        Task of `volseg.data.layouts.load_task`.
    progress : callable, optional
        Called after each case.

    Raises
    ------
    ReaderError
        If an image cannot be read.
    """
    cases = [*task.training, *task.test]
    measured = []
    # The channels of a case share one grid, so its first file is enough.
    for found in map_in_threads(lambda case: _measure(list_files(case["image"])[0]), cases):
        measured.append(found)
        if progress is not None:
            progress()
    shapes, spacings = (np.array(side, dtype=np.float64) for side in zip(*measured, strict=True))
    regions = ", ".join(f"{name} = {' + '.join(map(str, values))}" for name, values in task.regions.items())
    proposed = propose_groups(task)
    patients = proposed if proposed is not None and proposed.evident else None
    partly = sum("labelled" in case for case in task.training)
    facts = [
        ("task", task.name),
        ("folder", str(task.root)),
        ("cases", f"{len(task.training)} with labels, {len(task.test)} without"),
        ("channels", format_numbered(enumerate(task.modalities))),
        ("labels", format_numbered(task.labels.items())),
        *([("regions", regions)] if regions else []),
        *([("ignored", str(task.ignore))] if task.ignore is not None else []),
        *([("partly", f"{partly} case(s) were looked through for some labels only")] if partly else []),
        *([("folds", f"{len(task.splits)}, of the data set's own")] if task.splits else []),
        *([("patients", f"{patients.num_patients} (split.group: {patients.group})")] if patients else []),
        ("voxels", _summarise(shapes)),
        ("spacing", f"{_summarise(spacings)} mm"),
    ]
    return "\n".join(align_columns(facts))


def _measure(path: Path) -> tuple[tuple[int, ...], list[float]]:
    volume = read_volume(path)
    return tuple(volume.shape[1:]), list(measure_sides(volume.affine))


def _summarise(sides: np.ndarray) -> str:
    """Return the median of each axis, and the smallest and largest of each."""
    median, least, most = (
        " x ".join(f"{side:.4g}" for side in found)
        for found in (np.median(sides, axis=0), sides.min(axis=0), sides.max(axis=0))
    )
    return median if least == most else f"{median} (median; from {least} to {most})"
