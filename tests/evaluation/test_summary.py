import math
import os
from pathlib import Path

import pytest
import torch
from monai.data import MetaTensor

from volseg.errors import DataError, GridError
from volseg.evaluation.overlap import METRICS, evaluate_case
from volseg.evaluation.summary import EvaluatedCase, evaluate_files, read_summary, summarise, write_summary
from volseg.inference.writing import write_prediction

LABELS = {1: "anterior", 2: "posterior", 3: "never there"}


def case_of(prediction, label, name) -> EvaluatedCase:
    metrics = evaluate_case(torch.tensor([[prediction]]), torch.tensor([[label]]), LABELS)
    return EvaluatedCase(metrics=metrics, prediction_file=Path("pred") / name, reference_file=f"ref/{name}")


@pytest.fixture
def summary():
    cases = [
        case_of([1, 1, 2, 0], [1, 1, 2, 2], "a.nii.gz"),  # Dice 1 and 2/3
        case_of([1, 0, 0, 0], [1, 1, 0, 0], "b.nii.gz"),  # Dice 2/3 and nothing to find
    ]
    return summarise(cases)


def test_summary_has_nnunets_shape(summary):
    assert list(summary) == ["foreground_mean", "mean", "metric_per_case"]
    assert list(summary["mean"]) == ["1", "2", "3"]
    assert set(summary["foreground_mean"]) == set(summary["mean"]["1"]) == set(METRICS)
    first = summary["metric_per_case"][0]
    assert list(first) == ["metrics", "prediction_file", "reference_file"]
    assert (first["prediction_file"], first["reference_file"]) == (os.path.join("pred", "a.nii.gz"), "ref/a.nii.gz")
    assert first["metrics"]["2"]["FN"] == 1


def test_means_leave_out_what_was_not_there(summary):
    assert summary["mean"]["1"]["Dice"] == pytest.approx((1 + 2 / 3) / 2)
    assert summary["mean"]["2"]["Dice"] == pytest.approx(2 / 3)  # the second case has no label 2
    assert math.isnan(summary["mean"]["3"]["Dice"])
    assert summary["foreground_mean"]["Dice"] == pytest.approx((5 / 6 + 2 / 3) / 2)
    assert summary["mean"]["2"]["n_ref"] == 1  # counts are never absent: 2 and 0
    assert summary["foreground_mean"]["TN"] == pytest.approx((2 + 3 + 4) / 3)


def test_summary_of_nnunet_is_read(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(
        '{"foreground_mean": {"Dice": 0.9}, "mean": {"1": {"Dice": NaN}}, "metric_per_case": []}', encoding="utf-8"
    )
    assert math.isnan(read_summary(path)["mean"]["1"]["Dice"])


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"mean": {}}', '{"foreground_mean": {}, "mean": [], "metric_per_case": 3}']
)
def test_what_is_no_summary_is_refused(tmp_path, text):
    path = tmp_path / "summary.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"summary\.json is not a summary.json as volseg and nnU-Net write it"):
        read_summary(path)


def test_failing_write_leaves_the_old_summary(summary, tmp_path):
    path = write_summary(summary, tmp_path / "summary.json")
    old = path.read_text(encoding="utf-8")
    with pytest.raises(TypeError):
        write_summary(summary | {"mean": object()}, path)
    assert path.read_text(encoding="utf-8") == old
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_and_mixed_labels_are_refused():
    with pytest.raises(DataError, match="at least one evaluated case"):
        summarise([])
    one = EvaluatedCase(metrics={1: {"Dice": 1.0}})
    other = EvaluatedCase(metrics={2: {"Dice": 1.0}}, prediction_file="b.nii.gz")
    with pytest.raises(DataError, match=r"b.nii.gz has labels \[2\], the first case has \[1\]"):
        summarise([one, other])


def test_files_are_compared_and_named_when_they_cannot_be(tmp_path):
    image = MetaTensor(torch.zeros(1, 3, 3, 3), affine=torch.eye(4, dtype=torch.float64))
    labels = torch.randint(0, 3, (1, 3, 3, 3))
    reference, same = (write_prediction(labels, image, tmp_path / name) for name in ("ref.nii.gz", "pred.nii.gz"))
    case = evaluate_files(same, reference, LABELS)
    assert case.metrics[1]["Dice"] == 1
    assert case.prediction_file == same

    image.affine[2, 3] = 1
    moved = write_prediction(labels, image, tmp_path / "moved.nii.gz")
    with pytest.raises(GridError, match=r"moved.nii.gz and .*ref.nii.gz: prediction lies up to 1 mm away"):
        evaluate_files(moved, reference, LABELS)


@pytest.mark.real_data
def test_real_label_files_equal_themselves(msd_task04):
    files = sorted((msd_task04 / "labelsTr").glob("hippocampus_*.nii.gz"))[:20]
    summary = summarise([evaluate_files(file, file, {1: "Anterior", 2: "Posterior"}) for file in files])
    assert summary["foreground_mean"]["Dice"] == 1
    assert summary["foreground_mean"]["FP"] == 0
    assert summary["mean"]["1"]["n_ref"] > 500  # anterior: about 1700 voxels a case
