"""Voxel counts and overlap of a prediction with its reference, per label, with nnU-Net's names.

One joint histogram of the two label maps gives every count of every label, exactly, in one pass over the voxels.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.errors import DataError, GridError
from volseg.transforms.grid import Grid

__all__ = ["METRICS", "LabelMap", "Metrics", "evaluate_case"]

METRICS = ("Dice", "IoU", "FN", "FP", "TN", "TP", "n_pred", "n_ref")
"""What is measured per label; counts are voxels."""

LabelMap = Tensor | np.ndarray
Metrics = dict[str, float]

MOST_VALUES = 1024
"""Label values beyond this mean that the file is an image, not a label map."""


def evaluate_case(prediction: LabelMap, label: LabelMap, labels: Mapping[int, str]) -> dict[int, Metrics]:
    """Compare a prediction with its reference on the reference's own grid.

    Parameters
    ----------
    prediction, label : Tensor or array
        ``(1, D, H, W)`` or ``(D, H, W)``, whole numbers (label files may store them as floats). Where both are
        MetaTensors their affines must agree as well.
    labels : mapping
        Label value to name. 0, the background, is not evaluated.

    Returns
    -------
    dict
        Label value to `METRICS`. ``Dice = 2 TP / (2 TP + FP + FN)``, ``IoU = TP / (TP + FP + FN)``: 0 where only one
        of the two has the label, NaN where neither has it, as in nnU-Net: there is nothing to find, and finding
        nothing is no merit that should raise a mean.

    Raises
    ------
    GridError
        For different shapes or affines.
    DataError
        For values that are not whole numbers or not in ``labels``.

    Examples
    --------
    >>> case = evaluate_case(torch.tensor([[[1, 1, 0]]]), torch.tensor([[[1, 0, 0]]]), {1: "anterior"})
    >>> round(case[1]["Dice"], 4), case[1]["FP"]
    (0.6667, 1)
    """
    _check_grids(prediction, label)
    known = {0, *labels}
    joint = _count_pairs(
        _flatten_values(prediction, "prediction", known), _flatten_values(label, "label", known), max(known) + 1
    )
    return {value: _compute_metrics(joint, value) for value in sorted(known - {0})}


def _check_grids(prediction: LabelMap, label: LabelMap) -> None:
    if prediction.shape[-3:] != label.shape[-3:] or math.prod(prediction.shape) != math.prod(label.shape):
        raise GridError(
            f"prediction and label must have the same shape, got {tuple(prediction.shape)} and {tuple(label.shape)}; "
            "evaluate on the image's original grid"
        )
    if isinstance(prediction, MetaTensor) and isinstance(label, MetaTensor):
        Grid.of(label).require_same(Grid.of(prediction), "label", "prediction")


def _flatten_values(label_map: LabelMap, name: str, known: set[int]) -> Tensor:
    """Return the values of a label map as a flat int64 tensor, all of them ``known``."""
    values = (label_map.as_tensor() if isinstance(label_map, MetaTensor) else torch.as_tensor(label_map)).flatten()
    whole = values.long()
    if values.is_floating_point() and not torch.equal(whole.to(values.dtype), values):
        raise DataError(f"{name} must hold whole numbers, got {values[whole != values][0].item():g}")
    if whole.min() < 0 or whole.max() >= MOST_VALUES:
        raise DataError(f"{name} holds {whole.min().item()} to {whole.max().item()}: an image, not a label map")
    if unknown := sorted(set(torch.bincount(whole).nonzero().flatten().tolist()) - known):
        raise DataError(f"{name} has the label values {unknown}, declared are {sorted(known)}; mend the dataset.json")
    return whole


def _count_pairs(prediction: Tensor, label: Tensor, size: int) -> Tensor:
    """Return the number of voxels for each pair (label, predicted label)."""
    pairs = label * size + prediction.to(label.device)
    return torch.bincount(pairs, minlength=size * size).reshape(size, size).cpu()


def _compute_metrics(joint: Tensor, value: int) -> Metrics:
    both = int(joint[value, value])
    num_predicted, num_reference = int(joint[:, value].sum()), int(joint[value].sum())
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
