"""Voxel counts and overlap of a prediction with its reference, per label, with nnU-Net's names.

One joint histogram of the two label maps gives every count of every label, exactly, in one pass over the voxels.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Structure
from volseg.errors import DataError, GridError
from volseg.transforms.grid import Grid

__all__ = ["METRICS", "LabelMap", "Metrics", "evaluate_case"]

METRICS = ("Dice", "IoU", "FN", "FP", "TN", "TP", "n_pred", "n_ref")
"""What is measured per label; counts are voxels."""

LabelMap = Tensor | np.ndarray
Metrics = dict[str, float]

OF_UINT16 = 65_535
"""An unknown value beyond it, or below 0, means that the file is an image, not a label map."""


def evaluate_case(
    prediction: LabelMap,
    label: LabelMap,
    labels: Mapping[Any, str],
    *,
    ignore: int | None = None,
    values: Collection[int] = (),
    labelled: Collection[int] | None = None,
) -> dict[Any, Metrics]:
    """Compare a prediction with its reference on the reference's own grid.

    Parameters
    ----------
    prediction, label : Tensor or array
        ``(1, D, H, W)`` or ``(D, H, W)``, whole numbers (label files may store them as floats). Where both are
        MetaTensors their affines must agree as well.
    labels : mapping
        What is scored to its name: a label value, or the values of a region. 0, the background, is not evaluated.
    ignore : int, optional
        Value of the reference where nothing is counted, because nobody annotated it.
    values : collection of int
        Further values that may occur, which nothing is scored of.
    labelled : collection of int, optional
        The values that were looked for in the reference, where these are not all. What has others has no score, NaN:
        it may be hidden in the background.

    Returns
    -------
    dict
        The keys of ``labels`` to `METRICS`. ``Dice = 2 TP / (2 TP + FP + FN)``, ``IoU = TP / (TP + FP + FN)``: 0 where
        only one of the two has the label, NaN where neither has it, as in nnU-Net: there is nothing to find, and
        finding nothing is no merit that should raise a mean.

    Raises
    ------
    GridError
        For different shapes or affines.
    DataError
        For values that are not whole numbers or not among those known.

    Examples
    --------
    >>> case = evaluate_case(torch.tensor([[[1, 1, 0]]]), torch.tensor([[[1, 0, 0]]]), {1: "anterior"})
    >>> round(case[1]["Dice"], 4), case[1]["FP"]
    (0.6667, 1)
    >>> case = evaluate_case(torch.tensor([[[1, 2, 0]]]), torch.tensor([[[1, 1, 0]]]), {(1, 2): "whole", 2: "core"})
    >>> case[1, 2]["Dice"], case[2]["Dice"]
    (1.0, 0.0)
    """
    _check_grids(prediction, label)
    # Regions in their own order, single values in that of their size.
    keys = list(labels) if any(isinstance(key, tuple) for key in labels) else sorted(labels)
    structures = {key: _list_values(key) for key in keys if key != 0}
    known = sorted({0, *values, *(value for of in structures.values() for value in of)})
    of_label = known if ignore is None else [*known, ignore]
    joint = _count_pairs(
        _index_values(prediction, "prediction", known), _index_values(label, "label", of_label), len(of_label)
    )
    joint = joint[: len(known), : len(known)]  # without the rows of what is ignored
    result = {}
    for key, of in structures.items():
        judged = labelled is None or set(of) <= set(labelled)
        places = [known.index(value) for value in of]
        result[key] = _compute_metrics(joint, places) if judged else dict.fromkeys(METRICS, math.nan)
    return result


def _list_values(structure: Structure) -> tuple[int, ...]:
    return structure if isinstance(structure, tuple) else (structure,)


def _check_grids(prediction: LabelMap, label: LabelMap) -> None:
    if prediction.shape[-3:] != label.shape[-3:] or math.prod(prediction.shape) != math.prod(label.shape):
        raise GridError(
            f"prediction and label must have the same shape, got {tuple(prediction.shape)} and {tuple(label.shape)}; "
            "evaluate on the image's original grid"
        )
    if isinstance(prediction, MetaTensor) and isinstance(label, MetaTensor):
        Grid.of(label).require_same(Grid.of(prediction), "label", "prediction")


def _index_values(label_map: LabelMap, name: str, known: list[int]) -> Tensor:
    """Return the place of each voxel's value in ``known``, a flat int64 tensor."""
    values = (label_map.as_tensor() if isinstance(label_map, MetaTensor) else torch.as_tensor(label_map)).flatten()
    whole = values.long()
    if values.is_floating_point() and not torch.equal(whole.to(values.dtype), values):
        raise DataError(f"{name} must hold whole numbers, got {values[whole != values][0].item():g}")
    ordered, order = torch.tensor(known, device=whole.device).sort()
    place = torch.searchsorted(ordered, whole).clamp_(max=len(known) - 1)
    is_strange = ordered[place] != whole
    if (strange := whole[is_strange].unique()).numel():
        if strange[0] < 0 or strange[-1] > OF_UINT16:
            raise DataError(f"{name} holds {whole.min().item()} to {whole.max().item()}: an image, not a label map")
        raise DataError(
            f"{name} has the label values {strange[:5].tolist()}, declared are {known}; mend the dataset.json"
        )
    return order[place]


def _count_pairs(prediction: Tensor, label: Tensor, size: int) -> Tensor:
    """Return the number of voxels for each pair (label, predicted label)."""
    pairs = label * size + prediction.to(label.device)
    return torch.bincount(pairs, minlength=size * size).reshape(size, size).cpu()


def _compute_metrics(joint: Tensor, places: list[int]) -> Metrics:
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
