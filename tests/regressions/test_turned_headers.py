"""A turned header changed scores: a side of 2 mm was recomputed as 2.0000002 mm, above a tolerance of 2 mm. Scores of
the same voxels at the same spacing do not depend on the orientation of the volume."""

import itertools
import json
import math

import nibabel
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from scipy.spatial.transform import Rotation
from typer.testing import CliRunner

from volseg.cli import app
from volseg.evaluation.overlap import evaluate_case
from volseg.evaluation.scoring import Scoring
from volseg.planning.fingerprint import CaseSizes, Fingerprint
from volseg.planning.geometry import plan_geometry
from volseg.transforms.grid import measure_sides, spacing_after

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


def score(offset, affine, tolerance):
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
    found = [score(offset, place(spacing, turn), tolerance) for turn in random_turns(40)]
    assert {one["NSD"] for one in found} == {1.0}
    for metric in ("HD", "HD95", "ASSD", "volume_pred_ml"):
        assert {one[metric] for one in found} == {found[0][metric]}, metric


def test_a_shift_beyond_the_tolerance_lies_beyond_it_in_every_orientation():
    turns = random_turns(20)
    found = [score((0, 0, 1), place((0.5, 0.5, 2.0), turn), 1.999) for turn in turns]
    assert {one["NSD"] for one in found} == {found[0]["NSD"]}
    assert 0 < found[0]["NSD"] < 0.9
    assert {score((0, 0, 0), place((0.5, 0.5, 2.0), turn), 0.0)["NSD"] for turn in turns} == {1.0}


def test_the_command_scores_turned_files_alike(tmp_path):
    by_turn = []
    for number, turn in enumerate(random_turns(3)):
        folder = tmp_path / str(number)
        for name, voxels in zip(("labels", "predictions"), shifted((0, 0, 1)), strict=True):
            (folder / name).mkdir(parents=True)
            image = nibabel.Nifti1Image(voxels.astype(np.uint8), place((0.5, 0.5, 2.0), turn))
            nibabel.save(image, folder / name / "case.nii.gz")
        words = ["evaluate", "--predictions", str(folder / "predictions"), "--labels", str(folder / "labels")]
        ended = CliRunner().invoke(app, [*words, "--tolerance", "2", "-o", str(folder)])
        assert ended.exit_code == 0, ended.output
        by_turn.append(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["mean"]["1"])
    assert [one["NSD"] for one in by_turn] == [1.0] * 3
    assert len({one["HD95"] for one in by_turn}) == 1


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 2.0), (0.8, 0.8, 1.6), (1.0, 1.0, 3.0)])
def test_a_plan_does_not_depend_on_the_orientation(spacing):
    # An axis is halved once its side is below twice the finest: 2 mm beside 1 mm is the limit.
    planned = set()
    for turn in random_turns(50):
        sides = measure_sides(place(spacing, turn))
        cases = tuple(CaseSizes(case=f"c{number}", shape=(96, 96, 48), spacing=sides) for number in range(3))
        labels = {0: "background", 1: "organ"}
        geometry = plan_geometry(Fingerprint(task="t", channels=("T1",), labels=labels, cases=cases), "unet", 8.0)
        planned.add(repr(geometry))
    assert len(planned) == 1


def test_sides_are_measured_without_rounding_errors():
    for spacing, turn in itertools.product(SPACINGS[:2], random_turns(50)):
        assert measure_sides(place(spacing, turn)) == spacing
        assert measure_sides(torch.from_numpy(place(spacing, turn))) == spacing
        assert spacing_after([{"name": "Spacing", "spacing": [1.5, 1.5, 3.0]}], place(spacing, turn)) == (1.5, 1.5, 3.0)
