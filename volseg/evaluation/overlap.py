"""Count voxels and overlap of a prediction and its reference per label, with nnU-Net's names; measure more on request.

One joint histogram of the two label maps gives every count of every label, exactly, in one pass over the voxels.
Measurements in mm use the box around each structure, several structures in parallel.
"""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from monai.data import MetaTensor
from numpy.typing import NDArray
from scipy.ndimage import find_objects
from torch import Tensor

from volseg.data.cases import list_values
from volseg.errors import DataError, GridError
from volseg.evaluation.scoring import VOLUMES, Scoring, read_spacing
from volseg.transforms.grid import Grid

METRICS = ("Dice", "IoU", "FN", "FP", "TN", "TP", "n_pred", "n_ref")
"""Metrics per label; counts are in voxels."""

LabelMap = Tensor | np.ndarray
Metrics = dict[str, float]
Places = NDArray[np.uint8] | NDArray[np.uint16]
"""Index of each voxel's value among the known values, ``(D, H, W)``."""

MOST_THREADS = 8

OF_UINT16 = 65_535
"""A larger unknown value, or a negative one, means that the file is an image, not a label map."""


def evaluate_case(
    prediction: LabelMap,
    label: LabelMap,
    labels: Mapping[Any, str],
    *,
    ignore: int | None = None,
    values: Collection[int] = (),
    labelled: Collection[int] | None = None,
    scoring: Scoring | None = None,
) -> dict[Any, Metrics]:
    """Compare a prediction with its reference on the reference's own grid.

    Parameters
    ----------
    prediction, label : Tensor or array
        ``(1, D, H, W)`` or ``(D, H, W)``, whole numbers (label files may store them as floats). If both are
        MetaTensors, their affines must agree as well.
    labels : mapping
        Name of each scored structure: a label value, or the values of a region. 0, the background, is not evaluated.
    ignore : int, optional
        Value of voxels of the reference that are not annotated and not counted.
    values : collection of int
        Further values that may occur but are not scored.
    labelled : collection of int, optional
        The annotated values of a partially labelled reference. The scores of structures with other values are NaN:
        these may be hidden in the background.
    scoring : Scoring, optional
        Further measurements, in mm, which need a MetaTensor as label. By default, only counts and overlap.

    Returns
    -------
    dict
        `METRICS` by key of ``labels``. ``Dice = 2 TP / (2 TP + FP + FN)``, ``IoU = TP / (TP + FP + FN)``: 0 if only one
        of the two has the label, NaN if neither has it, as in nnU-Net: finding nothing where nothing is should not
        raise a mean. Then the metrics of ``scoring``; its module documents them.

    Raises
    ------
    GridError
        For different shapes or affines.
    DataError
        For values that are not known whole numbers, or a label without the affine that ``scoring`` needs.

    Examples
    --------
    >>> case = evaluate_case(np.array([[[1, 1, 0]]]), np.array([[[1, 0, 0]]]), {1: "anterior"})
    >>> round(case[1]["Dice"], 4), case[1]["FP"]
    (0.6667, 1)
    >>> case = evaluate_case(np.array([[[1, 2, 0]]]), np.array([[[1, 1, 0]]]), {(1, 2): "whole", 2: "core"})
    >>> case[1, 2]["Dice"], case[2]["Dice"]
    (1.0, 0.0)
    """
    _check_grids(prediction, label)
    # Regions stay in their order, single values are sorted.
    keys = list(labels) if any(isinstance(key, tuple) for key in labels) else sorted(labels)
    structures = {key: list_values(key) for key in keys if key != 0}
    known = sorted({0, *values, *(value for of in structures.values() for value in of)})
    of_label = known if ignore is None else [*known, ignore]
    places = (_index_values(prediction, "prediction", known), _index_values(label, "label", of_label))
    joint = _count_pairs(*places, len(of_label))[: len(known), : len(known)]  # without ignored voxels
    members = {key: [known.index(value) for value in of] for key, of in structures.items()}
    judged = {key: labelled is None or set(of) <= set(labelled) for key, of in structures.items()}
    result = {
        key: _compute_metrics(joint, members[key]) if judged[key] else dict.fromkeys(METRICS, math.nan)
        for key in structures
    }
    if scoring is None:
        return result
    if not isinstance(label, MetaTensor):
        raise DataError("distances and volumes need an affine (voxel to mm), but the label has none; pass a MetaTensor")
    spacing, voxel_ml = read_spacing(label.affine)
    asked = {key: of for key, of in members.items() if judged[key]}
    further = _measure_structures(scoring, places, spacing, asked, None if ignore is None else len(known))
    nothing: Metrics = dict.fromkeys(scoring.names, math.nan)
    return {
        key: metrics | nothing | further.get(key, {}) | _compute_volumes(metrics, voxel_ml)
        for key, metrics in result.items()
    }


def _measure_structures(
    scoring: Scoring,
    places: tuple[Places, Places],
    spacing: Sequence[float] | None,
    members: Mapping[Any, list[int]],
    ignored: int | None,
) -> dict[Any, Metrics]:
    """Return the measurements of each structure in its box, in threads, since NumPy and SciPy release the GIL."""
    boxes = [find_objects(volume) for volume in places]  # of every value except the first, the background

    def measure(key: Any) -> Metrics:
        found = [of[place - 1] for of in boxes for place in members[key] if place <= len(of)]
        box = _join_boxes([each for each in found if each is not None])
        prediction, reference = (np.isin(volume[box], members[key]) for volume in places)
        unknown = None if ignored is None else places[1][box] == ignored
        return scoring.measure(key, prediction, reference, spacing, unknown)

    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        return dict(zip(members, threads.map(measure, members), strict=True))


def _join_boxes(boxes: Sequence[tuple[slice, ...]]) -> tuple[slice, ...]:
    """Return a box around boxes, with one more voxel on each side, which may be unknown; an empty box for none."""
    if not boxes:
        return (slice(0, 0),) * 3
    axes = zip(*boxes, strict=True)
    return tuple(slice(max(0, min(of.start for of in axis) - 1), max(of.stop for of in axis) + 1) for axis in axes)


def _compute_volumes(metrics: Metrics, voxel_ml: float) -> Metrics:
    predicted, reference = metrics["n_pred"] * voxel_ml, metrics["n_ref"] * voxel_ml
    return dict(zip(VOLUMES, (predicted, reference, predicted - reference), strict=True))


def _check_grids(prediction: LabelMap, label: LabelMap) -> None:
    if prediction.shape[-3:] != label.shape[-3:] or math.prod(prediction.shape) != math.prod(label.shape):
        raise GridError(
            f"prediction and label must have the same shape, got {tuple(prediction.shape)} and {tuple(label.shape)}; "
            "evaluate on the image's original grid"
        )
    if math.prod(label.shape) != math.prod(label.shape[-3:]):
        raise GridError(f"a label map has one channel, got {label.shape[0]}; evaluate them one by one")
    if isinstance(prediction, MetaTensor) and isinstance(label, MetaTensor):
        Grid.of(label).require_same(Grid.of(prediction), "label", "prediction")


def _index_values(label_map: LabelMap, name: str, known: list[int]) -> Places:
    """Return the index of each voxel's value in ``known``."""
    voxels = label_map.numpy(force=True) if isinstance(label_map, Tensor) else label_map
    voxels = voxels.reshape(voxels.shape[-3:])
    strange = len(known)
    # The table begins one value lower and ends one higher: smaller and larger values are clipped to its ends.
    table = np.full(max(known) + 3, strange, dtype=np.uint8 if strange <= 255 else np.uint16)
    table[np.add(known, 1)] = np.arange(strange)
    places = np.empty(voxels.shape, dtype=table.dtype)
    for plane, found in zip(voxels, places, strict=True):  # by planes: a whole volume in int64 would need gigabytes
        with np.errstate(invalid="ignore"):  # values that are not finite are not whole numbers
            whole = plane.astype(np.int64)
        if (whole != plane).any():
            raise DataError(f"{name} must contain whole numbers, got {plane[whole != plane].flat[0]:g}")
        table.take(whole + 1, mode="clip", out=found)
    if (values := np.unique(voxels[places == strange]).astype(np.int64)).size:
        if values[0] < 0 or values[-1] > OF_UINT16:
            raise DataError(f"{name} has values {voxels.min():.0f} to {voxels.max():.0f}: an image, not a label map")
        raise DataError(
            f"{name} has the label values {values[:5].tolist()}, but declared are {known}; correct the dataset.json"
        )
    return places


def _count_pairs(prediction: Places, label: Places, size: int) -> NDArray[np.int64]:
    """Return the number of voxels for each pair (label, predicted label)."""
    joint = np.zeros(size * size, dtype=np.int64)
    for predicted, true in zip(prediction, label, strict=True):
        joint += np.bincount((true.astype(np.intp) * size + predicted).ravel(), minlength=size * size)
    return joint.reshape(size, size)


def _compute_metrics(joint: NDArray[np.int64], places: list[int]) -> Metrics:
    both = int(joint[places][:, places].sum())
    num_predicted, num_reference = int(joint[:, places].sum()), int(joint[places].sum())
    only_predicted, only_reference = num_predicted - both, num_reference - both
    union = both + only_predicted + only_reference
    return {
        "Dice": 2 * both / (both + union) if union else math.nan,
        "IoU": both / union if union else math.nan,
        "FN": only_reference,
        "FP": only_predicted,
        "TN": int(joint.sum()) - union,
        "TP": both,
        "n_pred": num_predicted,
        "n_ref": num_reference,
    }
