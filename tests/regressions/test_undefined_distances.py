"""A mean of distances became infinite by one case, and what was not a number was dropped without a word.

MONAI's HausdorffDistanceMetric gives inf where prediction or reference lacks a label, and NaN if it is asked for a
percentile. A validation averaged over labels and cases without NaN: with a percentile a network that missed the
structure in half of the cases was judged by the other half, without one by a mean of inf. TensorBoard got one number.
"""

import math

import pytest
import torch
from monai.data import MetaTensor

from volseg.evaluation.scoring import Scoring
from volseg.inference.predictor import Predictor
from volseg.workflow.components import build_metric
from volseg.workflow.validation import Validation

pytestmark = [
    pytest.mark.filterwarnings("ignore:the (ground truth|prediction) of class"),  # MONAI's, of absent labels
    pytest.mark.filterwarnings("ignore:monai.metrics.utils get_mask_edges"),  # its own use of what it deprecates
]
AFFINE = torch.eye(4, dtype=torch.float64)
VOXELS = {"nothing": (), "one": (1,), "two": (2,), "both": (1, 2)}


def make_case(name, reference, found):
    """Return a case of a row of voxels, whose image is what the predictor finds."""
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


def test_one_infinite_case_leaves_a_mean_and_is_counted(validated):
    scores = validated.scores
    assert (scores["further"], scores["further/organ"], scores["further/tumour"]) == (0, 0, 0)
    assert "undefined/further/organ" not in scores
    assert scores["undefined/further/tumour"] == 2
    assert (scores["hd95/tumour"], scores["assd/tumour"]) == (0, 0)
    assert (scores["undefined/organ"], scores["undefined/tumour"]) == (0, 2)
    # Which are not forgotten where there is a number for them: of three cases with a tumour somewhere one is right.
    assert scores["dice/tumour"] == scores["nsd/tumour"] == pytest.approx(1 / 3)


def test_the_median_counts_them_as_the_largest(validated, tmp_path):
    text = (tmp_path / "summary.json").read_text(encoding="utf-8")
    assert '"undefined"' in text
    assert "Infinity" not in text
    assert all(math.isfinite(value) for value in validated.summary["mean"]["2"].values())
