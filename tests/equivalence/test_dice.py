"""Our Dice and IoU against MONAI's metrics, our way back to the file's grid against MONAI's Invertd."""

import math

import pytest
import torch
from monai.data import MetaTensor
from monai.metrics import DiceMetric, MeanIoU
from monai.networks.utils import one_hot

from volseg.evaluation.overlap import evaluate_case

LABELS = {0: "background", 1: "anterior", 2: "posterior", 3: "never there"}


def label_maps(count=4, shape=(12, 13, 14)):
    """Return pairs of label maps that share most voxels; label 3 occurs in predictions only, in the last in neither."""
    generator = torch.Generator().manual_seed(0)
    for index in range(count):
        label = torch.randint(0, 3, (1, *shape), generator=generator)
        redrawn = torch.rand(label.shape, generator=generator) < 0.3
        high = 3 if index == count - 1 else 4
        yield torch.where(redrawn, torch.randint(0, high, label.shape, generator=generator), label), label


@pytest.mark.parametrize(("name", "metric"), [("Dice", DiceMetric), ("IoU", MeanIoU)])
def test_overlap_is_monais(name, metric):
    for prediction, label in label_maps():
        both = [one_hot(each[None], num_classes=4) for each in (prediction, label)]
        [theirs] = metric(include_background=False, reduction="none")(*both).tolist()
        ours = evaluate_case(prediction, label, LABELS)
        for value, expected in enumerate(theirs, start=1):
            if label.eq(value).any():
                assert ours[value][name] == pytest.approx(expected, abs=1e-6)  # MONAI counts in float32
            else:
                # MONAI ignores every case without the label; nnU-Net and we give 0 to a label that is invented.
                assert math.isnan(expected)
                invented = prediction.eq(value).any()
                assert ours[value][name] == 0 if invented else math.isnan(ours[value][name])


def test_dice_is_nnunets():
    """The formulas of nnunetv2's ``compute_metrics``, on boolean masks."""
    for prediction, label in label_maps():
        for value, ours in evaluate_case(MetaTensor(prediction), label.float(), LABELS).items():
            there, found = label == value, prediction == value
            tp, fp = int((there & found).sum()), int((~there & found).sum())
            fn, tn = int((there & ~found).sum()), int((~there & ~found).sum())
            nothing = tp + fp + fn == 0
            expected = {
                "Dice": math.nan if nothing else 2 * tp / (2 * tp + fp + fn),
                "IoU": math.nan if nothing else tp / (tp + fp + fn),
                "FN": fn,
                "FP": fp,
                "TN": tn,
                "TP": tp,
                "n_pred": fp + tp,
                "n_ref": fn + tp,
            }
            assert ours == pytest.approx(expected, abs=1e-12, nan_ok=True)  # float64, one division
