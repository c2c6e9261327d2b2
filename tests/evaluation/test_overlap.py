"""Dice and counts: of labels, of regions, of sparse and of partial annotations, against nnU-Net's own way to count."""

import math

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from volseg.errors import DataError, GridError
from volseg.evaluation.overlap import METRICS, evaluate_case
from volseg.evaluation.summary import EvaluatedCase, read_structure, read_summary, summarise, write_summary

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


REGIONS = {(1, 2, 4): "whole", (1, 4): "core", 4: "enhancing"}


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


@pytest.mark.parametrize("structures", [REGIONS, {1: "a", 2: "b", 4: "c"}, {3: "in neither"}])
@pytest.mark.parametrize("ignore", [None, 3, 14175])
def test_metrics_are_nnunets(structures, ignore):
    rng = np.random.default_rng(0)
    values = [0, 1, 2, 4, *([] if ignore is None else [ignore])]
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
    label = torch.tensor([[[0, 1, 0, 4]]])
    prediction = torch.tensor([[[2, 1, 1, 4]]])
    plain = evaluate_case(prediction, label, {1: "a", 2: "b", 4: "c"}, labelled=(1, 4))
    assert plain[1]["Dice"] == pytest.approx(2 / 3)
    assert plain[4]["Dice"] == 1
    assert all(math.isnan(value) for value in plain[2].values())
    regions = evaluate_case(prediction, label, REGIONS, labelled=(1, 4))
    assert math.isnan(regions[1, 2, 4]["Dice"])
    assert regions[1, 4]["Dice"] == pytest.approx(4 / 5)


def test_a_mean_is_over_the_cases_that_tell(tmp_path):
    labels = {1: "a", 2: "b"}
    first = evaluate_case(torch.tensor([[[1, 2]]]), torch.tensor([[[1, 2]]]), labels, labelled=(1,))
    second = evaluate_case(torch.tensor([[[1, 2]]]), torch.tensor([[[0, 2]]]), labels)
    summary = summarise([EvaluatedCase(metrics=first), EvaluatedCase(metrics=second)])
    assert summary["mean"]["1"]["Dice"] == 0.5
    assert summary["mean"]["2"]["Dice"] == 1
    assert summary["foreground_mean"]["Dice"] == 0.75
    again = read_summary(write_summary(summary, tmp_path / "summary.json"))
    assert math.isnan(again["metric_per_case"][0]["metrics"]["2"]["TP"])


def test_a_summary_names_regions_as_nnunet_does(tmp_path):
    label = torch.tensor([[[0, 1, 2, 4]]])
    summary = summarise([EvaluatedCase(metrics=evaluate_case(label, label, REGIONS))])
    path = write_summary(summary, tmp_path / "summary.json")
    assert list(read_summary(path)["mean"]) == [str((1, 2, 4)), str((1, 4)), str(4)]
    assert [read_structure(key) for key in summary["mean"]] == list(REGIONS)


@pytest.mark.parametrize("key", ["whole", "(1, x)", ""])
def test_other_keys_are_refused(key):
    with pytest.raises(DataError, match="a summary's keys are label values"):
        read_structure(key)


def test_the_value_to_ignore_is_never_predicted():
    with pytest.raises(DataError, match=r"prediction has the label values \[3\]"):
        evaluate_case(torch.tensor([[[3]]]), torch.tensor([[[3]]]), {1: "a"}, ignore=3)
