"""A validation scores partial annotations, in tables, additional metrics and pictures."""

import math

import pytest
import torch
from monai.data import MetaTensor

from volseg.inference.predictor import Predictor
from volseg.workflow.components import build_metric
from volseg.workflow.validation import Validation

AFFINE = torch.eye(4, dtype=torch.float64)


def make_case(reference, found, **further):
    """Return a case with an image of one row, which equals the prediction of the predictor below."""
    meta = {"original_affine": AFFINE, "spatial_shape": (1, 1, len(found))}
    image = MetaTensor(torch.tensor(found).float().view(1, 1, 1, -1), affine=AFFINE, meta=meta)
    label = MetaTensor(torch.tensor(reference).float().view(1, 1, 1, -1), affine=AFFINE)
    return {"case": "a", "image": image, "reference": label, **further}


def validate(case, values, labels, columns, **settings):
    """Predict the classes in the image, and score them."""
    classes = torch.arange(len(values)).view(1, -1, 1, 1, 1)
    predictor = Predictor(model=lambda x: 9.0 * (x == classes), num_classes=len(values), values=values)
    metric = build_metric({"name": "DiceMetric"}, inputs=["pred", "label"], output="further", columns=columns)
    validation = Validation(predictor, [case], labels, values=values, metrics=[metric], **settings)
    return validation(), validation.examples[0]


def test_values_with_gaps_are_shown_by_name_and_in_colours_of_their_own():
    case = make_case([0, 7, 7, 500], [0, 1, 2, 2])
    validated, example = validate(case, (0, 7, 500), {7: "left", 500: "right"}, [(0,), (7,), (500,)])
    further = {"further": 2 / 3, "further/left": 2 / 3, "further/right": 2 / 3}
    assert validated.scores == pytest.approx({"dice/left": 2 / 3, "dice/right": 2 / 3, **further})
    assert list(validated.summary["mean"]) == ["7", "500"]
    assert example.prediction.flatten().tolist() == [0, 1, 2, 2]
    assert example.label.flatten().tolist() == [0, 1, 1, 2]


def test_nothing_is_scored_where_nobody_annotated():
    case = make_case([0, 1, 3, 3, 2], [1, 1, 2, 1, 2])
    validated, example = validate(case, (0, 1, 2), {1: "a", 2: "b"}, [(0,), (1,), (2,)], ignore=3)
    expected = {"dice/a": 2 / 3, "dice/b": 1.0, "further": 5 / 6, "further/a": 2 / 3, "further/b": 1.0}
    assert validated.scores == pytest.approx(expected)
    assert example.label.flatten().tolist() == [0, 1, 0, 0, 2]


def test_what_was_not_looked_for_is_in_no_score():
    case = make_case([0, 1, 0], [2, 1, 1], labelled=(1,))
    validated, _ = validate(case, (0, 1, 2), {1: "a", 2: "b"}, [(0,), (1,), (2,)])
    further = {"further": 2 / 3, "further/a": 2 / 3, "further/b": math.nan}
    assert validated.scores == pytest.approx({"dice/a": 2 / 3, "dice/b": math.nan, **further}, nan_ok=True)
    assert validated.score == pytest.approx(2 / 3)


def test_regions_are_judged_on_what_was_painted():
    case = make_case([0, 1, 4, 4], [0, 1, 1, 2])
    labels = {(1, 4): "whole", 4: "core"}
    validated, _ = validate(case, (0, 1, 4), labels, [(1, 4), (4,)])
    further = {"further": 5 / 6, "further/whole": 1.0, "further/core": 2 / 3}
    assert validated.scores == pytest.approx({"dice/whole": 1.0, "dice/core": 2 / 3, **further})
    case["labelled"] = (4,)
    validated, _ = validate(case, (0, 1, 4), labels, [(1, 4), (4,)])
    assert math.isnan(validated.scores["dice/whole"])
    assert validated.scores["further"] == pytest.approx(2 / 3)
