"""The page of plain Python trains, validates and writes what it says."""

import sys

import nibabel
import pytest
import train_msd

from volseg.data.layouts import load_task
from volseg.data.mock_msd import make_mock_task


@pytest.mark.parametrize("preset", ["unet", pytest.param("vnet", marks=pytest.mark.slow)])
def test_a_task_is_trained_and_validated(preset, tmp_path, monkeypatch, capsys):
    root = make_mock_task(tmp_path / "twin", "Task04_Hippocampus", num_cases=5, num_test=0, scale=0.5)
    output = tmp_path / "run"
    small = ["--epochs", "1", "--iterations", "1", "--patch", "16", "16", "16"]
    arguments = ["--task", "4", "--root", str(root), "--preset", preset, "--output", str(output), *small]
    monkeypatch.setattr(sys, "argv", ["train_msd.py", *arguments])
    train_msd.main()
    said = capsys.readouterr().out
    assert "dice/Anterior: " in said
    assert "dice/Posterior: " in said
    [predicted] = (output / "validation").glob("*.nii.gz")
    case = next(case for case in load_task(root).training if case["case"] == predicted.name.removesuffix(".nii.gz"))
    assert nibabel.load(predicted).shape == nibabel.load(case["label"]).shape
    assert (output / "checkpoints" / "latest.pt").exists()
