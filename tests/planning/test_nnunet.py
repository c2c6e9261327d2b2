"""Our plans equal nnU-Net's, which ``tests/oracles/nnunet_plans.py`` recorded from its own planners."""

import json
from pathlib import Path

import pytest

from volseg.planning.fingerprint import CaseSizes, Fingerprint, Intensities
from volseg.planning.plan import plan

RECORDED = json.loads(Path(__file__).with_name("nnunet_plans.json").read_text(encoding="utf-8"))
PRESETS = {"ExperimentPlanner": "unet"}
RUNS = [
    pytest.param(data_set, run, id=f"{data_set['name']}, {run['planner']}, {run['memory']} GB")
    for data_set in RECORDED["data_sets"]
    for run in data_set["plans"]
]
CHANNEL = Intensities(mean=100, std=50, median=90, min=0, max=400, percentile_00_5=-20, percentile_99_5=300)


def make_fingerprint(data_set):
    """Return our fingerprint of a data set that nnU-Net describes as (z, y, x)."""
    pairs = list(zip(data_set["shapes"], data_set["spacings"], strict=True))
    repeated = pairs * (data_set["num_training"] // len(pairs))
    return Fingerprint(
        task=data_set["name"],
        channels=tuple(data_set["channels"]),
        labels={value: f"label {value}" for value in range(data_set["num_labels"])},
        cases=tuple(
            CaseSizes(case=str(i), shape=tuple(shape[::-1]), spacing=tuple(spacing[::-1]), kept=data_set["kept"])
            for i, (shape, spacing) in enumerate(repeated)
        ),
        intensities=(CHANNEL,) * len(data_set["channels"]),
    )


def turn(values, transpose):
    """Return nnU-Net's transposed (z, y, x) along D, H, W."""
    return [values[transpose.index(2 - axis)] for axis in range(3)]


def describe(ours):
    """Return the numbers of a plan that nnU-Net's has too."""
    steps = ours.values()["preprocessing"]
    count = len(ours.fingerprint.channels)
    schemes = ["ZScoreNormalization"] * count
    masked = [False] * count
    for step in steps:
        channels = step.get("channels", range(count))
        if step["name"] == "ClipZScore":
            schemes = ["CTNormalization" if i in channels else scheme for i, scheme in enumerate(schemes)]
        if step["name"] == "ZScore" and step.get("nonzero"):
            masked = [i in channels or mask for i, mask in enumerate(masked)]
    network = ours.values()["network"]
    return {
        "spacing": pytest.approx(ours.geometry.spacing, abs=1e-9),
        "median": list(ours.geometry.median_shape),
        "patch": ours.values()["patch"]["size"],
        "batch": ours.values()["patch"]["batch"],
        "strides": network["strides"],
        "kernels": network["kernel_size"],
        "filters": network["filters"],
        "normalisation": schemes,
        "masked": masked,
    }


@pytest.mark.parametrize(("data_set", "run"), RUNS)
def test_plans_are_nnunets(data_set, run):
    fingerprint = make_fingerprint(data_set)
    theirs, axes = dict(run["plan"]), run["plan"]["transpose"]
    del theirs["transpose"]
    once = {key: turn(theirs[key], axes) for key in ("spacing", "median", "patch")}
    each = {key: [turn(stage, axes) for stage in theirs[key]] for key in ("strides", "kernels")}
    expected = theirs | once | each
    ours = plan(fingerprint, PRESETS.get(run["planner"], "resenc"), run["memory"])
    assert expected == describe(ours)
