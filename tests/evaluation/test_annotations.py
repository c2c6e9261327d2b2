"""Scores of regions, of sparse and of partial annotations, against nnU-Net's own way to count."""

import math

import numpy as np
import pytest
import torch

from volseg.errors import DataError
from volseg.evaluation.overlap import METRICS, evaluate_case
from volseg.evaluation.summary import EvaluatedCase, read_structure, read_summary, summarise, write_summary

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
