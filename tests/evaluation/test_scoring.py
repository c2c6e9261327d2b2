"""The scores of a structure, the rules for absent structures, and the summary."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from monai.data import MetaTensor

from volseg.data.cases import Task
from volseg.errors import ConfigError, DataError, GridError
from volseg.evaluation.overlap import METRICS, evaluate_case
from volseg.evaluation.scoring import Scoring, choose_scoring, match_lesions, published_results
from volseg.evaluation.summary import (
    EvaluatedCase,
    complete_summary,
    count_undefined,
    evaluate_files,
    read_structure,
    read_summary,
    summarise,
    write_summary,
)
from volseg.evaluation.surfaces import measure_surfaces
from volseg.inference.writing import write_prediction

ALL = Scoring(tolerances={1: 1.0, 2: 1.0}, lesions=(2,))
LABELS = {0: "background", 1: "organ", 2: "tumour"}


def label_map(*boxes, spacing=(1.0, 1.0, 2.0)):
    """Return a volume of 10 x 10 x 10 with boxes of voxels from one index to before another, ``(value, from, to)``."""
    voxels = torch.zeros(1, 10, 10, 10)
    for value, start, stop in boxes:
        voxels[:, start:stop, start:stop, start:stop] = value
    return MetaTensor(voxels, affine=torch.diag(torch.tensor([*spacing, 1.0], dtype=torch.float64)))


def test_rules_for_what_is_absent():
    both, nothing = label_map((1, 1, 5), (2, 6, 9)), label_map((1, 1, 5))
    for prediction, reference in ((both, nothing), (nothing, both)):
        found = evaluate_case(prediction, reference, LABELS, scoring=ALL)[2]
        assert (found["Dice"], found["NSD"], found["lesion_F1"]) == (0, 0, 0)
        assert found["HD95"] == found["HD"] == found["ASSD"] == math.inf
    found = evaluate_case(nothing, nothing, LABELS, scoring=ALL)[2]
    measured = ("Dice", "NSD", "HD95", "HD", "ASSD", "lesion_F1", "lesion_precision")
    assert all(math.isnan(found[name]) for name in measured)
    assert found["volume_diff_ml"] == 0
    found = evaluate_case(both, both, LABELS, scoring=ALL)[2]
    assert (found["NSD"], found["HD95"], found["ASSD"], found["lesion_F1"]) == (1, 0, 0, 1)


def test_volumes_are_in_ml_of_the_labels_own_voxels():
    found = evaluate_case(label_map((1, 0, 10)), label_map((1, 0, 5)), LABELS, scoring=ALL)[1]
    assert (found["volume_pred_ml"], found["volume_ref_ml"], found["volume_diff_ml"]) == (2.0, 0.25, 1.75)


def test_all_structures_have_the_same_metrics_and_counts_come_first():
    found = evaluate_case(label_map((1, 1, 5)), label_map((1, 1, 5)), LABELS, scoring=ALL)
    assert list(found[1]) == list(found[2]) == [*METRICS, *ALL.names]
    assert math.isnan(found[1]["lesion_F1"])  # nobody asked
    assert list(evaluate_case(label_map(), label_map(), LABELS, scoring=Scoring(distances=False))[1]) == [
        *METRICS,
        *("volume_pred_ml", "volume_ref_ml", "volume_diff_ml"),
    ]


def test_a_region_is_measured_as_a_whole_and_a_label_nobody_looked_for_not_at_all():
    prediction, reference = label_map((1, 1, 9), (2, 3, 5)), label_map((2, 1, 9))
    found = evaluate_case(prediction, reference, {(1, 2): "whole", 2: "core"}, scoring=Scoring())
    assert (found[1, 2]["HD"], found[1, 2]["ASSD"]) == (0, 0)
    assert found[2]["HD"] > 0
    found = evaluate_case(prediction, reference, LABELS, labelled=(2,), scoring=ALL)
    assert all(math.isnan(value) for value in found[1].values())
    assert not math.isnan(found[2]["HD95"])


def test_where_nobody_annotated_nothing_is_measured():
    reference, prediction = label_map((1, 1, 5), (3, 6, 10)), label_map((1, 1, 5))
    prediction[:, 7:9, 7:9, 7:9] = 1
    found = evaluate_case(
        prediction, reference, {1: "organ"}, ignore=3, scoring=Scoring(tolerances={1: 0}, lesions=[1])
    )
    assert (found[1]["HD"], found[1]["NSD"], found[1]["lesion_FP"], found[1]["volume_diff_ml"]) == (0, 1, 0, 0)
    reference[:, 5:], prediction[:, 4:] = 3, 0  # a surface beyond the box around both counted as annotated
    found = evaluate_case(prediction, reference, {1: "organ"}, ignore=3, scoring=Scoring())
    masks = [volume[0].numpy() == value for volume, value in ((prediction, 1), (reference, 1), (reference, 3))]
    assert found[1]["ASSD"] == measure_surfaces(*masks[:2], (1.0, 1.0, 2.0), ignored=masks[2]).average()


def test_sheared_voxels_are_no_boxes_and_a_missed_structure_is_missed_whatever_its_voxels(caplog, tmp_path):
    """Of sheared voxels it had no distance, and an infinite one once the summary was read back."""
    sheared, empty = label_map((1, 1, 5)), label_map()
    for volume in (sheared, empty):
        volume.affine[0, 1] = 0.5
    found = evaluate_case(sheared, sheared, LABELS, scoring=ALL)[1]
    assert math.isnan(found["HD95"])
    assert found["Dice"] == 1
    assert "voxels are sheared" in caplog.text
    metrics = evaluate_case(empty, sheared, LABELS, scoring=ALL)
    assert (metrics[1]["HD95"], metrics[1]["NSD"]) == (math.inf, 0)
    path = write_summary(summarise([EvaluatedCase(metrics=metrics)]), tmp_path / "summary.json")
    assert read_summary(path)["metric_per_case"][0]["metrics"]["1"]["HD95"] == math.inf


def test_lesions_are_matched_once_each_and_the_best_first():
    reference, prediction = np.zeros((2, 1, 1, 30), dtype=bool)
    reference[..., 0:10] = reference[..., 12:16] = reference[..., 20:22] = True
    prediction[..., 0:3] = prediction[..., 5:10] = prediction[..., 14:30] = True
    found = match_lesions(prediction, reference)
    # 0-10 by its larger piece, the smaller one is a false alarm; 14-30 shares 2 of 18 with 12-16, 2 of 16 with 20-22.
    assert (*found.values(),)[3:] == (2, 1, 1)
    assert found["lesion_F1"] == pytest.approx(4 / 6)
    strict = match_lesions(prediction, reference, minimum_overlap=0.5)
    assert (*strict.values(),)[3:] == (1, 2, 2)
    corner = np.zeros((2, 2, 2), dtype=bool)
    corner[0, 0, 0] = corner[1, 1, 1] = True
    assert match_lesions(corner, corner)["lesion_TP"] == 1  # joined by a corner


def test_structures_are_asked_for_by_name():
    structures = {1: "liver", (1, 2): "whole"}
    assert choose_scoring(structures, "Task03_Liver").tolerances == {1: 7.0, (1, 2): 7.0}
    assert choose_scoring(structures, "mine").tolerances == {}
    assert choose_scoring(structures, "Task03_Liver", tolerance={"whole": 2}).tolerances == {(1, 2): 2}
    assert choose_scoring(structures, "mine", lesions=("liver",)).lesions == (1,)
    for wrong in ({"tolerance": {"livr": 2.0}}, {"lesions": ("livr",)}):
        with pytest.raises(ConfigError, match=r"no label is called 'livr'; did you mean 'liver'\?"):
            choose_scoring(structures, "mine", **wrong)
    for wrong in ({"tolerances": {1: -1.0}}, {"lesion_overlap": 0.0}):
        with pytest.raises(DataError, match=r"tolerance of NSD must be a distance|overlap of matching lesions must be"):
            Scoring(**wrong)


@pytest.fixture
def summary():
    """Return three cases: equal, moved by a voxel, and without the second label."""
    prediction, reference = label_map((1, 1, 5), (2, 6, 8)), label_map((1, 1, 5), (2, 6, 8))
    moved = MetaTensor(torch.roll(reference.as_tensor(), 1, 3), affine=reference.affine)
    pairs = [(prediction, reference), (moved, reference), (label_map((1, 1, 5)), reference)]
    return summarise(
        [
            EvaluatedCase(metrics=evaluate_case(*pair, LABELS, scoring=ALL), reference_file=f"{number}.nii.gz")
            for number, pair in enumerate(pairs)
        ]
    )


def test_an_undefined_distance_is_counted_and_in_no_mean(summary):
    assert summary["mean"]["2"]["HD95"] == 1.0  # of 0 and 2 mm
    assert math.isfinite(summary["foreground_mean"]["HD95"])
    assert count_undefined(summary) == {"1": {"HD95": 0, "HD": 0, "ASSD": 0}, "2": {"HD95": 1, "HD": 1, "ASSD": 1}}
    full = complete_summary(summary, ALL, LABELS)
    assert full["median"]["2"]["HD95"] == 2.0  # of 0, 2 and infinity
    assert full["median"]["2"]["NSD"] == summary["metric_per_case"][1]["metrics"]["2"]["NSD"]
    low, high = full["intervals"]["mean"]["2"]["HD95"]
    assert 0 <= low <= 1 <= high <= 2
    assert full["settings"]["tolerance_mm"] == {"1": 1.0, "2": 1.0}


def test_a_summary_comes_back_as_it_was_with_its_infinities(summary, tmp_path):
    """The keys of nnU-Net's readers come first, with plain numbers."""
    path = write_summary(complete_summary(summary, ALL, LABELS), tmp_path / "validation" / "summary.json")
    read = read_summary(path)
    assert repr({key: read[key] for key in summary}) == repr(summary)
    assert read["labels"] == {"0": "background", "1": "organ", "2": "tumour"}
    told = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert list(told)[:3] == ["foreground_mean", "mean", "metric_per_case"]
    for part in (told["foreground_mean"], told["mean"]["1"], told["metric_per_case"][2]["metrics"]["2"]):
        assert tuple(part)[: len(METRICS)] == METRICS
    assert told["metric_per_case"][2]["metrics"]["2"]["HD95"] is None


STRUCTURES = {1: "anterior", 2: "posterior", (1, 3): "a region"}


def case_of(prediction, label, name, **settings) -> EvaluatedCase:
    metrics = evaluate_case(torch.tensor([[prediction]]), torch.tensor([[label]]), STRUCTURES, **settings)
    return EvaluatedCase(metrics=metrics, prediction_file=Path("pred") / name, reference_file=f"ref/{name}")


def test_a_summary_is_nnunets_and_its_means_leave_out_what_was_not_there():
    short = summarise(
        [
            case_of(
                [1, 1, 2, 0], [1, 1, 2, 2], "a.nii.gz", labelled=(1, 2)
            ),  # Dice 1 and 2/3; value 3 is not annotated
            case_of([1, 0, 0, 0], [1, 1, 0, 0], "b.nii.gz"),  # Dice 2/3 and nothing to find
        ]
    )
    assert list(short) == ["foreground_mean", "mean", "metric_per_case"]
    assert list(short["mean"]) == ["1", "2", "(1, 3)"]  # as nnU-Net names regions
    assert [read_structure(key) for key in short["mean"]] == list(STRUCTURES)
    assert set(short["foreground_mean"]) == set(short["mean"]["1"]) == set(METRICS)
    first = short["metric_per_case"][0]
    assert list(first) == ["metrics", "prediction_file", "reference_file"]
    assert (first["prediction_file"], first["reference_file"]) == (os.path.join("pred", "a.nii.gz"), "ref/a.nii.gz")
    assert first["metrics"]["2"]["FN"] == 1
    assert math.isnan(first["metrics"]["(1, 3)"]["TP"])
    dice = {key: mean["Dice"] for key, mean in short["mean"].items()}
    assert dice == pytest.approx({"1": 5 / 6, "2": 2 / 3, "(1, 3)": 2 / 3})  # the second case has no label 2
    assert short["foreground_mean"]["Dice"] == pytest.approx((5 / 6 + 2 / 3 + 2 / 3) / 3)
    assert short["mean"]["2"]["n_ref"] == 1  # counts are never absent: 2 and 0


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"foreground_mean": 0.5, "mean": {}, "metric_per_case": []}',
        '{"foreground_mean": {}, "mean": {"1": {"IoU": 1}}, "metric_per_case": []}',
        '{"foreground_mean": {}, "mean": {"1": {"Dice": 1}}, "metric_per_case": [{"metrics": {"2": {"Dice": 1}}}]}',
    ],
)
def test_nnunets_summary_is_read_and_another_file_refused(tmp_path, text):
    path = tmp_path / "summary.json"
    path.write_text('{"foreground_mean": {}, "mean": {"1": {"Dice": NaN}}, "metric_per_case": []}', encoding="utf-8")
    assert math.isnan(read_summary(path)["mean"]["1"]["Dice"])
    path.write_text(text, encoding="utf-8")
    with pytest.raises(
        DataError, match=r"summary\.json (is not a summary.json of volseg|cannot be read as a summary: E)"
    ):
        read_summary(path)
    with pytest.raises(DataError, match="a summary's keys must be label values"):
        read_structure("(1, x)")


def test_nothing_and_mixed_labels_are_refused():
    with pytest.raises(DataError, match="at least one evaluated case"):
        summarise([])
    one = EvaluatedCase(metrics={1: {"Dice": 1.0}})
    other = EvaluatedCase(metrics={2: {"Dice": 1.0}}, prediction_file="b.nii.gz")
    with pytest.raises(DataError, match=r"b.nii.gz has labels \[2\], but the first case \[1\]"):
        summarise([one, other])


def test_files_are_compared_and_named_when_they_cannot_be(tmp_path):
    image = MetaTensor(torch.zeros(1, 3, 3, 3), affine=torch.eye(4, dtype=torch.float64))
    labels = torch.randint(0, 3, (1, 3, 3, 3))
    reference, same = (write_prediction(labels, image, tmp_path / name) for name in ("ref.nii.gz", "pred.nii.gz"))
    case = evaluate_files(same, reference, STRUCTURES)
    assert case.metrics[1]["Dice"] == 1
    assert case.prediction_file == same

    image.affine[2, 3] = 1
    moved = write_prediction(labels, image, tmp_path / "moved.nii.gz")
    with pytest.raises(GridError, match=r"moved.nii.gz and .*ref.nii.gz: prediction is up to 1 mm away"):
        evaluate_files(moved, reference, STRUCTURES)


FOLDER = Path(__file__).parents[2] / "datasets" / "msd"
MANIFESTS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}
HIPPOCAMPUS = {0: "background", 1: "Anterior", 2: "Posterior"}


def task_of(name, labels):
    return Task(name=name, root=Path("x"), modalities=("MRI",), labels=labels, training=(), test=())


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_manifest_gives_its_rows(name):
    manifest = MANIFESTS[name]
    labels = {value: label.swapcase() for value, label in manifest["labels"].items()}  # spelt otherwise, the same label
    results = published_results(task_of(name, labels))
    for result, row in zip(results, manifest["published"], strict=True):
        is_crossed = "cross-validation" in row["evaluation"]
        count = manifest["num_training" if is_crossed else "num_test"]
        assert result == {**{key: row[key] for key in ("method", "evaluation", "dice", "source")}, "num_cases": count}
        assert is_crossed or row["evaluation"] == "challenge test set"


@pytest.mark.parametrize("name", ["Task00_Synthetic", "../msd/Task04_Hippocampus", "", "*"])
def test_a_task_without_manifest_has_no_published_results(name):
    assert published_results(task_of(name, HIPPOCAMPUS)) == []


@pytest.mark.parametrize("labels", [{1: "hippocampus"}, {1: "Posterior", 2: "Anterior"}])
def test_published_results_of_other_labels_are_not_compared(labels, caplog):
    assert published_results(task_of("Task04_Hippocampus", {0: "background", **labels})) == []
    assert "published results of Task04_Hippocampus are for the labels" in caplog.text
