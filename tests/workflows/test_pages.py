"""Each script in ``workflows`` runs on a small data set by its own command, with the promised result."""

import ast
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from documented import ROOT

from volseg.data import load_task
from volseg.data.mock_msd import make_mock_task
from volseg.experiment import REGISTRIES

PAGES = sorted((ROOT / "workflows").glob("*.py"))
SMALL = ["training.epochs=1", "training.iterations=1", "patch.size=[16, 16, 16]", "patch.batch=1"]
SMALL += ["inference.window=[16, 16, 16]", "inference.overlap=0", "evaluation.distances=false", "device=cpu"]
NARROW = ["network={name: UNet, channels: [4, 8], strides: [2]}"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """Return a function that runs a script in a folder with a task and configs, and returns its output."""
    make_mock_task(tmp_path / "task", "Task04_Hippocampus", num_cases=5, num_test=1, scale=0.4)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    # As a program sees them: what pages register here is theirs.
    before = {kind: registry.registered for kind, registry in REGISTRIES.items()}

    def called(page: str, *arguments: str, values: list[str] | None = None) -> str:
        sets = [part for value in values or [] for part in ("--set", value)]
        monkeypatch.setattr(sys, "argv", [page, *arguments, *sets])
        runpy.run_path(str(ROOT / "workflows" / page), run_name="__main__")
        return capsys.readouterr().out

    yield called
    for kind, registry in REGISTRIES.items():
        for name in registry.registered - before[kind]:
            registry.forget(name)


def test_msd_task(run):
    said = run("msd_task.py", "task", "--output", "runs/any", values=[*SMALL, *NARROW])
    assert "Posterior" in said
    assert "1 predicted" in said
    assert Path("runs/any.yaml").exists()


def test_cross_validation(run):
    said = run("cross_validation.py", "configs/task04_cpu.yaml", "task", values=[*SMALL, *NARROW, "split.num_folds=2"])
    assert re.search(r"mean: Dice 0\.\d+ \(0\.\d+ to 0\.\d+\)", said)
    assert "1 predicted" in said
    assert Path("runs/task04_cpu/postprocessing.json").exists()


def test_large_volume_on_two_devices_is_that_of_one(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cut = run("large_volume.py", "--side", "16", "--steps", "2", "--devices", "cpu", "cpu:1")
    whole = run("large_volume.py", "--side", "16", "--steps", "2", "--devices", "cpu")
    losses = [[float(word) for word in re.findall(r"loss (\S+)", said)] for said in (cut, whole)]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # float32, sums in another order


def test_own_network(run):
    said = run("own_network.py", "task", values=SMALL)
    assert re.search(r"epoch 1: loss \d+\.\d+, weights \d+", said)


def test_task04_and_predict_folder(run):
    said = run("task04.py", "task", values=[*SMALL, *NARROW])
    assert re.search(r"Anterior +\| \d\.\d+", said)
    assert "runs/task04_cpu" in said
    said = run("predict_folder.py", "runs/task04_cpu", "task/imagesTs")
    assert "1 predicted" in said
    assert re.search(r"synthetic_\d+: (nothing|\d+: \d+\.\d\d ml)", said)


@pytest.mark.parametrize("preset", ["unet", pytest.param("vnet", marks=pytest.mark.slow)])
def test_train_msd(run, preset):
    small = ["--epochs", "1", "--iterations", "1", "--patch", "16", "16", "16", "--preset", preset]
    said = run("train_msd.py", "--task", "4", "--root", "task", "--output", "runs/by_hand", *small)
    assert "dice/Anterior: " in said
    assert "dice/Posterior: " in said
    [predicted] = Path("runs/by_hand/validation").glob("*.nii.gz")
    [label] = [
        case["label"] for case in load_task("task").training if case["case"] == predicted.name[: -len(".nii.gz")]
    ]
    assert nibabel.load(predicted).shape == nibabel.load(label).shape
    assert Path("runs/by_hand/checkpoints/latest.pt").exists()


def test_unlabelled(run):
    """Certain voxels are kept, others are ignored, and the third network trains on both."""
    values = [*SMALL, *NARROW, "data.root=task"]
    Path("new").mkdir()
    for name, image in zip(("a", "b", "c"), sorted(Path("task/imagesTr").glob("*.gz")), strict=False):
        volume = nibabel.load(image)
        nibabel.save(nibabel.Nifti1Image(volume.get_fdata() + 1, volume.affine), f"new/{name}.nii.gz")
    config = Path("configs/task04_cpu.yaml")
    other = Path("other.yaml")  # an ensemble of two windows was refused, after both had trained
    text = config.read_text(encoding="utf-8")
    other.write_text(text.replace("inference: {mirror: true}", "inference: {window: [24, 24, 24]}"), encoding="utf-8")
    said = run("unlabelled.py", "new", str(config), str(other), "--keep", "0.67", "--entropy", "0.9", values=values)
    assert "Posterior" in said
    task = load_task("runs/unlabelled/data/cases.csv")
    weights = task.columns["weight"]
    new = [name for name in weights if name in ("a", "b", "c")]
    assert len(new) == 2
    assert {weights[name] for name in new} == {"2.0"}  # half of the patches are of two cases, the others of four
    [split] = task.splits
    assert set(new) < set(split.training)
    assert task.ignore == 3
    for case in task.training:
        if case["case"] in new:
            values = np.unique(np.asanyarray(nibabel.load(case["label"]).dataobj))
            assert set(values) <= {0, 1, 2, 3}
            assert 3 in values


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short_and_begins_with_its_command_line(page):
    """A page that is put together by hand may be longer."""
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (100 if page.name in ("train_msd.py", "unlabelled.py") else 70)
    commands = [line for line in (ast.get_docstring(ast.parse(text)) or "").splitlines() if line.startswith("python ")]
    assert commands
    assert all(shlex.split(line, comments=True)[1] == f"workflows/{page.name}" for line in commands)


def test_every_page_is_listed():
    listed = re.findall(r"\]\((\w+\.py)\)", (ROOT / "workflows" / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == [page.name for page in PAGES]
