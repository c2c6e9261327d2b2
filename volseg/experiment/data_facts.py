"""What a forecast must know of a data set, without a volume being read: by its description, or by what is published.

A network takes as many channels as the images have, and gives as many as there are labels. Where the data set is not
there, the Decathlon's ten are known by their names (`volseg.data.catalogue`), and of any other the user says it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.catalogue import PublicTask, find_public_task
from volseg.data.layouts import load_task
from volseg.errors import DataError
from volseg.experiment.network_plan import find_spacing
from volseg.models.networks import ISOTROPIC
from volseg.transforms.spacing import Sides, depends_on_case, spacing_after

__all__ = ["DataFacts", "find_facts"]

FLOAT_BYTES, LABEL_BYTES = 4, 1
"""Of a voxel of a prepared case: float32 for each channel, and a class."""


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Of a data set."""

    task: Task
    """Its channels and labels; without cases where these were not looked at."""
    spacing: Sides
    """Voxel sides after preprocessing, in mm."""
    case_bytes: int | None = None
    """Of all prepared training cases together; None where their sizes are not known."""
    largest: tuple[int, int, int] | None = None
    """Sides of the largest case after preprocessing, in voxels."""
    source: str
    """Where all this is from."""


def find_facts(config: ExperimentConfig, channels: int | None = None, classes: int | None = None) -> DataFacts:
    """Return what is known of a config's data set.

    Parameters
    ----------
    config : ExperimentConfig
        Its data and preprocessing.
    channels, classes : int, optional
        Of images, and of label maps with the background, in place of what a data set says.

    Raises
    ------
    DataError
        If they follow from a data set that is not there and not known.
    """
    root = config.data.root
    if channels is not None and classes is not None:
        labels = {value: f"label {value}" if value else "background" for value in range(classes)}
        task = _make_task(root.name or "task", [f"channel {n}" for n in range(channels)], labels)
        return DataFacts(task=task, spacing=_spacing_without_cases(config), source="--channels and --classes")
    if root.exists():
        task = replace(load_task(root, require_files=False), stage_labels=config.stage_labels)
        known = _find_public(task.name)
        return _with_sizes(task, find_spacing(config, task), known, f"the description in {root}")
    known = _find_public(root.name)
    if known is None:
        raise DataError(
            f"a network's channels and classes follow from the data set, and {root} is not there; say them by "
            "--channels N --classes N (with the background), or name the data set by --set data.root=DIR"
        )
    labels = {int(value): name for value, name in known.labels.items()}
    task = _make_task(known.name, known.modalities, labels)
    median = known.manifest["nnunet"]["fingerprint"]["median_spacing"]
    spacing = _spacing_without_cases(config, tuple(float(mm) for mm in median))
    return _with_sizes(task, spacing, known, f"what is published of {known.name}")


def _make_task(name: str, modalities: Sequence[str], labels: dict[int, str]) -> Task:
    return Task(name=name, root=Path(name), modalities=tuple(modalities), labels=labels, training=(), test=())


def _find_public(name: str) -> PublicTask | None:
    try:
        return find_public_task(name)
    except DataError:
        return None  # a data set of the user's own


def _spacing_without_cases(config: ExperimentConfig, median: Sequence[float] = ISOTROPIC) -> Sides:
    """Return the voxel sides that the preprocessing names, else those of cases with the ``median`` ones."""
    steps = [component.spec() for component in config.preprocessing]
    affine = np.diag([*median, 1.0]) if depends_on_case(steps) else np.eye(4)
    return spacing_after(steps, affine)


def _with_sizes(task: Task, spacing: Sides, known: PublicTask | None, source: str) -> DataFacts:
    """Return the facts with the sizes of the cases, where these are published."""
    if known is None:
        return DataFacts(task=task, spacing=spacing, source=source)
    nnunet = known.manifest["nnunet"]
    resampled, at = nnunet["fingerprint"]["median_shape_resampled"], nnunet["spacing"]
    voxels = math.prod(side * mm / to for side, mm, to in zip(resampled, at, spacing, strict=True))
    largest = None
    stored = known.manifest.get("stored")  # smallest, median and largest
    if stored is not None and stored["spacing"][0] == stored["spacing"][-1]:  # else no two of them belong to one case
        d, h, w = (
            math.ceil(side * mm / to)
            for side, mm, to in zip(stored["shape"][-1], stored["spacing"][0], spacing, strict=True)
        )
        largest = (d, h, w)
    return DataFacts(
        task=task,
        spacing=spacing,
        case_bytes=math.ceil(voxels * known.num_training * (FLOAT_BYTES * task.num_inputs + LABEL_BYTES)),
        largest=largest,
        source=source,
    )
