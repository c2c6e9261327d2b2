import json

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from volseg.cli import app
from volseg.commands import spell
from volseg.errors import ConfigError, DataError


def say(*arguments):
    return CliRunner().invoke(app, ["data", *arguments], catch_exceptions=False).stdout.splitlines()


def test_the_public_tasks_in_a_table():
    head, *rows = say("list")
    assert head.split() == ["task", "channels", "labelled", "test", "labels", "licence"]
    assert len(rows) == 10
    [prostate] = [row for row in rows if row.startswith("Task05_Prostate")]
    assert prostate[head.index("channels") :].startswith("T2, ADC  ")
    assert prostate[head.index("labels") :].startswith("PZ, TZ  ")
    assert prostate[head.index("labelled") :].split()[:2] == ["32", "16"]


def test_a_public_task():
    lines = say("info", "hippocampus")
    assert "licence   CC-BY-SA 4.0" in lines
    assert "cases     260 with labels, 130 without" in lines
    assert "labels    0 background, 1 Anterior, 2 Posterior" in lines
    assert lines[-1] == f"fetch it with: {spell('volseg data fetch Task04_Hippocampus')}"


def test_a_folder_of_ones_own(tmp_path):
    for case, shape, spacing in (("a", (4, 5, 6), 1.0), ("b", (8, 5, 7), 2.0), ("c", (6, 5, 9), 2.0)):
        affine = np.diag([spacing, 1.0, 3.0, 1.0])
        for word in ("t1", "t2", "seg"):
            image = nibabel.Nifti1Image(np.zeros(shape, np.uint8), affine)
            nibabel.save(image, tmp_path / f"{case}_{word}.nii.gz")
    declared = {
        "labels": {"background": 0, "whole": [1, 2], "core": 2, "ignore": 5},
        "labelled": {"b": ["core"]},
        "name": "Mine",
    }
    (tmp_path / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    assert say("info", str(tmp_path)) == [
        "task      Mine",
        f"folder    {tmp_path}",
        "cases     3 with labels, 0 without",
        "channels  0 t1, 1 t2",
        "labels    0 background, 1 label_1, 2 core",
        "regions   whole = 1 + 2, core = 2",
        "ignored   5",
        "partly    1 case(s) are annotated for some labels only",
        "voxels    6 x 5 x 7 (median; from 4 x 5 x 6 to 8 x 5 x 9)",
        "spacing   2 x 1 x 3 (median; from 1 x 1 x 3 to 2 x 1 x 3) mm",
    ]


def test_neither_a_task_nor_a_folder(tmp_path):
    with pytest.raises(DataError, match="no public task is called 'Task4_Hippo'; did you mean 'Task04_Hippocampus'"):
        say("info", "Task4_Hippo")
    with pytest.raises(ConfigError, match="here does not exist; name the TaskNN_Name folder"):
        say("info", str(tmp_path / "here"))
