"""Describe a data set in a few lines for the terminal."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from volseg.commands import spell
from volseg.data.cases import Task
from volseg.data.catalogue import PublicTask, list_public_tasks
from volseg.data.groups import propose_groups
from volseg.data.readers import list_files, read_volume
from volseg.data.threads import map_in_threads
from volseg.formatting import align_columns
from volseg.transforms.spacing import measure_sides

__all__ = ["describe_public_task", "describe_task", "tabulate_public_tasks"]


def tabulate_public_tasks() -> str:
    """Return a table of the tasks that can be downloaded."""
    rows = [("task", "channels", "labelled", "test", "labels", "licence")]
    for task in list_public_tasks():
        structures = [name for value, name in task.labels.items() if value != 0]
        counts = (str(task.num_training), str(task.num_test))
        rows.append((task.name, ", ".join(task.modalities), *counts, ", ".join(structures), task.licence))
    return "\n".join(align_columns(rows))


def describe_public_task(task: PublicTask) -> str:
    """Return the known facts of a task that can be downloaded."""
    plan = task.manifest.get("plan", {})
    facts = [
        ("task", task.name),
        ("from", task.url),
        ("md5", task.md5),
        ("licence", task.licence),
        ("cases", f"{task.num_training} with labels, {task.num_test} without"),
        ("channels", _list_channels(task.modalities)),
        ("labels", _list_labels(task.labels)),
        *([("a plan", ", ".join(f"{name} {value}" for name, value in plan.items()))] if plan else []),
        *(("mind", quirk) for quirk in task.manifest.get("quirks", ())),
    ]
    return "\n".join([*align_columns(facts), f"fetch it by: {spell(f'volseg data fetch {task.name}')}"])


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
        ("channels", _list_channels(task.modalities)),
        ("labels", _list_labels(task.labels)),
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


def _list_channels(modalities: Sequence[str]) -> str:
    return ", ".join(f"{number} {name}" for number, name in enumerate(modalities))


def _list_labels(labels: Mapping[int, str]) -> str:
    return ", ".join(f"{value} {name}" for value, name in labels.items())
