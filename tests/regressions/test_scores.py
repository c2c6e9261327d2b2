"""Predictions and scores that were silently wrong."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from planted_faults import save
from scipy.spatial.transform import Rotation

from tests.reporting.run_folders import make_run
from volseg.errors import DataError
from volseg.evaluation.comparing import compare_methods, read_method
from volseg.evaluation.folders import evaluate_folders, load_label_names, pair_files
from volseg.evaluation.overlap import evaluate_case
from volseg.evaluation.scoring import Scoring
from volseg.evaluation.summary import complete_summary, write_summary
from volseg.inference.predictor import Predictor
from volseg.reporting import write_brief, write_report
from volseg.transforms.grid import measure_sides, spacing_after
from volseg.workflow.components import build_metric
from volseg.workflow.validation import Validation


def write(path, side=3, value=1):
    """Write a label map of a cube."""
    voxels = np.zeros((8, 8, 8), np.uint8)
    voxels[1 : 1 + side, 1 : 1 + side, 1 : 1 + side] = value
    save(path, voxels, np.eye(4))


def test_numbered_cases_are_not_paired_with_each_other(tmp_path):
    """The prediction of scan_0011 was scored with the label of scan_0010, as if both were channels of one case."""
    for name in ("scan_0001", "scan_0011"):
        write(tmp_path / "out" / f"{name}.nii.gz")
    for name in ("scan_0001", "scan_0010"):
        write(tmp_path / "labels" / f"{name}.nii.gz")
    pairs = pair_files(tmp_path / "out", tmp_path / "labels")
    assert list(pairs.matched) == ["scan_0001"]
    assert pairs.missing == ("scan_0010",)
    assert [path.name for path in pairs.surplus] == ["scan_0011.nii.gz"]
    write(tmp_path / "out" / "scan_0012.nii.gz")  # two predictions more than labels were refused as one case's
    assert len(pair_files(tmp_path / "out", tmp_path / "labels").surplus) == 2


def test_two_labels_of_one_name_are_not_taken_for_one_prediction(tmp_path):
    write(tmp_path / "out" / "a_pred.nii.gz")
    for name in ("a", "a_seg"):
        write(tmp_path / "labels" / f"{name}.nii.gz")
    with pytest.raises(DataError, match=r"a\.nii\.gz, a_seg\.nii\.gz .*may all be case a; keep one of each"):
        pair_files(tmp_path / "out", tmp_path / "labels")


def test_a_value_with_two_names_is_refused():
    with pytest.raises(DataError, match=r"but '1=a,01=b' names 1 twice"):
        load_label_names("labels", "predictions", "1=a,01=b")


def score(tmp_path, name, *, truth=3, names="1=liver", tolerance=1.0):
    """Score predictions of two cases, write their summary, and return it to be compared."""
    for case in ("a", "b"):
        write(tmp_path / name / f"{case}.nii.gz", side=2)
        write(tmp_path / f"{name}_labels" / f"{case}.nii.gz", side=truth)
    found = evaluate_folders(tmp_path / name, tmp_path / f"{name}_labels", names=names, tolerance=tolerance)
    write_summary(complete_summary(found.summary, found.scoring, found.names), tmp_path / name / "summary.json")
    return read_method(tmp_path / name)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"names": "1=tumour"}, r"the name of label 1 \(liver and tumour\)"),
        ({"tolerance": 2.0}, r"they differ in the setting tolerance_mm \(\{'1': 1\.0\} and \{'1': 2\.0\}\)"),
        ({"truth": 4}, r"the true voxels of label 1 in case a \(27\.0 and 64\.0\)"),
    ],
)
def test_scores_of_other_labels_rules_or_truth_are_not_compared_and_others_are(tmp_path, other, why):
    methods = [score(tmp_path, "one"), score(tmp_path, "two", **other)]
    with pytest.raises(DataError, match=why):
        compare_methods(methods)
    assert len(compare_methods([methods[0], score(tmp_path, "same")])) > 1


# A turned header changed scores: a side of 2 mm was recomputed as 2.0000002 mm, above a tolerance of 2 mm. Scores of
# the same voxels at the same spacing do not depend on the orientation of the volume.


LABELS = {0: "background", 1: "organ"}
SPACINGS = [(0.5, 0.5, 2.0), (0.7, 0.7, 2.0), (0.48828125, 0.48828125, 3.0), (1.0, 1.0, 1.0), (0.9, 1.1, 3.3)]


def place(spacing, rotation, dtype=np.float32):
    """Return an affine with turned axes, as NIfTI keeps it."""
    affine = np.eye(4)
    affine[:3, :3] = rotation @ np.diag(spacing)
    affine[:3, 3] = (-37.2, 11.9, 801.3)
    return affine.astype(dtype).astype(np.float64)


def shifted(offset):
    """Return a label map and its copy ``offset`` voxels further on; each structure is a box with a notch."""
    label = np.zeros((14, 14, 12), dtype=np.float32)
    label[3:9, 3:8, 3:7] = 1
    label[3:5, 3:5, 3:4] = 0
    return label, np.roll(label, offset, axis=(0, 1, 2))


def score_shifted(offset, affine, tolerance):
    label, prediction = (
        MetaTensor(torch.from_numpy(voxels)[None], affine=torch.from_numpy(affine)) for voxels in shifted(offset)
    )
    return evaluate_case(prediction, label, LABELS, scoring=Scoring(tolerances={1: tolerance}))[1]


def random_turns(count):
    return [np.eye(3), *Rotation.random(count - 1, random_state=11).as_matrix()]


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("offset", [(0, 0, 1), (1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)])
def test_a_shift_by_the_tolerance_lies_within_it_in_every_orientation(spacing, offset):
    # The diagonal of a voxel's face and its space diagonal are tolerances too.
    tolerance = math.sqrt(sum((step * side) ** 2 for step, side in zip(offset, spacing, strict=True)))
    found = [score_shifted(offset, place(spacing, turn), tolerance) for turn in random_turns(12)]
    assert {one["NSD"] for one in found} == {1.0}
    for metric in ("HD", "HD95", "ASSD", "volume_pred_ml"):
        assert {one[metric] for one in found} == {found[0][metric]}, metric


def test_a_shift_beyond_the_tolerance_lies_beyond_it_in_every_orientation():
    turns = random_turns(8)
    found = [score_shifted((0, 0, 1), place((0.5, 0.5, 2.0), turn), 1.999) for turn in turns]
    assert {one["NSD"] for one in found} == {found[0]["NSD"]}
    assert 0 < found[0]["NSD"] < 0.9
    assert {score_shifted((0, 0, 0), place((0.5, 0.5, 2.0), turn), 0.0)["NSD"] for turn in turns} == {1.0}


def test_sides_are_measured_without_rounding_errors():
    for spacing, turn in itertools.product(SPACINGS, random_turns(50)):
        expected = tuple(round(side, 6) for side in spacing)
        assert measure_sides(place(spacing, turn)) == expected
        assert measure_sides(torch.from_numpy(place(spacing, turn))) == expected
        assert spacing_after([{"name": "Spacing", "spacing": [1.5, 1.5, 3.0]}], place(spacing, turn)) == (1.5, 1.5, 3.0)


# MONAI's HausdorffDistanceMetric gives inf where a label is absent, and NaN with a percentile. One such case made the
# mean infinite; with a percentile a network that missed half of the structures was judged by the other half.


AFFINE = torch.eye(4, dtype=torch.float64)
VOXELS = {"nothing": (), "one": (1,), "two": (2,), "both": (1, 2)}


def make_case(name, reference, found):
    """Return a case of a row of voxels, whose image equals the prediction."""
    rows = []
    for labels in (reference, found):
        row = torch.zeros(1, 3, 3, 8)
        for label in VOXELS[labels]:
            row[..., 3 * label - 2 : 3 * label] = label
        rows.append(row)
    meta = {"original_affine": AFFINE, "spatial_shape": (3, 3, 8)}
    image, label = MetaTensor(rows[1], affine=AFFINE, meta=meta), MetaTensor(rows[0], affine=AFFINE)
    return {"case": name, "image": image, "reference": label}


@pytest.fixture(params=[95, None])
def validated(request, tmp_path):
    classes = torch.arange(3).view(1, -1, 1, 1, 1)
    predictor = Predictor(model=lambda x: 9.0 * (x == classes), num_classes=3)
    spec, columns = {"name": "HausdorffDistanceMetric", "percentile": request.param}, [(0,), (1,), (2,)]
    metric = build_metric(spec, inputs=["pred", "label"], output="further", columns=columns)
    cases = [
        make_case("whole", "both", "both"),
        make_case("missed", "both", "one"),
        make_case("too_much", "one", "both"),
        make_case("healthy", "one", "one"),
    ]
    labels = {1: "organ", 2: "tumour"}
    validation = Validation(
        predictor, cases, labels, metrics=[metric], scoring=Scoring(tolerances={1: 1.0, 2: 1.0}), folder=tmp_path
    )
    return validation()


@pytest.mark.filterwarnings("ignore:the (ground truth|prediction) of class")
@pytest.mark.filterwarnings("ignore:monai.metrics.utils get_mask_edges")
def test_one_infinite_case_leaves_a_mean_and_is_counted(validated, tmp_path):
    scores = validated.scores
    assert (scores["further"], scores["further/organ"], scores["further/tumour"]) == (0, 0, 0)
    assert "undefined/further/organ" not in scores
    assert scores["undefined/further/tumour"] == 2
    assert (scores["hd95/tumour"], scores["assd/tumour"]) == (0, 0)
    assert (scores["undefined/organ"], scores["undefined/tumour"]) == (0, 2)
    # Which are not forgotten where there is a number for them: of three cases with a tumour somewhere one is right.
    assert scores["dice/tumour"] == scores["nsd/tumour"] == pytest.approx(1 / 3)
    text = (tmp_path / "summary.json").read_text(encoding="utf-8")
    assert '"undefined"' in text
    assert "Infinity" not in text
    assert all(math.isfinite(value) for value in validated.summary["mean"]["2"].values())


def test_the_short_form_of_a_report_names_the_lowest_cases(tmp_path):
    run = make_run(tmp_path / "run", names=())
    judged = json.loads((run / "validation" / "summary.json").read_text(encoding="utf-8"))["metric_per_case"]
    dices = {
        case["prediction_file"].removeprefix("/runs/validation/").removesuffix(".nii.gz"): np.mean(
            [values["Dice"] for values in case["metrics"].values()]
        )
        for case in judged
    }
    section = write_brief(run).partition("## Validation\n")[2].partition("\n## ")[0].splitlines()
    assert [line.partition(":")[0] for line in section if line.startswith("- ")] == [
        f"- {name}" for name in sorted(dices, key=dices.__getitem__)[:5]
    ]
    assert any(line.startswith("| Anterior ") for line in section)
    assert "<h2>Validation</h2>" not in write_report(run).read_text(encoding="utf-8")
