"""Dice and counts of labels, regions, sparse and partial annotations, against nnU-Net's counting."""

import math

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from volseg.errors import DataError, GridError
from volseg.evaluation.overlap import METRICS, evaluate_case
from volseg.evaluation.scoring import Scoring

LABELS = {0: "background", 1: "anterior", 2: "posterior"}


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
    with pytest.raises(GridError, match=r"prediction is up to 2 mm away from its label"):
        evaluate_case(here, there, {1: "a"})


@pytest.mark.parametrize(
    ("prediction", "error", "message"),
    [
        (torch.zeros(1, 2, 2, 3), GridError, r"same shape, got \(1, 2, 2, 3\) and \(1, 2, 2, 2\)"),
        (torch.zeros(2, 2, 2, 2), GridError, "must have the same shape"),
        (torch.full((1, 2, 2, 2), 9), DataError, r"prediction has the label values \[9\]"),  # what is ignored
        (torch.full((1, 2, 2, 2), 0.5), DataError, "prediction must contain whole numbers, got 0.5"),
        (torch.full((1, 2, 2, 2), float("nan")), DataError, "prediction must contain whole numbers, got nan"),
        (torch.full((1, 2, 2, 2), 3), DataError, r"label values \[3\], but declared are \[0, 1, 2\]; correct"),
        (torch.full((1, 2, 2, 2), -1), DataError, "an image, not a label map"),
        (torch.full((1, 2, 2, 2), 70000), DataError, "an image, not a label map"),
    ],
)
def test_what_cannot_be_compared_is_refused(prediction, error, message):
    with pytest.raises(error, match=message):
        evaluate_case(prediction, torch.zeros(1, 2, 2, 2), LABELS, ignore=9)


def test_other_labels_are_refused():
    with pytest.raises(GridError, match="one channel, got 2"):
        evaluate_case(torch.ones(2, 2, 2, 2), torch.ones(2, 2, 2, 2), LABELS)
    with pytest.raises(DataError, match=r"need an affine .*, but the label has none"):
        evaluate_case(np.ones((2, 2, 2)), np.ones((2, 2, 2)), LABELS, scoring=Scoring())


REGIONS = {(1, 2, 255): "whole", (1, 255): "core", 255: "enhancing"}


def nnunet(reference, prediction, structure, ignore):
    """``compute_metrics`` of nnU-Net 2.8.1's ``evaluate_predictions``."""
    mask_ref, mask_pred = (np.isin(volume, structure) for volume in (reference, prediction))
    use_mask = reference != ignore
    tp = np.sum((mask_ref & mask_pred) & use_mask)
    fp = np.sum((~mask_ref & mask_pred) & use_mask)
    fn = np.sum((mask_ref & ~mask_pred) & use_mask)
    tn = np.sum((~mask_ref & ~mask_pred) & use_mask)
    dice, iou = (2 * tp / (2 * tp + fp + fn), tp / (tp + fp + fn)) if tp + fp + fn else (np.nan, np.nan)
    counts = {"FP": fp, "TP": tp, "FN": fn, "TN": tn, "n_pred": fp + tp, "n_ref": fn + tp}
    return {"Dice": dice, "IoU": iou, **counts}


@pytest.mark.parametrize("structures", [REGIONS, {1: "a", 2: "b", 255: "c"}, {3: "in neither"}])
@pytest.mark.parametrize("ignore", [None, 3, 14175])
def test_metrics_are_nnunets(structures, ignore):
    rng = np.random.default_rng(0)
    values = [0, 1, 2, 255, *([] if ignore is None else [ignore])]
    reference, prediction = rng.choice(values, (1, 6, 7, 8)), rng.choice(values[:4], (1, 6, 7, 8))
    if ignore == 3 and 3 in structures:
        return
    found = evaluate_case(
        torch.tensor(prediction),
        torch.tensor(reference, dtype=torch.float32),
        structures,
        ignore=ignore,
        values=values[:4],
    )
    assert list(found) == list(structures)
    for structure, metrics in found.items():
        assert tuple(metrics) == METRICS
        expected = nnunet(reference, prediction, structure, -1 if ignore is None else ignore)
        assert metrics == pytest.approx(expected, nan_ok=True, abs=0, rel=1e-15)


def test_what_was_not_looked_for_has_no_score():
    label = torch.tensor([[[0, 1, 0, 255]]])
    prediction = torch.tensor([[[2, 1, 1, 255]]])
    plain = evaluate_case(prediction, label, {1: "a", 2: "b", 255: "c"}, labelled=(1, 255))
    assert plain[1]["Dice"] == pytest.approx(2 / 3)
    assert plain[255]["Dice"] == 1
    assert all(math.isnan(value) for value in plain[2].values())
    regions = evaluate_case(prediction, label, REGIONS, labelled=(1, 255))
    assert math.isnan(regions[1, 2, 255]["Dice"])
    assert regions[1, 255]["Dice"] == pytest.approx(4 / 5)
