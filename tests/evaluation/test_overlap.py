import math

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from volseg.errors import DataError, GridError
from volseg.evaluation.overlap import METRICS, evaluate_case

LABELS = {0: "background", 1: "anterior", 2: "posterior"}


def test_counts_of_a_case_small_enough_to_count_by_hand():
    label = torch.tensor([[[[0, 1, 1, 2, 2, 2]]]])
    prediction = torch.tensor([[[[1, 1, 1, 1, 2, 0]]]])
    metrics = evaluate_case(prediction, label, LABELS)
    assert list(metrics) == [1, 2]
    assert tuple(metrics[1]) == METRICS
    assert metrics[1] == {"Dice": 4 / 6, "IoU": 0.5, "FN": 0, "FP": 2, "TN": 2, "TP": 2, "n_pred": 4, "n_ref": 2}
    assert metrics[2] == {"Dice": 0.5, "IoU": 1 / 3, "FN": 2, "FP": 0, "TN": 3, "TP": 1, "n_pred": 1, "n_ref": 3}


def test_label_in_neither_is_nan_and_in_one_of_them_zero():
    nothing, something = torch.zeros(1, 2, 2, 2), torch.ones(1, 2, 2, 2)
    assert math.isnan(evaluate_case(nothing, nothing, {1: "a"})[1]["Dice"])
    assert evaluate_case(something, nothing, {1: "a"})[1]["Dice"] == 0
    assert evaluate_case(nothing, something, {1: "a"})[1]["IoU"] == 0


def test_label_files_may_store_floats_and_arrays_may_lack_the_channel():
    label = np.array([[[0.0, 1.0, 2.0]]], dtype=np.float32)
    prediction = torch.tensor([[[[0, 1, 2]]]], dtype=torch.uint8)
    assert all(metrics["Dice"] == 1 for metrics in evaluate_case(prediction, label, LABELS).values())


def test_labels_need_not_be_consecutive():
    label = torch.tensor([[[0, 4, 255]]])
    assert evaluate_case(label, label, {4: "liver", 255: "cancer"})[255]["TP"] == 1


def test_counts_are_exact_beyond_float32():
    """2**24 + 1 voxels: the first count that float32 cannot hold."""
    label = torch.ones(1, 1, 1, 2**24 + 1, dtype=torch.uint8)
    assert evaluate_case(label, label, {1: "all"})[1]["TP"] == 2**24 + 1


def test_rounded_affines_agree_and_shifted_ones_do_not():
    here = MetaTensor(torch.zeros(1, 3, 3, 3), affine=torch.eye(4, dtype=torch.float64))
    there = here.clone()
    there.affine[0, 3] = 1e-3
    evaluate_case(here, there, {1: "a"})
    there.affine[0, 3] = 2
    with pytest.raises(GridError, match=r"prediction lies up to 2 mm away from its label"):
        evaluate_case(here, there, {1: "a"})


@pytest.mark.parametrize(
    ("prediction", "error", "message"),
    [
        (torch.zeros(1, 2, 2, 3), GridError, r"same shape, got \(1, 2, 2, 3\) and \(1, 2, 2, 2\)"),
        (torch.zeros(2, 2, 2, 2), GridError, "must have the same shape"),
        (torch.full((1, 2, 2, 2), 0.5), DataError, "prediction must hold whole numbers, got 0.5"),
        (torch.full((1, 2, 2, 2), float("nan")), DataError, "prediction must hold whole numbers, got nan"),
        (torch.full((1, 2, 2, 2), 3), DataError, r"label values \[3\], declared are \[0, 1, 2\]; correct"),
        (torch.full((1, 2, 2, 2), -1), DataError, "an image, not a label map"),
        (torch.full((1, 2, 2, 2), 70000), DataError, "an image, not a label map"),
    ],
)
def test_what_cannot_be_compared_is_refused(prediction, error, message):
    with pytest.raises(error, match=message):
        evaluate_case(prediction, torch.zeros(1, 2, 2, 2), LABELS)
