"""Plan a run's network for the geometry of its data: the voxel sides for network and augmentation.

The run folder keeps both from the start (``network.json``). A run that is resumed, validates or predicts builds its
network from that file and never from data or rules, which may have changed since. A run of an older volseg has no such
file: its network and augmentation assumed cubic voxels.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from volseg.config.catalogue import PublicTask, get_public_task
from volseg.config.registry import read_record
from volseg.config.schema import ExperimentConfig
from volseg.config.sections import NetworkConfig
from volseg.data.cases import Case, Task
from volseg.data.readers import read_affine
from volseg.data.threads import map_in_threads
from volseg.errors import DataError, ReaderError
from volseg.experiment.cases import read_task
from volseg.models.networks import ISOTROPIC, complete_spec
from volseg.parallel.processes.group import gather_over_processes
from volseg.transforms.grid import Sides, depends_on_case, spacing_after

logger = logging.getLogger(__name__)

VARIES = 2.0
"""Ratio to the median side, or its inverse, from which a case is reported: nnU-Net's rules for axes differ there."""


@dataclass(frozen=True, kw_only=True)
class NetworkPlan:
    """Values that are decided once for a run."""

    spacing: Sides = ISOTROPIC
    """Voxel sides along D, H, W in mm, after preprocessing."""
    network: Mapping[str, Any] = field(default_factory=dict)
    """The network's spec with the values that follow from patch and spacing; empty if none was recorded."""

    def complete(self, config: ExperimentConfig) -> ExperimentConfig:
        """Return ``config`` with the planned network."""
        if not self.network:
            return config
        return config.model_copy(update={"network": NetworkConfig(**self.network, outputs=config.network.outputs)})

    def as_json(self) -> dict[str, Any]:
        """Return the content for the run folder."""
        return {"spacing": list(self.spacing), "network": dict(self.network)}

    @classmethod
    def from_json(cls, content: object, file: Path) -> Self:
        """Return the plan from the output of `as_json`.

        Raises
        ------
        DataError
            If ``content`` is not a plan.
        """
        with suppress(ValueError):
            plan = read_record(cls, content)
            if min(plan.spacing) > 0 and isinstance(plan.network.get("name"), str):
                return plan
        raise DataError(f"{file} should contain the spacing and the network of a run; restore it from a backup")


def plan_network(config: ExperimentConfig, task: Task) -> NetworkPlan:
    """Plan the network of a new run; every process of a job calls this function and gets the first process's plan.

    Raises
    ------
    ConfigError
        If the network cannot be planned for the patch.
    DataError
        If neither a case nor the preprocessing defines the size of voxels.
    """
    # Machines may store the files in different forms.
    d, h, w = json.loads(gather_over_processes([json.dumps(compute_spacing(config, task))])[0])
    return plan_for_spacing(config, (d, h, w))


def plan_for_spacing(config: ExperimentConfig, spacing: Sides) -> NetworkPlan:
    """Return the plan for voxels with these sides; see `plan_network`."""
    spec = complete_spec(config.network.spec(), patch_size=config.patch.size, spacing=spacing)
    return NetworkPlan(spacing=spacing, network=json.loads(json.dumps(spec)))  # as a later read returns it


def compute_spacing(config: ExperimentConfig, task: Task) -> Sides:
    """Return the voxel sides after preprocessing: its target spacing, else the median of all cases with labels.

    The median covers the cases of all folds, so that the folds of a cross-validation train one network.
    """
    steps = [component.spec() for component in config.preprocessing]
    if not depends_on_case(steps):
        return spacing_after(steps, np.eye(4))
    read = list(map_in_threads(lambda case: _read_sides(case, steps), task.training))
    known = {case["case"]: sides for case, sides in zip(task.training, read, strict=True) if sides is not None}
    if not known:
        raise DataError(
            f"the voxel sides of all {len(read)} cases of {task.root} are unreadable, but the plan of the network and "
            "rotations need them; run volseg data check, or set the sides with a Spacing step"
        )
    d, h, w = np.median(list(known.values()), axis=0).tolist()
    _remark(known, (d, h, w))
    return d, h, w


def _read_sides(case: Case, steps: Sequence[Mapping[str, Any]]) -> Sides | None:
    image = case["image"]
    try:
        return spacing_after(steps, read_affine(image[0] if isinstance(image, tuple) else image))
    except ReaderError:
        return None  # the check of the cases reports its faults, with all others at once


def _remark(known: Mapping[str, Sides], median: Sides) -> None:
    """Warn of the cases that the plan does not fit."""
    off = {name: np.maximum(np.divide(sides, median), np.divide(median, sides)).max() for name, sides in known.items()}
    if far := sorted((name for name in off if off[name] > VARIES), key=lambda name: -off[name]):
        logger.warning(
            "check the voxel sides: %d of %d cases differ from the median %s mm by more than %g times along an axis, "
            "first %s with %s mm; the preprocessing has no Spacing step, so the network sees them as they are",
            *(len(far), len(known), _join(median), VARIES, far[0], _join(known[far[0]])),
        )


def _join(sides: Sides) -> str:
    return " x ".join(f"{side:.4g}" for side in sides)


# Facts of a data set for an estimate, without reading a volume: from its description, or from published numbers.
#
# A network has an input channel for each image channel, and an output channel for each label. If the data set is
# absent, the Decathlon's ten tasks are found by name (`volseg.config.catalogue`); for any other the user states them.


FLOAT_BYTES, LABEL_BYTES = 4, 1
"""Bytes per voxel of a prepared case: float32 for each channel, and a class."""


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Facts of a data set."""

    task: Task
    """Its channels and labels; without cases if none were read."""
    spacing: Sides
    """Voxel sides after preprocessing, in mm."""
    case_bytes: int | None = None
    """Bytes of all prepared training cases together; None if their sizes are unknown."""
    largest: tuple[int, int, int] | None = None
    """Sides of the largest case after preprocessing, in voxels."""
    source: str
    """Source of these facts."""


def load_facts(config: ExperimentConfig, channels: int | None = None, classes: int | None = None) -> DataFacts:
    """Return the known facts of a config's data set.

    Parameters
    ----------
    config : ExperimentConfig
        Config with its data and preprocessing.
    channels, classes : int, optional
        Channels of images, and classes of label maps with the background, instead of those of a data set.

    Raises
    ------
    DataError
        If the facts follow from a data set that is absent and unknown.
    """
    root = config.data.root
    if channels is not None and classes is not None:
        labels = {value: f"label {value}" if value else "background" for value in range(classes)}
        task = _make_task(root.name or "task", [f"channel {n}" for n in range(channels)], labels)
        task = replace(task, stage_labels=config.stage_labels)
        return DataFacts(task=task, spacing=_spacing_without_cases(config), source="--channels and --classes")
    if root.exists():
        task = read_task(config)
        known = _find_public(task.name)
        return _with_sizes(task, compute_spacing(config, task), known, f"the description in {root}")
    known = _find_public(root.name)
    if known is None:
        raise DataError(
            f"a network's channels and classes follow from the data set, but {root} does not exist; state them with "
            "--channels N --classes N (with the background), or name the data set with --set data.root=DIR"
        )
    labels = {int(value): name for value, name in known.labels.items()}
    task = replace(_make_task(known.name, known.modalities, labels), stage_labels=config.stage_labels)
    median = known.manifest["nnunet"]["fingerprint"]["median_spacing"]
    spacing = _spacing_without_cases(config, tuple(float(mm) for mm in median))
    return _with_sizes(task, spacing, known, f"the published facts of {known.name}")


def _make_task(name: str, modalities: Sequence[str], labels: dict[int, str]) -> Task:
    return Task(name=name, root=Path(name), modalities=tuple(modalities), labels=labels, training=(), test=())


def _find_public(name: str) -> PublicTask | None:
    try:
        return get_public_task(name)
    except DataError:
        return None  # the user's own data set


def _spacing_without_cases(config: ExperimentConfig, median: Sequence[float] = ISOTROPIC) -> Sides:
    """Return the voxel sides that the preprocessing names, else those of cases with sides ``median``."""
    steps = [component.spec() for component in config.preprocessing]
    affine = np.diag([*median, 1.0]) if depends_on_case(steps) else np.eye(4)
    return spacing_after(steps, affine)


def _with_sizes(task: Task, spacing: Sides, known: PublicTask | None, source: str) -> DataFacts:
    """Return the facts with the sizes of the cases, if they are published."""
    if known is None:
        return DataFacts(task=task, spacing=spacing, source=source)
    nnunet = known.manifest["nnunet"]
    resampled, at = nnunet["fingerprint"]["median_shape_resampled"], nnunet["spacing"]
    voxels = math.prod(side * mm / to for side, mm, to in zip(resampled, at, spacing, strict=True))
    largest = None
    stored = known.manifest.get("stored")  # smallest, median and largest
    if stored is not None and stored["spacing"][0] == stored["spacing"][-1]:  # else they may be of different cases
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
