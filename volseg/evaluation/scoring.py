"""Measure structures beyond voxel counts: distances between surfaces, volumes in ml, lesions.

An undefined measurement is not a number, which a mean must not hide:

======================  ==========  ==========  ==============  ==========
the structure is in     Dice, IoU   NSD         HD95, HD, ASSD  lesion_F1
======================  ==========  ==========  ==============  ==========
both                    as defined  as defined  as defined      as defined
one of the two          0           0           infinite        0
neither                 NaN         NaN         NaN             NaN
======================  ==========  ==========  ==============  ==========

An infinite distance is left out of the mean and counted separately; the median includes it as the largest value. NaN is
left out of both: there was nothing to find, and nothing was found.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import label as label_components
from torch import Tensor

from volseg.config.catalogue import list_public_tasks
from volseg.config.nearest import did_you_mean
from volseg.data.cases import Task
from volseg.errors import ConfigError, DataError
from volseg.evaluation.surfaces import DISTANCES, measure_surfaces
from volseg.transforms.grid import measure_sides

# Match lesions, the connected components of prediction and reference, one to one. Components are joined by faces, edges
# and corners (26 neighbours). A predicted and a true lesion match if their intersection over union is at least
# `MINIMUM_OVERLAP`; pairs match in the order of their overlap, largest first, each lesion once. So one blob over three
# lesions finds one of them; if a lesion is predicted in three pieces, one matches and two are false positives.
#
# .. [1] Kofler et al., Panoptica: instance-wise evaluation of 3D semantic and instance segmentation maps,
#        arXiv:2312.02608: its approximation by connected components and ``NaiveThresholdMatching``.
# .. [2] Baumgartner et al., nnDetection: a self-configuring method for medical object detection, MICCAI 2021,
#        doi:10.1007/978-3-030-87240-3_51: an overlap of 0.1 in 3D, where lesions do not lie over each other and their
#        place counts more than their outline.


LESIONS = ("lesion_F1", "lesion_precision", "lesion_recall", "lesion_TP", "lesion_FP", "lesion_FN")

MINIMUM_OVERLAP = 0.1

Mask = NDArray[np.bool_]


def match_lesions(prediction: Mask, reference: Mask, minimum_overlap: float = MINIMUM_OVERLAP) -> dict[str, float]:
    """Match the lesions of two structures ``(D, H, W)``; return `LESIONS`, with NaN for a share of zero lesions.

    Examples
    --------
    >>> reference = np.zeros((1, 1, 9), dtype=bool)
    >>> reference[..., 0:3] = reference[..., 6:9] = True
    >>> prediction = np.zeros((1, 1, 9), dtype=bool)
    >>> prediction[..., 1:3] = True
    >>> found = match_lesions(prediction, reference)
    >>> found["lesion_TP"], found["lesion_FP"], found["lesion_FN"], found["lesion_recall"]
    (1, 0, 1, 0.5)
    """
    neighbours = np.ones((3, 3, 3), dtype=bool)
    (predicted, num_predicted), (true, num_true) = (
        label_components(mask, structure=neighbours) for mask in (prediction, reference)
    )
    sizes_predicted, sizes_true = (np.bincount(lesions.ravel()) for lesions in (predicted, true))
    is_shared = prediction & reference
    pairs, shared = np.unique(np.stack([predicted[is_shared], true[is_shared]]), axis=1, return_counts=True)
    overlaps = shared / (sizes_predicted[pairs[0]] + sizes_true[pairs[1]] - shared)
    taken_predicted: set[int] = set()
    taken_true: set[int] = set()
    # Stable: of equal overlaps, the first lesion in the volume matches, on every machine.
    for place in np.argsort(-overlaps, kind="stable"):
        one, other = pairs[:, place].tolist()
        if overlaps[place] >= minimum_overlap and one not in taken_predicted and other not in taken_true:
            taken_predicted.add(one)
            taken_true.add(other)
    matched = len(taken_true)
    shares = ((2 * matched, num_predicted + num_true), (matched, num_predicted), (matched, num_true))
    rates = [part / whole if whole else math.nan for part, whole in shares]
    return dict(zip(LESIONS, (*rates, matched, num_predicted - matched, num_true - matched), strict=True))


# What is measured of each structure.


logger = logging.getLogger(__name__)

VOLUMES = ("volume_pred_ml", "volume_ref_ml", "volume_diff_ml")
"""Volume of the prediction, of the reference, and their difference."""

MOST_SKEW = 1e-3
"""Cosine of the angle between two axes above which voxels are not boxes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """Measurements beyond counts and overlap.

    Raises
    ------
    DataError
        For an invalid tolerance or overlap.
    """

    distances: bool = True
    """Measure HD95, HD and ASSD in mm; NSD if ``tolerances`` has the structure."""
    tolerances: Mapping[Any, float] = field(default_factory=dict)
    """Largest distance (mm) at which two surfaces agree, by structure."""
    lesions: Collection[Any] = ()
    """Structures that are lesions, to be matched one by one."""
    lesion_overlap: float = MINIMUM_OVERLAP

    def __post_init__(self) -> None:
        if wrong := {key: mm for key, mm in self.tolerances.items() if not 0 <= mm < math.inf}:
            raise DataError(f"a tolerance of NSD must be a distance in mm, at least 0, got {wrong}")
        if not 0 < self.lesion_overlap <= 1:
            raise DataError(f"the overlap of matching lesions must be in (0, 1], got {self.lesion_overlap}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of each structure's metrics; a metric that does not apply to a structure is NaN."""
        distances = (*DISTANCES, *(("NSD",) if self.tolerances else ())) if self.distances else ()
        return (*distances, *VOLUMES, *(LESIONS if self.lesions else ()))

    def describe(self) -> dict[str, Any]:
        """Return the rules of the measurement, for comparisons with other numbers, as plain values for JSON."""
        surfaces = {
            "surface": "marching-cubes surface elements (google-deepmind/surface-distance)",
            "percentiles": "HD95: the larger of the two directed ones, weighted by area",
            "tolerance_mm": {str(key): mm for key, mm in self.tolerances.items()},
        }
        lesions = {"lesions": [str(key) for key in self.lesions], "lesion_overlap": self.lesion_overlap}
        return {**(surfaces if self.distances else {}), **(lesions if self.lesions else {})}

    def measure(
        self, key: Any, prediction: Mask, reference: Mask, spacing: Sequence[float] | None, ignored: Mask | None
    ) -> dict[str, float]:
        """Return the measurements of one structure.

        Parameters
        ----------
        key
            Key of the structure.
        prediction, reference : array of bool
            ``(D, H, W)``, a box around the structure in both, with the voxels next to it.
        spacing : sequence of float or None
            Sides of a voxel in mm; None if voxels are not boxes: surfaces are then not measured.
        ignored : array of bool or None
            Voxels without annotation, which are left out.
        """
        if ignored is not None:
            prediction, reference = prediction & ~ignored, reference & ~ignored
        measured: dict[str, float] = dict.fromkeys(self.names, math.nan)
        if self.distances:
            measured |= self._measure_surfaces(key, prediction, reference, spacing, ignored)
        if key in self.lesions:
            measured |= match_lesions(prediction, reference, self.lesion_overlap)
        return measured

    def _measure_surfaces(
        self, key: Any, prediction: Mask, reference: Mask, spacing: Sequence[float] | None, ignored: Mask | None
    ) -> dict[str, float]:
        found = bool(prediction.any()), bool(reference.any())
        if not any(found):
            return {}
        if not all(found):
            missed = dict.fromkeys(DISTANCES, math.inf)
            return missed | ({"NSD": 0.0} if key in self.tolerances else {})
        if spacing is None:
            return {}
        distances = measure_surfaces(prediction, reference, spacing, ignored=ignored)
        return {} if distances is None else distances.metrics(self.tolerances.get(key))


def choose_scoring(
    structures: Mapping[Any, str],
    task_name: str,
    *,
    distances: bool = True,
    tolerance: float | Mapping[str, float] | None = None,
    lesions: Collection[str] = (),
    lesion_overlap: float = MINIMUM_OVERLAP,
) -> Scoring:
    """Return the measurements of structures, selected by name.

    Parameters
    ----------
    structures : mapping
        Name of each scored structure.
    task_name : str
        Task whose manifest may have the tolerance, if none is given.
    distances, tolerance, lesions, lesion_overlap
        See `volseg.config.schema.EvaluationConfig`.

    Raises
    ------
    ConfigError
        For a name that no structure has.
    """
    keys = {name: key for key, name in structures.items() if key != 0}
    if tolerance is None:
        tolerance = get_tolerance(task_name)
    by_name = (
        tolerance if isinstance(tolerance, Mapping) else {} if tolerance is None else dict.fromkeys(keys, tolerance)
    )
    for kind, named in (("a tolerance of NSD", by_name), ("lesions", lesions)):
        if strange := [name for name in named if name not in keys]:
            raise ConfigError(f"{kind}: no label is called {strange[0]!r}; {did_you_mean(strange[0], keys)}")
    return Scoring(
        distances=distances,
        tolerances={keys[name]: mm for name, mm in by_name.items()},
        lesions=tuple(keys[name] for name in lesions),
        lesion_overlap=lesion_overlap,
    )


def read_spacing(affine: Tensor) -> tuple[tuple[float, float, float] | None, float]:
    """Return the sides of a voxel in mm (None if it is not a box), and its volume in ml."""
    axes = affine[:3, :3].double()
    sides = axes.norm(dim=0)
    skew = ((axes / sides).T @ (axes / sides)).fill_diagonal_(0).abs().max()
    if skew > MOST_SKEW:
        logger.warning("voxels are sheared (cosine between axes: %.3g), so surfaces are not measured", float(skew))
        return None, abs(float(axes.det())) / 1000
    spacing = measure_sides(affine)
    return spacing, math.prod(spacing) / 1000


# Largest distance (mm) at which two surfaces agree: the tolerance of a task's NSD, if its manifest has one. A task
# without a manifest has no default: only its annotators know how exactly a structure can be outlined, and the NSD
# depends on the tolerance.


def get_tolerance(task_name: str) -> float | None:
    """Return the tolerance in mm of a public task's NSD, by the task's name; None for another task.

    >>> get_tolerance("Task04_Hippocampus"), get_tolerance("mine")
    (1.0, None)
    """
    known = {task.name: task.manifest for task in list_public_tasks()}
    return float(known[task_name]["nsd_tolerance"]["mm"]) if task_name in known else None


def published_results(task: Task) -> list[dict[str, Any]]:
    """Return the published results of a task from its manifest; none without a manifest, or if the labels differ.

    Each has ``method``, ``evaluation`` (its cases, such as ``5-fold cross-validation`` or ``challenge test set``),
    ``num_cases`` (those with labels for a cross-validation, else those of the test set), ``dice`` (label value to mean
    Dice) and ``source``. Dice of merged or renumbered labels is not comparable: values and names of the labels must be
    the manifest's, except for case, since tasks are often rewritten by hand.
    """
    # Searched in the existing manifests: a task's name is from its folder or its dataset.json, and must not be used as
    # a path.
    manifest = next((known.manifest for known in list_public_tasks() if known.name == task.name), None)
    if manifest is None:
        return []
    scored = {0: task.labels[0], **task.structures}  # regions are other structures, even with equal names
    ours, theirs = ({key: name.casefold() for key, name in of.items()} for of in (scored, manifest["labels"]))
    if ours != theirs:
        logger.warning(
            "the published results of %s are for the labels %s, but this task has %s, so they are not shown",
            task.name,
            manifest["labels"],
            scored,
        )
        return []
    counts = {True: manifest["num_training"], False: manifest["num_test"]}
    keys = ("method", "evaluation", "dice", "source")
    return [
        {**{key: row[key] for key in keys}, "num_cases": counts["cross-validation" in row["evaluation"]]}
        for row in manifest["published"]
    ]
